"""The notebooks in JupyterLab and as exported pages, seen through a real browser.

One server for all. Notebook 01 is opened and looked at as it is. The cells that make the lessons'
explorers are one notebook: it is run with Run All, and then they are driven; a test begins by
bringing its explorer to a known state.
"""

import html
import io
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from browser import (
    ROOT,
    barriers,
    chromium,
    lab,
    need_chromium,
    open_another,
    open_notebook,
    run_all,
    run_cell,
    wait_for,
)
from explorers import MAKE
from lesson_cells import fresh, needed
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from tools.publish.build import LESSONS, sources
from tools.publish.html import page as export
from tutorial_engine.lab.real import needs_real

pytestmark = pytest.mark.browser
FOLDER = ROOT / "notebooks"
ATTENTION, EXPLORERS = "01_attention_rope.ipynb", "explorers.ipynb"
MAKES = re.compile(
    r"(Attention|Rope|Cache|Sampling|Block|Cell|Dial|Race)Explorer\(|MemoryCalculator\("
)
NASTY = "<script>window.hacked = 1</script> <s> <think> \"'& 😀"

# every kind of view that a learner's text can reach: explorer, plot, question, verdict, print
EVERY_VIEW = """
import torch
from IPython.display import display
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.learn.predict import Predictions
from tutorial_engine.learn.exercises.verdict import check_close
from tutorial_engine.viz.explorers.attention_explorer import AttentionExplorer
from tutorial_engine.viz.run.attention_weights import attention_weights
from tutorial_engine.viz.views.rope_maps_picture import rope_maps_picture
from tutorial_engine.viz.tokens import token_labels
model, tokenizer = load_model(), load_tokenizer()
with torch.inference_mode():
    ids = tokenizer.encode(PROMPT).ids
    labels = token_labels(tokenizer, ids)
    display(AttentionExplorer(model, tokenizer, PROMPT))
    display(rope_maps_picture({PROMPT: attention_weights(model, ids)[0, 0]}, labels, PROMPT))
display(Predictions().ask("nasty", PROMPT, [PROMPT, "no"]))
display(check_close(torch.ones(1), torch.ones(1), 1e-6, PROMPT))
print(PROMPT, labels)
"""

# what is gone with the kernel: an explorer, which has its picture, and a question, which has a text
SAVED = (
    """
from tutorial_engine import load_model, load_tokenizer
from tutorial_engine.learn import Predictions
from tutorial_engine.viz import AttentionExplorer
AttentionExplorer(load_model(), load_tokenizer(), "One day Ben")
""",
    """
Predictions().ask("kept", "What stays?", ["the picture", "nothing"])
""",
)

# two pictures that were stored, one without a magnitude and one with
STORED = """
import torch
from tutorial_engine.viz import heads_picture, mask_picture

plain = mask_picture({"causal": torch.ones(3, 3).tril().bool()})
display(plain, heads_picture(torch.full((1, 2, 3, 3), 0.2), torch.zeros(1, 2)))
"""

THREE_REQUESTS = """
from tutorial_engine.viz import SchedulerExplorer

prompts = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]
SchedulerExplorer(model, tokenizer, prompts, [6, 3, 5], details=True)
"""

# notebook 06's, with the tiny model
TWO_TEXTS = """
from tutorial_engine.viz import FactExplorer

text = "had an old coat. Tima was a friend of N"
FactExplorer(model, tokenizer, f"Namo {text}", f"Nedo {text}")
"""
CHAT = """
from tutorial_engine.cache import PagedKVCache
from tutorial_engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.chat import ChatTemplate
from tutorial_engine.lab import Conversation
from tutorial_engine.sampling import SamplingParams
from tutorial_engine.viz import ChatBox

pool = PagedKVCache.from_config(model.config, num_blocks=64, block_size=4)
served = LLMEngine(model, tokenizer, EngineConfig(max_num_seqs=1, max_model_len=256), memory=pool)
written = ChatTemplate("{% for m in messages %}{{ m['content'] }} {% endfor %}")
ChatBox(Conversation(served, written, SamplingParams(max_tokens=12)))
"""


