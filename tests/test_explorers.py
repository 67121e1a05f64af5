"""All explorers: shown, saved and stepped through, and what each shows is what the engine did.

That every step can be read and is drawn as it was is in test_pictures, with all other views.
"""

import base64
import json
import re
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pytest
import torch
from explorers import (
    LARGEST,
    MAKE,
    PROMPT,
    Text,
    caption_of,
    inside,
    items,
    message_of,
    race,
    seen,
    svg_of,
    tips,
    turn,
    words,
)
from inputs import PROMPTS
from tokenizers import Tokenizer
from traces import check_words
from transformers import AutoModelForCausalLM

from tutorial_engine.engine.generate import generate
from tutorial_engine.lab.dial import Dial
from tutorial_engine.learn import OwnServer, check_num_tokens, check_plan
from tutorial_engine.learn.capstone import watched
from tutorial_engine.learn.parts import scheduler as own_scheduler
from tutorial_engine.learn.parts.scheduler import plan_step as right
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import Sampler, filter_logits
from tutorial_engine.trace.events import TokenSampled
from tutorial_engine.trace.pool import CELLS, ROWS
from tutorial_engine.viz.drawing.picture import WIDGET_VIEW
from tutorial_engine.viz.drawing.scene import HATCHED, Frame, Item, Scene, plain
from tutorial_engine.viz.explorers.attention_explorer import MAX_TOKENS, AttentionExplorer
from tutorial_engine.viz.explorers.block_explorer import BlockExplorer
from tutorial_engine.viz.explorers.cache_explorer import MAX_SLOTS, CacheExplorer
from tutorial_engine.viz.explorers.cell_explorer import APPEND, CellExplorer
from tutorial_engine.viz.explorers.dial_explorer import DialExplorer
from tutorial_engine.viz.explorers.explorer import Explorer
from tutorial_engine.viz.explorers.memory_calculator import MemoryCalculator, preset
from tutorial_engine.viz.explorers.moving import moving
from tutorial_engine.viz.explorers.player import film_of, player, still
from tutorial_engine.viz.explorers.race_explorer import BAR
from tutorial_engine.viz.explorers.sampling_explorer import MOST_DRAWS, SamplingExplorer
from tutorial_engine.viz.explorers.scheduler_explorer import CLASSES, MINE, STEPS, SchedulerExplorer
from tutorial_engine.viz.run.attention_weights import attention_weights
from tutorial_engine.viz.run.recorded import ALL_AT_ONCE, LATE_LONG, ONE_BY_ONE
from tutorial_engine.viz.tokens import token_label, token_labels
from tutorial_engine.viz.views.scheduler_view import COLUMNS, OVER
from tutorial_engine.viz.words import counted, percent

NASTY = ["<script>a</script>", '</svg>&"]]>', "a\x00\u202eb😀", "$x$\n\t "]
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


@pytest.fixture(scope="module", params=MAKE)
def shared(
    request: pytest.FixtureRequest, model: CausalLM, tokenizer: Tokenizer
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
    explorer: Explorer, model: CausalLM
) -> None:
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
    model: CausalLM, tokenizer: Tokenizer, name: str
) -> None:
    explorer, spent = LARGEST[name](model, tokenizer, PROMPT), []
    for step in [0, 1] * 3:
        began = time.process_time()  # of our own: the machine may be busy with others
        turn(explorer, step)
        spent.append(time.process_time() - began)
    assert min(spent[1:]) < 0.1 and len(svg_of(explorer).encode()) < 350_000


# -- set from code, and what cannot be shown ------------------------------------------------------


def test_set_returns_the_picture_and_a_refused_one_leaves_all_as_it_was(
    explorer: Explorer,
) -> None:
    picture = explorer.set(step=1)
    assert explorer.step == 1 and picture == explorer.picture()
    assert picture.caption == caption_of(explorer)
    before = seen(explorer)
    for step in (-1, explorer.num_steps):
        with pytest.raises(ValueError, match="outside"):
            explorer.set(step=step)
        assert seen(explorer) == before and not message_of(explorer)
    with pytest.raises(ValueError, match=r"no knob.*colour.*this explorer has") as error:
        explorer.set(colour="red")
    assert all(name in str(error.value) for name in explorer.parameters)


