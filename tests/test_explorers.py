"""All explorers: shown, saved and stepped through, whatever they show; nothing breaks them.

That every step can be read and is drawn as it was is in test_pictures, with all other views.
"""

import base64
import json
import re
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from typing import Any

import ipywidgets as widgets
import pytest
from explorers import (
    LARGEST,
    MAKE,
    PROMPT,
    Text,
    caption_of,
    inside,
    message_of,
    seen,
    svg_of,
    turn,
)
from inputs import PROMPTS
from matplotlib.figure import Figure
from tokenizers import Tokenizer
from traces import check_words

from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.learn.capstone import watched
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz import (
    attention_explorer,
    block_explorer,
    cache_steps,
    scheduler_explorer,
)
from tutorial_engine.viz.attention_explorer import MAX_TOKENS
from tutorial_engine.viz.block_explorer import OFF
from tutorial_engine.viz.cache_explorer import MAX_SLOTS
from tutorial_engine.viz.explorer import Explorer
from tutorial_engine.viz.moving import moving
from tutorial_engine.viz.picture import WIDGET_VIEW
from tutorial_engine.viz.player import Frame, film_of, player, still
from tutorial_engine.viz.recorded import ALL_AT_ONCE, LATE_LONG
from tutorial_engine.viz.scene import Item, Scene, plain
from tutorial_engine.viz.style import new_figure

NASTY = ["<script>a</script>", '</svg>&"]]>', "a\x00\u202eb😀", "$x$\n\t "]
REFUSED: dict[str, list[dict[str, Any]]] = {  # by `set`, with nothing changed
    "attention": [{"layer": 99}, {"prompt": "Ben had a hat.", "step": 999}],
    "rope": [{"m": 1000}, {"pair": -1}],
    "cache": [{"chunk": -1}, {"B": "Ben", "step": 999}],
    "sampling": [{"top_k": -1}, {"temperature": 2.5}, {"top_p": 0.0}],
    "calculator": [{"fraction": 2.0}, {"dtype": "int4"}, {"context": 0}],
    "scheduler": [{"policy": "best effort"}, {"max_num_seqs": 7}],
    "blocks": [{"block_size": 33}, {"prefix_caching": "maybe"}],
    "pages": [{"block_size": 33}],
    "cells": [{"seq": 9}, {"p0": 1000}],
    "dial": [{"block_size": 3}, {"block_size": "pages"}],
}
TOLD: list[tuple[str, dict[str, Any], str]] = [  # to a learner who turns these knobs
    ("attention", {"prompt": ""}, "The prompt is empty"),
    ("attention", {"prompt": "Anna " * 100}, f"the picture holds {MAX_TOKENS}"),
    ("attention", {"prompt": "One \ud800day"}, "prompt holds .* half of a character"),
    ("cache", {"B": ""}, "The prompt of B is empty"),
    ("cache", {"C": "Anna " * 40}, rf"of C has \d+ tokens; with 4 new .* holds {MAX_SLOTS} slots"),
    ("sampling", {"prompt": ""}, "The prompt is empty"),
    ("calculator", {"config_json": "{"}, "JSON"),
    ("calculator", {"config_json": '{"model_type": "<b>gpt2</b>"}'}, "type is '<b>gpt2</b>'"),
]
ONE, STORY = "One day", PROMPTS[0]


