"""Explorers: what is shown is what the engine returned, at every knob, and nothing breaks them."""

import base64
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import ipywidgets as widgets
import pytest
import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz import attention_explorer
from tutorial_engine.viz.attention_explorer import (
    MAX_TOKENS,
    AttentionExplorer,
    attention_weights,
)
from tutorial_engine.viz.block_explorer import BlockExplorer
from tutorial_engine.viz.cache_explorer import CacheExplorer
from tutorial_engine.viz.cell_explorer import CellExplorer
from tutorial_engine.viz.dial_explorer import DialExplorer
from tutorial_engine.viz.explorer import Explorer
from tutorial_engine.viz.rope_explorer import RopeExplorer
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.scheduler_explorer import SchedulerExplorer
from tutorial_engine.viz.style import new_figure
from tutorial_engine.viz.tokens import token_labels

PROMPT = "Anna had a red kite. Ben had a hat. Anna"
VIEW = "application/vnd.jupyter.widget-view+json"
SVG = "{http://www.w3.org/2000/svg}"
NASTY = [
    "<script>alert(1)</script>",
    "<s><think>hm</think>",
    "<img src=x onerror=alert(1)>",
    "\"double\" 'single' &amp; ]]>",
    "$x$ 😀 naïve",
    "</div></svg><b>bold",
]