@pytest.mark.parametrize("knobs", [{"layer": 99}, {"prompt": "Ben had a hat.", "step": 999}])
def test_a_knob_beyond_its_end_is_refused_and_nothing_is_turned(
    model: CausalLM, tokenizer: Tokenizer, knobs: dict[str, Any]
) -> None:
    explorer = MAKE["attention"](model, tokenizer, PROMPT)
    before = seen(explorer)
    with pytest.raises(ValueError, match=r"layer cannot be 99; the nearest is 3|outside 0 .. \d"):
        explorer.set(**knobs)
    assert seen(explorer) == before and not message_of(explorer)


@pytest.mark.parametrize(("name", "knobs", "said"), TOLD)
def test_what_cannot_be_shown_is_told_and_the_old_picture_kept(
    model: CausalLM, tokenizer: Tokenizer, name: str, knobs: dict[str, Any], said: str
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


@pytest.mark.parametrize("name", [name for name in MAKE if name not in ("rope", "calculator")])
def test_a_prompt_of_markup_can_be_read_at_every_step(
    model: CausalLM, tokenizer: Tokenizer, name: str
) -> None:
    for start, prompt in enumerate(NASTY[:3]):
        explorer = MAKE[name](model, tokenizer, prompt)
        steps = range(explorer.num_steps)  # of a race, which has 48, each text has every third one
        for step in steps if len(steps) < 20 else steps[start::3]:
            check_words(explorer.scene(step))


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


# -- attention and RoPE ----------------------------------------------------------------------------


def test_weights_are_those_of_transformers(model: CausalLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT).ids
    reference = AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32, attn_implementation="eager"
    )
    theirs = reference(torch.tensor([ids]), output_attentions=True).attentions
    ours = attention_weights(model, ids)
    assert ours.shape == (4, 6, len(ids), len(ids))
    assert (ours - torch.cat(theirs)).abs().max() < 1e-4


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (2, 1)])
def test_tips_and_captions_hold_the_weights_that_the_engine_returned(
    model: CausalLM, tokenizer: Tokenizer, layer: int, head: int
) -> None:
    attention, ids = AttentionExplorer(model, tokenizer, PROMPT), tokenizer.encode(PROMPT).ids
    labels, weights = token_labels(tokenizer, ids), attention_weights(model, ids)[layer, head]
    said = tips(turn(attention, 4, layer=layer, head=head))
    cells = [m for t in said if (m := re.match(r"query (\d+) “(.*)” → key (\d+) “(.*)”: s", t))]
    assert len(cells) == len(ids) * (len(ids) + 1) // 2
    for tip, cell in zip([t for t in said if "→" in t], cells, strict=True):
        query, key = int(cell[1]), int(cell[3])
        assert (cell[2], cell[4]) == (labels[query], labels[key])
        assert tip.endswith(f"share {float(weights[query, key]):.3f}")
    assert [t for t in said if t.startswith("key ")] == [
        f"key {key} “{labels[key]}”: "
        + (f"share {float(weights[4, key]):.3f}" if key <= 4 else "later, hidden")
        for key in range(len(ids))
    ]
    for step in range(len(ids)):
        caption, best = caption_of(turn(attention, step)), int(weights[step].argmax())
        assert f"query {step} “{labels[step]}” may look at {step + 1} of {len(ids)}" in caption
        assert f"{float(weights[step, best]):.2f} of its attention" in caption
        assert f"to key {best} “{labels[best]}”" in caption


