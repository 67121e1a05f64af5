"""Puts the table "What is in the notebook" into each page of docs/teaching.

    python tools/teaching.py

Sections, exercises with their minutes, and questions are read from the notebooks' sources.
"""

import re
from pathlib import Path
from typing import NamedTuple

from tutorial_engine.learn.build import QUESTION, make_notebook, sources
from tutorial_engine.syllabus import LESSONS, Lesson

PAGES = Path(__file__).parent.parent / "docs" / "teaching"
TABLE = re.compile(r"(?<=<!-- tools/teaching.py -->\n).*?(?=<!-- end -->)", re.S)
EXERCISE = re.compile(r"(Exercise \d+: .*) \((\d+) minutes\)")


class Section(NamedTuple):
    """A part of a notebook under a heading, as "3 · The block table"."""

    name: str
    minutes: int  # of an exercise, else 0
    level: int
    questions: list[str]


def sections(lesson: Lesson) -> list[Section]:
    """All headings below the title, in order, with the questions that are asked below each."""
    found: list[Section] = []
    for cell in make_notebook(sources()[lesson.notebook], solved=False).cells:
        if cell.cell_type == "markdown":
            for marks, title in re.findall(r"^(##+) (.*)$", cell.source, re.M):
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
        if one.level == 2:
            rows.append((one.name, [], 0))
        name, exercises, asked = rows[-1]
        if one.minutes:
            exercises.append(f"{one.name.partition(':')[0].lower()}, {one.minutes} min")
        rows[-1] = (name, exercises, asked + len(one.questions))
    for name, exercises, asked in rows:
        lines.append(f"| {name} | {'; '.join(exercises)} | {asked or ''} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the tables anew."""
    for lesson in LESSONS:
        page = PAGES / f"{lesson.code}.md"
        page.write_text(TABLE.sub(table(lesson), page.read_text(encoding="utf-8")), "utf-8")


if __name__ == "__main__":
    main()
