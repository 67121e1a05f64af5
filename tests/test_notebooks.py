"""The notebooks that learners open: in step with their sources, complete, light and offline.

nbval runs the solutions. The learner's copies differ from them in the exercises and in what checks
say of these: that is compared here, and the open exercises are run.
"""

import builtins
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest
from conftest import need_real
from lesson_cells import fresh, needed, run_cell
from nbformat import NotebookNode

from tools.publish.build import (
    ELSEWHERE,
    LESSONS,
    QUESTION,
    SOLUTION,
    SOLVED,
    answers,
    fold_answers,
    sources,
    target,
)
from tools.publish.figures import DARK, FIGURES, TAG
from tools.publish.html import page
from tutorial_engine.lab.real import needs_real
from tutorial_engine.learn.parts.memory import PARTS_04, PARTS_05
from tutorial_engine.learn.parts.model import PARTS
from tutorial_engine.learn.parts.scheduler import PARTS_03
from tutorial_engine.learn.without_model import LINE
from tutorial_engine.viz.drawing.png import at_night

MAX_LINES, MAX_EXERCISE_LINES, MAX_WORDS = 20, 30, 120
MAX_FILE, MAX_OUTPUTS = 725_000, 605_000
LIGHT, MAX_LIGHT_FILE, MAX_CELLS = ("03", "04", "05"), 480_000, 130
IGNORE, EXERCISE = "nbval-ignore-output", "exercise"
ASKS, REVEALS = "predictions.ask(", "predictions.reveal("
TELLS = re.compile(r"(mine|server|on_cells)\.(?:tell|serve)\(")  # the learner's parts run
LABELS = re.compile(r"\b(mine|server)\.(label\b|parts\.own\b|beside_vllm)")  # named after them
USES = re.compile(r"^(mine|server|on_cells)\.use\((\w+), check_\w+\)$", re.M)
BRINGS = re.compile(r"bring\((?:mine|server), ")  # what is read there is the learner's own file
CHOOSE = "Choose an answer above, then run this cell again."
NAMES = [lesson.notebook for lesson in LESSONS]
CODES = {lesson.notebook: lesson.code for lesson in LESSONS}

every_lesson = pytest.mark.parametrize("name", NAMES)
every_notebook = pytest.mark.parametrize(
    ("name", "solved"),
    [(name, solved) for name in NAMES for solved in (False, True)],
    ids=[f"{name}{solved}" for name in NAMES for solved in ("", ", solved")],
)


@cache
def built(name: str, solved: bool) -> NotebookNode:
    return nbformat.read(target(name, solved), as_version=4)


def tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


class Shown(NamedTuple):
    """One output of a cell."""

    kind: str
    data: dict[str, Any]
    metadata: dict[str, Any]

    @property
    def text(self) -> str:
        """What it says in words: what was printed, or its data as plain text."""
        return self.data.get("text/plain", "")

    @property
    def folded(self) -> str:
        """What can be opened below a question: HTML with the answer's pictures in it."""
        return self.data.get("text/html", "")


def shown(cell: NotebookNode) -> list[Shown]:
    found = []
    for output in cell.get("outputs", []):
        data = dict(output.get("data", {}))
        if output.output_type == "stream":
            data = {"text/plain": output.text}
        kind = output.get("name", output.output_type)
        found.append(Shown(kind, data, dict(output.get("metadata", {}))))
    return found


def outputs(notebook: NotebookNode) -> list[Shown]:
    return [output for cell in code_cells(notebook) for output in shown(cell)]


# -- in step with the source --------------------------------------------------------------------


@every_notebook
def test_notebook_is_in_step_with_its_source_and_was_run(name: str, solved: bool) -> None:
    def content(notebook: NotebookNode) -> list[tuple[str, str, str, list[str]]]:
        return [(c.id, c.cell_type, c.source, sorted(tags(c))) for c in notebook.cells]

    nbformat.validate(built(name, solved))
    assert content(built(name, solved)) == content(fresh(name, solved)), "run `make notebooks`"
    counts = [cell.execution_count for cell in code_cells(built(name, solved))]
    assert counts == list(range(1, len(counts) + 1))


