"""The page "Where is Paris?": it says what the real model said, and needs nothing else."""

import json
import random
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Literal

import pytest
import torch
from browser import barriers, chromium, reached_by_tab
from conftest import need_real
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tools.publish import facts, players, site
from tutorial_engine.lab.two_texts import TwoTexts
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.viz.explorers.fact_page import LEAD, LIKELIEST, TITLE, fact_page, map_scene

SAID = facts.known()
LAYERS, HEADS = SAID["layers"], SAID["heads"]
CHOICES = [*product("kv", (None, *range(HEADS)), facts.ranges(LAYERS))]


def answer(pair: dict, which: str, head: int | None, layers: range) -> list[int]:
    """What the file says to a choice."""
    return pair["answers"][pair["edits"][CHOICES.index((which, head, layers))]]


# -- what it is made of ---------------------------------------------------------------------------


def test_the_file_has_an_answer_to_every_choice() -> None:
    assert facts.FILE.stat().st_size < 400_000
    assert (LAYERS, HEADS, SAID["head_dim"]) == (30, 3, 64) and "11,520" in LEAD
    assert ["".join(own) for own, _ in (pair["parts"] for pair in SAID["pairs"])] == [
        own for own, _ in facts.PAIRS
    ]
    for pair in SAID["pairs"]:
        assert len(pair["edits"]) == len(CHOICES) == 8 * 465
        assert {*pair["edits"]} == {*range(len(pair["answers"]))}
        for said in (pair["own"], pair["other"], *pair["answers"]):
            places, parts = said[::2], said[1::2]
            assert len({*places}) == LIKELIEST and max(places) < len(SAID["tokens"])
            assert parts == sorted(parts, reverse=True) and sum(parts) <= 101


def test_four_answers_are_in_one_cell_and_one_is_spread() -> None:
    *alike, spread = SAID["pairs"]
    for pair, which, head in product(SAID["pairs"], "kv", (None, *range(HEADS))):
        ones = [
            layer
            for layer in range(LAYERS)
            if answer(pair, which, head, range(layer, layer + 1))[0] == pair["other"][0]
        ]
        assert ones == ([23] if pair in alike and which == "v" and head in (None, 1) else [])
    assert answer(spread, "v", None, range(22, 26))[0] == spread["other"][0]


