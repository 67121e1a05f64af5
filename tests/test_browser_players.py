"""Players in a real browser, from disk: every step by keyboard, no request, fast enough."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from browser import barriers, chromium, reached_by_tab
from explorers import MAKE, PROMPT
from playwright.sync_api import Browser, expect
from tokenizers import Tokenizer
from traces import check_phone

from tools.publish.figures import FIGURES, MOVES, moving_pictures
from tools.publish.players import SHOWS, Film, show_of
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.drawing.scene import Frame, Scene
from tutorial_engine.viz.explorers.moving import moving
from tutorial_engine.viz.explorers.player import film_of, player, save_player, still
from tutorial_engine.viz.explorers.scheduler_explorer import CLASSES

pytestmark = pytest.mark.browser
LEAST = 30  # updates a second
ALONE = ("sampling", "calculator", "dial", "scheduler")  # the explorers of no show, and the slowest
PROMISED = {  # player: what its captions say
    "attention": ["may look at"],
    "rope": ["the distance 5"],
    "cache": ["prefill"],
    "softmax": ["multiplied by", "✔"],
    "scheduler": ["nobody joins before A is done", "A stalls", *(f", {one}:" for one in CLASSES)],
    "sharing": ["stored once for A and B"],
    "preemption": ["C waits without a block: in step", "B waits without a block: in step"],
    "cells": ["belong to both"],
}


@cache
def made(name: str) -> Film:
    """What the player of this name shows."""
    return show_of(name).make(load_model(), load_tokenizer())


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.mark.parametrize("name", ALONE)
def test_a_player_is_driven_by_keyboard_and_address(
    model: CausalLM, tokenizer: Tokenizer, browser: Browser, tmp_path: Path, name: str
) -> None:
    explorer = MAKE[name](model, tokenizer, PROMPT)
    file = explorer.player(tmp_path / "player.html")
    captions = [explorer.caption(step) for step in range(explorer.num_steps)]
    page = browser.new_page()
    asked, said = list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{file.as_uri()}#t=1")
    caption = page.locator("#caption")
    expect(caption).to_have_text(captions[1])
    page.keyboard.press("Home")
    for words in captions[1:]:
        page.keyboard.press("ArrowRight")
        expect(caption).to_have_text(words)
    assert page.url.endswith(f"#t={len(captions) - 1}")
    page.keyboard.press("ArrowLeft")
    expect(caption).to_have_text(captions[-2])
    assert page.locator("#stage").get_attribute("aria-labelledby") == "caption"
    assert reached_by_tab(page) == [
        "view", *("first", "back", "play", "on", "end"), "slider", "speed",
    ]  # fmt: skip
    assert barriers(page) == []
    updates = """() => {
        const began = performance.now();
        let number = 0;
        for (; performance.now() < began + 200; number++) {
            show(number % (last + 1));
            stage.getBBox();  // lays it out
        }
        return number / 0.2;
    }"""
    assert any(page.evaluate(updates) > LEAST for _ in range(3)), "others may use the machine"
    assert said == [] and [url for url in asked if not url.startswith("file:")] == []
    page.close()


def test_each_control_acts_on_its_key(
    model: CausalLM, tokenizer: Tokenizer, browser: Browser, tmp_path: Path
) -> None:
    explorer = MAKE["attention"](model, tokenizer, PROMPT)
    page, last = browser.new_page(), explorer.num_steps - 1
    page.goto(f"{explorer.player(tmp_path / 'player.html').as_uri()}#t=1")
    told, play = page.locator("#told"), page.locator("#play")
    acts = [("end", "Enter", last), ("back", " ", last - 1), ("on", "Enter", last)]
    acts += [("slider", "ArrowLeft", last - 1), ("first", " ", 0), ("slider", "End", last)]
    for control, key, step in acts:
        while page.evaluate("document.activeElement.id") != control:
            page.keyboard.press("Tab")
        page.keyboard.press(key)
        expect(told).to_have_text(f"query {step} of {last}")
    page.locator("#speed").focus()
    page.keyboard.press("ArrowUp")  # the list takes it
    expect(page.locator("#speed")).to_have_value("0.7")
    page.keyboard.press("End")  # and this: the step stays
    expect(told).to_have_text(f"query {last} of {last}")
    play.focus()
    page.keyboard.press("Enter")
    expect(play).to_have_attribute("aria-pressed", "true")
    page.keyboard.press(" ")
    expect(play).to_have_attribute("aria-pressed", "false")
    page.close()


def test_play_runs_to_the_end_and_pauses(
    model: CausalLM, tokenizer: Tokenizer, browser: Browser, tmp_path: Path
) -> None:
    explorer = MAKE["scheduler"](model, tokenizer, PROMPT)
    page = browser.new_page()
    page.goto(explorer.player(tmp_path / "player.html").as_uri())
    page.get_by_label("speed").select_option("fast")
    page.keyboard.press("Tab")
    page.locator("#stage").click()
    page.keyboard.press(" ")
    expect(page.locator("#play")).to_have_text("❚❚ Pause")
    expect(page.locator("#play")).to_have_text("▶ Play", timeout=20_000)
    last = explorer.num_steps - 1
    expect(page.locator("#told")).to_have_text(f"step {last} of {last}")
    page.locator("#play").click()
    expect(page.locator("#told")).to_have_text(f"step 0 of {last}")
    page.keyboard.press("ArrowRight")  # a key takes over
    expect(page.locator("#play")).to_have_text("▶ Play")
    page.close()


def test_the_moving_picture_shows_each_step_of_its_player(browser: Browser, tmp_path: Path) -> None:
    frames = made(MOVES).runs[0]
    file = tmp_path / "moving.svg"
    words = show_of(MOVES).words
    for name, svg in moving_pictures(frames).items():
        assert (FIGURES / name).read_text(encoding="utf-8") == svg, "make figures"
    file.write_text(moving(frames, words, speed=1), encoding="utf-8")
    assert file.stat().st_size < 400_000
    told = """times => times.map((time) => {
        for (const one of document.getAnimations()) { one.pause(); one.currentTime = time; }
        return [...document.querySelectorAll("svg > text")]
            .filter(one => getComputedStyle(one).visibility === "visible")
            .map(one => one.textContent);
    })"""
    film, steps = film_of(frames), range(len(frames))
    for motion, shown in (("no-preference", [*steps]), ("reduce", [0] * len(steps))):
        page = browser.new_page(reduced_motion=motion)
        page.goto(file.as_uri())
        wanted = [[one.text for one in still(film, step) if one.text] for step in shown]
        assert page.evaluate(told, [1000 * step + 500 for step in steps]) == wanted
        page.close()


def test_buttons_choose_the_run_and_the_step_stays(browser: Browser, tmp_path: Path) -> None:
    """A shorter run shows its last step; the address remembers run and step."""
    film = made("scheduler")
    assert film.choices is not None
    (names,) = film.choices.values()
    assert [re.findall(r": (\d+) steps$", name) for name in names] == [
        [str(len(run))] for run in film.runs
    ]
    file = save_player(film.runs, tmp_path / "player.html", "runs", choices=film.choices)
    page = browser.new_page()
    page.goto(f"{file.as_uri()}#t=4")
    for number, (name, frames) in enumerate(zip(names, film.runs, strict=True)):
        button = page.get_by_role("button", name=name)
        button.focus()
        page.keyboard.press("Enter")
        expect(button).to_have_attribute("aria-pressed", "true")
        assert page.locator(".choice [aria-pressed=true]").count() == 1
        expect(page.locator("#caption")).to_have_text(frames[4].caption)
        expect(page.locator("#told")).to_have_text(f"step 4 of {len(frames) - 1}")
        assert page.url.endswith(f"#t=4&v={number}" if number else "#t=4")
        shown = page.evaluate("""() => [...document.querySelectorAll("#all > text")]
            .filter(one => one.getAttribute("display") !== "none")
            .map(one => one.textContent)""")
        wanted = [item.text for item in frames[4].scene.items.values() if item.text]
        assert sorted(filter(None, shown)) == sorted(wanted), name
    page.get_by_role("button", name=names[3]).click()
    page.keyboard.press("End")
    page.get_by_role("button", name=names[0]).click()
    expect(page.locator("#caption")).to_have_text(film.runs[0][-1].caption)
    page.goto(f"{file.as_uri()}#t=2&v=3")
    page.reload()
    expect(page.locator("#caption")).to_have_text(film.runs[3][2].caption)
    page.close()


LOOK = """(step) => {
    go(step);
    const bar = document.getElementById("on").getBoundingClientRect();
    return [document.documentElement.scrollWidth, bar.bottom];
}"""


@pytest.mark.parametrize("name", [show.name for show in SHOWS])
def test_a_phone_has_all_words_in_parts_that_fit_and_the_buttons(
    browser: Browser, tmp_path: Path, name: str
) -> None:
    film = made(name)
    assert all(words in film.captions() for words in PROMISED.get(name, [])), "what it promises"
    words = {"lead": show_of(name).words, "choices": film.choices}
    file = save_player(film.runs, tmp_path / "player.html", name, **words)
    context = browser.new_context(
        has_touch=True, is_mobile=True, viewport={"width": 390, "height": 780}
    )
    page = context.new_page()
    for number, frames in enumerate(film.runs):
        check_phone([frame.scene for frame in frames], least=6)
        page.goto(f"{file.as_uri()}#t=0&v={number}")
        assert not page.get_by_text("swipe it").is_visible()
        assert not page.get_by_text("Keys:").is_visible()
        steps = [0, 1, len(frames) // 3, len(frames) // 2, len(frames) - 1]
        seen = page.evaluate(f"(steps) => steps.map({LOOK})", steps)
        for step, (width, bottom) in zip(steps, seen, strict=True):
            assert width <= 390 and bottom <= 780, f"step {step} of run {number}"
    page.locator("#back").tap()
    expect(page.locator("#caption")).to_have_text(film.runs[-1][-2].caption)
    context.close()  # test_site.py asks axe-core about these pages


@pytest.mark.parametrize("name", [show.name for show in SHOWS])
def test_a_low_screen_has_the_whole_picture_with_its_controls(
    browser: Browser, tmp_path: Path, name: str
) -> None:
    """1280 × 720, in the longest caption's step; what the player is about may be scrolled to."""
    show, film = show_of(name), made(name)
    longest = max(range(len(film.runs[0])), key=lambda step: len(film.runs[0][step].caption))
    file = save_player(
        film.runs, tmp_path / "player.html", show.title, choices=film.choices, lead=show.words
    )
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(f"{file.as_uri()}#t={longest}")
    expect(page.locator("#caption")).to_have_text(film.runs[0][longest].caption)
    stage, bar = (page.locator(one).bounding_box() for one in ("#stage", ".bar:not(.choice)"))
    assert stage is not None and bar is not None
    assert stage["y"] >= 0 and stage["y"] + stage["height"] <= bar["y"] + 1, "nothing is covered"
    assert bar["y"] + bar["height"] <= 721
    page.close()


