"""The scheduler explorer: all its views of a step are what the engine's trace says."""

from itertools import pairwise

import pytest
from explorers import check_places, items, place, turn, words
from tokenizers import Tokenizer

from tutorial_engine.engine.generate import generate
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import TokenSampled
from tutorial_engine.viz import recorded
from tutorial_engine.viz.recorded import ALL_AT_ONCE, LATE_LONG, ONE_BY_ONE, coming
from tutorial_engine.viz.request_look import look
from tutorial_engine.viz.scene import HATCHED
from tutorial_engine.viz.scheduler_explorer import CLASSES, DETAILS, STEPS, SchedulerExplorer
from tutorial_engine.viz.scheduler_view import ACTIVITIES, COLUMNS, MAX_CELLS

PROMPTS = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]
FRESH = {"policy": "one rule", "budget": 8, "max_num_seqs": 3, "arrivals": ALL_AT_ONCE}
FRESH |= {"show": DETAILS}


@pytest.fixture(scope="module")
def shared(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> SchedulerExplorer:
    return SchedulerExplorer(model, tokenizer, PROMPTS)


@pytest.fixture
def explorer(shared: SchedulerExplorer) -> SchedulerExplorer:
    """An explorer as it is when new."""
    return turn(shared, step=0, **FRESH)


# -- the run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrivals", [ALL_AT_ONCE, ONE_BY_ONE, LATE_LONG])
@pytest.mark.parametrize("policy", list(CLASSES))
def test_every_policy_gives_the_tokens_of_generate_alone(
    explorer: SchedulerExplorer, policy: str, arrivals: str
) -> None:
    turn(explorer, budget=32, policy=policy, arrivals=arrivals)
    assert not explorer.error and explorer.run.policy == policy
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    for one in coming(PROMPTS, arrivals, explorer.long_prompt):
        alone = generate(explorer.model, one.prompt, params, tokenizer=explorer.tokenizer)[0]
        prompt = tuple(explorer.tokenizer.encode(one.prompt).ids)
        assert explorer.run.tokens[one.name] == prompt + alone.outputs[0].token_ids


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


def test_each_request_may_want_a_number_of_tokens_of_its_own(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    explorer = turn(SchedulerExplorer(model, tokenizer, PROMPTS, [6, 3, 5]), arrivals=LATE_LONG)
    lives = explorer.run.lives
    assert {name: len(life.token_times) for name, life in lives.items()} == {
        "A": 6,
        "B": 3,
        "C": 5,
        "D": 6,
    }


def test_knobs_are_the_engines_settings(explorer: SchedulerExplorer) -> None:
    turn(explorer, policy="static batching", budget=11, max_num_seqs=2)
    settings = explorer.trace.settings
    assert settings["policy"] == "StaticBatching"
    assert settings["max_num_batched_tokens"] == 11 and settings["max_num_seqs"] == 2
    assert settings["max_model_len"] == explorer.run.max_len == 16  # 10 + 6 tokens


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
            x, _, width, _ = place(explorer, cell)
            assert x + width / 2 == pytest.approx(columns[f"step{step}"])
            number = f" {share.num_tokens}" if share.num_tokens else ""
            said = words(explorer, f"{cell}.n")[0] if f"{cell}.n" in explorer.shown.items else ""
            narrow = "step" in explorer.shown.items
            assert said == (number.strip() if narrow else share.kind + number)
            fills = {"prefill": look(ord(name) - 65).light, "decode": look(ord(name) - 65).dark}
            fill = explorer.shown.items[cell].attributes["fill"]
            assert share.kind not in fills or fill == fills[share.kind]
        assert (
            words(explorer, f"end.{name}")[0] == "finished" and life.ending == "finished · length"
        )
    assert drawn == sum(len(life.shares) for life in run.lives.values())


def test_first_tokens_are_marked_in_the_step_that_gives_them(explorer: SchedulerExplorer) -> None:
    turn(explorer, step=2)
    dots = items(explorer, r"cell\..*\.first")
    assert list(dots) == ["cell.A.1.first", "cell.B.2.first", "cell.C.2.first"]


@pytest.mark.parametrize("budget", [1, 8])
def test_the_cursor_frames_the_step_however_many_there_are(
    explorer: SchedulerExplorer, budget: int
) -> None:
    turn(explorer, budget=budget, arrivals=LATE_LONG)
    assert (explorer.num_steps > 44) == (budget == 1)
    for step in range(explorer.num_steps):
        turn(explorer, step=step)
        x, y, width, height = place(explorer, "cursor")
        label = explorer.shown.items[f"step{step}"].attributes
        assert x + width / 2 == pytest.approx(label["x"]) and label["font-weight"] == "bold"
        assert y < label["y"] < y + height
        ran = explorer.run.steps[step].scheduled
        for name in ran:
            left, top, wide, tall = place(explorer, f"cell.{name}.{step}")
            assert x <= left and left + wide <= x + width and y <= top and top + tall < y + height
        shown = [int(name[4:]) for name in items(explorer, r"step\d+")]
        assert shown == list(range(shown[0], shown[-1] + 1))
        assert len(shown) == explorer.num_steps or len(shown) >= 40
        others = {n: i for n, i in items(explorer, r"step\d+").items() if n != f"step{step}"}
        assert not any("font-weight" in item.attributes for item in others.values())


# -- budget, requests, cache, tokens --------------------------------------------------------------


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
        boxes = [place(explorer, name) for name in cells]
        for (x, y, width, _), (right, below, *_) in pairwise(boxes):
            assert x + width < right or y < below
        assert max(x + width for x, _, width, _ in boxes) < 560


@pytest.mark.parametrize("step", range(8))
def test_rows_show_what_the_cache_holds_and_what_is_written(
    explorer: SchedulerExplorer, step: int
) -> None:
    run, now = turn(explorer, step=step).run, explorer.run.steps[step]
    held = {r.table[0]: name for name, r in now.planned.requests.items() if r.table}
    assert {i.text for i in items(explorer, r"row\d+\.who").values()} == set(held.values())
    for row in range(3):
        if row not in held:
            assert words(explorer, f"row{row}.n")[0] == "free"
            assert f"row{row}.free" in explorer.shown.items
            continue
        name = held[row]
        new = now.scheduled[name].slots if name in now.scheduled else ()
        slots = (*now.planned.requests[name].slots, *new)
        tail = ", then free" * (name in run.ended(step))
        assert words(explorer, f"row{row}.n")[0] == f"{len(slots)} of 16{tail}"
        for position, slot in enumerate(slots):
            assert slot // 16 == row and f"slot{slot}" in explorer.shown.items
            label = run.label(name, position)
            tip = f"slot {slot}: K and V of token {position} of {name}, “{label}”"
            assert explorer.shown.items[f"slot{slot}"].tip == tip
        x, _, width, _ = place(explorer, f"row{row}.new")
        assert x == place(explorer, f"slot{new[0]}")[0]
        assert width == pytest.approx(len(new) * place(explorer, f"slot{new[0]}")[2])
        if len(slots) < 16:
            empty = explorer.shown.items[f"row{row}.empty"]
            assert empty.attributes["fill"] == HATCHED
            assert empty.tip.startswith(f"slots {slots[-1] + 1} to {16 * row + 15}: reserved for")
    drawn = sum(len(r.slots) for r in now.planned.requests.values()) + now.num_tokens
    assert len(items(explorer, r"slot\d+")) == drawn


@pytest.mark.parametrize("policy", list(CLASSES))
def test_the_table_has_the_numbers_that_the_rule_goes_by(
    explorer: SchedulerExplorer, policy: str
) -> None:
    turn(explorer, arrivals=LATE_LONG, max_num_seqs=2, budget=32, policy=policy, show=STEPS)
    for step in range(explorer.num_steps):
        run, now = turn(explorer, step=step).run, explorer.run.steps[step]
        spent = 0
        for name in [*now.scheduled, *now.planned.waiting]:
            said = {w: words(explorer, f"asked.{name}.{w}")[0] for w in (*COLUMNS, "state")}
            request, event = now.planned.requests[name], now.scheduled.get(name)
            known, computed = len(request.token_ids), request.num_computed_tokens
            assert [said[w] for w in ("known", "computed", "to run")] == [
                str(n) for n in (known, computed, known - computed)
            ]
            assert said["budget left"] == str(32 - spent)
            assert said["runs"] == (str(len(event.slots)) if event else "–")
            spent += len(event.slots) if event else 0
            assert ("running" in said["state"]) == (name in now.planned.running)
            outcome = words(explorer, f"asked.{name}.outcome")[0]
            assert outcome.startswith("new token “") == (name in now.by_request(TokenSampled))
            assert outcome.startswith("waits: ") == (name in now.planned.waiting)
        gone = [name for name in run.lives if not items(explorer, f"asked.{name}.known")]
        assert set(gone) == {*run.over(step), *run.to_come(step)}


def test_at_first_nothing_is_shown_but_steps_budget_and_requests(
    explorer: SchedulerExplorer, model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    fresh = SchedulerExplorer(model, tokenizer, PROMPTS)
    headings = [
        item.text for item in fresh.shown.items.values() if "font-weight" in item.attributes
    ]
    assert {"budget in step 0", "requests in step 0"} < set(headings)
    assert not items(fresh, r"slot.*|token\..*|row.*") and items(explorer, r"slot.*")
    assert fresh.shown.height < explorer.shown.height
    keys = {item.text for item in items(fresh, r"key\..*\.words").values()}
    assert keys == {"waits", "prefill", "decode", "first token"}  # nobody stalls or comes later
    check_steps(fresh)


def test_tokens_show_how_far_each_request_is(explorer: SchedulerExplorer) -> None:
    dashed, thick = "stroke-dasharray", 2.6
    for step in range(explorer.num_steps):
        run = turn(explorer, step=step).run
        for name in run.steps[step].planned.requests:
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
                assert words(explorer, f"token.{name}.{i}.n")[0] == run.label(name, i)


def test_stepping_moves_nothing(explorer: SchedulerExplorer) -> None:
    turn(explorer, arrivals=LATE_LONG)
    places: dict[str, tuple[float, ...]] = {}
    fixed = r"token\.[A-F]\.\d+|cell\.[A-F]\.\d+|budget\d+|slot\d+|row\d+|tokens|slots|table"
    for step in range(explorer.num_steps):
        turn(explorer, step=step)
        for name, item in items(explorer, fixed).items():
            place = tuple(float(item.attributes[key]) for key in ("x", "y"))
            assert places.setdefault(name, place) == place
    assert len({explorer.scene(step).height for step in range(explorer.num_steps)}) == 1


# -- reading it -----------------------------------------------------------------------------------


def check_steps(explorer: SchedulerExplorer) -> None:
    for step in {0, 2, explorer.num_steps // 2, explorer.num_steps - 1}:
        check_places(turn(explorer, step).shown)


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
    explorer = SchedulerExplorer(model, tokenizer, prompts, new_tokens, budget, rows, details=True)
    check_steps(turn(explorer, arrivals=arrivals))
    if budget >= 64:
        check_steps(turn(explorer, policy="prefill first"))


def brightness(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_grey_still_tells_prefill_from_decode(explorer: SchedulerExplorer) -> None:
    for i in range(6):
        one = look(i)
        assert brightness(one.light) - brightness(one.dark) > 25
    turn(explorer, arrivals=ONE_BY_ONE, policy="prefill first", budget=16, max_num_seqs=2)
    assert {
        f"key.{said}" for said in ACTIVITIES.values()
    } <= explorer.shown.items.keys()  # and each that occurs has a key


# -- knobs and prompts ----------------------------------------------------------------------------


def test_a_run_that_takes_too_long_is_refused(
    explorer: SchedulerExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "MAX_STEPS", 8)
    turn(explorer, budget=9)
    assert not explorer.error
    turn(explorer, budget=2)
    assert explorer.error == "This takes more than 8 steps: raise the budget."