def test_the_page_is_one_file_and_says_what_the_file_says() -> None:
    page = fact_page(SAID, links={"All players": "../players.html"})
    assert len(page.encode()) < 500_000
    assert set(re.findall(r"\w+://[^\"' )]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'" in page
    assert not re.search(r"<(?:link|img|iframe)|@import|url\((?!#)|\bsrc=", page)
    film = json.loads(re.findall(r'id="film">(.*?)</script>', page, re.S)[0])
    assert {name: film[name] for name in SAID} == json.loads(json.dumps(SAID))
    assert page.count("<option>") == len(SAID["pairs"])
    assert '<a href="../players.html">All players</a>' in page
    for narrow in (False, True):
        names = map_scene(LAYERS, HEADS, narrow=narrow).items
        assert sum(bool(re.fullmatch(r"[kv]\.\d+\.\d+", name)) for name in names) == 180


def test_the_readme_counts_these_numbers() -> None:
    all_of_a_token = LAYERS * HEADS * SAID["head_dim"] * len("kv")
    readme = (players.NOTEBOOKS.parent / "README.md").read_text(encoding="utf-8")
    assert f"exchange {SAID['head_dim']} numbers of France for those of Italy" in readme
    assert f"{all_of_a_token:,} numbers for each token (SmolLM2" in readme
    found = answer(SAID["pairs"][0], "v", 1, range(23, 24))
    assert SAID["tokens"][found[0]][1] == "Rome" and "capital of France is Rome" in readme


def test_it_is_the_first_player_of_the_site() -> None:
    page = site.players_page()
    first = re.findall(r"^## (.+)$", page, re.M)[0]
    assert first == TITLE == players.entries()[0].title
    assert f'href="players/{players.FACTS.file}"' in page
    assert "../players.html" in site.links_of(players.FACTS).values()


def test_the_real_model_says_it_again() -> None:
    """A sample of the choices; a token of them has the same probability, within 0.02."""
    folder = need_real()
    model, tokenizer = load_model(folder, dtype=torch.float32), load_tokenizer(folder)
    sample = random.Random(6)
    for pair, two in zip(SAID["pairs"], facts.PAIRS, strict=True):
        chosen = sample.sample(CHOICES, 40 // len(facts.PAIRS))
        texts = TwoTexts.of(model, tokenizer, *two)
        assert [SAID["tokens"][pair[name][0]][0] for name in ("own", "other")] == [*texts.answers]
        for choice, row in zip(chosen, facts.after(texts, iter(chosen)), strict=True):
            said = answer(pair, *choice)
            for place, part in zip(said[::2], said[1::2], strict=True):
                again = float(row[SAID["tokens"][place][0]])
                assert abs(again - part / 100) < 0.02, f"{two}, {choice}"
            assert float(row.max()) - said[1] / 100 < 0.02, f"{two}, {choice}"


# -- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return facts.write_page(tmp_path / "facts.html", {"All players": "../players.html"})


def opened(context: Browser | BrowserContext, file: Path) -> tuple[Page, list[str]]:
    """The page, and what goes wrong on it: a request that leaves, words on the console."""
    page, wrong = context.new_page(), list[str]()
    page.on("request", lambda request: wrong.append(request.url))
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(file.as_uri())
    assert wrong == [file.as_uri()]
    wrong.clear()
    return page, wrong


def now(page: Page) -> set[str]:
    """The cells that look as those that are replaced now."""
    return {
        name
        for name in page.locator(".wide [data-name][stroke-width='2']").evaluate_all(
            "them => them.map(one => one.getAttribute('data-name'))"
        )
        if name != "key.now"
    }


@pytest.mark.browser
def test_halves_find_layer_23_and_then_its_head(browser: Browser, file: Path) -> None:
    page, wrong = opened(browser, file)
    task, caption = page.locator("#task"), page.locator("#caption")
    expect(caption).to_contain_text("V of all layers, all heads. These are 5,760 of 11,520 numbers")
    expect(page.locator("#before strong")).to_have_text("Paris")
    expect(page.locator("#after strong")).to_have_text("Rome")
    page.locator("#first").click()  # a wrong half, and back
    expect(caption).to_contain_text("layers 0 to 14")
    expect(page.locator("#after strong")).to_have_text("Paris")
    expect(task).to_contain_text("Go back")
    page.locator("#back").click()
    expect(page.locator("#tries")).to_have_text("Tries: 2.")
    for half, told in (
        ("second", "15 to 29"),
        ("second", "22 to 29"),
        ("first", "22 to 25"),
        ("first", "22 to 23"),
        ("second", "layer 23"),
    ):
        expect(task).to_contain_text("Try one half")
        page.locator(f"#{half}").click()
        expect(caption).to_contain_text(told)
        expect(page.locator("#after strong")).to_have_text("Rome")
    expect(task).to_contain_text("Found in 7 tries: V of layer 23. Which head is it?")
    expect(task).to_contain_text("6 at best: all layers, then 5 halves")
    assert now(page) == {f"v.{head}.23" for head in range(HEADS)}
    for head in range(HEADS):
        page.get_by_role("button", name=str(head), exact=True).click()
        assert now(page) == {f"v.{head}.23"}
        expect(page.locator("#after strong")).to_have_text("Rome" if head == 1 else "Paris")
        words = "64 of 11,520 numbers are enough" if head == 1 else "This head alone does not"
        expect(task).to_contain_text(words)
    page.get_by_role("button", name="K", exact=True).click()
    expect(task).to_contain_text("Choose V")
    page.locator("#texts").select_option(index=3)  # three tokens, and a search of its own
    expect(page.locator("#tries")).to_have_text("Tries: 1.")
    expect(caption).to_contain_text("17,280 of 34,560 numbers")
    assert barriers(page) == [] and wrong == []
    page.close()


@pytest.mark.browser
def test_it_says_so_where_all_layers_are_too_many_and_where_no_layer_is_enough(
    browser: Browser, file: Path
) -> None:
    page, _ = opened(browser, file)
    task = page.locator("#task")
    page.locator("#texts").select_option(index=1)  # Japan, Egypt
    expect(task).to_contain_text("The numbers of all layers do not give")
    page.locator("#second").click()
    expect(page.locator("#after strong")).to_have_text("Cairo")
    page.locator("#texts").select_option(index=4)  # hot, big
    for half in ("second", "second", "first"):
        page.locator(f"#{half}").click()
        expect(page.locator("#after strong")).to_have_text("small")
    for half in ("first", "second"):
        page.locator(f"#{half}").click()
        expect(task).to_contain_text("These layers alone do not")
        page.locator("#back").click()
    expect(task).to_contain_text("Neither half alone")
    page.close()


@pytest.mark.browser
def test_every_choice_reads_its_own_answer(browser: Browser, file: Path) -> None:
    page, _ = opened(browser, file)
    for index, pair in enumerate(SAID["pairs"]):
        page.locator("#texts").select_option(index=index)
        read = page.evaluate(
            "them => them.map(([part, head, first, last]) => answer({part, head, first, last}))",
            [(which, head, layers[0], layers[-1]) for which, head, layers in CHOICES],
        )
        assert read == [pair["answers"][place] for place in pair["edits"]]
    page.close()


@pytest.mark.browser
def test_the_keyboard_does_all(browser: Browser, file: Path) -> None:
    page, wrong = opened(browser, file)
    assert reached_by_tab(page)[:2] == ["texts", "BUTTON"]  # of the buttons without an id the first
    controls = ["texts", *["BUTTON"] * 6, "first", "second", "every", "back", "from", "to", "A"]
    page.evaluate("document.activeElement.blur()")
    page.locator("#texts").focus()
    for wanted in controls:
        assert (
            page.evaluate("document.activeElement.id || document.activeElement.tagName") == wanted
        )
        page.keyboard.press("Tab")
    page.clock.install(time=0)
    page.clock.pause_at(1000)  # one move, however many keys and however slow this machine is
    page.locator("#from").focus()
    for _ in range(23):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#caption")).to_contain_text("layers 23 to 29")
    expect(page.locator("#tries")).to_have_text("Tries: 1.")
    page.clock.run_for(1000)
    expect(page.locator("#tries")).to_have_text("Tries: 2.")
    page.keyboard.press("Tab")
    page.keyboard.press("Home")  # the other end goes with it
    expect(page.locator("#caption")).to_contain_text("layer 0,")
    page.keyboard.press("End")
    for _ in range(6):
        page.keyboard.press("ArrowLeft")
    expect(page.locator("#caption")).to_contain_text("layers 0 to 23")
    page.locator("#second").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#caption")).to_contain_text("layers 12 to 23")
    page.locator("#back").focus()
    page.keyboard.press(" ")
    expect(page.locator("#caption")).to_contain_text("layers 0 to 23")
    page.locator("#texts").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#before strong")).to_have_text("Tokyo")
    assert wrong == []
    page.close()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_without_swiping(
    browser: Browser, file: Path, scheme: Literal["light", "dark"]
) -> None:
    context = browser.new_context(
        has_touch=True,
        is_mobile=True,
        color_scheme=scheme,
        reduced_motion="reduce",
        viewport={"width": 390, "height": 844},
    )
    page, wrong = opened(context, file)
    for index in range(len(SAID["pairs"])):
        page.locator("#texts").select_option(index=index)
        for half in ("second", "second", "first", "first", "second"):
            page.locator(f"#{half}").tap()
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator(".small").is_visible() and not page.locator(".wide").is_visible()
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(18, 18, 18)" if scheme == "dark" else "rgb(255, 255, 255)")
    bar = page.locator("#after rect").first
    assert bar.evaluate("one => getComputedStyle(one).transitionDuration") == "0s"
    low = "document.getElementById('from').getBoundingClientRect().bottom + scrollY"
    assert page.evaluate(low) <= 844, "the answer and the buttons are seen together"
    assert barriers(page) == [] and wrong == []
    context.close()