def test_what_the_model_predicts_stands_beside_what_the_head_looks_at(
    model: CausalLM, tokenizer: Tokenizer
) -> None:
    prompt, layer, head = "Once upon a time Rado had an old coat. One day R", 3, 3
    ids = tokenizer.encode(prompt).ids
    reference = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    top = reference(torch.tensor([ids])).logits[0].softmax(-1).topk(3)
    explorer = AttentionExplorer(model, tokenizer, prompt, layer, head)
    weights = attention_weights(model, ids)[layer, head]
    verdicts = set()
    for step in range(len(ids)):
        turn(explorer, step)
        predicted = top.indices[step].tolist()
        labels, probs = token_labels(tokenizer, predicted), top.values[step].tolist()
        said = [t for t in tips(explorer) if t.startswith("next token")]
        for tip, label, p in zip(said, labels, probs, strict=True):
            assert tip.startswith(f"next token “{label}”: probability ")
            assert float(tip.rsplit(" ", 1)[1]) == pytest.approx(p, abs=1e-3)
        same = predicted[0] == ids[int(weights[step].argmax())]
        assert (", the token that this head looks at" in caption_of(explorer)) == same
        assert words(explorer, r"same\.0") == ["= the token that"] * same
        assert f"predicts “{labels[0]}” with probability" in caption_of(explorer)
        verdicts.add(same)
    assert verdicts == {True, False}


# -- the cache -------------------------------------------------------------------------------------


@pytest.fixture
def cache(model: CausalLM, tokenizer: Tokenizer) -> CacheExplorer:
    return CacheExplorer(model, tokenizer, PROMPTS, new_tokens=5)


@pytest.fixture(scope="module")
def lengths(tokenizer: Tokenizer) -> list[int]:
    """Tokens of the three prompts."""
    found = [len(tokenizer.encode(prompt).ids) for prompt in PROMPTS]
    assert len(set(found)) == 3, "rows of unequal length"
    return found


@pytest.mark.parametrize("chunk", [0, 3])
def test_tokens_are_those_of_generate(cache: CacheExplorer, chunk: int) -> None:
    turn(cache, chunk=chunk)
    params = SamplingParams(max_tokens=5)
    want = generate(cache.model, PROMPTS, params, tokenizer=cache.tokenizer)
    for row, one in enumerate(want):
        chosen = [step.best[row][0][0] for step in cache.run.steps if row in step.best]
        assert list(chosen) == one.outputs[0].token_ids
        ran = [s.parts[row].ids[0] for s in cache.run.steps if s.kind == "decode"]
        assert list(ran) == one.outputs[0].token_ids[:-1]  # the last is never run


def test_probabilities_are_those_of_each_sequence_alone(cache: CacheExplorer) -> None:
    model = cache.model
    for row in range(3):
        sequence: list[int] = []
        for step in cache.run.steps:
            sequence += step.parts[row].ids
            hidden = model(Batch.from_sequences([sequence]))
            p = model.compute_logits(hidden[-1:])[0].softmax(-1)
            assert len(step.best[row]) == 6
            assert p.topk(6).values.tolist() == pytest.approx(
                [q for _, q in step.best[row]], abs=1e-5
            )


@pytest.mark.parametrize("step", range(6))
def test_cells_are_free_stored_or_new_as_in_the_cache(
    cache: CacheExplorer, lengths: list[int], step: int
) -> None:
    turn(cache, step=step)
    used = [n + step - 1 if step else 0 for n in lengths]
    cells = items(cache, r"slot\d+")
    assert len(cells) == cache.run.num_slots
    for slot in range(cache.run.num_slots):
        row, position = divmod(slot, cache.run.row_len)
        look = cells[f"slot{slot}"].attributes
        assert (look["fill"] == HATCHED) is (position >= used[row])
        new = position < used[row] and (step == 1 or position == used[row] - 1)
        assert (look.get("stroke-width") == 2.6) is new
    assert f"{sum(used)} of {cache.run.num_slots} slots are used" in cache.shown_caption or (
        step == 0
    )