@pytest.fixture(scope="module", params=MAKE)
def shared(
    request: pytest.FixtureRequest, model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> tuple[str, Explorer]:
    return request.param, MAKE[request.param](model, tokenizer, PROMPT)


@pytest.fixture
def explorer(shared: tuple[str, Explorer]) -> Explorer:
    return turn(shared[1], 0)


# -- shown and stepped ----------------------------------------------------------------------------


def test_it_shows_a_live_view_a_picture_and_a_caption(explorer: Explorer) -> None:
    data, metadata = turn(explorer, 2)._repr_mimebundle_()
    assert data.keys() == {WIDGET_VIEW, "image/png", "text/plain"}
    assert data[WIDGET_VIEW]["model_id"] == explorer.view.model_id
    assert data["text/plain"] == explorer.caption(2) == caption_of(explorer)
    assert metadata["image/png"]["alt"] == data["text/plain"]
    png = base64.b64decode(data["image/png"])
    assert png == explorer.picture().png and len(png) < 100_000


def test_every_step_has_its_own_picture_and_runs_nothing(
    explorer: Explorer, model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a figure was made")

    monkeypatch.setattr(Figure, "__init__", refuse)
    with pytest.raises(AssertionError, match="a figure was made"):
        new_figure(1, 1)  # the trap is armed
    pictures, captions = set(), set()
    with watched(model) as batches:
        for step in range(explorer.num_steps):
            turn(explorer, step)
            assert caption_of(explorer) == explorer.shown_caption == explorer.caption(step)
            assert svg_of(explorer) == explorer.scene(step).svg() == explorer.shown.svg()
            pictures.add(svg_of(explorer))
            captions.add(caption_of(explorer))
    assert len(pictures) == len(captions) == explorer.num_steps and not batches


def test_buttons_slider_and_play_run_over_the_same_steps_and_stop_at_both_ends(
    explorer: Explorer,
) -> None:
    last = explorer.num_steps - 1
    assert explorer.play.min == explorer.slider.min == 0 and explorer.play.repeat is False
    assert explorer.play.max == explorer.slider.max == last
    for button, step in ((explorer.back, 0), (explorer.forward, 1), (explorer.back, 0)):
        button.click()
        assert explorer.step == step and caption_of(explorer) == explorer.caption(step)
    turn(explorer, last + 100).forward.click()
    assert explorer.step == last


def test_all_controls_are_stock_ones_and_shown(explorer: Explorer) -> None:
    shown = inside(explorer.view)
    assert all(type(w).__module__.startswith("ipywidgets.") for w in shown)
    assert not any(isinstance(w, widgets.Output) for w in shown)
    wanted = [explorer.play, explorer.slider, explorer.back, explorer.forward]
    assert all(any(w is other for other in shown) for w in wanted)
    assert all(w in shown and w.description for w in explorer.parameters.values())
    assert all(w in shown and w.tooltip for w in explorer.buttons.values())


def test_the_player_shows_every_step_item_by_item_and_a_button_saves_it(
    explorer: Explorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [Frame(explorer.scene(s), explorer.caption(s)) for s in range(explorer.num_steps)]
    film = film_of(frames)
    for step, (scene, caption) in enumerate(frames):
        items = [
            Item(i.tag, {name: plain(value) for name, value in i.attributes.items()}, i.text, i.tip)
            for i in scene.items.values()
        ]
        assert still(film, step) == items and film["captions"][step] == caption
    page = turn(explorer, 1).player(tmp_path / "page.html").read_text()
    assert explorer.step == 1 and '"start":1' in page and len(page.encode()) < 400_000
    assert page.count("://") == page.count("http://www.w3.org/2000/svg"), "nothing is requested"
    with pytest.raises(ValueError, match="no folder"):
        explorer.player(tmp_path / "nowhere" / "page.html")
    monkeypatch.chdir(tmp_path)
    buttons = [w for w in inside(explorer.view) if isinstance(w, widgets.Button)]
    next(w for w in buttons if w.description == "save as a page").click()
    assert explorer.page in message_of(explorer)
    assert (tmp_path / explorer.page).read_text() == page


@pytest.mark.parametrize("name", LARGEST)
def test_no_step_takes_longer_than_a_slider_may(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, name: str
) -> None:
    make, steps, most = LARGEST[name]
    explorer, spent = make(model, tokenizer, PROMPT), []
    for step in (*steps, *steps, *steps):
        began = time.process_time()  # of our own: the machine may be busy with others
        turn(explorer, step)
        spent.append(time.process_time() - began)
    assert min(spent[1:]) < 0.1 and len(svg_of(explorer).encode()) < most


# those that run the model again -> what runs it, and a value for each knob that does so
AGAIN: dict[str, tuple[ModuleType, str, dict[str, Any]]] = {
    "blocks": (
        block_explorer,
        "LLMEngine",
        {"block_size": 5, "num_blocks": 24, "prefix_caching": OFF, "n": 2, "budget": 8}
        | {"arrivals": ALL_AT_ONCE},
    ),
    "scheduler": (
        scheduler_explorer,
        "LLMEngine",
        {"budget": 9, "max_num_seqs": 2, "policy": "one by one", "arrivals": LATE_LONG},
    ),
    "attention": (attention_explorer, "look_inside", {"prompt": "Mia saw a dog."}),
    "cache": (cache_steps, "record_steps", {"chunk": 5, "B": "Mia saw a dog."}),
}


@pytest.mark.parametrize("name", AGAIN)
def test_a_knob_runs_the_engine_once_and_a_step_does_not(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    explorer, made = MAKE[name](model, tokenizer, PROMPT), list[Any]()
    module, what, changed = AGAIN[name]
    real = getattr(module, what, LLMEngine)

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, what, counted)
    for step in range(explorer.num_steps):
        turn(explorer, step=step)
    assert not made
    for i, (knob, value) in enumerate(changed.items(), 1):
        turn(explorer, **{knob: value})
        assert len(made) == i and not explorer.error


# -- set from code, and what cannot be shown ------------------------------------------------------


def test_set_returns_the_picture_and_a_refused_one_leaves_all_as_it_was(
    explorer: Explorer, shared: tuple[str, Explorer]
) -> None:
    picture = explorer.set(step=1)
    assert explorer.step == 1 and picture == explorer.picture()
    assert picture.caption == caption_of(explorer)
    before = seen(explorer)
    steps = [{"step": step} for step in (-1, explorer.num_steps, 1000)]
    for knobs in [*REFUSED[shared[0]], *steps]:
        with pytest.raises(Exception, match=r"empty|holds|room|refuses|cannot|outside|valid"):
            explorer.set(**knobs)
        assert seen(explorer) == before and not message_of(explorer)
    with pytest.raises(ValueError, match=r"no knob.*colour.*this explorer has") as error:
        explorer.set(colour="red")
    assert all(name in str(error.value) for name in explorer.parameters)


@pytest.mark.parametrize(("name", "knobs", "said"), TOLD)
def test_what_cannot_be_shown_is_told_and_the_old_picture_kept(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, name: str, knobs: dict[str, Any], said: str
) -> None:
    explorer = turn(MAKE[name](model, tokenizer, PROMPT), 1)
    before, old = seen(explorer), {knob: explorer.value(knob) for knob in knobs}
    with pytest.raises(ValueError, match=said):
        explorer.set(**knobs)
    assert seen(explorer) == before and not message_of(explorer)
    turn(explorer, **knobs)
    assert re.search(said, message_of(explorer)) and seen(explorer)[:4] == before[:4]
    assert explorer.shown.svg() == svg_of(explorer)
    assert explorer.picture().caption == caption_of(explorer)
    assert caption_of(turn(explorer, 0)) == explorer.caption(0), "it can still be stepped through"
    assert not message_of(turn(explorer, **old)) and caption_of(explorer) == explorer.caption(0)


# -- any text -------------------------------------------------------------------------------------


def tags(explorer: Explorer) -> set[str]:
    """The kinds of elements in the picture."""
    return {element.tag for element in ET.fromstring(svg_of(explorer)).iter()}


@pytest.mark.parametrize("name", [name for name in MAKE if name not in ("rope", "calculator")])
def test_markup_in_a_prompt_is_shown_literally(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, name: str
) -> None:
    known = set[str]()
    for words in (PROMPT, *NASTY):
        explorer = MAKE[name](model, tokenizer, words)
        for step in range(explorer.num_steps):
            turn(explorer, step)
            if words == PROMPT:
                known |= tags(explorer)
                continue
            assert tags(explorer) <= known
            assert not set("\x00\u202e") & set(svg_of(explorer) + caption_of(explorer))
            caption = Text(explorer._caption_html.value)
            assert (caption.words, caption.tags) == (explorer.caption(step), ["div"])
        check_words(explorer.shown)


# -- the machinery --------------------------------------------------------------------------------


class Toy(Explorer):
    """Draws a number; refuses odd ones with the words that it is given."""

    def __init__(self, complaint: str) -> None:
        self.complaint, self.draws = complaint, 0
        super().__init__({"number": widgets.IntText(2), "steps": widgets.IntText(4)})

    def rerun(self) -> int:
        if self.value("number") % 2:
            raise ValueError(self.complaint)
        return self.value("steps")

    def scene(self, step: int) -> Scene:
        self.draws += 1
        scene = Scene(100, 30)
        scene.text("n", 4, 20, f"{self.value('number')} at {step}")
        return scene

    def caption(self, step: int) -> str:
        return f"{self.value('number')} at {step} of {self.num_steps}."


@pytest.mark.parametrize(("stands", "at"), [("first", 0), ("same", 1), ("last", 1)])
def test_new_number_of_steps_draws_once(
    monkeypatch: pytest.MonkeyPatch, stands: str, at: int
) -> None:
    monkeypatch.setattr(Toy, "stands", stands)
    toy = turn(Toy("odd"), 3)
    before = toy.draws
    turn(toy, steps=2)  # fewer: the slider has to move, too
    assert toy.draws == before + 1
    assert (toy.step, toy.slider.max, toy.play.max) == (at, 1, 1)
    assert caption_of(toy) == f"2 at {at} of 2."
    assert turn(toy, steps=9).step == {"first": 0, "same": 1, "last": 8}[stands]


@pytest.mark.parametrize("words", NASTY)
def test_titles_captions_and_complaints_are_shown_literally(words: str) -> None:
    class Named(Toy):
        title = words

        def caption(self, step: int) -> str:
            return words

    toy, sign = Named(words), words.replace("\x00", "�")
    before = svg_of(toy)
    turn(toy, number=3)
    message = Text(toy._message_html.value)
    assert message.words.startswith(sign) and message.tags == ["div"] and svg_of(toy) == before
    title, caption = Text(toy.view.children[0].children[0].value), Text(toy._caption_html.value)
    assert (title.words, title.tags) == (sign, ["b"])
    assert (caption.words, caption.tags) == (sign, ["div"])
    assert not message_of(turn(toy, number=4))


@pytest.mark.parametrize("words", NASTY[:2])
def test_no_text_gets_out_of_a_player(words: str) -> None:
    scene = Scene(100, 30)
    scene.text("n", 4, 20, words)
    scene.rect(words, (0, 0, 5, 5), words, tip=words)
    page = player([[Frame(scene, words)]], words)
    plain_page = player([[Frame(Scene(100, 30), "a")]], "a")
    assert page.count("<") - plain_page.count("<") == 0, "no tag more than without it"
    film = json.loads(page.split('id="film">')[1].split("</script>")[0])
    assert film["captions"] == [words] and still(film, 0)[1].tip == words
    assert Text(page.split("<title>")[1].split("</title>")[0]).words == words
    read = [one.text for one in ET.fromstring(moving([Frame(scene, words)], words)).iter()]
    assert read.count(words) == 2, "the title and the item"


def test_items_that_change_their_order_are_drawn_in_the_order_of_each_step() -> None:
    def frame(names: str) -> Frame:
        scene = Scene(9, 9)
        for name in names:
            scene.text(name, 1, 1, name)
        return Frame(scene, names)

    steps = ["abcd", "dbca", "ac", "", "xaby", "yxba"]
    film = film_of([frame(names) for names in steps])
    for step, names in enumerate(steps):
        assert "".join(item.text for item in still(film, step)) == names
