"""A built notebook as pages of the site: one for each sitting, its questions as buttons.

What only somebody who runs the notebook can use is left out: the cell that installs, and what an
open exercise or an open question prints. Knows cells; runs nothing and knows no Sphinx.
"""

import base64
import hashlib
import html
import re
import shutil
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbformat import NotebookNode
from PIL import Image

from tools.publish.build import NOTEBOOKS, QUESTION, Lesson, sources, target
from tutorial_engine.viz.drawing.png import png_at_night
from tutorial_engine.viz.tokens import escape

HEADING = re.compile(r"^# (#{1,3}) (.+)$", re.M)  # in a Markdown cell of a source
NUMBER = re.compile(r"^(?:\w+ · |Exercise \d+: )?(.*?)(?: \(\d+ minutes\))?$")
TITLE = re.compile(r"\A# (.+)$", re.M)  # of a lesson, or of a sitting
OPEN = ("Choose an answer above", "☐")  # how the outputs begin that only a run can change
INLINE = re.compile(r'<img src="data:image/png;base64,([^"]+)"([^>]*)>')
FIGURES = NOTEBOOKS.parent / "figures"


class Question(NamedTuple):
    """A prediction of a lesson: what is asked, the options, which is right, and the answer."""

    lesson: Lesson
    name: str
    words: str
    options: tuple[str, ...]
    right: str
    answer: str  # HTML
    heading: str  # of its section, without number and minutes

    def html(self, up: str) -> str:
        """Buttons that open the answer below them. `up`: the way to the site's first folder."""
        buttons = "".join(
            f'<button type="button"{mark}>{escape(option)}</button>'
            for option in self.options
            for mark in [" data-right" if option == self.right else ""]
        )
        answer = INLINE.sub(lambda one: picture(one[1], one[2], up), self.answer)
        return (
            f'<div class="ask"><p><b>Predict:</b> {escape(self.words)}</p>'
            f'<div class="ask-options" role="group" aria-label="answers">{buttons}</div>'
            f"<details><summary>Answer</summary>{answer}</details></div>"
        ).replace("\n", "&#10;")  # an empty line would end the HTML in Markdown


class Page(NamedTuple):
    """A page of the site: its file without ending, its title, its notebook."""

    name: str
    title: str
    notebook: NotebookNode


def built(lesson: Lesson) -> NotebookNode:
    """The learner's notebook. ValueError for one that is not built."""
    path = target(lesson.notebook, solved=False)
    if not path.is_file():
        raise ValueError(f"{path} is not there: run `make notebooks` first")
    return nbformat.read(path, as_version=4)


def name_of(lesson: Lesson, sitting: int = 1) -> str:
    """The file of a sitting, without its ending: "02_kv_cache", "02_kv_cache-2"."""
    name = lesson.notebook.rpartition("/")[2]
    return name if sitting == 1 else f"{name}-{sitting}"


def headings(lesson: Lesson) -> dict[str, tuple[str, str]]:
    """Heading, without number and minutes → its page and its anchor, for a lesson's source."""
    found, sitting = dict[str, tuple[str, str]](), -1  # the title, then the first sitting
    for level, text in HEADING.findall(sources()[lesson.notebook].read_text(encoding="utf-8")):
        sitting += level == "#"
        own = _title(lesson, text) if level == "#" and sitting > 1 else text
        found[NUMBER.sub(r"\1", text)] = name_of(lesson, max(sitting, 1)), slug(own)
    return found


def slug(heading: str) -> str:
    """The anchor that MyST gives a heading: GitHub's."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def _title(lesson: Lesson, words: str) -> str:
    return f"{lesson.code} · {words}"


def questions(lesson: Lesson) -> dict[str, Question]:
    """The predictions of a lesson by their names, in order."""
    found, heading = dict[str, Question](), ""
    for cell in built(lesson).cells:
        if cell.cell_type == "markdown":
            for words in re.findall(r"^#{1,3} (.+)$", cell.source, re.M):
                heading = NUMBER.sub(r"\1", words)
        elif (one := _question(lesson, cell, heading)) is not None:
            found[one.name] = one
    return found


def _question(lesson: Lesson, cell: NotebookNode, heading: str = "") -> Question | None:
    """What a cell asks; ValueError where its answer is none of the options."""
    names = [name for kind, name in QUESTION.findall(cell.source) if kind == "ask"]
    if not names:
        return None
    asked, folded = (output["data"] for output in cell.outputs[-2:])
    first, *options = asked["text/plain"].split("\n  ( ) ")
    answer = re.sub(r"^<details><summary>Answer</summary>|</details>$", "", folded["text/html"])
    said = html.unescape(re.sub(r"<[^>]+>", "\n", answer))
    right = [one for one in options if re.search(rf"^Answer: {re.escape(one)}\.", said, re.M)]
    if not right:
        raise ValueError(f"{names[0]!r} of {lesson.code} has no answer among {options}: {said!r}")
    words = first.removeprefix("Predict: ")
    right_one = max(right, key=len)
    return Question(lesson, names[0], words, tuple(options), right_one, answer, heading)


def picture(data: str, look: str, up: str) -> str:
    """A picture (base64) that opens alone, so that a phone can enlarge it; `look`: attributes.

    What is one of the figures opens as SVG, whose letters stay sharp, and turns with the page: furo
    shows one of two. (A plot of times is measured anew for the figures, so it stays as it is.)
    """
    file, png = f"pictures/{_file(data)}", base64.b64decode(data)
    if png not in figures():
        return f'<a class="picture" href="{up}{file}"><img src="{up}{file}"{look}></a>'
    both = "".join(
        f'<img class="only-{page}" src="{up}{name}"{look}>'
        for page, name in (("light", file), ("dark", by_night(file)))
    )
    return f'<a class="picture" href="{up}figures/{figures()[png]}">{both}</a>'


def by_night(file: str) -> str:
    """The name of a picture's file for a dark page."""
    return f"{file.removesuffix('.png')}-dark.png"