@every_lesson
def test_answers_are_folded_below_their_questions(name: str) -> None:
    """In the learner's copy, which nobody has answered; the solved one shows them."""
    for solved in (False, True):
        cells = code_cells(built(name, solved))
        folds = [[o.folded for o in shown(c) if o.folded] for c in cells if ASKS in c.source]
        assert folds and all(len(fold) == (not solved) for fold in folds)
        assert all("<summary>Answer</summary>" in fold[0] for fold in folds if fold)
        for cell in [cell for cell in cells if REVEALS in cell.source]:
            said = shown(cell)
            if solved:
                assert said[0].text.startswith("Answer: "), cell.source
            else:
                assert said[0].text.startswith(CHOOSE), cell.source
                gated = len(said) == 1 and said[0].text.strip() == CHOOSE
                assert gated, "what gives the answer away stays behind the gate"


@every_lesson
def test_outputs_are_checked_but_for_what_depends_on_the_machine(name: str) -> None:
    cells = code_cells(built(name, True))
    checked = [cell for cell in cells if cell.outputs and IGNORE not in tags(cell)]
    assert len(checked) > len(cells) / 2


# -- light, offline, and whole without a kernel ---------------------------------------------------


@every_lesson
def test_cells_and_texts_of_a_source_are_short(name: str) -> None:
    for cell in fresh(name, True).cells:
        if cell.cell_type == "markdown":
            words = re.sub(r"<details>.*?</details>", "", cell.source, flags=re.S).split()
            assert 0 < len(words) <= MAX_WORDS, cell.source
        else:
            most = MAX_EXERCISE_LINES if EXERCISE in tags(cell) else MAX_LINES
            assert len(cell.source.splitlines()) <= most, cell.source


@every_notebook
def test_files_and_outputs_are_small(name: str, solved: bool) -> None:
    is_light = CODES[name] in LIGHT
    assert target(name, solved).stat().st_size <= (MAX_LIGHT_FILE if is_light else MAX_FILE)
    assert not is_light or len(built(name, solved).cells) <= MAX_CELLS
    size = sum(len(json.dumps(cell.outputs)) for cell in code_cells(built(name, solved)))
    assert 0 < size <= MAX_OUTPUTS


# an address that a browser fetches by itself when it shows the thing
LOADS = re.compile(
    r"""(?:src|srcset|data|poster|action)\s*=\s*["']?\s*(?:https?:)?//"""
    r"""|<link\b[^>]*href\s*=\s*["']?\s*(?:https?:)?//"""
    r"""|url\(\s*["']?\s*(?:https?:)?//|@import|\bimport\s*\(|\bfetch\s*\("""
    r"""|!\[[^\]]*\]\(\s*<?\s*(?:https?:)?//|!\[[^\]]*\]\[""",  # images of Markdown
    re.I,
)


@every_notebook
def test_nothing_remote_is_loaded(name: str, solved: bool) -> None:
    assert LOADS.search('<img src="https://example.org/a.png">') and LOADS.search("@import 'a'")
    assert not LOADS.search('<a href="https://example.org">a link is no load</a>')
    for cell in built(name, solved).cells:
        assert cell.cell_type != "markdown" or not LOADS.search(cell.source)
    for output in outputs(built(name, solved)):
        for mime, data in output.data.items():
            assert mime == "image/png" or not LOADS.search(str(data)), mime


@every_notebook
def test_outputs_show_without_a_kernel_and_name_no_place(name: str, solved: bool) -> None:
    assert "widgets" not in built(name, solved).metadata
    images = []
    for output in outputs(built(name, solved)):
        assert output.kind in ("stdout", "execute_result", "display_data"), output.text
        assert set(output.data) <= {"text/plain", "text/html" if output.folded else "image/png"}
        assert not re.search(r"0x[0-9a-f]{6,}|<Figure size|\bat /", output.text), output.text
        if "image/png" in output.data:
            images.append(output.text)
            alt = output.metadata.get("image/png", {}).get("alt")
            assert alt and alt == output.text, "the caption is the alt text"
            assert re.search(r"\d", alt) and alt.endswith("."), "a sentence with numbers"
    assert len(set(images)) == len(images) > 0


# -- exercises and predictions ------------------------------------------------------------------


