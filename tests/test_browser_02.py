"""Notebook 02 in JupyterLab, through a real browser: Run All, and the cache filling."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import ROOT, chromium, lab, need_chromium, open_notebook, run_all
from playwright.sync_api import Browser, Locator, Page, expect

from tutorial_engine.learn.html import page as export

pytestmark = pytest.mark.browser
NOTEBOOK = "02_kv_cache.ipynb"
PICTURES = 11


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    need_chromium()
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("notebooks")
    shutil.copy(ROOT / "notebooks" / NOTEBOOK, folder / NOTEBOOK)
    with lab(folder, tmp_path_factory.mktemp("home")) as address:
        page = open_notebook(browser, address, NOTEBOOK)
        assert run_all(page) == []
        yield page


@pytest.fixture
def view(page: Page) -> Locator:
    output = page.locator(".jp-OutputArea-output")
    found = output.filter(has=page.get_by_text("Cache explorer", exact=True))
    found.scroll_into_view_if_needed()
    return found


def test_stepping_shows_prefill_then_decode(view: Locator) -> None:
    caption, scene = view.locator(".te-caption"), view.locator("svg.te-scene")
    expect(caption).to_contain_text("Step 5 of 8, decode")
    before = scene.inner_html()
    for step in (4, 3, 2):
        view.get_by_role("button", name="◀").click()
        expect(caption).to_contain_text(f"Step {step} of 8, decode")
    assert scene.inner_html() != before
    view.get_by_role("button", name="◀").click()
    expect(caption).to_contain_text("Step 1 of 8, prefill: 10 tokens")
    view.get_by_role("button", name="◀").click()
    expect(caption).to_contain_text("Step 0 of 8")


def test_chunks_make_more_prefill_steps(view: Locator) -> None:
    caption = view.locator(".te-caption")
    chunk = view.get_by_label("chunk")
    chunk.fill("4")
    chunk.press("Enter")
    expect(caption).to_contain_text("Step 0 of 10")  # 4 + 4 + 2 tokens, 7 decodes
    chunk.fill("0")
    chunk.press("Enter")
    expect(caption).to_contain_text("Step 0 of 8")


def test_hovering_over_a_slot_tells_its_token(view: Locator, page: Page) -> None:
    view.get_by_role("button", name="▶", exact=True).click()
    expect(view.locator(".te-caption")).to_contain_text("Step 1 of 8")
    slot = view.locator("g.te-hot").filter(has=page.locator('[id="K0"]'))
    tip = slot.locator(".te-tip text")
    expect(tip).to_be_hidden()
    slot.locator('[id="K0"]').hover(force=True)
    expect(tip).to_be_visible()
    expect(tip).to_contain_text("Once")


def test_a_prompt_that_does_not_fit_says_so_and_keeps_the_picture(view: Locator) -> None:
    scene = view.locator("svg.te-scene")
    before = scene.inner_html()
    prompt = view.get_by_label("prompt")
    prompt.fill("Once upon a time " * 20)
    prompt.press("Enter")
    expect(view.locator(".te-error")).to_contain_text("slots")
    assert scene.inner_html() == before
    prompt.fill("<b>Ben</b> had")
    prompt.press("Enter")
    expect(view.locator(".te-error")).to_have_count(0)
    assert view.locator("svg.te-scene b").count() == 0


def test_the_exported_page_shows_every_picture_without_network(
    browser: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(export(ROOT / "notebooks" / NOTEBOOK), encoding="utf-8")
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_load_state("networkidle")
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    shown = page.locator("img").evaluate_all("all => all.map(i => [i.naturalWidth, i.alt])")
    assert len(shown) == PICTURES
    assert all(width > 300 for width, _ in shown)
    assert len({alt for _, alt in shown}) == PICTURES
    page.close()