def test_account_counts_tokens_and_bytes(cache: CacheExplorer, lengths: list[int]) -> None:
    again, kib = 0, cache.run.spec.bytes_per_token / 1024
    for step in range(cache.num_steps):
        turn(cache, step=step)
        used = sum(n + step - 1 for n in lengths) if step else 0
        again += used  # without a cache every step runs all of it
        said = [words(cache, f"sum{i}.n")[0] for i in range(4)]
        reserved = cache.run.num_slots * kib
        assert said == [f"{used}", f"{again}", f"{used * kib:.0f} KiB", f"{reserved:.0f} KiB"]
    turn(cache, chunk=4, step=2)  # without a cache there are no chunks: a prompt runs once
    ran = sum(min(n, 8) for n in lengths)
    assert [words(cache, f"sum{i}.n")[0] for i in range(2)] == [f"{ran}"] * 2


# -- sampling --------------------------------------------------------------------------------------


FLAT = "One day"  # any name may follow


NO_FILTER = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}


@pytest.fixture
def sampling(model: CausalLM, tokenizer: Tokenizer) -> SamplingExplorer:
    """The tiny model at a flat place, every filter off, at the last step."""
    return turn(SamplingExplorer(model, tokenizer, FLAT), 4, **NO_FILTER)


def kept(sampling: SamplingExplorer) -> list[int]:
    """Tokens of the lines that are drawn as kept."""
    return [
        token
        for i, token in enumerate(sampling.shown_ids)
        if "text-decoration" not in sampling.shown.items[f"token{i}"].attributes
    ]


SETTINGS = [
    {"top_k": 7},
    {"top_p": 0.5},
    {"min_p": 0.5},
    {"temperature": 0.5, "top_k": 30, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 12, "top_p": 0.3},
]


@pytest.mark.parametrize("knobs", SETTINGS, ids=str)
def test_last_step_is_what_the_engine_samples_from(sampling: SamplingExplorer, knobs: dict) -> None:
    turn(sampling, **knobs)
    params = SamplingParams(**{k: v for k, v in (NO_FILTER | knobs).items()})
    want = filter_logits(sampling.logits, params)
    last = sampling.stages[-1]
    assert torch.equal(last.kept, want.isfinite())
    assert (last.probs - want.double().softmax(-1)).abs().max() < 1e-9
    assert kept(sampling) == [i for i in sampling.shown_ids if want[i].isfinite()]
    left = int(want.isfinite().sum())
    assert words(sampling, "title") == [f"after min-p, {left} of 512 tokens can be drawn"]
    warm = (sampling.logits / params.temperature).softmax(-1)
    lost = float(warm[~want.isfinite()].sum())
    assert f"{percent(1 - lost)} of the probability is kept" in words(sampling, "mass")[0]
    assert f"{percent(lost)} is lost" in words(sampling, "mass")[0]


def test_the_place_of_top_p_in_the_order_is_told(sampling: SamplingExplorer) -> None:
    turn(sampling, 3, top_k=30, top_p=0.8)
    first = sampling.logits.softmax(-1).sort(descending=True).values
    after = first[:30] / first[:30].sum()
    count = [int((p.cumsum(-1) - p < 0.8).sum()) for p in (after, first)]
    assert count[0] < count[1], "top-k made a difference"
    assert f"Top-p 0.8 keeps {count[0]} of the 30 tokens" in caption_of(sampling)
    assert f"before top-k it would have kept {count[1]}" in caption_of(sampling)
    turn(sampling, 4)
    assert "the reverse order of the filters would keep" in caption_of(sampling)
    both = min(30, count[1])  # the nucleus of all, then the 30 best of it
    assert f"would keep {both};" in caption_of(sampling)
    turn(sampling, 3, top_k=0)
    assert "before top-k" not in caption_of(sampling)
    assert "lost" not in caption_of(turn(sampling, 4, top_p=1.0)) and sampling.stages[4].mass == 1