@pytest.fixture
def attention(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> AttentionExplorer:
    return AttentionExplorer(model, tokenizer, PROMPT)


@pytest.fixture(params=["attention", "rope", "cache", "scheduler", "cells", "blocks", "dial"])
def explorer(
    request: pytest.FixtureRequest,
    attention: AttentionExplorer,
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
) -> Explorer:
    if request.param == "cache":
        return CacheExplorer(model, tokenizer, PROMPT, new_tokens=4)
    if request.param == "cells":
        return CellExplorer(model, tokenizer)
    if request.param == "blocks":
        return BlockExplorer(model, tokenizer, [PROMPT, "One day"], new_tokens=3)
    if request.param == "dial":
        return DialExplorer(model, tokenizer, [PROMPT, "One day"], new_tokens=3)
    if request.param == "scheduler":
        return SchedulerExplorer(model, tokenizer, [PROMPT, "One day"], new_tokens=3)
    return attention if request.param == "attention" else RopeExplorer()


class Text(HTMLParser):
    """The words of a piece of HTML, and every tag that is in it."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.words, self.tags = "", []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words += data


def caption_of(explorer: Explorer) -> str:
    """The caption as the learner reads it below the live picture."""
    return Text(explorer._caption_html.value).words


def svg_of(explorer: Explorer) -> str:
    return explorer._scene_html.value


def message_of(explorer: Explorer) -> str:
    return Text(explorer._message_html.value).words


def tips(svg: str) -> list[str]:
    root = ET.fromstring(svg)
    groups = [g for g in root.iter(f"{SVG}g") if g.get("class") == "te-tip"]
    return [g.findtext(f"{SVG}text") or "" for g in groups]


class Toy(Explorer):
    """Draws a number; refuses odd ones with the words that it is given."""

    def __init__(self, complaint: str) -> None:
        self.complaint, self.draws = complaint, 0
        super().__init__({"number": widgets.IntText(2), "steps": widgets.IntText(4)})

    def rerun(self) -> None:
        if self.value("number") % 2:
            raise ValueError(self.complaint)
        self.steps = self.value("steps")

    @property
    def num_steps(self) -> int:
        return self.steps

    def scene(self, step: int) -> Scene:
        self.draws += 1
        scene = Scene(100, 30)
        scene.text("n", 4, 20, f"{self.value('number')} at {step}")
        return scene

    def caption(self, step: int) -> str:
        return f"{self.value('number')} at {step} of {self.steps}."


# -- all explorers ----------------------------------------------------------------------------


def test_explorer_shows_live_view_picture_and_caption(explorer: Explorer) -> None:
    data, metadata = explorer._repr_mimebundle_()
    assert data.keys() == {VIEW, "image/png", "text/plain"}
    assert data[VIEW]["model_id"] == explorer.view.model_id
    assert data["text/plain"] == explorer.caption(explorer.step) == caption_of(explorer)
    assert metadata["image/png"]["alt"] == data["text/plain"]
    assert base64.b64decode(data["image/png"]) == explorer.picture().png
    assert explorer.shown.svg() == svg_of(explorer)


def test_slider_changes_picture_and_caption(explorer: Explorer) -> None:
    seen = set()
    for step in (0, 1, explorer.num_steps - 1):
        explorer.slider.value = step
        assert caption_of(explorer) == explorer.caption(step)
        assert svg_of(explorer) == explorer.scene(step).svg()
        seen.add((svg_of(explorer), caption_of(explorer)))
    assert len({svg for svg, _ in seen}) == len({caption for _, caption in seen}) == 3


def test_buttons_step_and_stop_at_both_ends(explorer: Explorer) -> None:
    last = explorer.num_steps - 1
    explorer.set(step=0)
    explorer.back.click()
    assert explorer.step == 0
    explorer.forward.click()
    assert explorer.step == 1 and caption_of(explorer) == explorer.caption(1)
    explorer.back.click()
    assert explorer.step == 0 and caption_of(explorer) == explorer.caption(0)
    explorer.set(step=last)
    explorer.forward.click()
    assert explorer.step == last


def test_play_and_slider_run_over_the_same_steps(explorer: Explorer) -> None:
    last = explorer.num_steps - 1
    assert explorer.play.min == explorer.slider.min == 0
    assert explorer.play.max == explorer.slider.max == last
    assert explorer.play.repeat is False
    explorer.slider.value = last + 100
    assert explorer.step == last


def test_every_stock_control_is_in_the_view(explorer: Explorer) -> None:
    def inside(widget: widgets.Widget) -> list[widgets.Widget]:
        return [widget, *(w for child in getattr(widget, "children", ()) for w in inside(child))]

    shown = inside(explorer.view)
    assert all(type(w).__module__.startswith("ipywidgets.") for w in shown)
    assert not any(isinstance(w, widgets.Output) for w in shown)
    wanted = [explorer.play, explorer.slider, explorer.back, explorer.forward]
    assert all(any(w is shown_one for shown_one in shown) for w in wanted)
    for parameter in explorer.parameters.values():
        assert parameter in shown and parameter.description


def test_unknown_knob_is_refused_by_name(explorer: Explorer) -> None:
    before = svg_of(explorer)
    with pytest.raises(ValueError, match=r"no knob.*colour.*this explorer has") as error:
        explorer.set(colour="red")
    assert all(name in str(error.value) for name in explorer.parameters)
    assert svg_of(explorer) == before


@pytest.mark.parametrize("past", [-1, 0, 1000])
def test_step_out_of_range_is_refused(explorer: Explorer, past: int) -> None:
    step = past if past < 0 else explorer.num_steps + past
    before = explorer.step
    with pytest.raises(ValueError, match=f"step {step} is outside 0 .. {explorer.num_steps - 1}"):
        explorer.set(step=step)
    assert explorer.step == before


def test_knob_out_of_range_is_refused(attention: AttentionExplorer) -> None:
    with pytest.raises(ValueError, match="layer"):
        attention.set(layer=99)
    with pytest.raises(ValueError, match="m"):
        RopeExplorer().set(m=1000)


def test_a_refused_set_leaves_knobs_step_and_picture_alone(attention: AttentionExplorer) -> None:
    attention.set(step=3, layer=1)
    before = attention.value("prompt"), attention.value("layer"), attention.step, svg_of(attention)
    for refused in ({"layer": 99}, {"prompt": ""}, {"prompt": "Ben had a hat.", "step": 999}):
        with pytest.raises(ValueError):
            attention.set(**refused)
        now = attention.value("prompt"), attention.value("layer"), attention.step, svg_of(attention)
        assert now == before and message_of(attention) == ""


def test_moving_the_slider_makes_no_matplotlib_figure(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a figure was made")

    monkeypatch.setattr(Figure, "__init__", refuse)
    with pytest.raises(AssertionError, match="a figure was made"):
        new_figure(1, 1)  # the trap is armed
    for step in range(3):
        explorer.slider.value = step
        assert caption_of(explorer) == explorer.caption(step)


def test_set_returns_the_picture_that_is_shown(explorer: Explorer) -> None:
    picture = explorer.set(step=2)
    assert explorer.step == 2 and picture == explorer.picture()
    assert explorer.shown.svg() == svg_of(explorer)
    assert picture.caption == caption_of(explorer)


def test_new_number_of_steps_draws_once() -> None:
    toy = Toy("odd")
    toy.slider.value = 3
    before = toy.draws
    toy.parameters["steps"].value = 2  # fewer: the slider has to move, too
    assert toy.draws == before + 1
    assert (toy.step, toy.slider.max, toy.play.max) == (0, 1, 1)
    assert caption_of(toy) == "2 at 0 of 2."


@pytest.mark.parametrize("words", NASTY)
def test_complaint_is_shown_literally_and_the_picture_stays(words: str) -> None:
    toy = Toy(words)
    before = svg_of(toy), caption_of(toy)
    toy.parameters["number"].value = 3
    message = Text(toy._message_html.value)
    assert message.words.startswith(words) and message.tags == ["div"]
    assert (svg_of(toy), caption_of(toy)) == before
    toy.parameters["number"].value = 4
    assert toy._message_html.value == "" and caption_of(toy) == "4 at 0 of 4."


@pytest.mark.parametrize("words", NASTY)
def test_any_caption_and_title_are_shown_literally(words: str) -> None:
    class Named(Toy):
        title = words

        def caption(self, step: int) -> str:
            return words

    toy = Named("odd")
    title = Text(toy.view.children[0].value)
    assert (title.words, title.tags) == (words, ["b"])
    caption = Text(toy._caption_html.value)
    assert (caption.words, caption.tags) == (words, ["div"])


def test_other_errors_are_not_swallowed() -> None:
    class Broken(Toy):
        def rerun(self) -> None:
            raise RuntimeError("a bug in the engine")

    with pytest.raises(RuntimeError, match="a bug in the engine"):
        Broken("")


# -- attention --------------------------------------------------------------------------------


def test_weights_are_those_of_transformers(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT).ids
    reference = AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32, attn_implementation="eager"
    )
    theirs = reference(torch.tensor([ids]), output_attentions=True).attentions
    ours = attention_weights(model, ids)
    assert ours.shape == (4, 6, len(ids), len(ids))
    assert (ours - torch.cat(theirs)).abs().max() < 1e-4


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (3, 5), (2, 1)])
def test_tips_hold_the_weights_that_the_engine_returned(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    attention: AttentionExplorer,
    layer: int,
    head: int,
) -> None:
    ids = tokenizer.encode(PROMPT).ids
    labels, weights = token_labels(tokenizer, ids), attention_weights(model, ids)[layer, head]
    attention.set(layer=layer, head=head, step=4)
    said = tips(svg_of(attention))
    cells = [m for t in said if (m := re.match(r"query (\d+) “(.*)” → key (\d+) “(.*)”: w", t))]
    assert len(cells) == len(ids) * (len(ids) + 1) // 2
    for tip, cell in zip([t for t in said if "→" in t], cells, strict=True):
        query, key = int(cell[1]), int(cell[3])
        assert (cell[2], cell[4]) == (labels[query], labels[key])
        assert tip.endswith(f"weight {float(weights[query, key]):.3f}")
    bars = [t for t in said if t.startswith("key ")]
    assert len(bars) == len(ids)
    for key, tip in enumerate(bars):
        weight = f"weight {float(weights[4, key]):.3f}" if key <= 4 else "later, hidden"
        assert tip == f"key {key} “{labels[key]}”: {weight}"


def test_caption_says_where_the_most_attention_goes(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, attention: AttentionExplorer
) -> None:
    ids = tokenizer.encode(PROMPT).ids
    weights, labels = attention_weights(model, ids), token_labels(tokenizer, ids)
    attention.set(layer=1, head=2)
    for step in range(len(ids)):
        attention.slider.value = step
        caption = caption_of(attention)
        best = int(weights[1, 2, step].argmax())
        assert f"query {step} “{labels[step]}” may look at {step + 1} of {len(ids)}" in caption
        assert f"{float(weights[1, 2, step, best]):.2f} of its attention" in caption
        assert f"to key {best} “{labels[best]}”" in caption


def test_future_is_marked_and_explained(attention: AttentionExplorer) -> None:
    said = tips(svg_of(attention))
    n = attention.num_steps
    assert sum("they come later" in tip for tip in said) == n - 1
    first = next(tip for tip in said if "they come later" in tip)
    assert first.startswith("query 0 ") and f"keys 1 to {n - 1}" in first


def test_prompt_runs_the_model_and_a_head_does_not(
    attention: AttentionExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[list[int]] = []

    def counted(model: Qwen3ForCausalLM, ids: list[int]) -> torch.Tensor:
        runs.append(ids)
        return attention_weights(model, ids)

    monkeypatch.setattr(attention_explorer, "attention_weights", counted)
    shown = {svg_of(attention)}
    for knobs in ({"layer": 1}, {"head": 3}, {"layer": 2, "head": 0}):
        attention.set(**knobs)
        shown.add(svg_of(attention))
    assert not runs and len(shown) == 4
    attention.set(prompt="Mia saw a dog.")
    assert len(runs) == 1
    assert attention.num_steps == len(runs[0]) and attention.step == len(runs[0]) - 1
    assert "·Mia" not in caption_of(attention) and svg_of(attention) not in shown


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "The prompt is empty"), ("Anna " * 100, f"the picture holds {MAX_TOKENS}")],
)
def test_impossible_prompt_is_explained_and_the_old_picture_kept(
    attention: AttentionExplorer, prompt: str, message: str
) -> None:
    before = svg_of(attention), caption_of(attention), attention.num_steps
    attention.parameters["prompt"].value = prompt
    assert message in message_of(attention)
    assert (svg_of(attention), caption_of(attention), attention.num_steps) == before
    attention.slider.value = 1  # what is left can still be stepped through
    assert caption_of(attention) == attention.caption(1)
    with pytest.raises(ValueError, match=message):
        attention.set(prompt=prompt)
    attention.set(prompt="Ben had a hat.")
    assert message_of(attention) == ""
    assert f"of {attention.num_steps} keys" in caption_of(attention)
    assert svg_of(attention) != before[0]


def test_picture_is_what_is_shown_even_while_the_prompt_is_impossible(
    attention: AttentionExplorer,
) -> None:
    attention.parameters["prompt"].value = ""
    attention.parameters["layer"].value = 2
    assert attention.shown.svg() == svg_of(attention)
    assert attention.picture().caption == caption_of(attention)


def test_impossible_first_prompt_is_refused(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="The prompt is empty"):
        AttentionExplorer(model, tokenizer, "").picture()


@pytest.mark.parametrize("prompt", NASTY)
def test_markup_in_a_prompt_is_shown_literally(attention: AttentionExplorer, prompt: str) -> None:
    def tags() -> set[str]:
        return {element.tag for element in ET.fromstring(svg_of(attention)).iter()}

    known = tags()
    attention.set(prompt=prompt)
    assert tags() == known
    labels = token_labels(attention.tokenizer, attention.tokenizer.encode(prompt).ids)
    texts = [t.text for t in ET.fromstring(svg_of(attention)).iter(f"{SVG}text")]
    for label in labels:
        assert texts.count(label) >= 3  # row, column and bar
    caption = Text(attention._caption_html.value)
    assert caption.tags == ["div"]
    assert caption.words == attention.caption(attention.step)
    assert f"“{labels[-1]}”" in caption.words


def test_longest_prompt_stays_light(attention: AttentionExplorer) -> None:
    ids = attention.tokenizer.encode("Anna had a red kite. " * 30).ids[:MAX_TOKENS]
    prompt = attention.tokenizer.decode(ids)
    assert len(attention.tokenizer.encode(prompt).ids) == MAX_TOKENS
    attention.set(prompt=prompt)
    assert attention.num_steps == MAX_TOKENS
    assert len(svg_of(attention).encode()) < 470_000


# -- RoPE -------------------------------------------------------------------------------------


def score_of(explorer: RopeExplorer) -> float:
    found = re.search(r"the score is (-?\d+\.\d\d)", caption_of(explorer))
    assert found is not None
    return float(found[1])


def test_shifting_both_keeps_the_score() -> None:
    explorer = RopeExplorer(m=12, n=3)
    explorer.set(step=0)
    start, scores = score_of(explorer), []
    for step in range(1, explorer.num_steps, 7):
        explorer.slider.value = step
        scores.append(score_of(explorer))
        assert f"query at m = {12 + step}, key at n = {3 + step}, distance m − n = 9" in svg_of(
            explorer
        )
        assert f"shifting both by {step} changed it by less than 0.01" in caption_of(explorer)
    assert len(scores) > 5 and max(abs(score - start) for score in scores) <= 0.011


def test_moving_one_of_them_changes_the_score() -> None:
    explorer = RopeExplorer(m=9, n=4)
    scores = {}
    for n in range(10):
        explorer.parameters["n"].value = n
        scores[n] = score_of(explorer)
    assert len(set(scores.values())) == 10
    assert max(scores, key=lambda n: scores[n]) == 9  # nearest: all hands agree


def test_score_is_the_sum_of_the_pairs_cosines() -> None:
    explorer = RopeExplorer(head_dim=8, theta=100.0, m=7, n=2)
    speeds = 100.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    assert score_of(explorer) == pytest.approx(float(2 * (5 * speeds).cos().sum()), abs=0.006)


def test_score_on_the_curve_and_in_the_caption_agree() -> None:
    explorer = RopeExplorer(m=20, n=25)
    tip = next(t for t in tips(svg_of(explorer)) if t.startswith("distance "))
    assert tip == f"distance -5: score {explorer.curve[64 - 5]:.3f}"
    assert score_of(explorer) == pytest.approx(explorer.curve[64 - 5], abs=0.006)


def test_tips_of_the_clocks_hold_the_engines_angles() -> None:
    explorer = RopeExplorer(head_dim=8, theta=100.0, m=7, n=2)
    explorer.set(step=3)
    said = [t for t in tips(svg_of(explorer)) if t.startswith("pair ")]
    assert len(said) == 1 + 4  # the big clock and one for each pair
    for pair, tip in enumerate(said[1:]):
        speed = 100.0 ** -(pair / 4)
        for part in (10 * speed, 5 * speed):
            assert f"{part:.3f} rad" in tip


def test_chosen_pair_is_the_big_clock() -> None:
    explorer = RopeExplorer()
    for pair in (0, 7, 15):
        explorer.set(pair=pair)
        assert f"pair {pair}: {float(explorer.rotary.inv_freq[pair]):.4f} rad a position" in svg_of(
            explorer
        )


@pytest.mark.parametrize("head_dim", [2, 6, 128])
def test_heads_of_other_sizes_can_be_explored(head_dim: int) -> None:
    explorer = RopeExplorer(head_dim, 1_000_000.0, m=64, n=0)
    explorer.set(step=64, pair=head_dim // 2 - 1)
    assert "Query at 128, key at 64" in caption_of(explorer)
    assert len([t for t in tips(svg_of(explorer)) if t.startswith("pair ")]) == 1 + head_dim // 2
