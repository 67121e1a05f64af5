"""The answer key of all lessons on one page, docs/teaching/answers.md: `tools.teaching` writes it.

Everything on it is read from the notebooks: what a prediction's answer says, the marked solutions,
the folded answers in the text. Knows cells; knows no lesson.
"""

import html
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from tools.publish.build import (
    LESSONS,
    MEASURED,
    NOTEBOOKS,
    QUESTION,
    Lesson,
    make_notebook,
    sources,
    target,
)
from tools.publish.lesson_pages import NUMBER, questions

PLANS = NOTEBOOKS.parent / "docs" / "teaching"
PAGE = PLANS / "answers.md"
TASK = re.compile(r"^### (Exercise \d+: .*?)(?: \(\d+ minutes\))?$", re.M)
HEAD = re.compile(r"^#{2,3} (.*)$", re.M)
FOLDED = re.compile(r"<details><summary>(.*?)</summary>(.*?)</details>", re.S)
ANSWER = re.compile(r"(One a|A)nswer")  # a folded text that is one; below "Try" any but a hint is
HINT = re.compile(r"[Hh]int$")
ON_PAPER = re.compile(r"exercise (\d+) for ((?:\([\d, ]+\)(?:,| and)? ?)+)")  # in a plan
INTRO = """# Answers

For teachers: predictions, exercises and tasks on paper of the lessons. This page is written from
the notebooks by `make notebooks` (or `python -m tools.teaching`), and is not in `students.zip`. The
numbers of the predictions are those of the quiz. An answer with (m) was measured when the notebooks
were built: another machine may give another one. An exercise may have other right answers than the
one here, so let its check decide.
"""


def page() -> str:
    """The whole key. ValueError where a lesson is not built."""
    return "\n".join([INTRO, *(part for lesson in LESSONS for part in _lesson(lesson))])


def _lesson(lesson: Lesson) -> Iterator[str]:
    solved = make_notebook(sources()[lesson.notebook], solved=True)
    built = nbformat.read(target(lesson.notebook, solved=True), as_version=4)
    yield f"## {solved.cells[0].source.partition(chr(10))[0].lstrip('# ')}\n"
    yield "| no. | section | question | answer |\n|---|---|---|---|"
    measured = {
        name
        for cell in built.cells
        if MEASURED in cell.metadata.get("tags", [])
        for _, name in QUESTION.findall(cell.source)
    }
    for number, one in enumerate(questions(lesson).values(), 1):
        right = f"**{_plain(one.right)}**" + " (m)" * (one.name in measured)
        yield f"| {lesson.code}.{number} | {one.heading} | {_plain(one.words)} | {right} |"
    yield ""
    yield from _on_paper(lesson, built)
    title = ""
    for cell in solved.cells:
        if cell.cell_type == "markdown":
            title = (TASK.findall(cell.source) or [title])[-1]
        elif "exercise" in cell.metadata.get("tags", []):
            yield f"**{title}**\n\n```python\n{cell.source.strip()}\n```\n"


def _on_paper(lesson: Lesson, built: NotebookNode) -> Iterator[str]:
    """Tasks without a cell: with a folded answer, on paper, and in the teacher's plan."""
    found, head, text = list[str](), "", ""
    for cell in built.cells:
        if cell.cell_type == "markdown":
            titles = HEAD.findall(cell.source)
            head, text = (NUMBER.sub(r"\1", titles[-1]), "") if titles else (head, text)
            text += cell.source
            found += [
                f"{head}: {_text(said)}"
                for what, said in FOLDED.findall(cell.source)
                if ANSWER.match(what) or ("*Try" in cell.source and not HINT.search(what))
            ]
        elif "on paper" in text and ("reveal" in dict(QUESTION.findall(cell.source))):
            said = next((o.text for o in cell.outputs if o.output_type == "stream"), "")
            _, _, lines = said.partition("\n")
            found += [f"{head}: {_plain('; '.join(lines.splitlines()))}"] if lines else []
    plan = PLANS / f"{lesson.code}.md"
    if plan.is_file():
        for number, asked in ON_PAPER.findall(plan.read_text(encoding="utf-8")):
            found.append(f"exercise {number} on paper: {_computed(lesson, int(number), asked)}")
    if found:
        yield "Tasks in the text and on paper:\n"
        yield from (f"- {one}" for one in found)
        yield ""


def _computed(lesson: Lesson, number: int, asked: str) -> str:
    """What the solution of an exercise gives for "(1, 2) and (3, 4)"."""
    cells = make_notebook(sources()[lesson.notebook], solved=True).cells
    (code,) = [
        cell.source
        for before, cell in pairwise(cells)
        if f"### Exercise {number}:" in before.source and cell.cell_type == "code"
    ]
    scope: dict[str, Any] = {}
    exec(code, scope)
    (function,) = [thing for name, thing in scope.items() if not name.startswith("__")]
    given = [tuple(map(int, one.split(","))) for one in re.findall(r"\(([\d, ]+)\)", asked)]
    return ", ".join(f"{one} gives **{function(*one)}**" for one in given)


def _text(words: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", words)).split())


def _plain(words: str) -> str:
    """For a cell of a table, where nothing is Markdown."""
    return re.sub(r"([|*_<`\\])", r"\\\1", " ".join(words.split()))


def write(path: Path = PAGE) -> None:
    """Write the page."""
    path.write_text(page(), encoding="utf-8")
