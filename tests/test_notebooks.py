"""The notebooks that learners open: in step with their sources, complete, light and offline."""

import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest
from nbformat import NotebookNode

from tutorial_engine.learn.build import SOLUTION, make_notebook, sources, target
from tutorial_engine.learn.figures import FIGURES, TAG
from tutorial_engine.learn.html import page
from tutorial_engine.syllabus import LESSONS

MIN_CHECKED = 25  # cells whose outputs nbval compares
MAX_LINES, MAX_EXERCISE_LINES, MAX_WORDS = 20, 30, 60
MAX_FILE, MAX_OUTPUTS = 700_000, 500_000
IGNORE = "nbval-ignore-output"
EXERCISE = "exercise"
KNOWN_TAGS = {IGNORE, EXERCISE}
BUILT = [(lesson.notebook, solved) for lesson in LESSONS for solved in (False, True)]
BUILT_NAMES = [f"{name}{', solved' if solved else ''}" for name, solved in BUILT]

every_notebook = pytest.mark.parametrize(("name", "solved"), BUILT, ids=BUILT_NAMES)
every_lesson = pytest.mark.parametrize("name", [lesson.notebook for lesson in LESSONS])


@cache
def built(name: str, solved: bool) -> NotebookNode:
    return nbformat.read(target(name, solved), as_version=4)


@cache
def fresh(name: str, solved: bool) -> NotebookNode:
    return make_notebook(sources()[name], solved)


def tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def is_folded(cell: NotebookNode) -> bool:
    """Are its outputs hidden until it is run?"""
    return bool(cell.metadata.get("jupyter", {}).get("outputs_hidden"))


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


class Shown(NamedTuple):
    """One output of a cell."""

    cell: str
    kind: str
    data: dict[str, Any]
    metadata: dict[str, Any]

    @property
    def text(self) -> str:
        """All that it says in words: what was printed, or the texts of its data."""
        return "\n".join(v for k, v in self.data.items() if k.startswith("text/"))


def outputs(notebook: NotebookNode) -> list[Shown]:
    found = []
    for cell in code_cells(notebook):
        for output in cell.outputs:
            data = dict(output.get("data", {}))
            if output.output_type == "stream":
                data = {"text/plain": output.text}
            kind = output.get("name", output.output_type)
            found.append(Shown(cell.id, kind, data, dict(output.get("metadata", {}))))
    return found


# -- in step with the source --------------------------------------------------------------------


@every_notebook
def test_notebook_is_in_step_with_its_source(name: str, solved: bool) -> None:
    def content(notebook: NotebookNode) -> list[tuple[str, str, str, list[str], bool]]:
        return [
            (c.id, c.cell_type, c.source, sorted(tags(c)), is_folded(c)) for c in notebook.cells
        ]

    assert content(built(name, solved)) == content(fresh(name, solved)), "run `make notebooks`"


@every_lesson
def test_answers_are_folded_away_from_those_who_have_not_predicted_yet(name: str) -> None:
    folded = [cell for cell in built(name, False).cells if is_folded(cell)]
    asked = [cell for cell in built(name, False).cells if "predictions.ask(" in cell.source]
    assert len(folded) == len(asked) > 0
    assert all("predictions.reveal(" in cell.source for cell in folded)
    for cell in folded:  # the first line is all that JupyterLab shows of them
        assert cell.outputs[0].text.startswith("No prediction yet"), cell.source
    assert not any(is_folded(cell) for cell in built(name, True).cells)


@every_notebook
def test_notebook_is_valid_and_was_run_from_top_to_bottom(name: str, solved: bool) -> None:
    nbformat.validate(built(name, solved))
    counts = [cell.execution_count for cell in code_cells(built(name, solved))]
    assert counts == list(range(1, len(counts) + 1))


def test_no_other_notebook_lies_around() -> None:
    folder = target(LESSONS[0].notebook, solved=False).parent
    known = {target(name, solved) for name, solved in BUILT}
    found = {f for f in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in f.parts}
    assert found == known


@every_notebook
def test_many_outputs_are_checked(name: str, solved: bool) -> None:
    cells = code_cells(built(name, solved))
    checked = [cell for cell in cells if cell.outputs and IGNORE not in tags(cell)]
    assert len(checked) >= MIN_CHECKED
    assert len(checked) > len(cells) / 2