def exercises(name: str) -> list[int]:
    """The places of the exercises among the cells."""
    return [i for i, cell in enumerate(fresh(name, True).cells) if EXERCISE in tags(cell)]


@every_lesson
def test_exercises_are_open_for_learners_and_solved_in_the_other_copy(name: str) -> None:
    source = sources()[name].read_text(encoding="utf-8")
    parts = [part for part in re.split(r"^# %%", source, flags=re.M) if SOLUTION.search(part)]
    places = exercises(name)
    assert len(parts) == len(places) > 0
    opened, solved = built(name, False), built(name, True)
    for notebook in (opened, solved):
        assert "SOLUTION" not in "\n".join(cell.source for cell in notebook.cells)
    learners_code = "\n".join(cell.source for cell in code_cells(opened))
    for place, part in zip(places, parts, strict=True):
        assert re.match(rf".*tags=.*\"{EXERCISE}\"", part)
        answers = [match[0].splitlines()[1:-1] for match in SOLUTION.finditer(part)]
        mine, theirs = opened.cells[place].source, solved.cells[place].source
        assert len(re.findall(r"^ +\.\.\.$", mine, re.M)) == mine.count("...") == len(answers)
        assert "..." not in theirs
        for answer in answers:
            assert "\n".join(answer) in theirs and "\n".join(answer) not in learners_code
            assert not [line for line in answer if not line.strip() or line in mine]


@every_lesson
def test_every_exercise_of_a_source_has_a_hint_before_and_a_check_after(name: str) -> None:
    cells = fresh(name, False).cells
    for i in exercises(name):
        assert "<details><summary>Hint</summary>" in cells[i - 1].source
        assert "### Exercise" in cells[i - 1].source and "minutes" in cells[i - 1].source
        defined = "|".join(re.findall(r"^(?:def|class) (\w+)", cells[i].source, re.M))
        use = rf"(?:mine|server|on_cells)\.use\((?:{defined}), check_\w+\)"
        check = rf"^(?:{use}|check_\w+\((?:{defined})\b)"
        assert re.search(check, cells[i + 1].source, re.M)


@every_lesson
def test_copies_differ_in_the_exercises_and_what_follows_from_them_only(name: str) -> None:
    """Verdicts, whose parts told a story, answers. So what nbval finds of one is true of both."""
    pairs = list(zip(built(name, False).cells, built(name, True).cells, strict=True))
    places = exercises(name)
    deeper = [b.source.replace("../../docs/", "../docs/") for _, b in pairs]  # by a folder
    assert [i for i, (a, _) in enumerate(pairs) if a.source != deeper[i]] == [1, *places]
    assert pairs[1][1].source == f"{pairs[1][0].source}\n{SOLVED}", "it shows the answers"
    assert [tags(a) for a, _ in pairs] == [tags(b) for _, b in pairs]
    differ = {i for i, (a, b) in enumerate(pairs) if IGNORE not in tags(a) and shown(a) != shown(b)}
    verdicts = {i + 1 for i in places}
    brought = {i for i, (a, _) in enumerate(pairs) if BRINGS.search(a.source)}
    follow = brought | {
        i
        for i, (a, _) in enumerate(pairs)
        if TELLS.search(a.source) or "predictions." in a.source or LABELS.search(a.source)
    }
    for i, (mine, theirs) in enumerate(pairs):
        if i in differ and "yours(" in mine.source:  # a number: the learner's or the package's
            differ -= {i}
            said = [shown(cell)[0].text for cell in (mine, theirs)]
            assert said[0] == said[1].replace("✔ your ", "the package's "), "the same answer"
    assert verdicts <= differ <= verdicts | follow
    for i in verdicts:
        (mine,), (theirs,) = (shown(cell) for cell in pairs[i])
        assert mine.text.startswith("☐ not done yet: ") and theirs.text.startswith("✔ ")
    tells = [i for i in follow if TELLS.search(pairs[i][0].source)]
    for mine, theirs in [pairs[i] for i in tells if "predictions." not in pairs[i][0].source]:
        stories = [shown(cell)[0].text.partition("\nyours: ")[0] for cell in (mine, theirs)]
        assert stories[0] == stories[1], "the learner's parts tell the package's story"


