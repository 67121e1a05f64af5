"""Puts the table "What is in the notebook" and the numbers of slides into docs/teaching.

    python -m tools.teaching

`make notebooks` runs it, too. A lesson without a page is left out.
Sections, exercises with their minutes, and questions are read from the notebooks' sources; the
slides are those of the decks that `make slides` writes from the built notebooks. The answer key,
answers.md, is written from the notebooks as a whole.
"""

import re
from pathlib import Path
from typing import NamedTuple

from tools.publish import answers
from tools.publish.build import LESSONS, QUESTION, Lesson, make_notebook, sources
from tools.publish.slides import titles

PAGES = Path(__file__).parent.parent / "docs" / "teaching"
TABLE = re.compile(r"(?<=<!-- tools/teaching.py -->\n).*?(?=<!-- end -->)", re.S)
NAMED = re.compile(r"\*\*(.+?)\*\*(?:[ \n]\(slides? [\d–]+\))?")
EXERCISE = re.compile(r"(Exercise \d+: .*) \((\d+) minutes\)")


class Section(NamedTuple):
    """A part of a notebook under a heading, as "3 · The block table"."""

    name: str
    minutes: int  # of an exercise, else 0
    level: int
    questions: list[str]


def sections(lesson: Lesson) -> list[Section]:
    """All headings, in order, with the questions that are asked below each."""
    found: list[Section] = []
    for cell in make_notebook(sources()[lesson.notebook], solved=False).cells:
        if cell.cell_type == "markdown":
            for marks, title in re.findall(r"^(#+) (.*)$", cell.source, re.M):
                exercise = EXERCISE.fullmatch(title)
                name, minutes = (exercise[1], int(exercise[2])) if exercise else (title, 0)
                found.append(Section(name, minutes, len(marks), []))
        else:
            asked = [name for kind, name in QUESTION.findall(cell.source) if kind == "ask"]
            if asked:
                found[-1].questions.extend(asked)
    return found


def table(lesson: Lesson) -> str:
    """The numbered sections with what is to be done in each."""
    lines = ["| section | exercises | questions |", "|---|---|---|"]
    exercises: list[str] = []
    rows: list[tuple[str, list[str], int]] = []
    for one in sections(lesson):
        if one.level == 1 or (one.level > 2 and not rows):  # the title, and what stands below it
            continue
        if one.level == 2:
            rows.append((one.name, [], 0))
        name, exercises, asked = rows[-1]
        if one.minutes:
            exercises.append(f"{one.name.partition(':')[0].lower()}, {one.minutes} min")
        rows[-1] = (name, exercises, asked + len(one.questions))
    for name, exercises, asked in rows:
        lines.append(f"| {name} | {'; '.join(exercises)} | {asked or ''} |")
    return "\n".join(lines) + "\n"


def numbered(page: str, lesson: Lesson) -> str:
    """The page, with the slides behind each name of a section.

    A section ends where the next one begins; in a plan also at an exercise that it names itself.
    """
    heads, count = titles(lesson.notebook)
    levels = {one.name: one.level for one in sections(lesson)}
    starts = [(EXERCISE.sub(r"\1", title), number) for title, number in heads]
    starts = [(name, number) for name, number in starts if name in levels]

    def slides(name: str, named: set[str]) -> str:
        at = [one for one, _ in starts].index(name)
        ends = (
            number
            for other, number in starts[at + 1 :]
            if levels[other] <= levels[name] or other in named
        )
        first, last = starts[at][1], next(ends, count + 1) - 1
        return f"slides {first}–{last}" if last > first else f"slide {first}"

    def mended(part: str) -> str:
        named = {match[1] for match in NAMED.finditer(part)}
        return NAMED.sub(lambda match: f"**{match[1]}** ({slides(match[1], named)})", part)

    parts = re.split(r"(\n\n|\n(?=\|))", page)  # a list is one plan; a table has lines
    return "".join(map(mended, parts))


def written(page: str, lesson: Lesson) -> str:
    """The page with its table and its numbers."""
    return numbered(TABLE.sub(lambda _: table(lesson), page), lesson)


def main() -> None:
    """Write the tables, the numbers and the answers anew."""
    for lesson in LESSONS:
        path = PAGES / f"{lesson.code}.md"
        if path.is_file():
            page = path.read_text(encoding="utf-8")
            path.write_text(written(page, lesson), encoding="utf-8")
    answers.write()


if __name__ == "__main__":
    main()