@every_notebook
def test_only_what_depends_on_the_machine_is_left_unchecked(name: str, solved: bool) -> None:
    unchecked = [cell for cell in code_cells(built(name, solved)) if IGNORE in tags(cell)]
    assert 1 <= len(unchecked) <= 5
    for cell in unchecked:
        assert re.search(r"cuda|perf_counter|\btime\b|measure", cell.source), cell.source


@every_lesson
def test_tags_are_known(name: str) -> None:
    for cell in fresh(name, True).cells:
        unknown = {tag for tag in tags(cell) - KNOWN_TAGS if not tag.startswith(TAG)}
        assert not unknown, cell.id
        assert cell.cell_type == "code" or not tags(cell)


# -- light --------------------------------------------------------------------------------------


@every_notebook
def test_code_cells_are_short(name: str, solved: bool) -> None:
    for cell in code_cells(built(name, solved)):
        most = MAX_EXERCISE_LINES if EXERCISE in tags(cell) else MAX_LINES
        assert len(cell.source.splitlines()) <= most, cell.source


def words_of(markdown: str) -> list[str]:
    return re.sub(r"<details>.*?</details>", "", markdown, flags=re.S).split()


@every_lesson
def test_texts_are_short(name: str) -> None:
    for cell in fresh(name, False).cells:
        if cell.cell_type == "markdown":
            assert 0 < len(words_of(cell.source)) <= MAX_WORDS, cell.source


@every_notebook
def test_files_and_outputs_are_small(name: str, solved: bool) -> None:
    assert target(name, solved).stat().st_size <= MAX_FILE
    size = sum(len(json.dumps(cell.outputs)) for cell in code_cells(built(name, solved)))
    assert 0 < size <= MAX_OUTPUTS


# -- offline and without a kernel ---------------------------------------------------------------

# an address that a browser fetches by itself when it shows the thing
LOADS = re.compile(
    r"""(?:src|srcset|data|poster|action)\s*=\s*["']?\s*(?:https?:)?//"""
    r"""|<link\b[^>]*href\s*=\s*["']?\s*(?:https?:)?//"""
    r"""|url\(\s*["']?\s*(?:https?:)?//|@import|\bimport\s*\(|\bfetch\s*\(""",
    re.I,
)
MARKDOWN_IMAGE = re.compile(r"!\[[^\]]*\]\(\s*<?\s*(?:https?:)?//|!\[[^\]]*\]\[", re.I)


@every_notebook
def test_nothing_remote_is_loaded(name: str, solved: bool) -> None:
    for cell in built(name, solved).cells:
        if cell.cell_type == "markdown":
            assert not LOADS.search(cell.source) and not MARKDOWN_IMAGE.search(cell.source)
    for output in outputs(built(name, solved)):
        for mime, data in output.data.items():
            if mime != "image/png":  # that is its own bytes
                assert not LOADS.search(str(data)), f"{output.cell} {mime}"


@pytest.mark.parametrize(
    "text",
    [
        '<img src="https://example.org/a.png">',
        "<script src='//example.org/a.js'></script>",
        '<link rel="stylesheet" href="http://example.org/a.css">',
        "<style>body{background:url(https://example.org/a.png)}</style>",
        "<style>@import 'https://example.org/a.css'</style>",
    ],
)
def test_the_search_for_remote_things_finds_them(text: str) -> None:
    assert LOADS.search(text)
    assert not LOADS.search('<a href="https://example.org">a link is no load</a>')


@every_notebook
def test_no_widget_is_saved(name: str, solved: bool) -> None:
    assert "widgets" not in built(name, solved).metadata
    for output in outputs(built(name, solved)):
        assert not [mime for mime in output.data if "widget" in mime], output.cell
        assert set(output.data) <= {"text/plain", "image/png"}, output.cell


@every_notebook
def test_every_image_has_its_caption_as_alt_text(name: str, solved: bool) -> None:
    images = [o for o in outputs(built(name, solved)) if "image/png" in o.data]
    assert len(images) >= 5
    for image in images:
        alt = image.metadata.get("image/png", {}).get("alt")
        assert alt and alt == image.data["text/plain"], image.cell
        assert re.search(r"\d", alt) and alt.endswith("."), "a sentence with numbers"
    assert len({image.data["text/plain"] for image in images}) == len(images)


@every_notebook
def test_nothing_went_wrong_while_it_ran(name: str, solved: bool) -> None:
    assert {o.kind for o in outputs(built(name, solved))} <= {
        *("stdout", "execute_result", "display_data")
    }


