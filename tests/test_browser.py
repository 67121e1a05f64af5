"""JupyterLab and the exported pages, seen through a real browser."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from browser import ROOT, chromium, lab, need_chromium, open_notebook, run_all, run_cell
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Browser, Locator, Page, expect

from tutorial_engine.learn.build import execute
from tutorial_engine.learn.html import page as export

pytestmark = pytest.mark.browser
NOTEBOOK = "01_attention_rope.ipynb"
NASTY = "<script>window.hacked = 1</script> <s> <think> \"'& 😀"

# every kind of view that a learner's text can reach: explorer, plot, question, verdict, print
EVERY_VIEW = """
import torch
from IPython.display import display
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.learn.predict import Predictions
from tutorial_engine.learn.verdict import check_close
from tutorial_engine.viz.attention_explorer import AttentionExplorer, attention_weights
from tutorial_engine.viz.attention_plots import attention_picture
from tutorial_engine.viz.tokens import token_labels
model, tokenizer = load_model(), load_tokenizer()
with torch.inference_mode():
    ids = tokenizer.encode(PROMPT).ids
    labels = token_labels(tokenizer, ids)
    display(AttentionExplorer(model, tokenizer, PROMPT))
    display(attention_picture(attention_weights(model, ids)[0, 0], labels, PROMPT))