@every_notebook
def test_no_claim_failed(name: str, solved: bool) -> None:
    said = "\n".join(output.text for output in outputs(built(name, solved)))
    brings = sum(len(BRINGS.findall(cell.source)) for cell in fresh(name, solved).cells)
    assert "✘" not in said and said.count("☐") == (0 if solved else len(exercises(name)) + brings)
    assert not re.search(r"not noticed|BELOW|> tolerance", said), "a claim did not hold here"
    assert LINE not in said, "it was built without the real model"


def open_exercises() -> Iterator[Any]:
    for name in NAMES:
        for place in exercises(name):
            yield pytest.param(name, place, id=f"{name} cell {place}")


@pytest.mark.parametrize(("name", "place"), open_exercises())
def test_an_untouched_exercise_runs_and_its_check_says_so(name: str, place: int) -> None:
    """In the learner's copy, with the cells that it needs and no others."""
    if needs_real(sources()[name]):
        need_real()
    cells = fresh(name, False).cells[: place + 2]
    codes = [cell.source if cell.cell_type == "code" else "" for cell in cells]
    namespace: dict[str, Any] = {"__builtins__": builtins}
    for i in sorted({*needed(codes, place), *needed(codes, place + 1)}):
        verdict = run_cell(codes[i], namespace)
    said = shown(built(name, False).cells[place + 1])
    assert [repr(verdict)] == [output.text for output in said]


def test_each_story_calls_all_that_the_learner_handed_in() -> None:
    """As the solved copies say, which nbval runs; test_own*.py have what becomes of wrong parts."""
    called = set[str]()
    for name in NAMES:
        used = set[tuple[str, str]]()
        for cell in code_cells(built(name, True)):
            used.update(USES.findall(cell.source))
            if not (tells := TELLS.search(cell.source)) or "predictions." in cell.source:
                continue
            said = shown(cell)[0].text
            all_are_right = re.search(r"\n(✔ )?(\d+) of \2 (tokens are|requests have)", said)
            assert "✘" not in said and (all_are_right or "window=" in cell.source), cell.source
            yours, _, theirs = said.partition("\nyours: ")[2].partition("; the package's: ")
            mine = {part for owner, part in used if owner == tells[1]}
            assert not mine & {*theirs.partition("\n")[0].split(", ")}, "nobody called these"
            called |= {part for part in mine if f"{part} (" in yours}
    replaced = {"ShortestFirst"}  # by Fair, before it serves
    assert called == {*PARTS, *PARTS_03, *PARTS_04, *PARTS_05} - replaced


def questions(codes: Sequence[str]) -> dict[str, list[tuple[str, int]]]:
    """Question → where it is asked and revealed."""
    found: dict[str, list[tuple[str, int]]] = {}
    for i, code in enumerate(codes):
        for kind, question in QUESTION.findall(code):
            found.setdefault(question, []).append((kind, i))
    return found


@every_lesson
def test_every_prediction_of_a_source_is_asked_once_revealed_later_and_scored(name: str) -> None:
    codes = [cell.source for cell in code_cells(fresh(name, True))]
    places = questions(codes)
    for question, found in places.items():
        (_, before), (_, after) = found
        assert [kind for kind, _ in found] == ["ask", "reveal"] and before < after, question
        assert "reveal" not in codes[before], "the answer is in another cell"
    assert any("predictions.score()" in code for code in codes)
    (kept,) = [code for code in codes if "= Predictions(" in code]
    assert f'predictions = Predictions("{CODES[name]}")' in kept, "its file has the right name"


@every_lesson
def test_folded_answers_are_what_the_solved_copy_says(name: str) -> None:
    said = answers(built(name, True), built(name, False))
    for cell in code_cells(built(name, False)):
        for kind, question in QUESTION.findall(cell.source):
            if kind == "ask":
                assert cell.outputs[-1] == said[question], "run `make notebooks`"