@every_notebook
def test_outputs_name_no_address_and_no_place(name: str, solved: bool) -> None:
    for output in outputs(built(name, solved)):
        assert not re.search(r"0x[0-9a-f]{6,}|<Figure size|\bat /", output.text), output.text


# -- exercises and predictions ------------------------------------------------------------------


def exercise_ids(name: str) -> list[str]:
    return [cell.id for cell in fresh(name, True).cells if EXERCISE in tags(cell)]


def by_id(notebook: NotebookNode) -> dict[str, NotebookNode]:
    return {cell.id: cell for cell in notebook.cells}


@every_lesson
def test_exercises_are_marked_and_solved_in_the_source(name: str) -> None:
    parts = re.split(r"^# %%", sources()[name].read_text(encoding="utf-8"), flags=re.M)
    marked = [part for part in parts if re.match(rf".*tags=.*\"{EXERCISE}\"", part)]
    solved = [part for part in parts if SOLUTION.search(part)]
    assert marked == solved and len(marked) == len(exercise_ids(name)) >= 3
    for part in marked:
        assert part.count("### BEGIN SOLUTION") == part.count("### END SOLUTION") >= 1


@every_lesson
def test_learners_copy_is_open_and_the_other_is_solved(name: str) -> None:
    source = sources()[name].read_text(encoding="utf-8")
    cells = [cell for cell in re.split(r"^# %%", source, flags=re.M) if SOLUTION.search(cell)]
    answers = [[match[0].splitlines()[1:-1] for match in SOLUTION.finditer(c)] for c in cells]
    opened, solved = (built(name, which) for which in (False, True))
    learners_code = "\n".join(cell.source for cell in code_cells(opened))
    for exercise, parts in zip(exercise_ids(name), answers, strict=True):
        mine, theirs = (by_id(n)[exercise].source for n in (opened, solved))
        assert len(re.findall(r"^ +\.\.\.$", mine, re.M)) == mine.count("...") == len(parts)
        assert "..." not in theirs
        for answer in parts:
            for line in answer:
                assert line.strip() and line in theirs
                assert line not in mine
            assert "\n".join(answer) not in learners_code
    for notebook in (opened, solved):
        assert "SOLUTION" not in "\n".join(cell.source for cell in notebook.cells)


@every_lesson
def test_copies_differ_in_the_exercises_only(name: str) -> None:
    pairs = zip(fresh(name, False).cells, fresh(name, True).cells, strict=True)
    assert [a.id for a, b in pairs if a.source != b.source] == exercise_ids(name)


@every_lesson
def test_every_exercise_has_a_hint_before_and_a_check_after(name: str) -> None:
    cells = fresh(name, False).cells
    for i, cell in enumerate(cells):
        if EXERCISE not in tags(cell):
            continue
        assert "<details><summary>Hint</summary>" in cells[i - 1].source
        assert "### Exercise" in cells[i - 1].source and "minutes" in cells[i - 1].source
        defined = re.findall(r"^def (\w+)", cell.source, re.M)
        assert re.search(rf"^check_\w+\((?:{'|'.join(defined)})\b", cells[i + 1].source, re.M)


@every_notebook
def test_open_exercises_are_open_and_solved_ones_right(name: str, solved: bool) -> None:
    said = "\n".join(output.text for output in outputs(built(name, solved)))
    marks = len(re.findall("^☐ ", said, re.M)), len(re.findall("^✔ ", said, re.M))
    exercises = len(exercise_ids(name))
    other = len(re.findall("^✔ ", "\n".join(o.text for o in outputs(built(name, True))), re.M))
    assert "✘" not in said
    assert not re.search(r"not noticed|BELOW|> tolerance", said), "a claim did not hold here"
    assert said.count("☐") == marks[0] == (0 if solved else exercises)
    assert marks[1] == other - (0 if solved else exercises)


@every_lesson
def test_every_prediction_is_asked_once_and_revealed_later(name: str) -> None:
    cells = code_cells(fresh(name, True))

    def places(method: str) -> list[tuple[str, int]]:
        pattern = rf"predictions\.{method}\(\s*\"([\w-]+)\""
        return [(found, i) for i, c in enumerate(cells) for found in re.findall(pattern, c.source)]

    asked, revealed = places("ask"), places("reveal")
    assert len(asked) >= 3 and len(dict(asked)) == len(asked)
    assert [question for question, _ in asked] == [question for question, _ in revealed]
    for (question, before), (_, after) in zip(asked, revealed, strict=True):
        assert before < after, question
        assert "reveal" not in cells[before].source, "the answer is in another cell"