display(Predictions().ask("nasty", PROMPT, [PROMPT, "no"]))
display(check_close(torch.ones(1), torch.ones(1), 1e-6, PROMPT))
print(PROMPT, labels)
"""


def nasty_notebook() -> nbformat.NotebookNode:
    code = EVERY_VIEW.replace("PROMPT", repr(NASTY))
    kernel = {"name": "python3", "display_name": "Python 3"}
    cells = [new_code_cell(code, id="cell-000")]
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    need_chromium()
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    need_chromium()
    folder = tmp_path_factory.mktemp("notebooks")
    shutil.copy(ROOT / "notebooks" / NOTEBOOK, folder / NOTEBOOK)
    shutil.copy(ROOT / "notebooks" / NOTEBOOK, folder / "unrun.ipynb")
    shutil.copy(ROOT / "notebooks" / NOTEBOOK, folder / "predict.ipynb")
    nbformat.write(nasty_notebook(), folder / "nasty.ipynb")
    with lab(folder, tmp_path_factory.mktemp("home")) as address:
        yield address


@pytest.fixture(scope="module")
def ran(browser: Browser, address: str) -> Page:
    page = open_notebook(browser, address, NOTEBOOK)
    assert run_all(page) == []
    return page


def explorer(page: Page, title: str) -> Locator:
    return page.locator(".jp-OutputArea-output").filter(has=page.get_by_text(title, exact=True))


def test_opened_but_not_run_shows_the_explorers_as_pictures(browser: Browser, address: str) -> None:
    page = open_notebook(browser, address, "unrun.ipynb")
    pictures = page.locator(".jp-OutputArea-output img")
    expect(pictures.first).to_be_attached()
    widths = pictures.evaluate_all("all => all.map(i => i.naturalWidth)")
    assert len(widths) == 8  # and three more are answers, folded away: only a first line shows
    assert all(width > 300 for width in widths)
    folded = page.locator(".jp-OutputPlaceholder")
    expect(folded).to_have_count(6)
    assert all("No prediction yet" in text for text in folded.all_text_contents())
    body = page.inner_text("body")
    assert "Error displaying widget" not in body
    assert "Loading widget" not in body
    page.close()


def test_stepping_and_layers_change_the_attention_picture(ran: Page) -> None:
    view = explorer(ran, "Attention explorer")
    scene, caption = view.locator("svg.te-scene"), view.locator(".te-caption")
    view.scroll_into_view_if_needed()
    before = scene.inner_html(), caption.inner_text()
    view.get_by_role("button", name="◀").click()
    expect(caption).not_to_have_text(before[1])
    assert scene.inner_html() != before[0]
    stepped = caption.inner_text()
    layer = view.get_by_label("layer")
    layer.fill("0")
    layer.press("Enter")
    expect(caption).to_contain_text("Layer 0")
    assert caption.inner_text() != stepped


def test_hovering_over_a_cell_reads_its_weight(ran: Page) -> None:
    view = explorer(ran, "Attention explorer")
    view.scroll_into_view_if_needed()
    cell = view.locator("g.te-hot").filter(has=ran.locator('[id="w5.0"]'))
    tip = cell.locator(".te-tip text")
    expect(tip).to_be_hidden()
    cell.locator('[id="w5.0"]').hover(force=True)
    expect(tip).to_be_visible()
    expect(tip).to_contain_text("query 5")
    expect(tip).to_contain_text("weight 0.")


def test_a_nasty_prompt_is_shown_literally_everywhere(ran: Page) -> None:
    view = explorer(ran, "Attention explorer")
    prompt = view.get_by_label("prompt")
    prompt.fill(NASTY)
    prompt.press("Enter")
    expect(view.locator(".te-caption")).to_contain_text("“<0x80>”")  # the last byte of the emoji
    labels = view.locator("svg.te-scene text[id^=row]").all_text_contents()
    text = "".join(labels).replace("·", " ").replace("<0xF0><0x9F><0x98><0x80>", "😀")
    assert text == NASTY
    assert view.locator("svg.te-scene script, svg.te-scene s, svg.te-scene think").count() == 0
    tips = view.locator("svg.te-scene .te-tip text").all_text_contents()
    assert any("“<”" in tip for tip in tips)
    assert ran.evaluate("window.hacked") is None


def assert_shown_literally(page: Page, times: int) -> None:
    """The text stands in the page that often, and no part of it became an element or ran."""
    assert page.evaluate("window.hacked") is None
    shown = page.locator(".jp-OutputArea-output")
    assert shown.locator("s, think").count() == 0
    scripts = shown.locator("script").all_text_contents()
    assert not any("hacked" in script for script in scripts)
    text = " ".join(shown.all_text_contents())
    assert text.count(NASTY) >= times, text[-2000:]


def test_every_live_view_shows_a_nasty_text_literally(browser: Browser, address: str) -> None:
    page = open_notebook(browser, address, "nasty.ipynb")
    assert run_all(page) == []
    expect(page.locator("svg.te-scene")).to_be_visible()
    assert page.get_by_label("prompt").input_value() == NASTY
    expect(page.get_by_role("radio").first).to_be_visible()
    assert_shown_literally(page, times=4)  # question, option, verdict, print
    page.close()


def test_every_exported_view_shows_a_nasty_text_literally(browser: Browser, tmp_path: Path) -> None:
    notebook = nasty_notebook()
    execute(notebook)
    nbformat.write(notebook, tmp_path / "nasty.ipynb")
    (tmp_path / "nasty.html").write_text(export(tmp_path / "nasty.ipynb"), encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "nasty.html").as_uri())
    assert_shown_literally(page, times=4)
    alts = page.locator("img").evaluate_all("all => all.map(i => i.alt)")
    assert len(alts) == 2
    assert all("“<0x80>”" in alt for alt in alts)
    page.close()


def test_a_bad_prompt_says_so_and_keeps_the_picture(ran: Page) -> None:
    view = explorer(ran, "Attention explorer")
    before = view.locator("svg.te-scene").inner_html()
    prompt = view.get_by_label("prompt")
    prompt.fill("")
    prompt.press("Enter")
    expect(view.locator(".te-error")).to_contain_text("empty")
    assert view.locator("svg.te-scene").inner_html() == before
    prompt.fill("Once upon a time")
    prompt.press("Enter")
    expect(view.locator(".te-error")).to_have_count(0)
    expect(view.locator(".te-caption")).to_contain_text("“·time”")


def test_the_rope_explorer_reacts_and_shifting_keeps_the_score(ran: Page) -> None:
    view = explorer(ran, "RoPE explorer")
    view.scroll_into_view_if_needed()
    caption, scene = view.locator(".te-caption"), view.locator("svg.te-scene")
    before = scene.inner_html()
    view.get_by_role("button", name="▶", exact=True).click()
    expect(caption).to_contain_text("shifting both by 1 changed it by less than 0.01")
    assert scene.inner_html() != before


def test_a_prediction_is_kept_and_scored(browser: Browser, address: str) -> None:
    page = open_notebook(browser, address, "predict.ipynb")
    cells = nbformat.read(ROOT / "notebooks" / NOTEBOOK, as_version=4).cells
    asked = next(i for i, cell in enumerate(cells) if '"emoji"' in cell.source)
    for index in range(asked + 1):
        run_cell(page, index)
    answers = page.locator(".jp-CodeCell").filter(has_text='predictions.reveal("emoji"')
    expect(answers).not_to_contain_text("<0xF0>")  # the stored outputs do not say it before
    page.get_by_role("radio", name="4", exact=True).check()
    run_cell(page, asked + 1)
    expect(answers).to_contain_text("<0xF0>")
    output = page.locator(".jp-OutputArea-output", has_text="Answer: 4.")
    expect(output.last).to_contain_text("✔ As you predicted.")
    expect(page.get_by_role("radio", name="4", exact=True)).to_be_disabled()
    page.close()


def test_the_exported_page_needs_no_network(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(export(ROOT / "notebooks" / NOTEBOOK), encoding="utf-8")
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_load_state("networkidle")
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    pictures = page.locator("img")
    shown = pictures.evaluate_all("all => all.map(i => [i.naturalWidth, i.alt])")
    assert len(shown) == 11
    assert all(width > 300 for width, _ in shown)
    assert len({alt for _, alt in shown}) == 11  # each its own caption
    assert not any("No description" in alt for _, alt in shown)
    page.close()
