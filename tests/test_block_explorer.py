"""The explorer of pages: the real engine on a pool of blocks, seen step by step."""

import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import ipywidgets as widgets
import pytest
from engines import one_thread
from tokenizers import Tokenizer
from traces import check_words

from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.viz import block_explorer
from tutorial_engine.viz.block_explorer import OFF, ON, BlockExplorer, labels
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.scheduler_explorer import ALL_AT_ONCE, ONE_BY_ONE

PROMPTS = [
    "Once upon a time Anna had a red kite.",
    "Once upon a time Anna had a red ball.",
    "One day Ben went to the park.",
]
VIEW = "application/vnd.jupyter.widget-view+json"
NASTY = ["<s>hi</s>", "<img src=x>", "$x$ 😀", 'A & "b" ]]>', "</svg><b>", "\n\t "]
FRESH: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 16,
    "prefix_caching": ON,
    "n": 1,
    "budget": 64,
    "arrivals": ONE_BY_ONE,
}


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def shared(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> BlockExplorer:
    return BlockExplorer(model, tokenizer, PROMPTS)


@pytest.fixture
def explorer(shared: BlockExplorer) -> BlockExplorer:
    """An explorer as it is when new."""
    return turn(shared, step=0, **FRESH)


def turn(explorer: BlockExplorer, step: int | None = None, **knobs: Any) -> BlockExplorer:
    """As `set`, without making the PNG."""
    for name, value in knobs.items():
        explorer.parameters[name].value = value
    if step is not None:
        explorer.slider.value = step
    return explorer


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


def svg_of(explorer: BlockExplorer) -> str:
    return explorer._scene_html.value


def words(explorer: BlockExplorer, pattern: str) -> list[str]:
    found = explorer.shown.items.items()
    return [item.text for name, item in found if re.fullmatch(pattern, name)]


def captions(explorer: BlockExplorer) -> list[str]:
    return [explorer.caption(step) for step in range(explorer.num_steps)]


# -- the run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [ON, OFF])
@pytest.mark.parametrize(("size", "blocks"), [(1, 60), (4, 16), (4, 5), (3, 8), (16, 3)])
def test_every_pool_gives_the_tokens_of_generate_alone(
    explorer: BlockExplorer, size: int, blocks: int, caching: str
) -> None:
    turn(explorer, num_blocks=64, arrivals=ALL_AT_ONCE)
    turn(explorer, block_size=size, prefix_caching=caching)
    turn(explorer, num_blocks=blocks)
    assert not explorer.error and explorer.run.num_blocks == blocks
    last = explorer.run.steps[-1].state.requests
    for name, prompt in zip("ABC", PROMPTS, strict=True):
        params = SamplingParams(max_tokens=6)
        alone = generate(explorer.model, prompt, params, tokenizer=explorer.tokenizer)[0]
        ids = tuple(explorer.tokenizer.encode(prompt).ids)
        assert last[name].token_ids == ids + tuple(alone.token_ids)


def test_knobs_are_the_engines_settings(explorer: BlockExplorer) -> None:
    turn(explorer, block_size=2, num_blocks=30, prefix_caching=OFF, budget=9)
    settings = explorer.run.trace.settings
    assert (settings["block_size"], settings["num_blocks"]) == (2, 30)
    assert settings["prefix_caching"] is False and settings["max_num_batched_tokens"] == 9
    assert max(e.num_tokens for e in explorer.run.trace.events if hasattr(e, "num_tokens")) == 9


def test_a_knob_runs_the_engine_once_and_a_step_does_not(
    explorer: BlockExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[LLMEngine] = []

    class Counted(LLMEngine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(block_explorer, "LLMEngine", Counted)
    for step in range(explorer.num_steps):
        turn(explorer, step=step)
    assert not made
    changed = {
        "block_size": 5,
        "num_blocks": 20,
        "prefix_caching": OFF,
        "n": 2,
        "budget": 8,
        "arrivals": ALL_AT_ONCE,
    }
    for i, (knob, value) in enumerate(changed.items(), 1):
        turn(explorer, **{knob: value})
        assert len(made) == i and not explorer.error


def test_prefixes_are_shared_only_with_prefix_caching(explorer: BlockExplorer) -> None:
    assert any("B finds 8 tokens in blocks 0 and 1" in said for said in captions(explorer))
    assert any("stored once for A and B" in said for said in captions(explorer))
    turn(explorer, prefix_caching=OFF)
    assert not any(re.search("finds|once|findable", said) for said in captions(explorer))
    assert "prefix caching off" in words(explorer, "step")[0]
    assert not words(explorer, "chain")


def test_samples_share_a_prompt_and_are_copied_on_the_first_write(explorer: BlockExplorer) -> None:
    turn(explorer, n=2, num_blocks=32, arrivals=ALL_AT_ONCE, step=1)
    assert explorer.run.names == ("A", "B", "C", "A.1", "B.1", "C.1")
    assert explorer.run.forks == {"A.1": "A", "B.1": "B", "C.1": "C"}
    drawn = [name.split(".", 1)[1] for name in explorer.shown.items if name.startswith("request.")]
    assert drawn == ["A", "A.1", "B", "B.1", "C", "C.1"]
    copies = [name for name in explorer.shown.items if re.fullmatch(r"copy\.\d+\.line", name)]
    assert len(copies) == len(explorer.run.steps[1].copies) > 0
    ends = explorer.run.steps[-1].state.requests
    assert ends["A"].token_ids != ends["A.1"].token_ids  # they were drawn


def test_a_pool_that_is_too_small_shows_who_gives_way_and_comes_back(
    explorer: BlockExplorer,
) -> None:
    turn(explorer, num_blocks=5, arrivals=ALL_AT_ONCE)
    said = captions(explorer)
    (when,) = [i for i, one in enumerate(said) if "is preempted and loses" in one]
    turn(explorer, step=when)
    assert re.search(r"B is preempted and loses blocks .* \(\d+ tokens\)", explorer.shown_caption)
    assert words(explorer, r"note\.B") == [f"waits {explorer.run.waits(when, 'B')}"]
    assert any("B" in step.tables for step in explorer.run.steps[when + 1 :])
    assert explorer.run.steps[-1].ended.keys() == {"A", "B", "C"}


# -- the picture ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"n": 2, "num_blocks": 40},
        {"block_size": 1, "num_blocks": 64},
        {"block_size": 16, "num_blocks": 6},
        {"num_blocks": 5, "arrivals": ALL_AT_ONCE, "budget": 5},
    ],
)
def test_tables_and_pool_are_those_of_the_trace_and_no_word_covers_another(
    explorer: BlockExplorer, knobs: dict[str, Any]
) -> None:
    turn(explorer, num_blocks=64)
    turn(explorer, **knobs)
    assert not explorer.error
    for step in range(0, explorer.num_steps, 2):
        turn(explorer, step=step)
        now = explorer.run.steps[step]
        for name, table in now.tables.items():
            assert words(explorer, rf"block\.\d+\.{re.escape(name)}") == list(map(str, table))
        refs = [word for word in words(explorer, r"ref\.\d+") if word != "next"]
        assert refs == [f"ref {now.ref_cnts[block]}" for block in sorted(now.ref_cnts)]
        picture = Picture(svg_of(explorer), b"", "")
        check_words(picture)


def test_hovering_says_where_a_token_lies_and_all_of_a_block(explorer: BlockExplorer) -> None:
    turn(explorer, step=3)
    run, shown = explorer.run, explorer.shown.items
    for name, table in run.steps[3].tables.items():
        for position in range(len(table) * 4):
            tip = shown[f"token.{position}.{name}"].tip
            slot = table[position // 4] * 4 + position % 4
            assert tip == run.about_token(3, name, position) and f" = {slot}; " in tip
    tip = shown["block.0"].tip
    assert tip.startswith("block 0 · ref 2: A and B · positions 0–3 · Once|·upon|·a|·time · hash ")
    assert all(shown[f"block.{block}"].tip.startswith(f"block {block} · ") for block in range(16))
    assert "te-hot" in svg_of(explorer)


def test_what_cannot_fit_is_told_and_the_old_picture_kept(explorer: BlockExplorer) -> None:
    turn(explorer, step=2)
    before = svg_of(explorer), explorer.shown_caption, explorer.num_steps
    turn(explorer, num_blocks=2)
    message = Text(explorer._message_html.value).words
    assert message.startswith("The engine refuses: the prompt of request A has 10 tokens, but")
    assert "limited to 8" in message
    assert (svg_of(explorer), explorer.shown_caption, explorer.num_steps) == before
    turn(explorer, num_blocks=16, n=4)
    assert explorer.error == (
        "3 prompts with 4 samples each are 12 requests, and the picture has room for 6."
    )
    assert (svg_of(explorer), explorer.shown_caption, explorer.num_steps) == before
    turn(explorer, step=3)
    assert explorer.shown_caption == explorer.caption(3)
    turn(explorer, n=1)
    assert explorer._message_html.value == "" and not explorer.error


def test_tables_that_are_too_long_are_told(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    explorer = BlockExplorer(model, tokenizer, [f"{p} {p} {p}" for p in PROMPTS], num_blocks=64)
    turn(explorer, block_size=2, arrivals=ALL_AT_ONCE)
    assert not explorer.error
    turn(explorer, n=2)
    assert re.search(r"longest block table has \d+ entries: with 6 requests", explorer.error)


def test_set_refuses_what_is_not_there_and_leaves_all_alone(explorer: BlockExplorer) -> None:
    explorer.set(step=2, budget=9)
    before = svg_of(explorer), {name: knob.value for name, knob in explorer.parameters.items()}
    refused: list[dict[str, Any]] = [
        {"num_blocks": 2},
        {"n": 3},
        {"block_size": 17},
        {"block_size": 0},
        {"prefix_caching": "maybe"},
        {"arrivals": "never"},
        {"step": explorer.num_steps},
        {"colour": 1},
    ]
    for knobs in refused:
        with pytest.raises(Exception, match=r"refuses|cannot be|outside|no knob|room|[Ii]nvalid"):
            explorer.set(**knobs)
        now = {name: knob.value for name, knob in explorer.parameters.items()}
        assert (svg_of(explorer), now) == before and explorer.step == 2


def test_a_change_keeps_the_step_that_is_looked_at(explorer: BlockExplorer) -> None:
    turn(explorer, step=4)
    turn(explorer, prefix_caching=OFF)
    assert explorer.step == 4 and explorer.shown_caption == explorer.caption(4)
    turn(explorer, step=explorer.num_steps - 1)
    turn(explorer, arrivals=ALL_AT_ONCE)
    assert explorer.step == explorer.num_steps - 1


@pytest.mark.parametrize(
    ("prompts", "more", "message"),
    [
        ([], {}, "give 1 to 6 prompts, got 0"),
        (["a"] * 7, {}, "give 1 to 6 prompts, got 7"),
        (["One day"], {"new_tokens": 0}, r"new_tokens must be .* got 0"),
        (["One day"], {"block_size": 17}, "block size must be from 1 to 16, got 17"),
        (["One day"], {"num_blocks": 65}, "blocks must be from 1 to 64, got 65"),
        (["One day"], {"n": 0}, "n must be from 1 to 4, got 0"),
        (["One day"], {"arrivals": "never"}, "arrivals must be one of all at once, .* 'never'"),
        (PROMPTS, {"num_blocks": 2}, "The engine refuses: the prompt of request A has 10 tokens"),
        ([""], {}, "The engine refuses: .*empty"),
    ],
)
def test_impossible_first_arguments_are_refused(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    prompts: list[str],
    more: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        BlockExplorer(model, tokenizer, prompts, **more)


@pytest.mark.parametrize("prompt", NASTY)
def test_markup_in_a_prompt_is_shown_literally(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, explorer: BlockExplorer, prompt: str
) -> None:
    def tags(of: BlockExplorer) -> set[str]:
        return {element.tag for element in ET.fromstring(svg_of(of)).iter()}

    known = tags(turn(explorer, step=3))
    nasty = BlockExplorer(model, tokenizer, [prompt, "One day"], new_tokens=3, num_blocks=40)
    for step in range(nasty.num_steps):
        turn(nasty, step=step)
        assert tags(nasty) <= known
        caption = Text(nasty._caption_html.value)
        assert (caption.words, caption.tags) == (nasty.caption(step), ["div"])


def test_tokens_beyond_the_tokenizer_have_a_name(
    explorer: BlockExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Tokenizer, token: int) -> str:
        raise ValueError(f"token id {token} is not in the vocabulary")

    known = labels(explorer.run.trace, explorer.tokenizer)
    monkeypatch.setattr(block_explorer, "token_label", refuse)
    found = labels(explorer.run.trace, explorer.tokenizer)
    assert found == {token: f"<id {token}>" for token in known}
    assert set(known) == {t for r in explorer.run.steps[-1].state.requests.values() for t in r[2]}


# -- what is displayed ----------------------------------------------------------------------------


def test_it_shows_a_live_view_a_picture_and_a_caption(explorer: BlockExplorer) -> None:
    data, metadata = turn(explorer, step=3)._repr_mimebundle_()
    assert data.keys() == {VIEW, "image/png", "text/plain"}
    assert data[VIEW]["model_id"] == explorer.view.model_id
    assert data["text/plain"] == explorer.caption(3) == metadata["image/png"]["alt"]
    assert len(data["image/png"]) < 80_000  # base64 of 60 KB


def test_pictures_are_the_same_every_time(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    pictures = [BlockExplorer(model, tokenizer, PROMPTS, n=2).set(step=1) for _ in range(2)]
    assert pictures[0] == pictures[1]
    assert pictures[0].caption.startswith("Step 1 of 0–")


def test_no_step_takes_longer_than_a_slider_may(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    explorer = BlockExplorer(model, tokenizer, PROMPTS, n=2, block_size=2, num_blocks=64)
    spent = []
    for step in (3, 4, 3, 4, 3, 4):
        began = time.perf_counter()
        explorer.slider.value = step
        spent.append(time.perf_counter() - began)
    assert min(spent) < 0.1 and len(svg_of(explorer).encode()) < 250_000


def test_only_stock_controls_and_no_output_widget(explorer: BlockExplorer) -> None:
    def inside(widget: widgets.Widget) -> list[widgets.Widget]:
        return [widget, *(w for child in getattr(widget, "children", ()) for w in inside(child))]

    shown = inside(explorer.view)
    assert all(type(w).__module__.startswith("ipywidgets.") for w in shown)
    assert not any(isinstance(w, widgets.Output) for w in shown)
    assert all(w in shown and w.description for w in explorer.parameters.values())
