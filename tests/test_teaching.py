"""What a teacher gets: pages that name what is there, decks, handouts without answers, scores."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
import transformers
from browser import ROOT, barriers, chromium

from tools import teaching
from tools.mine import copy_of
from tools.publish import answers, exam, handout, players, slides
from tools.publish.build import (
    LESSONS,
    QUESTION,
    REPOSITORY,
    Lesson,
    make_notebook,
    sources,
    target,
)
from tools.publish.handout import leaks, solutions
from tools.publish.lesson_pages import questions
from tools.publish.score import Score, best, main, score
from tutorial_engine.learn.exercises.verdict import Verdict
from tutorial_engine.learn.stories.elsewhere import LLAMA_CPP, SGLANG, VLLM
from tutorial_engine.viz.tokens import escape

PAGES = ROOT / "docs" / "teaching"
WITH_PAGE = [lesson for lesson in LESSONS if (PAGES / f"{lesson.code}.md").is_file()]
every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.code)
every_page = pytest.mark.parametrize("lesson", WITH_PAGE, ids=lambda lesson: lesson.code)


# -- the pages ------------------------------------------------------------------------------------


@every_page
def test_a_page_names_sections_that_are_there_and_its_minutes_add_up(lesson: Lesson) -> None:
    page = (PAGES / f"{lesson.code}.md").read_text(encoding="utf-8")
    there = {section.name: section for section in teaching.sections(lesson)}
    named = re.findall(r"\*\*(.+?)\*\*", page.replace("\n", " "))
    assert len(named) > 10 and set(named) <= set(there), set(named) - set(there)
    for limit, plan in re.findall(r"^### (\d+) minutes\n\n((?:[-\w ].*\n)+)", page, re.M):
        assert sum(map(int, re.findall(r"^- (\d+) min: ", plan, re.M))) == int(limit)
        items = re.findall(r"^- (\d+) min: \*\*(.+?)\*\*", plan, re.M)
        assert all(int(minutes) >= there[name].minutes for minutes, name in items)
        places = [list(there).index(name) for _, name in items]
        assert places == sorted(places), "in the order of the notebook"


@every_page
def test_a_page_is_written_with_its_table_and_the_numbers_of_its_slides(lesson: Lesson) -> None:
    """As `make notebooks` writes them into the pages, and again without a change."""
    page = teaching.written((PAGES / f"{lesson.code}.md").read_text(encoding="utf-8"), lesson)
    assert teaching.table(lesson) in page and teaching.written(page, lesson) == page
    deck = slides.slides_of(lesson.notebook)
    named = re.findall(r"\*\*(.+?)\*\* \(slides? (\d+)(?:–(\d+))?\)", page)
    assert len(named) == page.count("**") / 2 > 10
    for name, first, last in named:
        begin, end = int(first), int(last or first)
        assert f"<h2>{escape(name)}" in deck[begin - 1].body
        inside = "".join(slide.body for slide in deck[begin:end])
        assert not re.search(r"<h2>\d+ ·", inside), f"{name} runs into the next section"


def test_the_syllabus_places_every_section_once_and_adds_up() -> None:
    page = (PAGES / "syllabus.md").read_text(encoding="utf-8")
    term = page.partition("## 14 weeks")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in re.findall(r"^\| \d.*$", term, re.M)]
    assert [int(row[0]) for row in rows] == list(range(1, 15))
    placed: dict[str, list[int]] = {}
    for code, words in re.findall(r"\b(0\d), sections? ([\d a-z]+)", term):
        first, last = (re.findall(r"\d+", words) * 2)[:2]
        placed.setdefault(code, []).extend(range(int(first), int(last) + 1))
    for lesson in LESSONS:
        if lesson.code.isdigit():
            names = [one.name for one in teaching.sections(lesson) if one.level == 2]
            numbers = [int(found[1]) for one in names if (found := re.match(r"(\d+) · ", one))]
            assert placed[lesson.code] == numbers, f"each section of {lesson.code}, in its order"
    hours = sum({"¼": 0.25, "½": 0.5, "¾": 0.75, "1": 1}[row[3].split()[0]] for row in rows)
    assert hours == 10.5 and "10½ hours at home" in page
    early = sum(one.points for one in exam.exam() if one.lesson <= "03")
    assert f"{early} points in {early} minutes" in page


# -- handouts -------------------------------------------------------------------------------------


@every_lesson
def test_no_solution_is_in_a_students_copy(lesson: Lesson) -> None:
    """Not in code, prose, outputs or metadata; what looks for it finds it wherever it is put."""
    secrets = solutions(sources()[lesson.notebook])
    copy = nbformat.read(target(lesson.notebook, solved=False), as_version=4)
    assert secrets and not leaks(copy, secrets)
    known = {"tags", "jupyter", "lines_to_next_cell"}
    assert {key for cell in copy.cells for key in cell.metadata} <= known
    for number, secret in enumerate(secrets, 1):
        told = "\n".join(f"    {line}" for line in secret)
        cell = copy.cells[-1]
        for place in (
            {"source": told},
            {"metadata": {"answer": told}},
            {"outputs": [{"data": {"text/html": f"<pre>{told.replace('<', '&lt;')}</pre>"}}]},
        ):
            found = leaks(nbformat.from_dict({"cells": [dict(cell) | place]}), secrets)
            assert any(one.endswith(f"solution {number}") for one in found), secret


def test_handouts_have_what_lab_needs_and_no_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = handout.students_files()
    names = {file.relative_to(ROOT).as_posix() for file in files}
    assert {"Makefile", "pyproject.toml", "tutorial_engine/model/decoder.py"} <= names
    assert {target(lesson.notebook, solved=False) for lesson in LESSONS} <= set(files)
    assert not [name for name in names if re.match("notebooks/(src|solutions)|tests", name)]
    handout.pack(files, tmp_path / "made" / "students.zip", handout.README)
    with zipfile.ZipFile(tmp_path / "made" / "students.zip") as box:
        there = {name.removeprefix("tutorial_engine/") for name in box.namelist()}
        first = box.read("tutorial_engine/README.md").decode()
    assert there == names | {"README.md"} and "unzip students.zip" in first
    teachers = {name for name in names if name.startswith("docs/teaching/")}
    assert teachers == {"docs/teaching/capstone.md"}, "the plans have answers in them"
    paths = set(re.findall(r"`((?:docs|notebooks)/[^`]+)`", first))
    copies = {
        target(one.notebook, solved=False).with_name(copy_of(one.code)).relative_to(ROOT).as_posix()
        for one in LESSONS
    }
    assert copies <= paths and paths - copies <= there, "what a student opens is a copy"
    monkeypatch.setattr(handout, "solutions", lambda _: [["import torch"]])
    with pytest.raises(ValueError, match="has solution 1"):
        handout.students_files()


@pytest.fixture(scope="module")
def key() -> str:
    """The answer key, as `make notebooks` writes it."""
    return answers.page()


@every_lesson
def test_the_answer_key_has_each_prediction_and_each_exercise(lesson: Lesson, key: str) -> None:
    """The numbers of the predictions are those of the quiz."""
    (part,) = re.findall(rf"^## {lesson.code} · .*?(?=^## \w\d · |\Z)", key, re.M | re.S)
    asked = questions(lesson)
    source = sources()[lesson.notebook].read_text(encoding="utf-8")
    assert len(re.findall(r"predictions\.ask\(", source)) == len(asked) > 2
    for number, one in enumerate(asked.values(), 1):
        (row,) = re.findall(rf"^\| {lesson.code}\.{number} \| (.*) \|$", part, re.M)
        right = re.sub(r"\\(.)", r"\1", row.rpartition(" | ")[2])
        assert right.removesuffix(" (m)") == f"**{one.right}**"
    code = [{line.strip() for line in one.splitlines()} for one in part.split("```python")[1:]]
    secrets = solutions(sources()[lesson.notebook])
    assert len(code) == source.count('tags=["exercise"]') and secrets
    assert all(any(set(secret) <= lines for lines in code) for secret in secrets)


def test_the_answer_key_has_the_tasks_on_paper_and_students_do_not_get_it(key: str) -> None:
    assert "exercise 1 on paper: (10, 0, 8) gives **8**, (10, 8, 8) gives **2**" in key
    planned = r"^- Three requests, a budget of 8: step 0 runs .*'A': 8.* step 1 runs .*'B': 6"
    assert re.search(planned, key, re.M)
    assert answers.PAGE not in handout.students_files() and answers.PAGE.is_file()
    files = [path for path in handout.students_files() if path.suffix in (".md", ".txt", ".toml")]
    assert files and not [path for path in files if "exercise 1 on paper" in path.read_text()]


# -- the score ------------------------------------------------------------------------------------


def test_a_score_is_read_from_what_the_saved_notebooks_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = nbformat.v4

    def said(code: str, text: str, **metadata: Any) -> nbformat.NotebookNode:
        output = new.new_output("stream", name="stdout", text=text)
        return new.new_code_cell(code, outputs=[output], metadata=metadata)

    def exercise(ok: bool | None) -> list[nbformat.NotebookNode]:
        result = new.new_output("execute_result", {"text/plain": repr(Verdict(ok, "said"))})
        cell = new.new_code_cell("def f(): ...", metadata={"tags": ["exercise"]})
        return [cell, new.new_code_cell("check_f(f)", outputs=[result])]

    def question(name: str, answer: str) -> list[nbformat.NotebookNode]:
        asked = said(f'predictions.ask("{name}", "?", [])', "Predict: ?")
        return [asked, said(f'predictions.reveal("{name}", 1)', answer)]

    cells = [
        *exercise(True),
        *exercise(False),
        *exercise(None),
        *question("a", "Answer: 1. ✔ As you predicted.\nmore\n"),
        *question("b", "Answer: 1. ✘ You predicted: 2. Read on to see why.\n"),
        *question("c", "Choose an answer above, then run this cell again.\n"),
        *question("d", "Answer: 1.\n"),  # shown without a choice
    ]
    mine = tmp_path / "my_01.ipynb"
    nbformat.write(new.new_notebook(cells=cells), mine)
    nbformat.write(new.new_notebook(cells=cells[2:]), tmp_path / "01_attention_rope.ipynb")
    assert score(mine) == Score("my_01.ipynb", 1, 3, 1, 2, 4)
    assert best(tmp_path) == [score(mine)], "the better copy counts"
    table = tmp_path / "score.csv"
    main([str(mine), "--csv", str(table)])
    assert re.search(r"^all +1 of 3 +1 of 2 \(of 4\)$", capsys.readouterr().out, re.M)
    assert table.read_text().splitlines()[1] == "my_01.ipynb,1,3,1,2,4"
    for name in ("anna", "ben"):  # a folder for each student: a row says whose it is
        (tmp_path / name).mkdir()
        nbformat.write(new.new_notebook(cells=cells), tmp_path / name / "01.ipynb")
    for content in ("no JSON", "[]", '{"nbformat": 4}', '{"cells": [1], "nbformat": 4}'):
        (tmp_path / "ben" / "carl_02.ipynb").write_text(content)
        main([str(tmp_path / "anna"), str(tmp_path / "ben"), "--csv", str(table)])
        assert "carl_02.ipynb: not a notebook of this course, left out" in capsys.readouterr().err
        rows = [row.partition(",")[0] for row in table.read_text().splitlines()[1:]]
        assert rows == [str(tmp_path / name / "01.ipynb") for name in ("anna", "ben")]


@every_lesson
def test_the_score_of_the_shipped_copies_is_nothing_and_everything(lesson: Lesson) -> None:
    opened, solved = (score(target(lesson.notebook, solved)) for solved in (False, True))
    source = sources()[lesson.notebook].read_text(encoding="utf-8")
    asked = sum(kind == "ask" for kind, _ in QUESTION.findall(source))
    assert (opened.done, opened.right, opened.made, opened.questions) == (0, 0, 0, asked)
    assert (solved.done, solved.made) == (opened.exercises, 0) and solved.done > 0


# -- slides ---------------------------------------------------------------------------------------


# each slide, turned by the key: how many are seen, and notes, its size, its headings
TURN = """() => [...document.querySelectorAll("section")].map(() => {
    const there = (one) => one.getClientRects().length;
    const seen = (what) => [...document.querySelectorAll(what)].filter(there);
    const [one, ...others] = seen("section"), size = [one.scrollWidth, one.scrollHeight];
    const heads = [...one.querySelectorAll("h2")].map((head) => head.innerText);
    const found = [others.length + 1, seen(".notes").length, size, heads];
    document.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
    return found;
})"""


@pytest.mark.browser
def test_decks_turn_by_keyboard_fit_the_screen_and_ask_nobody(tmp_path: Path) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        asked, said = list[str](), list[str]()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text))
        for lesson in LESSONS:
            file = tmp_path / f"{lesson.code}.html"
            file.write_text(slides.deck(lesson.notebook), encoding="utf-8")
            page.goto(f"{file.as_uri()}#3")
            assert page.locator("nav").inner_text().startswith("3 / ")
            page.keyboard.press("Home")
            turned = page.evaluate(TURN)
            assert turned, "slides"
            for number, (shown, notes, size, _) in enumerate(turned, 1):
                assert size <= [1280, 720], f"slide {number} of {lesson.code}: {size}"
                assert (shown, notes) == (1, 0), f"slide {number} of {lesson.code}"
            titles = {title for *_, heads in turned for title in heads}
            count = len(turned)
            assert f"{count} / {count}" in page.locator("nav").inner_text()
            page.keyboard.press("ArrowLeft")
            assert f"{count - 1} / {count}" in page.locator("nav").inner_text()
            page.keyboard.press("End")
            source = sources()[lesson.notebook].read_text(encoding="utf-8")
            heads = re.findall(r"^# ##+ (.*)$", source, re.M)
            assert set(heads) <= titles
            alts = page.locator("img").evaluate_all("all => all.map(one => one.alt)")
            assert all(re.search(r"\d", alt) for alt in alts)
            assert not leaks({"page": file.read_text()}, solutions(sources()[lesson.notebook]))
            assert barriers(page) == []
        page.keyboard.press("n")
        assert page.evaluate("document.body.className") == "deck told"
        page.goto(f"{file.as_uri()}#2")
        with page.expect_popup() as opened:
            page.keyboard.press("p")
        desk, notes = opened.value, page.locator("section:visible .notes")
        for number in (2, 3):  # the notes follow, and their window turns the slides
            assert desk.locator("p").first.inner_text().startswith(f"{number} / {count}")
            assert notes.inner_text() in desk.locator("body").inner_text()
            desk.keyboard.press("ArrowRight")
        desk.close()
        page.keyboard.press("ArrowLeft")
        assert {url.partition("#")[0].rpartition("/")[0] for url in asked} == {tmp_path.as_uri()}
        assert not said


# of each slide with a picture: the box of the picture, and where the line at the foot begins
PICTURES = """() => [...document.querySelectorAll("section")].flatMap((_, i) => {
    const key = i ? "ArrowRight" : "Home";
    document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    return [...document.querySelectorAll("section.here img")].map((one) => {
        const { left, top, right, bottom } = one.getBoundingClientRect();
        const foot = document.querySelector("nav").getBoundingClientRect().top;
        return { left, top, right, bottom, foot, high: document.documentElement.scrollHeight };
    });
})"""


@pytest.mark.browser
def test_a_key_makes_a_picture_as_large_as_the_screen_and_hides_nothing(tmp_path: Path) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        for lesson in LESSONS:
            file = tmp_path / f"{lesson.code}.html"
            file.write_text(slides.deck(lesson.notebook), encoding="utf-8")
            page.goto(file.as_uri())
            page.keyboard.press("z")
            for one in page.evaluate(PICTURES):
                assert one["left"] >= 0 and one["top"] >= 0 and one["right"] <= 1280
                assert one["bottom"] <= one["foot"] and one["high"] == 720
            page.keyboard.press("z")
            assert page.evaluate("document.body.className") == "deck wide"
            page.keyboard.press("z")
            assert page.evaluate("document.body.className") == "deck"


@pytest.mark.browser
def test_a_deck_turns_by_tap_and_swipe(tmp_path: Path) -> None:
    file = tmp_path / "deck.html"
    file.write_text(slides.deck(LESSONS[1].notebook), encoding="utf-8")
    with chromium() as browser:
        phone = {"width": 390, "height": 780}
        context = browser.new_context(viewport=phone, has_touch=True, is_mobile=True)
        page = context.new_page()
        page.goto(f"{file.as_uri()}#4")
        page.wait_for_timeout(300)  # an emulated phone finds its scale after the first frame
        touch = context.new_cdp_session(page)

        def swipe(*way: tuple[int, int]) -> None:
            """Begin at the first point, end at the last one."""
            for kind, (x, y) in zip(("Start", "Move"), way, strict=True):
                at = {"type": f"touch{kind}", "touchPoints": [{"x": x, "y": y}]}
                touch.send("Input.dispatchTouchEvent", at)
            touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})

        nav = page.locator("nav")
        page.touchscreen.tap(300, 300)
        assert nav.inner_text() == f"5 / {page.locator('section').count()} · tap or swipe"
        page.touchscreen.tap(50, 300)
        swipe((300, 300), (200, 310))
        swipe((300, 300), (200, 310))
        assert nav.inner_text().startswith("6 / ")
        swipe((200, 300), (300, 310))
        swipe((200, 300), (210, 500))  # that scrolls
        assert nav.inner_text().startswith("5 / ")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_no_slide_is_a_heading_alone_and_a_section_links_to_its_players() -> None:
    """Whatever says where it leads has something to look at below it."""
    linked = set[str]()
    for lesson in LESSONS:
        for number, slide in enumerate(slides.slides_of(lesson.notebook), 1):
            shown = re.findall(r"<(?:p|li|pre|img)\b", re.sub(r'<p class="small">', "", slide.body))
            alone = "<h2>" in slide.body and len(shown) < 1 + ("Objective: " in slide.body)
            assert not alone or "<h2>Answer: " in slide.body, f"slide {number} of {lesson.code}"
            for file in re.findall(r'<a href="players/([^"]+)"', slide.body):
                (show,) = [one for one in players.entries() if one.file == file]
                assert show.lesson == lesson.notebook and f"{show.heading}</h2>" in slide.body
                linked.add(file)
    assert linked == {show.file for show in players.entries()}


@every_lesson
def test_every_exercise_says_what_to_do_outside_of_its_hint(lesson: Lesson) -> None:
    tasks = [one.body for one in slides.slides_of(lesson.notebook) if ">Exercise" in one.body]
    assert tasks and all("</h2><p>" in re.sub(r"\n", "", task) for task in tasks)


def test_a_slide_has_the_task_the_formula_and_what_a_titled_paragraph_leads_to() -> None:
    new = nbformat.v4
    task = new.new_code_cell("def f(): ...", metadata={"tags": ["exercise"]})
    printed = [new.new_output("stream", name="stdout", text="seen: 3\n")]
    cells = [
        new.new_markdown_cell('## 1 · A\n\n**Objective:** ask "a. b?" Said.\n\nSo:\n\na = b · c'),
        new.new_markdown_cell(
            "A note with *b* and no formula.\n\n**Why so?** Because.\n\nThe next cell shows it."
        ),
        new.new_code_cell("print()", outputs=printed),
        new.new_code_cell("print()", outputs=printed),
        new.new_markdown_cell("Said only. Here *d* is e, where\n\n**e = 1**."),
        new.new_markdown_cell("### Then\n\nIt goes on:\n\nx = y\n\nNo more."),
        new.new_code_cell("print()", outputs=printed),
        new.new_markdown_cell("### Exercise 1: f (5 minutes)\n\n<details>no</details>"),
        new.new_markdown_cell("Write `f`."),
        task,
    ]
    book = new.new_notebook(cells=cells)
    first, led, formula, then, exercise = slides.merged(slides.slides(book, book))
    assert "Objective: ask &quot;a. b?&quot;</p>" in first.body
    assert "<li>So: a = b · c</li>" in first.body and "A note with" in first.notes
    assert ">Why so?</h2>" in led.body and "seen: 3" in led.body and "Because" in led.notes
    assert "is e, where <strong>e = 1</strong>" in formula.body and "Said" in formula.notes
    assert "Said" not in formula.body
    assert "<p>x = y</p>" in then.body and "seen: 3" in then.body and "No more" not in then.body
    assert "Write <code>f</code>" in exercise.body and "no" not in exercise.notes


def test_a_heading_shows_whole_thoughts_its_sections_and_the_question_that_it_has_room_for() -> (
    None
):
    new = nbformat.v4
    asked = new.new_output("display_data", {"text/plain": "Predict: how many?\n  ( ) 1"})
    ask = new.new_code_cell('predictions.ask("a", "how many?", ["1"])', outputs=[asked])
    cells = [
        new.new_markdown_cell("# 09 · A lesson\n\nIt is about this."),
        new.new_markdown_cell(
            "# First sitting\n\n## 1 · A\n\n**Objective:** see. A has 6. So b = 6 + 1. No more."
        ),
        new.new_markdown_cell("## 2 · B\n\n**Objective:** count. `B` is told.\n\n- c"),
        new.new_markdown_cell("## 3 · C\n\n**Objective:** say it."),
        ask,
    ]
    book = new.new_notebook(cells=cells)
    _, sitting, first, second, third = slides.merged(slides.slides(book, book))
    assert re.findall("<li>(.*?)</li>", sitting.body) == ["1 · A", "2 · B", "3 · C"]
    assert re.findall("<li>(.*?)</li>", first.body) == ["A has 6. So b = 6 + 1."]
    assert "<p><code>B</code> is told.</p>" in second.body
    assert "Objective: say it." in third.body and "<h2>Predict: how many?</h2><ol>" in third.body
    said = "### Exercise 1: f (5 minutes)\n\nThe sum of 117 is above.\n\n"
    cells[-2] = new.new_markdown_cell(f"Now 16 run.\n\n{said}")
    book = new.new_notebook(cells=cells)
    *_, last = slides.slides(book, book)
    assert "<p>Now 16 run.</p>" in last.body and "117" not in last.body


# -- take-away ------------------------------------------------------------------------------------


def test_the_paths_onward_are_pinned_and_transformers_has_what_is_named() -> None:
    page = (ROOT / "docs" / "reading-on.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## \d\. (.*?):", page, re.M)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (installed,) = re.findall(r"^transformers==(.*)$", pins, re.M)
    theirs = f"transformers {installed}"
    assert heads == ["nano-vllm 0.2.0", theirs, VLLM, SGLANG, LLAMA_CPP]
    (part,) = re.findall(r"^## 2\. .*?(?=^## 3)", page, re.M | re.S)
    found = 0
    for path, words in re.findall(r"^\d\. `(.+?\.py)`:(.*?)(?=^\d\. |\Z)", part, re.M | re.S):
        code = (Path(str(transformers.__file__)).parent / path).read_text(encoding="utf-8")
        for name in re.findall(r"`([A-Za-z_.]+)`", words):
            found += 1
            for word in name.split("."):
                assert re.search(rf"\b{word}\b", code), f"{path} has no {name}"
    assert found >= 7


def test_the_install_cell_acts_on_colab_without_the_package_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And it leaves the number of threads to whoever has set it."""
    cell = make_notebook(sources()[LESSONS[0].notebook], solved=False).cells[1]
    for before, after in ((None, "1"), ("4", "4")):
        with monkeypatch.context() as patch:
            patch.delenv("OMP_NUM_THREADS", raising=False)
            if before:
                patch.setenv("OMP_NUM_THREADS", before)
            exec(cell.source, {})
            assert os.environ["OMP_NUM_THREADS"] == after
    asked: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: asked.append(command))
    exec(cell.source, {})
    monkeypatch.setitem(sys.modules, "google.colab", object())
    exec(cell.source, {})
    assert not asked
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    exec(cell.source, {})
    ((*pip, package),) = asked
    assert pip[:4] == [sys.executable, "-m", "pip", "install"] and package.endswith(REPOSITORY)


def test_the_capstone_page_shows_what_runs() -> None:
    """Its three blocks of code: the outline has the methods that are asked for, the rest runs."""
    page = (PAGES / "capstone.md").read_text(encoding="utf-8")
    outline, check, assembled = re.findall(r"```python\n(.*?)```", page, re.S)
    scope: dict[str, Any] = {}
    exec(outline, scope)
    engine = scope["MyEngine"](None, None)
    assert {"add_request", "step"} <= {name for name in dir(engine) if not name.startswith("_")}
    for code in (check, assembled):
        exec(re.sub(r"^ *check_engine\(\w+\)$", "", textwrap.dedent(code), flags=re.M), scope)
    report = scope["check_engine"](scope["mine"], seed=1, rounds=1)
    assert report.ok, report
    assert len(report.verdicts) == len(re.findall(r"^\| (?!criterion|-)", page, re.M))