def test_draws_are_those_of_the_engines_sampler(sampling: SamplingExplorer) -> None:
    turn(sampling, temperature=1.5, top_k=9, seed=7)
    sampler = Sampler(SamplingParams(temperature=1.5, top_k=9, seed=7))
    want = [sampler.sample(sampling.logits).token_id for _ in range(20)]
    sampling.buttons["draw"].click()
    assert sampling.draws(4) == want
    assert words(sampling, "draws") == ["20 draws, seed 7"]
    for i, token in enumerate(sampling.shown_ids):
        shown = [str(want.count(token))] * bool(sampling.stages[4].kept[token])
        assert words(sampling, rf"drawn{i}\.n") == shown
    turn(sampling, 0)  # the model's own distribution: no temperature, no filter
    plain = Sampler(SamplingParams(temperature=1.0, seed=7))
    assert sampling.draws(0) == [plain.sample(sampling.logits).token_id for _ in range(20)]
    sampling.buttons["clear"].click()
    assert sampling.draws(0) == [] and caption_of(sampling).endswith("nothing is drawn.")
    sampling._set_draws(MOST_DRAWS - 5)
    sampling.buttons["draw"].click()
    assert len(sampling.draws(0)) == MOST_DRAWS


def test_temperature_zero_is_greedy_and_skips_the_filters(sampling: SamplingExplorer) -> None:
    turn(sampling, 1, temperature=0.0, top_k=5, min_p=0.5)
    best = token_label(sampling.tokenizer, int(sampling.logits.argmax()))
    assert caption_of(sampling).startswith(f"Temperature 0 is greedy: the likeliest token, “{best}")
    assert [stage.num_kept for stage in sampling.stages] == [512, 1, 1, 1, 1]
    assert kept(sampling) == [int(sampling.logits.argmax())]
    turn(sampling, 4)
    assert "min-p is skipped" in caption_of(sampling)
    assert caption_of(sampling).endswith(f"10 draws with seed 0 gave only “{best}”.")


# -- the calculator --------------------------------------------------------------------------------


def test_lines_are_as_vllm_logs_them() -> None:
    calculator = MemoryCalculator(preset("Qwen3-0.6B"))
    left = int(0.9 * 24 * 2**30) - 2 * 596_049_920
    pages = left // (16 * 114_688)
    for context, blocks in ((4100, 257), (4096, 256)):  # of 16 tokens, for a whole request
        calculator.parameters["context"].value = context
        times = pages / blocks
        size = f"GPU KV cache size: {int(context * times):,} tokens"
        most = f"Maximum concurrency for {context:,} tokens per request: {times:.2f}x"
        assert words(calculator, "sum5") == [f"{size}, {most}"]
    assert calculator.num_steps == int(times) + 1  # a step of the slider for each that fits


# -- cells -----------------------------------------------------------------------------------------


@pytest.fixture
def cells(model: CausalLM, tokenizer: Tokenizer) -> CellExplorer:
    made = CellExplorer(model, tokenizer)
    return turn(made, made.num_steps - 1)


def press(cells: CellExplorer, name: str, **knobs: Any) -> str:
    """As a learner does it; the message that is shown then."""
    turn(cells, **knobs).buttons[name].click()
    return message_of(cells)


@pytest.mark.parametrize(
    ("name", "knobs", "says"),
    [
        ("seq_add", {"seq": 1, "p0": 2, "delta": -1}, "(1, 2, −1, −1): sequences [0, 1] share"),
        (APPEND, {"seq": 0, "text": "One day Anna and Ben"}, "cell each, 2 of 8 are empty"),
        (APPEND, {"seq": 0, "text": ""}, "there is no text"),
    ],
)
def test_refused_is_said_and_nothing_is_lost(
    cells: CellExplorer, name: str, knobs: dict[str, Any], says: str
) -> None:
    before = cells.shown.svg(), cells.num_steps, repr(cells.cache.table)
    message = press(cells, name, **{"p1": -1, "p0": 0} | knobs)
    assert says in message and message.endswith("The picture below is the one before.")
    assert (cells.shown.svg(), cells.num_steps, repr(cells.cache.table)) == before
    cells.slider.value = 3
    assert cells.shown_caption == cells.caption(3)
    assert press(cells, "seq_rm", seq=1, p0=5, p1=-1) == "" and cells.num_steps == 8


# -- the dial --------------------------------------------------------------------------------------


