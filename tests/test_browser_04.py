"""Notebook 04 in JupyterLab, through a real browser: Run All, and the pool, the cells, the dial."""

import shutil
from collections.abc import Iterator

import pytest
from browser import ROOT, chromium, lab, need_chromium, open_notebook, run_all
from playwright.sync_api import Browser, Locator, Page, expect

pytestmark = pytest.mark.browser
NOTEBOOK = "04_paged_cells.ipynb"
FOLDER = ROOT / "notebooks"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    need_chromium()
    expect.set_options(timeout=30_000)  # a change runs the engine, on a machine that may be busy
    with chromium() as browser:
        yield browser
    expect.set_options(timeout=5_000)


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("notebooks")
    shutil.copy(FOLDER / NOTEBOOK, folder / NOTEBOOK)
    with lab(folder, tmp_path_factory.mktemp("home")) as address:
        page = open_notebook(browser, address, NOTEBOOK)
        assert run_all(page) == []
        yield page


def explorer(page: Page, title: str) -> Locator:
    output = page.locator(".jp-OutputArea-output")
    found = output.filter(has=page.get_by_text(title, exact=True))
    found.scroll_into_view_if_needed()
    return found


def number(view: Locator, label: str, value: int) -> None:
    knob = view.get_by_label(label, exact=True)
    knob.fill(str(value))
    knob.press("Enter")


def go(view: Locator, step: int) -> None:
    """Type the step beside the slider that is the last one."""
    readout = view.locator(".widget-readout").last
    readout.click()
    readout.fill(str(step))
    readout.press("Enter")
    expect(view.locator(".te-caption")).to_contain_text(f"Step {step} of ")


def test_pool_is_stepped_and_a_smaller_one_makes_somebody_give_way(page: Page) -> None:
    view = explorer(page, "Block explorer")
    caption, scene = view.locator(".te-caption"), view.locator("svg.te-scene")
    number(view, "blocks", 12)
    go(view, 0)
    expect(caption).to_contain_text("of 12 blocks hold")
    seen = {scene.inner_html()}
    for step in (1, 2, 3):
        view.get_by_role("button", name="▶", exact=True).click()
        expect(caption).to_contain_text(f"Step {step} of ")
        seen.add(scene.inner_html())
    assert len(seen) == 4
    expect(caption).to_contain_text("B finds 4 tokens in block 0")
    number(view, "blocks", 2)
    expect(view.locator(".te-error")).to_contain_text("limited to 8")
    number(view, "block size", 1)
    number(view, "blocks", 32)
    expect(view.locator(".te-error")).to_have_count(0)
    expect(caption).to_contain_text("B finds 7 tokens in blocks")
    number(view, "block size", 4)
    number(view, "blocks", 5)
    expect(caption).to_contain_text("of 5 blocks hold")
    number(view, "n", 2)
    expect(caption).to_contain_text("A.1")


def test_cells_are_shared_shifted_and_refused_by_hand(page: Page) -> None:
    view = explorer(page, "Cells explorer")
    caption = view.locator(".te-caption")
    expect(caption).to_contain_text("cells 0 to 3 belong to both")
    number(view, "seq", 0)
    number(view, "p0", 0)
    number(view, "p1", -1)
    number(view, "delta", 2)
    view.get_by_role("button", name="seq_add", exact=True).click()
    expect(view.locator(".te-error")).to_contain_text("Copy first: seq_unshare(0, 0, -1)")
    number(view, "seq", 1)
    view.get_by_role("button", name="seq_rm", exact=True).click()
    expect(view.locator(".te-error")).to_have_count(0)
    expect(caption).to_contain_text("seq_rm(1")
    number(view, "seq", 0)
    view.get_by_role("button", name="seq_add", exact=True).click()
    expect(caption).to_contain_text("seq_add(0")
    view.get_by_role("button", name="apply K-shift", exact=True).click()
    expect(view.locator(".te-error")).to_have_count(0)
    expect(caption).to_contain_text("shift")


def test_dial_runs_the_engine_at_each_block_size(page: Page) -> None:
    view = explorer(page, "Block-size dial")
    caption = view.locator(".te-caption")
    expect(caption).to_contain_text("pages of 4:")
    handle = view.locator(".widget-hslider .noUi-handle").first
    handle.focus()
    handle.press("ArrowRight")
    expect(caption).to_contain_text("pages of 8:")
    handle.press("End")
    expect(caption).to_contain_text("rows:")
    handle.press("Home")
    expect(caption).to_contain_text("cells:")
    expect(caption).to_contain_text("the tokens are those of each request alone")
    expect(view.locator('[id="table.here"]')).to_have_count(1)
