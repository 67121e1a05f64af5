"""The scheduler explorer: five views of one step, each of them what the engine's trace says."""

import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import matplotlib
import pytest
from engines import one_thread
from PIL import ImageFont
from tokenizers import Tokenizer

from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.viz import scheduler_explorer
from tutorial_engine.viz.request_look import look
from tutorial_engine.viz.scene import HATCHED
from tutorial_engine.viz.scheduler_explorer import (
    ALL_AT_ONCE,
    CLASSES,
    LATE_LONG,
    ONE_BY_ONE,
    SchedulerExplorer,
    coming,
)
from tutorial_engine.viz.scheduler_panels import MAX_CELLS
from tutorial_engine.viz.scheduler_scene import KEYS

PROMPTS = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]
SVG = "{http://www.w3.org/2000/svg}"
VIEW = "application/vnd.jupyter.widget-view+json"
NASTY = ["<s>hi</s>", "<img src=x>", "$x$ 😀", 'A & "b" ]]>', "</svg><b>", "A" * 9, "\n\t "]
FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
FRESH = {"policy": "one rule", "budget": 8, "max_num_seqs": 3, "arrivals": ALL_AT_ONCE}


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def shared(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> SchedulerExplorer:
    return SchedulerExplorer(model, tokenizer, PROMPTS)


@pytest.fixture
def explorer(shared: SchedulerExplorer) -> SchedulerExplorer:
    """An explorer as it is when new."""
    return turn(shared, step=0, **FRESH)


def turn(explorer: SchedulerExplorer, step: int | None = None, **knobs: Any) -> SchedulerExplorer:
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


def svg_of(explorer: SchedulerExplorer) -> str:
    return explorer._scene_html.value


def items(explorer: SchedulerExplorer, pattern: str) -> dict[str, Any]:
    found = explorer.shown.items.items()
    return {name: item for name, item in found if re.fullmatch(pattern, name)}


def words(explorer: SchedulerExplorer, name: str) -> str:
    return explorer.shown.items[name].text


def at(explorer: SchedulerExplorer, name: str) -> tuple[float, float, float, float]:
    """x, y, width and height of a box."""
    found = explorer.shown.items[name].attributes
    return tuple(float(found[key]) for key in ("x", "y", "width", "height"))  # type: ignore[return-value]


# -- the run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrivals", [ALL_AT_ONCE, ONE_BY_ONE, LATE_LONG])
@pytest.mark.parametrize("policy", list(CLASSES))
def test_every_policy_gives_the_tokens_of_generate_alone(
    explorer: SchedulerExplorer, policy: str, arrivals: str
) -> None:
    turn(explorer, budget=32, policy=policy, arrivals=arrivals)
    assert not explorer.error and explorer.run.policy == policy
    params = SamplingParams(max_tokens=6)
    for one in coming(PROMPTS, arrivals, explorer.long_prompt):
        alone = generate(explorer.model, one.prompt, params, tokenizer=explorer.tokenizer)[0]
        prompt = tuple(explorer.tokenizer.encode(one.prompt).ids)
        assert explorer.run.tokens[one.name] == prompt + alone.token_ids


def test_requests_come_when_the_pattern_says(explorer: SchedulerExplorer) -> None:
    came = {}
    for pattern in (ALL_AT_ONCE, ONE_BY_ONE, LATE_LONG):
        turn(explorer, arrivals=pattern)
        came[pattern] = [explorer.run.came(name) for name in explorer.run.lives]
    assert came == {ALL_AT_ONCE: [0, 0, 0], ONE_BY_ONE: [0, 3, 6], LATE_LONG: [0, 0, 0, 4]}


def test_an_idle_engine_does_not_wait_for_the_next_request(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    explorer = SchedulerExplorer(model, tokenizer, PROMPTS, new_tokens=1, budget=64)
    turn(explorer, arrivals=ONE_BY_ONE)
    assert [explorer.run.came(name) for name in "ABC"] == [0, 1, 2]
    assert explorer.num_steps == 3


def test_knobs_are_the_engines_settings(explorer: SchedulerExplorer) -> None:
    turn(explorer, policy="static batching", budget=11, max_num_seqs=2)
    settings = explorer.run.trace.settings
    assert settings["policy"] == "StaticBatching"
    assert settings["max_num_batched_tokens"] == 11 and settings["max_num_seqs"] == 2
    assert settings["max_model_len"] == explorer.run.max_len == 16  # 10 + 6 tokens


def test_a_knob_runs_the_engine_once_and_a_step_does_not(
    explorer: SchedulerExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[LLMEngine] = []

    class Counted(LLMEngine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(scheduler_explorer, "LLMEngine", Counted)
    for step in range(explorer.num_steps):
        turn(explorer, step=step)
    assert not made
    changed = {"budget": 9, "max_num_seqs": 2, "policy": "one by one", "arrivals": LATE_LONG}
    for i, (knob, value) in enumerate(changed.items(), 1):
        turn(explorer, **{knob: value})
        assert len(made) == i


# -- the timeline ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(CLASSES))
def test_boxes_are_what_each_request_did_in_each_step(
    explorer: SchedulerExplorer, policy: str
) -> None:
    turn(explorer, arrivals=LATE_LONG, budget=32, policy=policy, step=2)
    run, drawn = explorer.run, 0
    columns = {name: item.attributes["x"] for name, item in items(explorer, r"step\d+").items()}
    for name, life in run.lives.items():
        for step in range(run.last + 1):
            share, cell = run.share(name, step), f"cell.{name}.{step}"
            assert (share is None and step != run.came(name) - 1) == (
                cell not in explorer.shown.items
            )
            if share is None:
                continue
            drawn += 1
            x, _, width, _ = at(explorer, cell)
            assert x + width / 2 == pytest.approx(columns[f"step{step}"])
            number = f" {share.num_tokens}" if share.num_tokens else ""
            said = words(explorer, f"{cell}.n") if f"{cell}.n" in explorer.shown.items else ""
            narrow = "step" in explorer.shown.items
            assert said == (number.strip() if narrow else share.kind + number)
            fills = {"prefill": look(ord(name) - 65).light, "decode": look(ord(name) - 65).dark}
            fill = explorer.shown.items[cell].attributes["fill"]
            assert share.kind not in fills or fill == fills[share.kind]
        assert words(explorer, f"end.{name}") == "finished · length" == life.ending
    assert drawn == sum(len(life.shares) for life in run.lives.values())


def test_first_tokens_are_marked_where_ttft_ends(explorer: SchedulerExplorer) -> None:
    turn(explorer, step=2)
    dots = items(explorer, r"cell\..*\.first")
    assert list(dots) == ["cell.A.1.first", "cell.B.2.first", "cell.C.2.first"]
    assert words(explorer, "ttft.n") == "A 2 · B 3 · C 3"
    turn(explorer, step=1)
    assert words(explorer, "ttft.n") == "A 2 · B – · C –"


@pytest.mark.parametrize("budget", [1, 8])
def test_the_cursor_frames_the_step_however_many_there_are(
    explorer: SchedulerExplorer, budget: int
) -> None:
    turn(explorer, budget=budget, arrivals=LATE_LONG)
    assert (explorer.num_steps > 44) == (budget == 1)
    for step in range(explorer.num_steps):
        turn(explorer, step=step)
        x, y, width, height = at(explorer, "cursor")
        label = explorer.shown.items[f"step{step}"].attributes
        assert x + width / 2 == pytest.approx(label["x"]) and label["font-weight"] == "bold"
        assert y < label["y"] < y + height
        ran = explorer.run.steps[step].scheduled
        for name in ran:
            left, top, wide, tall = at(explorer, f"cell.{name}.{step}")
            assert x <= left and left + wide <= x + width and y <= top and top + tall < y + height
        shown = [int(name[4:]) for name in items(explorer, r"step\d+")]
        assert shown == list(range(shown[0], shown[-1] + 1))
        assert len(shown) == explorer.num_steps or len(shown) >= 40
        others = {n: i for n, i in items(explorer, r"step\d+").items() if n != f"step{step}"}
        assert not any("font-weight" in item.attributes for item in others.values())


# -- budget, cache, queues, tokens ----------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 5, 8, 32, 33, 64, 65, MAX_CELLS])
def test_budget_cells_are_filled_by_those_who_run(explorer: SchedulerExplorer, budget: int) -> None:
    turn(explorer, budget=budget, arrivals=LATE_LONG)
    for step in range(0, explorer.num_steps, 3):
        now = turn(explorer, step=step).run.steps[step]
        cells = items(explorer, r"budget\d+")
        assert len(cells) == budget
        owners = [name for name, event in now.scheduled.items() for _ in event.slots]
        for i, item in enumerate(cells.values()):
            tip = explorer.run.ran(owners[i], step) if i < len(owners) else "free: nobody needs it"
            assert item.tip == tip
        named = [item.text for item in items(explorer, r"budget\d+\.who").values()]
        assert named == (owners if budget <= 64 else list(now.scheduled))
        boxes = [at(explorer, name) for name in cells]
        for (x, y, width, _), (right, below, *_) in pairwise(boxes):
            assert x + width < right or y < below
        assert max(x + width for x, _, width, _ in boxes) < 560  # the queues begin at 600


@pytest.mark.parametrize("step", range(8))
def test_rows_show_what_the_cache_holds_and_what_is_written(
    explorer: SchedulerExplorer, step: int
) -> None:
    run, now = turn(explorer, step=step).run, explorer.run.steps[step]
    held = {r.table[0]: name for name, r in now.state.requests.items() if r.table}
    assert {i.text for i in items(explorer, r"row\d+\.who").values()} == set(held.values())
    for row in range(3):
        if row not in held:
            assert words(explorer, f"row{row}.n") == "free"
            assert f"row{row}.free" in explorer.shown.items
            continue
        name = held[row]
        new = now.scheduled[name].slots if name in now.scheduled else ()
        slots = (*now.state.requests[name].slots, *new)
        tail = ", then free" * (name in now.ended)
        assert words(explorer, f"row{row}.n") == f"{len(slots)} of 16{tail}"
        for position, slot in enumerate(slots):
            assert slot // 16 == row and f"slot{slot}" in explorer.shown.items
            label = run.label(name, position)
            tip = f"slot {slot}: K and V of token {position} of {name}, “{label}”"
            assert explorer.shown.items[f"slot{slot}"].tip == tip
        x, _, width, _ = at(explorer, f"row{row}.new")
        assert x == at(explorer, f"slot{new[0]}")[0]
        assert width == pytest.approx(len(new) * at(explorer, f"slot{new[0]}")[2])
        if len(slots) < 16:
            empty = explorer.shown.items[f"row{row}.empty"]
            assert empty.attributes["fill"] == HATCHED
            assert empty.tip.startswith(f"slots {slots[-1] + 1} to {16 * row + 15}: reserved for")
    drawn = sum(len(r.slots) for r in now.state.requests.values()) + now.num_tokens
    assert len(items(explorer, r"slot\d+")) == drawn


def test_queues_are_the_engines_in_its_order(explorer: SchedulerExplorer) -> None:
    turn(explorer, arrivals=LATE_LONG, max_num_seqs=2)
    for step in range(explorer.num_steps):
        run, now = turn(explorer, step=step).run, explorer.run.steps[step]

        def chips(queue: str) -> tuple[str, ...]:
            found = items(explorer, rf"queue\.{queue}\.[A-F]")
            order = sorted(found, key=lambda name: float(found[name].attributes["x"]))
            assert order == list(found)
            return tuple(words(explorer, f"{name}.who") for name in order)

        assert chips("running") == now.state.running
        assert chips("waiting") == now.state.waiting
        assert chips("finished") == tuple(run.over(step))
        assert chips("to come") == run.to_come(step)
        for name in now.state.waiting:
            assert words(explorer, f"queue.waiting.{name}.n") == str(now.to_run(name))
        facts = " ".join(item.text for item in items(explorer, r"fact\d+").values())
        assert facts == " ".join(run.facts(step))
    assert {"running", "waiting", "finished", "to come"} <= {
        item.text for item in items(explorer, r"queue\.[a-z ]+").values()
    }


def test_tokens_show_how_far_each_request_is(explorer: SchedulerExplorer) -> None:
    dashed, thick = "stroke-dasharray", 2.6
    for step in range(explorer.num_steps):
        run = turn(explorer, step=step).run
        for name in run.steps[step].state.requests:
            kinds = run.token_kinds(name, step)
            chips = items(explorer, rf"token\.{name}\.\d+")
            assert len(chips) == len(kinds)
            colours = look(ord(name) - 65)
            for i, (kind, chip) in enumerate(zip(kinds, chips.values(), strict=True)):
                look_of = chip.attributes
                assert (look_of["fill"] == colours.light) == (kind == "cached")
                assert (look_of["fill"] == colours.dark) == (kind == "run")
                assert (dashed in look_of) == (kind in ("known", "sampled"))
                assert (look_of.get("stroke-width") == thick) == (kind == "run")
                part = "prompt" if i < run.lives[name].num_prompt_tokens else "output"
                assert f"{name}, position {i} ({part}): “{run.label(name, i)}”" in chip.tip
                assert words(explorer, f"token.{name}.{i}.n") == run.label(name, i)


def test_stepping_moves_nothing(explorer: SchedulerExplorer) -> None:
    turn(explorer, arrivals=LATE_LONG)
    places: dict[str, tuple[float, ...]] = {}
    fixed = r"token\.[A-F]\.\d+|cell\.[A-F]\.\d+|budget\d+|slot\d+|row\d+|tokens|slots|queues"
    for step in range(explorer.num_steps):
        turn(explorer, step=step)
        for name, item in items(explorer, fixed).items():
            place = tuple(float(item.attributes[key]) for key in ("x", "y"))
            assert places.setdefault(name, place) == place
    assert len({explorer.scene(step).height for step in range(explorer.num_steps)}) == 1


# -- reading it -----------------------------------------------------------------------------------


@cache
def font(bold: bool) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(FONT / f"DejaVuSans{'-Bold' * bold}.ttf"), 100)


def boxes(explorer: SchedulerExplorer) -> list[tuple[str, float, float, float, float]]:
    """Every text of the scene as (name, left, top, right, bottom), by the font's own measures."""
    found = []
    for name, item in explorer.shown.items.items():
        if item.tag != "text":
            continue
        size, look_of = float(item.attributes["font-size"]), item.attributes
        assert size >= 9, f"{name} has {size} px"
        wide = font("font-weight" in look_of).getlength(item.text) * size / 100
        x, y, tall = float(look_of["x"]), float(look_of["y"]), 0.72 * size
        left = x - {"middle": wide / 2, "end": wide}.get(str(look_of.get("text-anchor")), 0)
        found.append((name, left, y - tall, left + wide, y))
    return found


def check_places(explorer: SchedulerExplorer) -> None:
    middle = explorer.num_steps // 2
    for step in {0, 2, middle, explorer.num_steps - 1}:
        placed = boxes(turn(explorer, step=step))
        for i, (name, left, top, right, bottom) in enumerate(placed):
            assert left >= 0 and right <= explorer.shown.width, f"{name} at step {step}"
            assert top >= 0 and bottom <= explorer.shown.height, f"{name} at step {step}"
            for other, *box in placed[:i]:
                beside = right <= box[0] or box[2] <= left or bottom <= box[1] or box[3] <= top
                assert beside, f"{name} and {other} at step {step}"


@pytest.mark.parametrize(
    ("count", "new_tokens", "budget", "rows", "arrivals"),
    [
        (1, 1, 8, 1, ALL_AT_ONCE),
        (3, 6, 8, 3, ALL_AT_ONCE),
        (3, 16, 16, 2, LATE_LONG),
        (5, 8, 128, 5, ALL_AT_ONCE),
        (5, 16, 64, 6, LATE_LONG),
        (5, 16, 64, 6, ONE_BY_ONE),
        (5, 12, 2, 3, LATE_LONG),
    ],
)
def test_no_text_covers_another(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    count: int,
    new_tokens: int,
    budget: int,
    rows: int,
    arrivals: str,
) -> None:
    prompts = [*PROMPTS, "The sun was warm and the sky was blue that day", "Mia"][:count]
    explorer = SchedulerExplorer(model, tokenizer, prompts, new_tokens, budget, rows)
    check_places(turn(explorer, arrivals=arrivals))
    if budget >= 64:
        check_places(turn(explorer, policy="prefill first"))


@pytest.mark.parametrize("label", ["W" * 30, "WWWW", "i" * 15])
def test_no_label_is_too_long(
    explorer: SchedulerExplorer, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    monkeypatch.setattr(scheduler_explorer, "token_label", lambda *_: label)
    check_places(turn(explorer, budget=7))
    tips = [item.tip for item in items(explorer, r"token\..*").values() if item.tip]
    assert tips and all(f"“{label}”" in tip for tip in tips)  # there it is whole


def brightness(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_grey_still_tells_prefill_from_decode(explorer: SchedulerExplorer) -> None:
    for i in range(6):
        one = look(i)
        assert brightness(one.light) - brightness(one.dark) > 25
    assert {f"key.{kind}" for kind in KEYS} <= explorer.shown.items.keys()  # and each has a key


# -- knobs and prompts ----------------------------------------------------------------------------


def test_what_a_policy_refuses_is_told_and_the_old_picture_kept(
    explorer: SchedulerExplorer,
) -> None:
    turn(explorer, step=2)
    before = svg_of(explorer), explorer.shown_caption, explorer.num_steps
    turn(explorer, policy="prefill first")
    message = Text(explorer._message_html.value).words
    assert message.startswith("The engine refuses: the prompt of request A has 10 tokens and must")
    assert "at most 8: raise max_num_batched_tokens" in message
    assert (svg_of(explorer), explorer.shown_caption, explorer.num_steps) == before
    turn(explorer, step=3)
    assert explorer.shown_caption == explorer.caption(3) and ", one rule: " in explorer.caption(3)
    turn(explorer, budget=10)
    assert explorer._message_html.value == "" and ", prefill first: " in explorer.shown_caption


def test_set_refuses_what_is_not_there_and_leaves_all_alone(explorer: SchedulerExplorer) -> None:
    explorer.set(step=2, budget=9)
    before = svg_of(explorer), {name: knob.value for name, knob in explorer.parameters.items()}
    refused: list[dict[str, Any]] = [
        {"policy": "prefill first"},
        {"policy": "best effort"},
        {"budget": 0},
        {"max_num_seqs": 7},
        {"arrivals": "never"},
        {"step": explorer.num_steps},
        {"colour": 1},
    ]
    for knobs in refused:
        with pytest.raises(Exception, match=r"refuses|cannot be|outside|no knob|[Ii]nvalid"):
            explorer.set(**knobs)
        now = {name: knob.value for name, knob in explorer.parameters.items()}
        assert (svg_of(explorer), now) == before and explorer.step == 2
    explorer.set(policy="prefill first", budget=32)
    assert explorer.run.policy == "prefill first" and not explorer.error


def test_a_change_keeps_the_step_that_is_looked_at(explorer: SchedulerExplorer) -> None:
    turn(explorer, step=5, policy="one by one")
    assert explorer.step == 5 and explorer.num_steps > 15
    turn(explorer, step=14)
    turn(explorer, policy="one rule")
    assert explorer.step == explorer.num_steps - 1 == 7
    assert explorer.shown_caption == explorer.caption(7)


@pytest.mark.parametrize(
    ("prompts", "more", "message"),
    [
        ([], {}, "give 1 to 5 prompts, got 0"),
        (["a"] * 6, {}, "give 1 to 5 prompts, got 6"),
        (["One day"], {"new_tokens": 0}, r"new_tokens must be .* got 0"),
        (["One day"], {"new_tokens": 62}, "need 65 slots, and the picture has rows of 64"),
        ([""], {}, "The engine refuses: .*empty"),
    ],
)
def test_impossible_first_arguments_are_refused(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    prompts: list[str],
    more: dict[str, int],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerExplorer(model, tokenizer, prompts, **more)


def test_a_run_that_takes_too_long_is_refused(
    explorer: SchedulerExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_explorer, "MAX_STEPS", 8)
    turn(explorer, budget=9)
    assert not explorer.error
    turn(explorer, budget=2)
    assert explorer.error == "This takes more than 8 steps: raise the budget."


@pytest.mark.parametrize("prompt", NASTY)
def test_markup_in_a_prompt_is_shown_literally(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, explorer: SchedulerExplorer, prompt: str
) -> None:
    def tags(of: SchedulerExplorer) -> set[str]:
        return {element.tag for element in ET.fromstring(svg_of(of)).iter()}

    known = tags(turn(explorer, step=2))
    nasty = SchedulerExplorer(model, tokenizer, [prompt, "One day"], new_tokens=3)
    for step in range(nasty.num_steps):
        nasty.slider.value = step
        assert tags(nasty) <= known
        caption = Text(nasty._caption_html.value)
        assert (caption.words, caption.tags) == (nasty.caption(step), ["div"])


def test_tokens_beyond_the_tokenizer_have_a_name(
    explorer: SchedulerExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Tokenizer, token: int) -> str:
        raise ValueError(f"token id {token} is not in the vocabulary")

    monkeypatch.setattr(scheduler_explorer, "token_label", refuse)
    turn(explorer, budget=7, step=1)
    assert re.fullmatch(r"<id·\d+>", words(explorer, "token.A.0.n"))


# -- what is displayed ----------------------------------------------------------------------------


def test_it_shows_a_live_view_a_picture_and_a_caption(explorer: SchedulerExplorer) -> None:
    data, metadata = turn(explorer, step=3)._repr_mimebundle_()
    assert data.keys() == {VIEW, "image/png", "text/plain"}
    assert data[VIEW]["model_id"] == explorer.view.model_id
    assert data["text/plain"] == explorer.caption(3) == metadata["image/png"]["alt"]
    assert len(data["image/png"]) < 150_000  # base64


def test_pictures_are_the_same_every_time(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    pictures = [SchedulerExplorer(model, tokenizer, PROMPTS).set(step=4) for _ in range(2)]
    assert pictures[0] == pictures[1]
    assert pictures[0].caption.startswith("Step 4 of 0–7, one rule: ")


def test_no_step_takes_longer_than_a_slider_may(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    prompts = [*PROMPTS, "The sun was warm and the sky was blue that day", "Mia"]
    explorer = SchedulerExplorer(model, tokenizer, prompts, 16, 64, 6)
    turn(explorer, arrivals=LATE_LONG)
    spent = []
    for step in (7, 8, 7, 8, 7, 8):
        began = time.perf_counter()
        explorer.slider.value = step
        spent.append(time.perf_counter() - began)
    assert min(spent) < 0.1 and len(svg_of(explorer).encode()) < 250_000


def test_only_stock_controls_and_no_output_widget(explorer: SchedulerExplorer) -> None:
    def inside(widget: widgets.Widget) -> list[widgets.Widget]:
        return [widget, *(w for child in getattr(widget, "children", ()) for w in inside(child))]

    shown = inside(explorer.view)
    assert all(type(w).__module__.startswith("ipywidgets.") for w in shown)
    assert not any(isinstance(w, widgets.Output) for w in shown)
    assert all(w in shown and w.description for w in explorer.parameters.values())
