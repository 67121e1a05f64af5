"""The dial explorer: at every position the pool that the engine had, and the counts of its run."""

import re
from typing import Any

import pytest
from explorers import check_places, turn
from tokenizers import Tokenizer

from tutorial_engine.engine.generate import generate
from tutorial_engine.lab.dial import Dial
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.pool import CELLS, ROWS, snapshots
from tutorial_engine.viz.dial_explorer import FACTS, DialExplorer
from tutorial_engine.viz.request_look import look
from tutorial_engine.viz.scene import HATCHED
from tutorial_engine.viz.style import PAPER

STORY = "Once upon a time Anna had a red kite."
PROMPTS = [
    STORY,
    "Ben had a blue ball.",
    f"{STORY} Ben had a blue ball.",
    "One day",
    f"{STORY} The",
]
NEW = (10, 6, 8, 12, 5)
POSITIONS = [CELLS, 1, 2, 4, 8, 16, ROWS]
every_position = pytest.mark.parametrize("position", POSITIONS)


def new(model: Qwen3ForCausalLM, tokenizer: Tokenizer, **options: Any) -> DialExplorer:
    return DialExplorer(model, tokenizer, PROMPTS, NEW, **options)


@pytest.fixture(scope="module")
def shared(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> DialExplorer:
    explorer = new(model, tokenizer)
    for position in POSITIONS:
        turn(explorer, block_size=position)
    return explorer


@pytest.fixture
def explorer(shared: DialExplorer) -> DialExplorer:
    """An explorer at rows and step 0 that has been everywhere."""
    return turn(shared, 0, block_size=ROWS)


# -- the run --------------------------------------------------------------------------------------


@every_position
def test_every_position_gives_the_tokens_of_generate_alone(
    explorer: DialExplorer, position: Any
) -> None:
    turn(explorer, block_size=position)
    point = explorer.point
    assert point.position == position and point.tokens_equal and not explorer.error
    for prompt, number, alone in zip(PROMPTS, NEW, explorer.dial.expected, strict=True):
        params = SamplingParams(max_tokens=number)
        (output,) = generate(explorer.dial.model, prompt, params, tokenizer=explorer.dial.tokenizer)
        assert output.outputs[0].token_ids == alone


def test_the_dial_goes_from_cells_over_powers_of_two_to_rows(explorer: DialExplorer) -> None:
    assert [value for _, value in explorer.parameters["block_size"].options] == POSITIONS
    assert {explorer.points[p].pool.num_slots for p in POSITIONS} == {128}
    waste = [explorer.points[p].mean_waste for p in (1, 2, 4, 8, 16, ROWS)]
    assert waste == sorted(waste) and waste[0] == 0 < waste[-1]
    assert explorer.points[4].tokens_found > 0 == explorer.points[ROWS].tokens_found


def test_the_engine_runs_once_at_each_position_and_only_on_demand(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    at = Dial.at

    def noted(self: Dial, position: Any) -> Any:
        asked.append(position)
        return at(self, position)

    monkeypatch.setattr(Dial, "at", noted)
    explorer = new(model, tokenizer, block_size=8)
    for position in (4, CELLS, 4, 8, CELLS):
        turn(explorer, 3, block_size=position)
    assert asked == [8, 4, CELLS] and set(explorer.points) == {8, 4, CELLS}


# -- the picture ----------------------------------------------------------------------------------


@every_position
@pytest.mark.parametrize("step", [0, 4, 9])
def test_the_pool_is_that_of_the_trace(explorer: DialExplorer, position: Any, step: int) -> None:
    turn(explorer, step, block_size=position)
    point, shown = explorer.point, explorer.shown.items
    moment = list(snapshots(point.trace))[step]
    for slot in range(128):
        who = list(moment.tokens.get(slot, ()))
        fill = look(ord(who[0]) - 65).dark if who else HATCHED if slot in moment.owners else PAPER
        assert shown[f"{point.name}.slot{slot}"].attributes["fill"] == fill


@every_position
def test_the_chart_is_as_high_as_slots_are_used_and_reserved(
    explorer: DialExplorer, position: Any
) -> None:
    turn(explorer, block_size=position)
    shown = explorer.shown.items
    whole = float(shown["chart.pool"].attributes["height"])
    for step, moment in enumerate(explorer.point.snapshots):
        u = moment.usage
        used = float(shown[f"chart.{step}.used"].attributes["height"])
        assert used == pytest.approx(whole * u.used / 128)
        idle = shown.get(f"chart.{step}.reserved")
        high = float(idle.attributes["height"]) if idle else 0.0
        assert high == pytest.approx(whole * u.reserved / 128)
        told = f"step {step}: {u.used} used, {u.reserved} reserved, {u.free} free"
        assert shown[f"chart.{step}.used"].tip == told


def test_the_table_has_the_counts_of_every_position(explorer: DialExplorer) -> None:
    shown = explorer.shown.items
    assert [shown[f"head.{i}"].text for i in range(7)] == [str(p) for p in POSITIONS]
    for i, position in enumerate(POSITIONS):
        point = explorer.points[position]
        column = [shown[f"fact{line}.{i}"].text for line in range(len(FACTS))]
        assert column == [
            f"{point.milliseconds:.0f}", str(point.tokens_run), str(point.tokens_found),
            f"{point.mean_waste:.1f}", str(point.peak_waste), str(point.total_entries),
            f"{point.bytes_gathered / 1024:.0f}", str(point.most_running),
            str(point.preemptions), "✔",
        ]  # fmt: skip
    bold = {n for n, item in shown.items() if item.attributes.get("font-weight") == "bold"}
    assert {name for name in bold if re.match(r"head|fact", name)} == {
        "head.6", *(f"fact{line}.6" for line in range(len(FACTS)))
    }  # fmt: skip


@every_position
def test_words_neither_overlap_nor_are_cut(explorer: DialExplorer, position: Any) -> None:
    for step in range(0, explorer.points[position].num_steps, 3):
        turn(explorer, step, block_size=position)
        check_places(explorer.shown, 10)


def test_caption_has_the_numbers_of_this_step_and_of_the_run(explorer: DialExplorer) -> None:
    turn(explorer, 7, block_size=4)
    point = explorer.point
    moment = point.snapshots[7]
    u, running = moment.usage, len(moment.running)
    several = sum(len(who) > 1 for who in moment.tokens.values())
    assert several > 0 and explorer.shown_caption == (
        f"Step 7 of 0–{point.num_steps - 1}, pages of 4: {running} requests run, {u.used} of 128 "
        f"slots have a token ({several} for several requests), {u.reserved} are reserved without "
        f"one, {u.free} free. The whole run: {point.milliseconds:.0f} ms on the engine's clock, "
        f"{point.tokens_run} tokens run, {point.tokens_found} found, waste "
        f"{point.mean_waste:.1f} (peak {point.peak_waste}), at most {point.total_entries} table "
        f"entries and {point.most_running} requests at once, {point.bytes_gathered / 1024:.0f} KiB "
        f"gathered, {point.preemptions} preemptions; the tokens are those of each request alone."
    )


def test_a_change_keeps_the_step_that_is_looked_at(explorer: DialExplorer) -> None:
    lengths = {p: explorer.points[p].num_steps for p in POSITIONS}
    longest = max(lengths, key=lengths.__getitem__)
    shortest = min(lengths, key=lengths.__getitem__)
    turn(explorer, 5, block_size=longest)
    assert turn(explorer, block_size=shortest).step == 5
    turn(explorer, lengths[longest] - 1, block_size=longest)
    assert turn(explorer, block_size=shortest).step == lengths[shortest] - 1
    assert explorer.shown_caption == explorer.caption(explorer.step)


# -- knobs and prompts ----------------------------------------------------------------------------


def test_a_row_that_is_no_power_of_two_has_only_blocks_that_divide_it(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    explorer = DialExplorer(model, tokenizer, ["One day"], 3, num_slots=60, max_len=20)
    assert [v for _, v in explorer.parameters["block_size"].options] == [CELLS, 1, 2, 4, ROWS]
    for position in (CELLS, 4, ROWS):
        assert turn(explorer, 1, block_size=position).point.pool.num_slots == 60
        check_places(explorer.shown, 10)
