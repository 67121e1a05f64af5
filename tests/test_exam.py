"""The exam: its pages are what the engine computes today, and its points add up."""

import math
import re
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import pytest
from browser import chromium

from tools.publish import exam, handout
from tools.publish.exam_numbers import NUMBERS

WRITTEN = tomllib.loads(exam.SOURCE.read_text(encoding="utf-8"))["question"]


def test_the_pages_have_what_the_engine_computes_now() -> None:
    """Each number of an answer is computed again by the package: none of them can drift."""
    questions = exam.exam()
    for name, solved in (("exam.md", False), ("exam-answers.md", True)):
        page = (exam.PAGES / name).read_text(encoding="utf-8")
        assert page == exam.page(questions, exam.SEED, solved), f"run `make exam`: {name} is old"
    drawn = {f"exam-{one.name}.png" for one in questions if one.picture is not None}
    assert drawn == {path.name for path in exam.PAGES.glob("exam-*.png")} and len(drawn) > 2


def test_points_add_up_and_every_lesson_is_asked() -> None:
    questions = exam.exam()
    assert len(questions) >= 25 and len({one.name for one in questions}) == len(questions)
    assert [one.lesson for one in questions] == sorted(one.lesson for one in questions)
    for lesson in ("01", "02", "03", "04", "05", "06"):
        assert sum(one.lesson == lesson for one in questions) >= 3
    assert all(re.match(r"[123]: ", words) for one in questions for words in one.marking)
    assert all(3 <= one.points <= 6 for one in questions)
    assert {one["name"] for one in WRITTEN} >= NUMBERS.keys()
    sheet = exam.page(questions, exam.SEED, solved=False)
    assert f"{sum(one.points for one in questions)} points" in sheet
    assert not [one.name for one in questions if one.answer in sheet]


def test_another_seed_asks_with_other_numbers_and_leaves_no_blank() -> None:
    questions, others = exam.exam(1), exam.exam.__wrapped__(1)
    assert [one[:5] for one in questions] == [one[:5] for one in others], "the same seed"
    first = {one.name: one for one in exam.exam()}
    changed = {one.name for one in questions if one.ask != first[one.name].ask}
    assert changed <= NUMBERS.keys() and len(changed) > len(NUMBERS) * 2 / 3
    for one in questions:
        assert not re.search(r"[{}]", re.sub(r"`[^`]*`", "", one.ask + one.answer)), one.name


def numbers(name: str, seed: int) -> dict[str, Any]:
    return NUMBERS[name](Random(f"{seed} {name}"))


def whole(text: object) -> int:
    return int(str(text).replace(",", ""))


@pytest.mark.parametrize("seed", range(3))
def test_the_engine_answers_as_somebody_with_a_pencil(seed: int) -> None:
    """The sums that a student writes, beside what the package gave."""
    got = numbers("pairs", seed)
    assert got["allowed"] == sum(got["old"] + i + 1 for i in range(got["new"]))
    assert got["near"] == got["new"] * got["window"]
    got = numbers("heads", seed)
    assert got["reads"] == got["h"] // (got["heads"] // got["kv"])
    got = numbers("rope", seed)
    assert float(got["score"]) == round(math.cos(math.radians(got["turn"])), 2)
    got = numbers("cost", seed)
    assert got["without"] == sum(got["prompt"] + i for i in range(got["new"]))
    assert got["with"] == got["prompt"] + got["new"] - 1
    got = numbers("price", seed)
    token = 2 * got["layers"] * got["kv"] * got["head_dim"] * 2
    assert whole(got["token"]) == token
    assert got["users"] == got["room"] * 2**30 // (token * whole(got["context"]))
    got = numbers("slots", seed)
    cached, new = (re.findall(r"\d+", line) for line in got["given"].splitlines()[2:])
    expected = [
        row * got["length"] + int(old) + i
        for row, (old, more) in enumerate(zip(cached, new, strict=True))
        for i in range(int(more))
    ]
    assert got["slots"] == ", ".join(map(str, expected))
    got = numbers("roofline", seed)
    assert float(got["one"]) == 2 * got["weights"] / float(got["bandwidth"])
    assert whole(got["ridge"]) == float(got["peak"]) / float(got["bandwidth"])
    got = numbers("timeline", seed)
    assert sum(map(int, got["lasted"].split(" + "))) == int(got["ttft"])
    got = numbers("budget", seed)
    assert got["most"] == got["gap"] - got["forward"]
    got = numbers("blocks", seed)
    block = 2 * got["layers"] * got["kv"] * 64 * 2 * got["size"]
    assert whole(got["block"]) == block
    assert whole(got["number"]) == got["room"] * 2**20 // block
    got = numbers("pages", seed)
    assert got["slot"] == 4 * got["block"] + got["pos"] % 4 and got["block"] != got["logical"]
    got = numbers("prefix", seed)
    assert got["same"] == (got["prompt"] - 1) // got["size"] * got["size"]
    assert got["other"] == got["equal"] // got["size"] * got["size"]
    got = numbers("queue", seed)
    assert sorted(map(int, got["order"].split(", "))) == list(range(got["number"]))
    assert 0 < got["found"] < got["tokens"] // 4 * 4, "some are gone, and some are left"
    got = numbers("preempt", seed)
    assert got["known"] == got["lost"] + 1 and got["who"] == "C"
    got = numbers("halves", seed)
    assert 2 ** (got["runs"] - 1) < got["layers"] <= 2 ** got["runs"]
    got = numbers("turns", seed)
    assert got["found"] == got["cached"] // 16 * 16


def test_students_get_neither_questions_nor_answers() -> None:
    given = handout.students_files()
    assert not [path for path in given if "exam" in path.name and path.suffix != ".py"]
    assert not [path for path in given if path.parent == exam.PAGES and "capstone" not in path.name]


@pytest.mark.browser
def test_an_exam_is_printed_from_pages_that_load_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exam, "OUT", tmp_path)
    exam.main(["--seed", "1"])
    with chromium() as browser:
        page = browser.new_page()
        asked = list[str]()
        page.on("request", lambda request: asked.append(request.url))
        for name, pictures in (("questions-1.html", 3), ("answers-1.html", 0)):
            page.goto((exam.OUT / name).as_uri())
            assert page.locator("h3").count() == len(WRITTEN)
            assert page.locator("img").count() == pictures
            wide = page.locator("img").evaluate_all("all => all.map(one => one.naturalWidth)")
            assert all(wide)
            assert page.locator("a").count() == 0
        assert {url.partition(":")[0] for url in asked} <= {"file", "data"}