def test_answers_are_folded_escaped_and_carry_their_pictures(tmp_path: Path) -> None:
    new = nbformat.v4
    ask = new.new_code_cell('predictions.ask("a", "?", ["1", "2"])')
    reveal = new.new_code_cell('if predictions.reveal("a", 2):\n    picture')
    learners = new.new_notebook(cells=[ask, reveal])
    with pytest.raises(ValueError, match="has no answer to 'a'; build it first"):
        fold_answers(learners, new.new_notebook())
    png = {"image/png": "aGVsbG8=\n", "text/plain": "A <b> picture."}
    said = new.new_code_cell(
        reveal.source,
        outputs=[
            new.new_output("stream", name="stdout", text="Answer: 2.\n<script>\n"),
            new.new_output("display_data", png),
        ],
    )
    fold_answers(learners, new.new_notebook(cells=[ask, said]))
    (folded,) = learners.cells[0].outputs
    nbformat.validate(learners)
    text = folded.data["text/html"]
    assert text.startswith(
        "<details><summary>Answer</summary><pre>Answer: 2.\n&lt;script&gt;</pre>"
    )
    assert 'src="data:image/png;base64,aGVsbG8=" alt="A &lt;b&gt; picture."' in text
    assert not LOADS.search(text) and not learners.cells[1].outputs
    said.metadata["tags"] = [IGNORE]
    measured = answers(new.new_notebook(cells=[ask, said]), new.new_notebook())["a"]
    assert "Your run has other numbers." in measured.data["text/html"] and ELSEWHERE not in text
    nbformat.write(learners, tmp_path / "a.ipynb")
    assert text[:50] in page(tmp_path / "a.ipynb"), "the web page has it too"


# -- numbers in prose ---------------------------------------------------------------------------

# a measured or computed number: with a unit, a percent sign, or "times"
MEASURED = re.compile(
    r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)[ \u202f]?"
    r"(%|×|[KMGT]i?B\b|[kMG]?bytes\b|ms\b|µs\b|seconds?\b|[MGT]?FLOPs?\b|times\b|tokens\b)"
)


def typed_numbers(prose: str, known: str) -> list[str]:
    """Numbers with a unit in prose that stand nowhere in the code and its outputs."""
    numbers = set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?", known.replace(",", "").replace("_", "")))
    found = [(m[1].replace(",", ""), m[0]) for m in MEASURED.finditer(prose)]
    return [text for number, text in found if number not in numbers]


@every_lesson
def test_numbers_with_units_in_prose_stand_in_a_cell_or_its_output(name: str) -> None:
    """A number that no cell has or prints was typed, and may be false tomorrow."""
    cells = built(name, True).cells
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    known = [cell.source for cell in code_cells(built(name, True))]
    known += [output.text for output in outputs(built(name, True))]
    assert typed_numbers(prose, "\n".join(known)) == []


def test_the_search_for_typed_numbers_finds_them() -> None:
    known = "print(252_000, 1.5)\n24 of 24, 40.5 %"
    assert typed_numbers("It reads 252,000 bytes 24 times, 1.5 MB, 40.5 % of it.", known) == []
    assert typed_numbers("It reads 251 MB in 3 ms.", known) == ["251 MB", "3 ms"]
    assert typed_numbers("Section 7 takes L3H3 to 16 bits, in part 2 of 9.", known) == []
    assert typed_numbers("40 %, 5 %", known) == ["40 %", "5 %"], "not part of 40.5"


# -- figures ------------------------------------------------------------------------------------


@every_lesson
def test_each_picture_is_a_tagged_cell_and_a_file(name: str) -> None:
    names = []
    for cell in code_cells(built(name, True)):
        figures = [tag.removeprefix(TAG) for tag in tags(cell) if tag.startswith(TAG)]
        images = [output for output in shown(cell) if "image/png" in output.data]
        assert len(figures) == len(images) <= 1, cell.id
        names += [f"{CODES[name]}_{figure}" for figure in figures]
    wanted = {f"{one}.{kind}" for one in names for kind in ("svg", "png")}
    for one in DARK & set(names):
        wanted.add(f"{one}-dark.svg")
        by_night = (FIGURES / f"{one}-dark.svg").read_text(encoding="utf-8")
        assert by_night == at_night((FIGURES / f"{one}.svg").read_text(encoding="utf-8")), one
    assert len(wanted) >= 2 * len(names) >= 2
    there = {file.name for file in FIGURES.iterdir() if file.name.startswith(f"{CODES[name]}_")}
    assert there == wanted, "run `make figures`"
    assert all((FIGURES / one).stat().st_size > 1000 for one in wanted)