@cache
def figures() -> dict[bytes, str]:
    """PNG of a figure → the file of the same as SVG."""
    return {path.read_bytes(): f"{path.stem}.svg" for path in FIGURES.glob("*.png")}


def _file(data: str) -> str:
    return hashlib.sha256(base64.b64decode(data)).hexdigest()[:24] + ".png"


def pictures(lesson: Lesson) -> dict[str, bytes]:
    """File name → PNG, of the pictures below the cells and in the answers."""
    outputs = [
        output.get("data", {}) for cell in built(lesson).cells for output in cell.get("outputs", [])
    ]
    found = [data["image/png"] for data in outputs if "image/png" in data]
    found += [data for one in questions(lesson).values() for data, _ in INLINE.findall(one.answer)]
    return {_file(data): base64.b64decode(data) for data in found}


def pages(lesson: Lesson) -> list[Page]:
    """The lesson's pages, in their order. The first has the introduction and the first sitting."""
    notebook = built(lesson)
    parts: list[list[NotebookNode]] = [[]]
    titles = list[str]()
    for cell in notebook.cells:
        if cell.get("id") == "install":
            continue
        begins = TITLE.match(cell.source) if cell.cell_type == "markdown" else None
        if begins:
            titles.append(begins[1])
            if len(titles) == 2:  # the first sitting stands below the title
                cell.source = f"#{cell.source}"
            elif len(titles) > 2:
                _end(parts[-1])
                parts.append([])
                cell.source = f"# {_title(lesson, begins[1])}" + cell.source[begins.end() :]
        if cell.cell_type == "code":
            parts[-1] += _for_readers(lesson, cell)
        else:
            parts[-1].append(cell)
    found = []
    for number, cells in enumerate(parts, 1):
        title = TITLE.match(cells[0].source)
        assert title is not None, "a page begins with its title"
        own = nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)
        found.append(Page(name_of(lesson, number), title[1], own))
    return found


def _end(cells: list[NotebookNode]) -> None:
    """A page does not end with a rule: what it led to is another page."""
    cells[-1].source = re.sub(r"\n+-{3,}\s*\Z", "\n", cells[-1].source)
    if re.fullmatch(r"\s*-{3,}\s*", cells[-1].source):
        del cells[-1]


def _for_readers(lesson: Lesson, cell: NotebookNode) -> list[NotebookNode]:
    """A code cell for who runs nothing: its question as buttons, no word about what is not done."""
    question = _question(lesson, cell)
    if question is not None:
        del cell.outputs[-2:]
    cell.outputs = [output for output in cell.outputs if not _said(output).startswith(OPEN)]
    for output in cell.outputs:
        if "image/png" in output.get("data", {}):
            alt = escape(output.data["text/plain"])
            shown = picture(output.data["image/png"], f' alt="{alt}"', "../")
            output.data, output.metadata = NotebookNode({"text/html": shown}), NotebookNode()
    found = [] if question and cell.source.startswith("predictions.ask(") else [cell]
    if question is not None:
        inside = question.html("../")
        found.append(nbformat.v4.new_markdown_cell(inside, id=f"{cell.id}-ask"))
    return found


def _said(output: NotebookNode) -> str:
    return output.get("text") or output.get("data", {}).get("text/plain", "")


def write_pictures(lessons: tuple[Lesson, ...], folder: Path) -> None:
    """All pictures as files below the folder, those that are figures as SVG, too."""
    for name in ("pictures", "figures"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for lesson in lessons:
        for name, png in pictures(lesson).items():
            (folder / "pictures" / name).write_bytes(png)
            if png in figures():
                shutil.copy(FIGURES / figures()[png], folder / "figures")
                svg = (FIGURES / figures()[png]).read_text(encoding="utf-8")
                width = Image.open(BytesIO(png)).width
                (folder / "pictures" / by_night(name)).write_bytes(png_at_night(svg, width))