def test_every_position_runs_once_and_gives_the_tokens_of_generate_alone(
    model: CausalLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    at, positions = Dial.at, [CELLS, 1, 2, 4, 8, 16, ROWS]

    def noted(self: Dial, position: Any) -> Any:
        asked.append(position)
        return at(self, position)

    monkeypatch.setattr(Dial, "at", noted)
    prompts, params = [*PROMPTS, f"{PROMPTS[0]} {PROMPTS[1]}"], SamplingParams(max_tokens=9)
    dial = DialExplorer(model, tokenizer, prompts, 9)  # begins with rows
    for position in (*positions, *positions):
        turn(dial, 3, block_size=position)
        assert dial.point.position == position and dial.point.tokens_equal and not dial.error
    assert asked == [ROWS, *positions[:-1]]
    for prompt, ids in zip(prompts, dial.dial.expected, strict=True):
        (alone,) = generate(model, prompt, params, tokenizer=tokenizer)
        assert alone.outputs[0].token_ids == ids


# -- the race --------------------------------------------------------------------------------------


def test_a_lane_is_as_long_as_the_part_of_the_answer_that_its_user_has(
    model: CausalLM, tokenizer: Tokenizer
) -> None:
    made = race(model, tokenizer, [*PROMPTS, "Mia", "Tom had a hat"], 4)
    traces = {name: lap.history for name, lap in made.laps.items()}
    assert {history.pool.kind for history in traces.values()} == {"rows", "pages"}
    for step in range(made.num_steps):
        bars = items(turn(made, step), r".*\.bar")
        for run, lap in made.laps.items():
            when, got = made.tick * step / 1000, dict[str, int]()
            for life in lap.run.lives:
                user = life.request_id
                got[user] = sum(one <= when for one in life.token_times)  # it starts at 0
                bar = bars.get(f"{run}.{user}.bar")
                wide = 0.0 if bar is None else bar.attributes["width"]
                assert wide == pytest.approx(BAR * got[user] / 4)
            over = [user for user, count in got.items() if count == 4]
            said = f"{len(over)} answered" if when < lap.end else f"all {len(over)} answered"
            assert f"{run}: {said}" in caption_of(made) and lap.answered(when) == over
            steps = [step for step, began in enumerate(lap.begins) if began <= when]
            assert lap.pool(when) == traces[run].snapshots[steps[-1]]


# -- the scheduler ---------------------------------------------------------------------------------


@pytest.fixture
def scheduler(model: CausalLM, tokenizer: Tokenizer) -> SchedulerExplorer:
    return SchedulerExplorer(model, tokenizer, PROMPTS)


def test_requests_come_when_the_pattern_says(scheduler: SchedulerExplorer) -> None:
    came = {}
    for pattern in (ALL_AT_ONCE, ONE_BY_ONE, LATE_LONG):
        turn(scheduler, arrivals=pattern)
        came[pattern] = [scheduler.run.came(name) for name in scheduler.run.names]
    assert came == {ALL_AT_ONCE: [0, 0, 0], ONE_BY_ONE: [0, 3, 6], LATE_LONG: [0, 0, 0, 4]}


FIVE = [*PROMPTS, "Tom saw a dog.", "Mia had a red hat."]


@pytest.fixture
def five(model: CausalLM, tokenizer: Tokenizer) -> SchedulerExplorer:
    """As notebook 03 opens it."""
    server = OwnServer(model, tokenizer)
    mine = server.as_written
    return SchedulerExplorer(model, tokenizer, FIVE, [6, 3, 5, 8, 4], max_num_seqs=2, mine=mine)


def test_the_four_policies_take_four_numbers_of_steps(five: SchedulerExplorer) -> None:
    took = {policy: turn(five, policy=policy).num_steps for policy in CLASSES}
    assert len({*took.values()}) == 4 and min(took, key=lambda policy: took[policy]) == "one rule"


def test_a_pool_has_room_for_the_longest_prompt_wherever_its_knobs_stand(
    model: CausalLM, tokenizer: Tokenizer
) -> None:
    for simple in (True, False):
        made = BlockExplorer(model, tokenizer, ["One day", PROMPTS[0]], simple=simple)
        longest = len(tokenizer.encode(PROMPTS[0]).ids)
        for size, blocks in ((1, 1), (4, 2), (16, 1), (16, 32)):
            turn(made, block_size=size, num_blocks=blocks)
            least = -(-(longest + 1) // size)
            assert not made.error and made.run.num_blocks == max(blocks, least)
            assert (f"has {counted(least, 'block')} and not" in made.note) == (blocks < least)


def test_no_position_of_a_knob_is_refused(five: SchedulerExplorer) -> None:
    """The ends of each knob, a budget below the longest prompts: every pair of positions."""
    for i, policy in enumerate((*CLASSES, MINE)):
        for j, (budget, places) in enumerate(((1, 6), (9, 1), (25, 2), (128, 6))):
            arrivals = (ALL_AT_ONCE, ONE_BY_ONE, LATE_LONG)[(i + j) % 3]
            five.turn(policy=policy, arrivals=arrivals, budget=budget, max_num_seqs=places)
            assert not five.error, (policy, arrivals, budget, places)
            assert len(five.run.lives) == 5 + (arrivals == LATE_LONG)


def test_who_cannot_chunk_gets_the_budget_of_the_longest_prompt_and_says_so(
    five: SchedulerExplorer,
) -> None:
    longest = len(five.tokenizer.encode(FIVE[0]).ids)
    turn(five, policy="prefill first", budget=8)
    assert five.run.budget == longest > 8 and five.value("budget") == 8
    assert f"a budget of {longest} and not of 8." in five._message_html.value
    turn(five, policy="one rule")
    assert five.run.budget == 8 and five._message_html.value == ""
    turn(five, policy="prefill first", budget=longest)
    assert five.run.budget == longest and five._message_html.value == ""


def plan_step(running: Any, waiting: Any, budget: int, max_num_seqs: int) -> dict[str, int]:
    """Wrong: it forgets the budget."""
    return dict([*running, *waiting[: max_num_seqs - len(running)]])


def test_a_rule_of_ones_own_is_seen_right_or_wrong(five: SchedulerExplorer) -> None:
    server: Any = five.mine.__self__  # type: ignore[union-attr]
    ours = [dict(step.scheduled) for step in turn(five, policy="one rule").run.steps]
    turn(five, policy=MINE)
    assert "You have not written a rule yet" in five.note
    for part, check in ((own_scheduler.num_tokens_to_run, check_num_tokens), (right, check_plan)):
        server.use(part, check)
        turn(five, policy="one rule")
        turn(five, policy=MINE)
        assert [dict(step.scheduled) for step in five.run.steps] == ours
        assert five.note == f"This is your {part.__name__}." and five.run.policy == "mine"
    assert server.use(plan_step, check_plan).verdict.ok is False
    turn(five, policy="one rule")
    turn(five, policy=MINE, step=0)
    assert five.note.endswith("The check of plan_step says ✘: see what it does.")
    assert five.run.steps[0].num_tokens == 17 and five.num_steps < len(ours)
    budget = items(five, r"budget\d+").values()
    red = [cell for cell in budget if cell.attributes.get("stroke") == OVER]
    assert len(red) == 17 - 8
    assert words(five, "budget.sum") == ["A 10 + B 7 = 17 of 8 tokens · 9 over the budget"]
    assert server.parts.own.keys() == {"num_tokens_to_run"}, "it serves nobody"


RULES = {
    "no budget is left": own_scheduler.waiting_first,
    "the policy gave nothing": lambda *work: dict([*right(*work).items()][-1:]),
}


@pytest.mark.parametrize("why", RULES)
def test_who_stalls_is_told_whether_there_was_budget(five: SchedulerExplorer, why: str) -> None:
    def plan_step(*work: Any) -> Any:
        return RULES[why](*work)

    assert five.mine.__self__.use(plan_step, check_plan).verdict.ok is False  # type: ignore[union-attr]
    turn(five, policy=MINE)
    stalls = [(name, s) for s in range(five.num_steps) for name in five.run.doing("stalls", s)]
    assert stalls
    for name, step in stalls:
        assert five.run.outcome(name, step) == f"runs nothing: {why}"
        assert re.search(f"stalls?: {why}", five.caption(step))


@pytest.mark.parametrize(
    ("at", "instead", "said"),
    [
        (0, lambda *_: {}, "step 0: your plan_step gave {}, which no step can run"),
        (4, lambda *_: {}, "step 4: your plan_step gave {}, which no step can run"),
        (0, lambda running, waiting, *most: right([], [*waiting, *running], *most), "by A and B"),
    ],
)
def test_a_rule_of_ones_own_that_fails_is_shown_up_to_there(
    five: SchedulerExplorer, at: int, instead: Any, said: str
) -> None:
    steps = iter(range(99))

    def plan_step(*work: Any) -> dict[str, int]:
        return instead(*work) if next(steps) >= at else right(*work)

    assert five.mine.__self__.use(plan_step, check_plan).verdict.ok is False  # type: ignore[union-attr]
    before, steps = five.num_steps, iter(range(99))
    turn(five, policy=MINE)
    assert said in five.note + five.error and "It stops before step" in five.note + five.error
    assert five.num_steps == (before if five.error else at or 2)


@pytest.mark.parametrize("policy", list(CLASSES))
def test_the_table_has_the_numbers_that_the_rule_goes_by(
    scheduler: SchedulerExplorer, policy: str
) -> None:
    turn(scheduler, arrivals=LATE_LONG, max_num_seqs=2, budget=32, policy=policy, show=STEPS)
    for step in range(scheduler.num_steps):
        run, now = turn(scheduler, step=step).run, scheduler.run.steps[step]
        spent = 0
        for name in [*now.scheduled, *now.planned.waiting]:
            said = {w: words(scheduler, f"asked.{name}.{w}")[0] for w in (*COLUMNS, "state")}
            request, event = now.planned.requests[name], now.scheduled.get(name)
            known, computed = len(request.token_ids), request.num_computed_tokens
            assert [said[w] for w in ("known", "computed", "to run")] == [
                str(n) for n in (known, computed, known - computed)
            ]
            assert said["budget left"] == str(32 - spent)
            assert said["runs"] == (str(len(event.slots)) if event else "–")
            spent += len(event.slots) if event else 0
            assert ("running" in said["state"]) == (name in now.planned.running)
            outcome = words(scheduler, f"asked.{name}.outcome")[0]
            assert outcome.startswith("new token “") == (name in now.by_request(TokenSampled))
            assert outcome.startswith("waits: ") == (name in now.planned.waiting)
        gone = [name for name in run.names if not items(scheduler, f"asked.{name}.known")]
        over = run.over(step - 1) if step else ()
        assert set(gone) == {*over, *run.to_come(step)}


# -- blocks ----------------------------------------------------------------------------------------


def test_the_explorer_of_notebook_05_evicts_at_7_blocks_and_preempts_at_5(
    model: CausalLM, tokenizer: Tokenizer
) -> None:
    prompts = [PROMPTS[0], "Once upon a time Anna had a blue ball.", PROMPTS[2]]
    explorer = BlockExplorer(model, tokenizer, prompts)

    def told(word: str, **knobs: Any) -> dict[int, str]:
        steps = enumerate(turn(explorer, **knobs).run.blocks)
        return {i: fact for i, step in steps for fact in step.facts if word in fact}

    assert not told("evicted", num_blocks=8)
    assert told("evicted", num_blocks=7)[8].startswith("C takes block 2")
    assert not told("preempted", num_blocks=6)
    assert told("preempted", num_blocks=5)[9].startswith("C is preempted")
    assert told("finds", num_blocks=24)[3].startswith("B finds 4 tokens")
    assert told("finds", block_size=1)[3].startswith("B finds 7 tokens")