def explorer_cells() -> Iterator[str]:
    """The lessons' cells that make an explorer, and those that they need; cells of our own."""
    for lesson in LESSONS:
        if needs_real(sources()[lesson.notebook]):
            continue  # its model would be that of the lessons behind it
        cells = fresh(lesson.notebook, solved=False).cells
        codes = [cell.source if cell.cell_type == "code" else "" for cell in cells]
        makes = [place for place, code in enumerate(codes) if MAKES.search(code)]
        for place in sorted(set[int]().union(*(needed(codes, place) for place in makes))):
            yield codes[place]
    yield from (THREE_REQUESTS, TWO_TEXTS, CHAT)


def notebook_of(*codes: str) -> nbformat.NotebookNode:
    kernel = {"name": "python3", "display_name": "Python 3"}
    cells = [new_code_cell(code, id=f"cell-{i:03d}") for i, code in enumerate(codes)]
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    need_chromium()
    expect.set_options(timeout=30_000)  # a change runs the engine, on a machine that may be busy
    with chromium() as browser:
        yield browser
    expect.set_options(timeout=5_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notebooks")
    shutil.copy(FOLDER / ATTENTION, folder)
    nasty = notebook_of(EVERY_VIEW.replace("PROMPT", repr(NASTY)))
    nbformat.write(nasty, folder / "nasty.ipynb")
    nbformat.write(notebook_of(*explorer_cells()), folder / EXPLORERS)
    nbformat.write(notebook_of(*SAVED), folder / "saved.ipynb")
    nbformat.write(notebook_of(STORED), folder / "stored.ipynb")
    return folder


@pytest.fixture(scope="module")
def address(
    browser: Browser, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    with lab(folder, tmp_path_factory.mktemp("home")) as address:
        yield address


@pytest.fixture(scope="module")
def windows(browser: Browser) -> BrowserContext:
    return browser.new_context(viewport={"width": 1400, "height": 1000})


@pytest.fixture(scope="module")
def opened(windows: BrowserContext, address: str) -> Iterator[Callable[[str], Page]]:
    """The page of a notebook, opened when it is asked for first; the one before it is closed."""
    pages: dict[str, Page] = {}

    def open_one(name: str) -> Page:
        if name not in pages:
            for page in pages.values():
                page.close()
            pages.clear()
            pages[name] = open_notebook(windows, address, name)
        return pages[name]

    yield open_one


@pytest.fixture(scope="module")
def ran(opened: Callable[[str], Page]) -> Callable[[str], Page]:
    """The same, after Run All without an error."""
    done: set[Page] = set()

    def run_one(name: str) -> Page:
        page = opened(name)
        if page not in done:
            assert run_all(page) == []
            done.add(page)
        return page

    return run_one


def explorer(page: Page, title: str) -> Locator:
    output = page.locator(".jp-OutputArea-output")
    found = output.filter(has=page.get_by_text(title, exact=True))
    found.scroll_into_view_if_needed()
    return found


def wait_for_kernel(view: Locator) -> None:
    """While it works, ipywidgets holds a new value back, and may show an older one again."""
    status = view.page.locator(".jp-Notebook-ExecutionIndicator")
    expect(status).to_have_attribute("data-status", "idle")


def press(view: Locator, name: str) -> None:
    wait_for_kernel(view)
    view.get_by_role("button", name=name, exact=True).click()


def fill(view: Locator, label: str, value: object) -> None:
    wait_for_kernel(view)
    knob = view.get_by_label(label, exact=True)
    knob.fill(str(value))
    knob.press("Enter")


def choose(view: Locator, label: str, option: str) -> None:
    wait_for_kernel(view)
    view.get_by_label(label).select_option(option)


def wait_until_it_differs(part: Locator, before: str) -> None:
    """Picture and caption come in messages of their own: one may be old when the other is new."""
    part.page.wait_for_function(
        "([one, before]) => one.innerHTML !== before", arg=[part.element_handle(), before]
    )


def hover(view: Locator, item: str, *said: str) -> None:
    """What is said of an item is hidden until the mouse is over it."""
    mark = f'[data-name="{item}"]'
    hot = view.locator("g.te-hot").filter(has=view.page.locator(mark))
    tip = hot.locator(".te-tip text")
    expect(tip).to_be_hidden()
    hot.locator(mark).hover(force=True)
    expect(tip).to_be_visible()
    for words in said:
        expect(tip).to_contain_text(words)


# -- notebook 01: before it is run, and a prediction ----------------------------------------------


def test_opened_but_not_run_shows_pictures_and_folded_answers(
    opened: Callable[[str], Page],
) -> None:
    page = opened(ATTENTION)
    cells = nbformat.read(FOLDER / ATTENTION, as_version=4).cells
    stored = [o.data for cell in cells for o in cell.get("outputs", []) if "data" in o]
    answers = [data["text/html"] for data in stored if "text/html" in data]
    images = sum("image/png" in data for data in stored) + sum(a.count("<img") for a in answers)
    pictures = page.locator(".jp-OutputArea-output img:not(.te-keep)")
    expect(pictures).to_have_count(images)
    widths = pictures.evaluate_all("all => all.map(i => i.naturalWidth)")
    assert len(widths) >= 12 and all(width > 300 for width in widths)
    folded = page.locator(".jp-OutputArea-output details")
    expect(folded).to_have_count(len(answers))
    assert not any(folded.evaluate_all("all => all.map(d => d.open)"))
    folded.first.locator("summary").click()
    expect(folded.first.locator("pre")).to_contain_text("Answer: about 20 %.")
    body = page.inner_text("body")
    assert "Error displaying widget" not in body
    assert "Loading widget" not in body


def test_a_prediction_is_kept_and_scored(opened: Callable[[str], Page]) -> None:
    page = opened(ATTENTION)
    cells = nbformat.read(FOLDER / ATTENTION, as_version=4).cells
    asked = next(i for i, cell in enumerate(cells) if '"share"' in cell.source)
    for index in range(asked + 1):
        run_cell(page, index)
    answers = page.locator(".jp-CodeCell").filter(has_text='predictions.reveal("share"')
    expect(answers).not_to_contain_text("Answer:")  # the stored outputs do not say it before
    page.get_by_role("radio", name="about 20 %", exact=True).check()
    run_cell(page, asked + 1)
    expect(answers).to_contain_text("Answer: about 20 %.")
    output = page.locator(".jp-OutputArea-output", has_text="Answer: about 20 %.")
    expect(output.last).to_contain_text("✔ As you predicted.")
    expect(page.get_by_role("radio", name="about 20 %", exact=True)).to_be_disabled()


# -- the explorers of all lessons ------------------------------------------------------------------


def test_on_a_projector_an_explorer_is_seen_whole(ran: Callable[[str], Page]) -> None:
    """Controls and picture together, at 1280 × 720; the sentence below them may be scrolled to."""
    page = ran(EXPLORERS)
    before = page.viewport_size
    page.set_viewport_size({"width": 1280, "height": 720})
    room = page.locator(".jp-NotebookPanel-notebook").evaluate("(one) => one.clientHeight")
    views = page.locator(".te-together")
    expect(views).to_have_count(len(MAKE) + 1)  # the race is shown with the learner's engine, too
    for view in views.all():
        height, shown, whole = view.evaluate(
            """(one) => {
                const picture = one.querySelector("svg").getBoundingClientRect();
                const box = one.getBoundingClientRect();
                return [picture.bottom - box.top, picture.height / picture.width, one.scrollHeight];
            }"""
        )
        assert 300 < height <= room and whole <= room, f"{view.inner_text()}: {height} of {room}"
        assert shown < 1, view.inner_text()
    page.set_viewport_size(before)


def test_layers_change_what_is_exchanged(ran: Callable[[str], Page]) -> None:
    facts = explorer(ran(EXPLORERS), "Fact explorer")
    caption = facts.locator(".te-caption")
    expect(caption).to_contain_text("layer 0")
    for layer in (1, 2, 3):
        press(facts, "▶")
        expect(caption).to_contain_text(f"layer {layer}")
    expect(caption).to_contain_text("“am”")
    expect(caption).to_contain_text("becomes “ed”")
    fill(facts, "other text", "Nedo had a hat.")
    expect(facts.get_by_role("alert")).to_contain_text("same number of tokens")


def test_a_chat_in_the_notebook_answers_and_finds_what_was_said(ran: Callable[[str], Page]) -> None:
    page = ran(EXPLORERS)
    line = page.get_by_placeholder("write to the model")
    line.fill("One day <b>Anna")
    line.press("Enter")
    log = page.locator("[aria-live=polite]").filter(has_text="One day <b>Anna")
    expect(log).to_contain_text("0 of them found; first token after")
    expect(line).to_have_value("")
    line.fill("Ben")
    page.get_by_role("button", name="Send").click()
    expect(log).to_contain_text("tokens/s", timeout=20_000)
    expect(log.locator("p")).to_have_count(6)
    assert not re.search(r"(?s)Ben.*\b0 of them found", log.inner_text())


@pytest.fixture
def attention(ran: Callable[[str], Page]) -> Locator:
    return explorer(ran(EXPLORERS), "Attention explorer")


def test_stepping_and_layers_change_the_attention_picture(attention: Locator) -> None:
    picture, caption = attention.locator(".te-picture"), attention.locator(".te-caption")
    wait_for_kernel(attention)
    before = picture.inner_html(), caption.inner_text()
    press(attention, "◀")
    wait_until_it_differs(picture, before[0])
    expect(caption).not_to_have_text(before[1])
    stepped = caption.inner_text()
    fill(attention, "layer", 0)
    expect(caption).to_contain_text("Layer 0")
    assert caption.inner_text() != stepped
    hover(attention, "w5.0", "query 5", "share 0.")


def test_any_head_is_chosen_by_one_click_or_by_keyboard(attention: Locator) -> None:
    caption = attention.locator(".te-caption")
    attention.get_by_text("every head's largest share").click()  # the grid is folded
    attention.get_by_title("show layer 1, head 4").click()
    expect(caption).to_contain_text("Layer 1, head 4:")
    expect(attention.get_by_label("head", exact=True)).to_have_value("4")
    attention.page.keyboard.press("Tab")  # the next head of the grid
    attention.page.keyboard.press("Enter")
    expect(caption).to_contain_text("Layer 1, head 5:")
    expect(attention.get_by_title("show layer 1, head 5")).to_contain_text("▸")


def test_a_nasty_prompt_is_shown_literally_and_a_bad_one_refused(attention: Locator) -> None:
    fill(attention, "prompt", NASTY)
    caption = attention.locator(".te-caption")
    expect(caption).to_contain_text("“<0x80>”")  # the last byte of the emoji
    expect(attention.locator("svg.te-scene")).to_contain_text("“<0x80>”")
    tips = attention.locator("svg.te-scene .te-tip text").all_text_contents()
    found = dict(re.findall(r"query (\d+) “(.*?)” →", "\n".join(tips)))
    text = "".join(found.values()).replace("·", " ").replace("<0xF0><0x9F><0x98><0x80>", "😀")
    assert text == NASTY
    assert attention.locator("svg.te-scene :is(script, s, think)").count() == 0
    assert attention.page.evaluate("window.hacked") is None
    scene = attention.locator("svg.te-scene")
    before = scene.inner_html()
    fill(attention, "prompt", "")
    expect(attention.locator(".te-error")).to_contain_text("empty")
    assert scene.inner_html() == before
    fill(attention, "prompt", "Once upon a time")
    expect(attention.locator(".te-error")).to_have_count(0)
    expect(caption).to_contain_text("“·time”")


def test_filters_are_moved_by_keyboard_and_tokens_drawn(ran: Callable[[str], Page]) -> None:
    view = explorer(ran(EXPLORERS), "Sampling explorer")
    fill(view, "prompt", "One day")
    expect(view.locator('[data-name="prompt"]')).to_contain_text("One·day")
    caption, temperature = view.locator(".te-caption"), view.get_by_role("slider").first
    temperature.focus()
    temperature.press("Home")
    expect(view.locator('[data-name="stage1.0.0"]')).to_have_text("temperature 0: greedy")
    press(view, "clear")
    expect(caption).to_contain_text("nothing is drawn")
    press(view, "draw 10")
    expect(caption).to_contain_text("10 draws with seed")
    press(view, "◀")
    expect(caption).to_contain_text("top-k is skipped")


def test_the_calculator_takes_a_config_and_refuses_what_it_cannot_count(
    ran: Callable[[str], Page],
) -> None:
    view = explorer(ran(EXPLORERS), "Memory and speed calculator")
    view.get_by_role("button", name="Llama-2-7B", exact=True).press("Enter")
    expect(view.locator('[data-name="sum1"]')).to_contain_text("= 524,288 bytes = 512 KiB")
    area = view.locator("textarea")
    area.fill('{"model_type": "gpt2"}')
    area.press("Tab")
    expect(view.locator(".te-error")).to_contain_text("model_type is 'gpt2'")
    press(view, "Qwen3-0.6B")
    expect(view.locator(".te-error")).to_have_count(0)
    expect(view.locator('[data-name="sum1"]')).to_contain_text("(224 KiB with 16 K/V heads)")


# -- of notebook 03: requests share steps ----------------------------------------------------------


def test_a_policy_is_chosen_and_play_runs_to_the_end(ran: Callable[[str], Page]) -> None:
    view = explorer(ran(EXPLORERS), "Scheduler explorer")
    caption = view.locator(".te-caption")
    choose(view, "policy", "one rule")
    expect(caption).to_contain_text(", one rule:")
    fill(view, "token budget", 32)
    expect(caption).to_contain_text("20 of 32 budget tokens for 3 requests")
    wait_for_kernel(view)
    view.locator(".widget-play button").first.click()
    expect(caption).to_have_text(re.compile(r"^Step (\d+) of \1, one rule"), timeout=60_000)
    expect(caption).to_contain_text("with this step")


# -- what another picture, or another day, must not take away --------------------------------------


def is_striped(page: Page, view: Locator) -> bool:
    """Are there grey lines on white where its largest hatched box stands on the screen?"""
    box = view.locator(".te-stripes").evaluate_all(
        """(all) => all.map((one) => one.getBoundingClientRect()).map(
            ({ x, y, width, height }) => ({ x, y, width, height }))
            .reduce((one, two) => (one.width * one.height > two.width * two.height ? one : two))"""
    )
    png = page.screenshot(clip={**box, "height": min(box["height"], 60)})
    grey = Image.open(io.BytesIO(png)).convert("L").tobytes()
    dark = sum(value < 245 for value in grey) / len(grey)
    return 0.1 < dark < 0.9 and max(grey) == 255


def test_hatching_stays_when_other_explorers_are_out_of_view(ran: Callable[[str], Page]) -> None:
    """With JupyterLab's own settings: what is scrolled away is not drawn."""
    page = ran(EXPLORERS)
    views = page.locator(".te-together").filter(has=page.locator(".te-stripes"))
    assert views.count() >= 5
    for view in views.all():
        view.locator(".te-stripes").first.scroll_into_view_if_needed()
        view.locator("svg").scroll_into_view_if_needed()
        assert is_striped(page, view), view.inner_text()


def colours(page: Page, image: Locator) -> Counter[tuple[int, ...]]:
    """How often it has each colour on the screen."""
    image.scroll_into_view_if_needed()
    png = Image.open(io.BytesIO(image.screenshot())).convert("RGB")
    return Counter(png.getdata())


def test_a_live_picture_turns_in_a_dark_theme(ran: Callable[[str], Page]) -> None:
    page = ran(EXPLORERS)
    scene = explorer(page, "Attention explorer").locator("svg.te-scene")
    assert colours(page, scene).most_common(1)[0][0] == (255, 255, 255)
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    by_night = colours(page, scene)
    page.evaluate("document.body.dataset.jpThemeLight = 'true'")
    assert max(by_night.most_common(1)[0][0]) < 30
    assert any(r > 200 and g > 180 and b < 90 for r, g, b in by_night), "the most is yellow"


@pytest.fixture(scope="module")
def saved(ran: Callable[[str], Page]) -> Page:
    """The page of all explorers, with saved.ipynb in a tab that hides them: run, and saved."""
    page = ran(EXPLORERS)
    open_another(page, "saved.ipynb")
    assert run_all(page) == []
    wait_for(page, "() => jupyterapp.commands.execute('docmanager:save')")
    return page


def test_hatching_stays_when_other_explorers_are_in_a_hidden_tab(saved: Page) -> None:
    page = saved
    panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    view = panel.locator(".te-together")
    view.scroll_into_view_if_needed()
    expect(view.locator("svg")).to_be_visible()
    assert is_striped(page, view)
    wait_for(page, "() => void jupyterapp.shell.currentWidget.close()")


def test_what_was_saved_shows_by_itself_on_the_next_day(
    saved: Page, windows: BrowserContext, address: str, folder: Path
) -> None:
    """And it is live as long as its kernel is, also in a page that is loaded anew."""
    file, name = folder / "saved.ipynb", "saved.ipynb"
    page = open_notebook(windows, address, name)
    scenes, stills = page.locator("svg.te-scene"), page.locator("img.te-turns")
    expect(scenes).to_have_count(1)
    expect(stills).to_have_count(0)
    expect(page.get_by_role("radio").first).to_be_enabled()
    wait_for(page, "() => jupyterapp.serviceManager.sessions.shutdownAll()")
    page.close()

    assert "widget-view" in file.read_text(encoding="utf-8")  # as every notebook saved so far
    page = open_notebook(windows, address, name)
    scenes, stills = page.locator("svg.te-scene"), page.locator("img.te-turns")
    outputs = page.locator(".jp-OutputArea-output.jupyter-widgets")
    expect(outputs).to_have_count(2)  # JupyterLab has given both up
    expect(stills).to_have_count(1)
    assert stills.evaluate("(one) => one.naturalWidth") > 300
    expect(outputs.last).to_contain_text("Predict: What stays?")
    expect(page.get_by_text("Run the cell to use it again.")).to_have_count(2)
    for words in ("Error displaying widget", "Loading widget"):
        expect(page.get_by_text(words)).to_have_count(0)
    assert run_all(page) == []
    expect(scenes).to_have_count(1)
    expect(stills).to_have_count(0)
    page.close()


# -- a stored picture in a dark theme --------------------------------------------------------------


def test_pictures_turn_in_a_dark_theme_but_for_their_magnitudes(ran: Callable[[str], Page]) -> None:
    page = ran("stored.ipynb")
    turned, kept = page.locator("img.te-turns"), page.locator("img.te-keep")
    plain, scores = turned.first, turned.last
    assert plain.get_attribute("alt"), "its caption, which JupyterLab drops"
    expect(kept).to_be_hidden()
    by_day = colours(page, plain), colours(page, scores)
    assert all(min(most.most_common(1)[0][0]) > 250 for most in by_day), by_day
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    expect(kept).to_be_visible()
    by_night = colours(page, plain), colours(page, scores)
    assert all(max(most.most_common(1)[0][0]) < 30 for most in by_night), by_night
    for seen in (by_day[1], by_night[1]):  # the score 0 is as blue by night as by day
        assert any(r < 9 and abs(g - 34) < 9 and abs(b - 78) < 9 for r, g, b in seen)


# -- a nasty text in every view, and the exported pages --------------------------------------------


def assert_shown_literally(page: Page, times: int) -> None:
    """The text stands in the page that often, and no part of it became an element or ran."""
    assert page.evaluate("window.hacked") is None
    shown = page.locator(".jp-OutputArea-output")
    assert shown.locator("s, think").count() == 0
    scripts = shown.locator("script").all_text_contents()
    assert not any("hacked" in script for script in scripts)
    text = " ".join(shown.all_text_contents())
    assert text.count(NASTY) >= times, text[-2000:]


def test_every_view_live_and_exported_shows_a_nasty_text_literally(
    ran: Callable[[str], Page], browser: Browser, folder: Path
) -> None:
    page = ran("nasty.ipynb")
    expect(page.locator("svg.te-scene")).to_be_visible()
    assert page.get_by_label("prompt").input_value() == NASTY
    expect(page.get_by_role("radio").first).to_be_visible()
    assert_shown_literally(page, times=4)  # question, option, verdict, print
    wait_for(page, "() => jupyterapp.commands.execute('docmanager:save')")
    (folder / "nasty.html").write_text(export(folder / "nasty.ipynb"), encoding="utf-8")
    page = browser.new_page()
    page.goto((folder / "nasty.html").as_uri())
    assert_shown_literally(page, times=4)
    alts = page.locator("img").evaluate_all("all => all.map(i => i.alt)")
    explorer, picture = alts
    assert "“<0x80>”" in explorer and NASTY in picture
    page.close()


def test_exported_page_shows_every_picture_without_network(
    browser: Browser, tmp_path: Path
) -> None:
    """Of one lesson; test_notebooks.py looks at the outputs of all."""
    file = tmp_path / "page.html"
    file.write_text(export(FOLDER / ATTENTION), encoding="utf-8")
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_load_state("networkidle")
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    cells = nbformat.read(FOLDER / ATTENTION, as_version=4).cells
    captions = []
    for data in [o.get("data", {}) for cell in cells for o in cell.get("outputs", [])]:
        captions += [data["text/plain"]] if "image/png" in data else []
        folded = re.findall(r'<img [^>]*alt="([^"]*)"', data.get("text/html", ""))  # in an answer
        captions += [html.unescape(alt) for alt in folded]
    shown = page.locator("img").evaluate_all("all => all.map(i => [i.naturalWidth, i.alt])")
    assert [alt for _, alt in shown] == captions and len(set(captions)) == len(captions) >= 7
    assert all(width > 300 for width, _ in shown)
    assert barriers(page) == []
    page.close()