@every_lesson
def test_score_comes_last(name: str) -> None:
    assert "predictions.score()" in code_cells(fresh(name, True))[-1].source


# -- figures ------------------------------------------------------------------------------------


def figure_names() -> list[str]:
    return [
        f"{lesson.notebook[:2]}_{tag.removeprefix(TAG)}"
        for lesson in LESSONS
        for cell in fresh(lesson.notebook, True).cells
        for tag in sorted(tags(cell))
        if tag.startswith(TAG)
    ]


def test_figures_are_the_tagged_cells_and_nothing_else() -> None:
    names = figure_names()
    assert len(names) == len(set(names)) >= 5
    wanted = {f"{name}.{kind}" for name in names for kind in ("svg", "png")}
    assert {file.name for file in FIGURES.iterdir()} == wanted, "run `make figures`"
    assert all((FIGURES / name).stat().st_size > 1000 for name in wanted)


@every_notebook
def test_every_tagged_cell_shows_one_picture(name: str, solved: bool) -> None:
    shown = outputs(built(name, solved))
    for cell in code_cells(built(name, solved)):
        figures = [tag for tag in tags(cell) if tag.startswith(TAG)]
        images = [o for o in shown if o.cell == cell.id and "image/png" in o.data]
        assert len(figures) == len(images) <= 1, cell.id


# -- the exported page --------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page shows and what it would fetch."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.images: list[dict[str, str]] = []
        self.fetched: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self._inside = tag
        if tag == "img":
            self.images.append(values)
        names = ("src", "srcset", "poster", "data") + (() if tag == "a" else ("href", "xlink:href"))
        self.fetched += [values[name] for name in names if name in values]
        self.styles.append(values.get("style", ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside == "style":
            self.styles.append(data)

    def remote(self) -> list[str]:
        """Every address on another machine that opening the page would fetch."""
        found = [url for url in self.fetched if re.match(r"\s*(?:https?:)?//", url)]
        for style in self.styles:
            found += re.findall(r"url\(\s*[\"']?((?:https?:)?//[^)\"']+)", style)
            found += re.findall(r"@import\s+[\"']((?:https?:)?//[^\"']+)", style)
        for script in self.scripts:
            found += re.findall(r"\bimport\b[^;\n]*?[\"'`]((?:https?:)?//[^\"'`]+)", script)
            found += re.findall(
                r"(?:fetch|importScripts)\(\s*[\"'`]((?:https?:)?//[^\"'`]+)", script
            )
            found += re.findall(r"\.src\s*=\s*[\"'`]((?:https?:)?//[^\"'`]+)", script)
            found += re.findall(r"paths\s*:\s*\{[^}]*?[\"'`]((?:https?:)?//[^\"'`]+)", script)
        return found


@cache
def exported(name: str, solved: bool) -> Page:
    return Page(page(target(name, solved)))


@every_notebook
def test_exported_page_loads_nothing_from_another_machine(name: str, solved: bool) -> None:
    assert exported(name, solved).remote() == []


@every_notebook
def test_exported_page_has_all_pictures_with_alt_texts(name: str, solved: bool) -> None:
    images = exported(name, solved).images
    captions = [o.data["text/plain"] for o in outputs(built(name, solved)) if "image/png" in o.data]
    assert [image.get("alt") for image in images] == captions
    assert all(image["src"].startswith("data:image/png;base64,") for image in images)


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://example.org/x.js"></script>',
        '<link rel="stylesheet" href="//example.org/x.css">',
        '<img src="http://example.org/x.png" alt="x">',
        "<style>a{background:url('https://example.org/x.png')}</style>",
        "<style>@import 'https://example.org/x.css';</style>",
        '<p style="background:url(//example.org/x.png)">x</p>',
        '<script type="module">import x from "https://example.org/x.mjs";</script>',
        '<script>import("https://example.org/x.mjs")</script>',
        "<script>require.config({paths: {x: 'https://example.org/x'}})</script>",
    ],
)
def test_the_reader_of_pages_sees_what_would_be_fetched(html: str) -> None:
    assert len(Page(html).remote()) == 1
    assert not Page('<a href="https://example.org">a link</a><img src="data:x" alt="">').remote()


def test_page_of_a_missing_notebook_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        page(tmp_path / "none.ipynb")
