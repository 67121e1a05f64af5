"""Notebook 03 in JupyterLab, through a real browser: Run All, and requests sharing steps."""

import re
import shutil
from collections.abc import Iterator

import pytest
from browser import ROOT, chromium, lab, need_chromium, open_notebook, run_all
from playwright.sync_api import Browser, Locator, Page, expect

pytestmark = pytest.mark.browser
NOTEBOOK = "03_scheduler.ipynb"
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


@pytest.fixture
def view(page: Page) -> Locator:
    """The explorer with the notebook's three prompts, all at once, at step 0."""
    output = page.locator(".jp-OutputArea-output")
    found = output.filter(has=page.get_by_text("Scheduler explorer", exact=True))
    found.scroll_into_view_if_needed()
    limits = found.locator('[id="policy"]')  # each change is waited for, as a learner would
    choose(found, "policy", "one rule")
    expect(limits).to_contain_text("one rule")
    number(found, "token budget", 8)
    expect(limits).to_contain_text("budget 8 ")
    number(found, "max_num_seqs", 3)
    expect(limits).to_have_text("one rule · budget 8 · max_num_seqs 3")
    choose(found, "arrivals", "all at once")
    expect(found.locator('[id="line.D"]')).to_have_count(0)
    go(found, 0)
    return found


def choose(view: Locator, label: str, option: str) -> None:
    view.get_by_label(label).select_option(option)


def number(view: Locator, label: str, value: int) -> None:
    knob = view.get_by_label(label)
    knob.fill(str(value))
    knob.press("Enter")


def go(view: Locator, step: int) -> None:
    """Type the step beside the slider."""
    readout = view.locator(".widget-readout")
    readout.click()
    readout.fill(str(step))
    readout.press("Enter")
    expect(view.locator(".te-caption")).to_contain_text(f"Step {step} of ")


def test_stepping_shows_who_runs_and_who_waits(view: Locator) -> None:
    caption, scene = view.locator(".te-caption"), view.locator("svg.te-scene")
    expect(caption).to_contain_text("A prefill 8 (2 left, no token yet)")
    seen = {scene.inner_html()}
    for said in ("A prefill 2, B prefill 6", "A decode 1, B prefill 1, C prefill 3"):
        view.get_by_role("button", name="▶", exact=True).click()
        expect(caption).to_contain_text(said)
        seen.add(scene.inner_html())
    assert len(seen) == 3
    expect(caption).to_contain_text("TTFT in steps: A 2, B 3, C 3.")
    view.get_by_role("button", name="◀").click()
    expect(caption).to_contain_text("C waits: no budget is left")


def test_a_larger_budget_runs_all_prompts_at_once(view: Locator) -> None:
    number(view, "token budget", 32)
    caption = view.locator(".te-caption")
    expect(caption).to_contain_text(
        "20 of 32 budget tokens for 3 requests: A prefill 10, B prefill 7, C prefill 3"
    )
    number(view, "max_num_seqs", 2)
    expect(caption).to_contain_text("C waits: all 2 rows are taken (max_num_seqs)")


def test_every_policy_runs_and_none_leaves_the_page_empty(view: Locator) -> None:
    number(view, "token budget", 32)
    expect(view.locator('[id="policy"]')).to_contain_text("budget 32 ")
    for policy in ("prefill first", "static batching", "one by one", "one rule"):
        choose(view, "policy", policy)
        expect(view.locator(".te-caption")).to_contain_text(f", {policy}:")
        assert view.locator("svg.te-scene").count() == 1
        assert view.locator(".te-error").count() == 0


def test_what_a_policy_refuses_is_said_and_the_picture_kept(view: Locator) -> None:
    scene = view.locator("svg.te-scene")
    before = scene.inner_html()
    choose(view, "policy", "prefill first")
    expect(view.locator(".te-error")).to_contain_text("must run in one step of at most 8")
    assert scene.inner_html() == before
    number(view, "token budget", 16)
    expect(view.locator(".te-error")).to_have_count(0)
    expect(view.locator(".te-caption")).to_contain_text(", prefill first:")


def test_a_late_long_prompt_joins_those_who_decode(view: Locator) -> None:
    number(view, "max_num_seqs", 4)
    expect(view.locator('[id="policy"]')).to_contain_text("max_num_seqs 4")
    choose(view, "arrivals", "a long prompt before step 4")
    expect(view.locator('[id="line.D"]')).to_have_text("D")
    go(view, 4)
    expect(view.locator(".te-caption")).to_contain_text(
        "8 of 8 budget tokens for 4 requests: A decode 1, B decode 1, C decode 1, D prefill 5"
    )


def test_hovering_tells_what_a_box_stands_for(view: Locator, page: Page) -> None:
    cell = view.locator("g.te-hot").filter(has=page.locator('[id="cell.A.0"]'))
    tip = cell.locator(".te-tip text")
    expect(tip).to_be_hidden()
    cell.locator('[id="cell.A.0"]').hover(force=True)
    expect(tip).to_be_visible()
    expect(tip).to_contain_text("step 0: A prefill 8 (2 left, no token yet); positions 0 to 7")


def test_play_runs_to_the_end(view: Locator) -> None:
    view.locator(".widget-play button").first.click()
    caption = view.locator(".te-caption")
    expect(caption).to_have_text(re.compile(r"^Step (\d+) of 0–\1, one rule"), timeout=60_000)
    expect(caption).to_contain_text("with this step")
