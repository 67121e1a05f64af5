"""The exam: `python -m tools.publish.exam` makes two pages of docs/teaching/exam.toml.

exam.md has the questions, exam-answers.md model answers and what each point is for. Both have the
numbers of one seed, and the engine computes the answers. The repository is public, and so is the
exam of its pages: `make exam SEED=...` writes one with other numbers, as HTML to print.
"""

import argparse
import base64
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from nbconvert.filters import markdown2html

from tools.publish.build import LESSONS, NOTEBOOKS
from tools.publish.exam_numbers import NUMBERS
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.tokens import escape

PAGES = NOTEBOOKS.parent / "docs" / "teaching"
SOURCE, OUT = PAGES / "exam.toml", NOTEBOOKS.parent / "exam"
SEED = 0  # of the pages in the repository
STYLE = """body { font: 16px/1.45 system-ui, sans-serif; max-width: 50em; margin: 2em auto; }
table { border-collapse: collapse; } td, th { border: 1px solid #999; padding: .3em .8em; }
td:empty { height: 1.4em; } img { max-width: 100%; } h3 { break-after: avoid; }"""
HEAD = """# {title}

{lead}
"""
ABOUT = """{number} questions, {points} points; plan a minute for a point. Notebooks 01 to 03 have
{half} of them, for an exam in the middle of the term. A calculator is allowed."""
SEEDED = """These are the numbers of seed {seed}: `make exam SEED=7` writes the same questions with
other numbers, and their answers. {other}"""


class Question(NamedTuple):
    """A question with its numbers filled in, as Markdown; `picture` is one to read."""

    name: str
    lesson: str
    ask: str
    answer: str
    marking: tuple[str, ...]
    picture: Picture | None = None

    @property
    def points(self) -> int:
        """What its marking adds up to."""
        return sum(int(one.partition(":")[0]) for one in self.marking)


@cache
def exam(seed: int = SEED) -> tuple[Question, ...]:
    """All questions, in the order of the lessons, with the numbers of a seed."""
    found = list[Question]()
    for one in tomllib.loads(SOURCE.read_text(encoding="utf-8"))["question"]:
        name = one["name"]
        known: dict[str, Any] = {}
        if name in NUMBERS:
            known = NUMBERS[name](Random(f"{seed} {name}"))
        picture = known.get("picture")
        known["picture"] = f"![{picture.caption}](exam-{name}.png)" if picture else ""
        ask, answer = (one[key].strip().format_map(known) for key in ("ask", "answer"))
        marking = tuple(words.format_map(known) for words in one["marking"])
        found.append(Question(name, one["lesson"], ask, answer, marking, picture))
    return tuple(found)


def page(questions: Sequence[Question], seed: int | None, solved: bool) -> str:
    """The sheet of questions, or the one with answers and points. Without a seed none is told."""
    titles = {True: "Exam: answers and points", False: "Exam"}
    others = {
        True: "The questions are on [the sheet](exam.md).",
        False: "The answers are on [a page of their own](exam-answers.md).",
    }
    lead = ABOUT.format(
        number=len(questions),
        points=sum(one.points for one in questions),
        half=sum(one.points for one in questions if one.lesson <= "03"),
    )
    if seed is not None:
        lead += "\n" + SEEDED.format(seed=seed, other=others[solved])
    if solved:
        lead += "\n\n" + (
            "Other words are as good. A number that follows rightly from a wrong one before it "
            "gets its points."
        )
    return "\n".join([HEAD.format(title=titles[solved], lead=lead), *_parts(questions, solved)])


def _parts(questions: Sequence[Question], solved: bool) -> Iterator[str]:
    names = {one.code: _title(one.notebook) for one in LESSONS}
    lesson = ""
    for number, one in enumerate(questions, 1):
        if one.lesson != lesson:
            lesson = one.lesson
            yield f"## {lesson} · {names[lesson]}\n"
        yield f"### Question {number} ({one.points} points)\n"
        yield f"{one.answer}\n" if solved else f"{one.ask}\n"
        if solved:
            yield "\n".join(f"- {_pointed(words)}" for words in one.marking) + "\n"


def _title(notebook: str) -> str:
    source = NOTEBOOKS / "src" / f"{notebook}.py"
    return re.findall(r"^# # \w+ · (.*)$", source.read_text(encoding="utf-8"), re.M)[0]


def _pointed(words: str) -> str:
    number, _, what = words.partition(": ")
    return f"{number} {'point' if number == '1' else 'points'}: {what}"


def write(folder: Path = PAGES, seed: int = SEED) -> None:
    """Both pages as Markdown, with their pictures beside them."""
    questions = exam(seed)
    for name, solved in (("exam.md", False), ("exam-answers.md", True)):
        (folder / name).write_text(page(questions, seed, solved), encoding="utf-8")
    for one in questions:
        if one.picture is not None:
            (folder / f"exam-{one.name}.png").write_bytes(one.picture.png)


def html(questions: Sequence[Question], seed: int, solved: bool) -> str:
    """A page to print, that loads nothing. The seed gives the answers, so only they tell it."""
    text = page(questions, None, solved)
    text += f"\nSeed {seed}.\n" if solved else ""
    body = re.sub(r'<a class="anchor-link".*?</a>', "", markdown2html(text))
    for one in questions:
        if one.picture is not None:
            data = base64.b64encode(one.picture.png).decode()
            body = body.replace(f"exam-{one.name}.png", f"data:image/png;base64,{data}")
    title = escape(text.partition("\n")[0].lstrip("# "))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Without a seed, write the pages of the repository; with one, an exam to print."""
    parser = argparse.ArgumentParser(description="Writes the exam and its answers.")
    parser.add_argument("--seed", type=int, help="other numbers, as HTML in exam/")
    seed = parser.parse_args(arguments).seed
    if seed is None:
        write()
        return
    OUT.mkdir(exist_ok=True)
    questions = exam(seed)
    for name, solved in (("questions", False), ("answers", True)):
        file = OUT / f"{name}-{seed}.html"
        file.write_text(html(questions, seed, solved), encoding="utf-8")
        print(f"wrote {OUT.name}/{file.name}")


if __name__ == "__main__":
    main()