def test_several_controls_choose_one_run(browser: Browser, tmp_path: Path) -> None:
    film = made("transplant")
    file = save_player(film.runs, tmp_path / "player.html", "transplant", choices=film.choices)
    page = browser.new_page()
    page.goto(f"{file.as_uri()}#t=2")
    caption = page.locator("#caption")
    expect(caption).to_contain_text("the one that it told before")
    page.keyboard.press("ArrowRight")  # the last layer
    expect(caption).to_contain_text("The screen says Namo, and the story is that of Nedo")
    page.get_by_role("button", name="K", exact=True).click()
    expect(caption).to_contain_text("the one that it told before")
    page.get_by_role("button", name="K and V").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Nedo gets").click()
    expect(caption).to_contain_text("The screen says Nedo, and the story is that of Namo")
    chosen = page.locator(".choice [aria-pressed=true]").all_text_contents()
    assert chosen == ["Nedo gets Namo's", "K and V"] and page.url.endswith("#t=3&v=5")
    assert barriers(page) == []
    page.close()


def test_a_title_that_the_page_says_is_not_drawn_again() -> None:
    def page_of(words: str) -> str:
        scene = Scene(200, 60)
        scene.text("title", 0, 20, words)
        return player([[Frame(scene, "a step")]], "Pages: a game", lead="Blocks change hands.")

    assert "who has which" not in page_of("Pages: who has which")
    assert "step 3" in page_of("step 3: a block")


def test_a_player_without_parts_is_swiped(
    model: CausalLM, tokenizer: Tokenizer, browser: Browser, tmp_path: Path
) -> None:
    file = MAKE["sampling"](model, tokenizer, PROMPT).player(tmp_path / "player.html")
    page = browser.new_page(viewport={"width": 390, "height": 780})
    page.goto(file.as_uri())
    assert page.get_by_text("swipe it").is_visible()
    assert page.evaluate("view.scrollWidth > 600 && document.body.scrollWidth <= 390")
    page.close()
