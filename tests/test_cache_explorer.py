"""The cache explorer: what is shown is what the engine wrote, read and chose, step by step."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from explorers import check_places, items, place, tips, turn, words
from tokenizers import Tokenizer

from tutorial_engine.engine.generate import generate
from tutorial_engine.learn.capstone import watched
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.viz import cache_steps
from tutorial_engine.viz.cache_explorer import CacheExplorer
from tutorial_engine.viz.cache_steps import record_steps
from tutorial_engine.viz.scene import HATCHED
from tutorial_engine.viz.words import percent

PROMPTS = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]
ROWS = dict(zip("ABC", PROMPTS, strict=True))


@pytest.fixture(scope="module")
def shared(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> CacheExplorer:
    return CacheExplorer(model, tokenizer, PROMPTS, new_tokens=5)


@pytest.fixture
def explorer(shared: CacheExplorer) -> CacheExplorer:
    """An explorer as it is when new, without running the engine for every test."""
    return turn(shared, step=0, **ROWS, chunk=0)


@pytest.fixture(scope="module")
def lengths(tokenizer: Tokenizer) -> list[int]:
    """Tokens of the three prompts."""
    found = [len(tokenizer.encode(prompt).ids) for prompt in PROMPTS]
    assert len(set(found)) == 3, "rows of unequal length"
    return found


# -- what was recorded --------------------------------------------------------------------------


def test_one_step_each_forward_and_one_for_the_empty_cache(
    explorer: CacheExplorer, lengths: list[int]
) -> None:
    assert explorer.num_steps == 1 + 1 + 4  # empty, prefill, four decodes for tokens 2 to 5
    prefill, *decodes = explorer.run.steps
    assert [len(part.ids) for part in prefill.parts.values()] == lengths
    for i, step in enumerate(decodes):
        assert step.kind == "decode"
        assert [part.positions for part in step.parts.values()] == [(n + i,) for n in lengths]


@pytest.mark.parametrize("chunk", [0, 3])
def test_tokens_are_those_of_generate(explorer: CacheExplorer, chunk: int) -> None:
    turn(explorer, chunk=chunk)
    params = SamplingParams(max_tokens=5)
    want = generate(explorer.model, PROMPTS, params, tokenizer=explorer.tokenizer)
    for row, one in enumerate(want):
        chosen = [step.best[row][0][0] for step in explorer.run.steps if row in step.best]
        assert tuple(chosen) == one.outputs[0].token_ids
        ran = [s.parts[row].ids[0] for s in explorer.run.steps if s.kind == "decode"]
        assert tuple(ran) == one.outputs[0].token_ids[:-1]  # the last is never run


@pytest.mark.parametrize("chunk", [0, 4])
def test_slot_is_row_times_length_plus_position(explorer: CacheExplorer, chunk: int) -> None:
    turn(explorer, chunk=chunk)
    length = explorer.run.row_len
    for step in explorer.run.steps:
        for row, part in step.parts.items():
            assert part.slots == tuple(row * length + position for position in part.positions)
            assert part.reads == (row * length, part.positions[-1] + 1)
    for slot, stored in explorer.run.stored.items():
        assert stored.position == slot % length
    assert any(slot != one.position for slot, one in explorer.run.stored.items())


def test_probabilities_are_those_of_each_sequence_alone(explorer: CacheExplorer) -> None:
    model = explorer.model
    for row in range(3):
        sequence: list[int] = []
        for step in explorer.run.steps:
            sequence += step.parts[row].ids
            hidden = model(Batch.from_sequences([sequence]))
            p = model.compute_logits(hidden[-1:])[0].softmax(-1)
            assert len(step.best[row]) == 6
            assert p.topk(6).values.tolist() == pytest.approx(
                [q for _, q in step.best[row]], abs=1e-5
            )


@pytest.mark.parametrize("chunk", [1, 3, 4, 9])
def test_chunk_cuts_each_prefill(explorer: CacheExplorer, lengths: list[int], chunk: int) -> None:
    turn(explorer, chunk=chunk)
    prefills = [step for step in explorer.run.steps if step.kind == "prefill"]
    assert len(prefills) == -(-max(lengths) // chunk)
    for row, length in enumerate(lengths):
        sizes = [len(step.parts[row].ids) for step in prefills if row in step.parts]
        assert sum(sizes) == length and set(sizes[:-1]) <= {chunk}
    assert [len(step.best) for step in prefills] == [0] * (len(prefills) - 1) + [3]


def test_a_request_ends_where_the_model_ends_it_and_the_others_go_on(
    explorer: CacheExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = explorer.model
    chosen = {row: [step.best[row][0][0] for step in explorer.run.steps] for row in range(3)}
    who, when, ender = next(
        (row, when, token)
        for row, own in chosen.items()
        for when, token in enumerate(own)
        if 0 < when < 4
        and token not in own[:when]
        and all(token not in chosen[other] for other in range(3) if other != row)
    )
    monkeypatch.setattr(model, "config", replace(model.config, eos_token_ids=(ender,)))
    explorer.ran = None  # run it again
    turn(explorer, chunk=24)
    others = [row for row in range(3) if row != who]
    parts = [list(step.parts) for step in explorer.run.steps]
    assert parts == [[0, 1, 2]] * (when + 1) + [others] * (4 - when)
    turn(explorer, step=5)
    assert "has ended" in words(explorer, f"run{who}.runs")[0]
    names = " and ".join("ABC"[row] for row in others)
    assert f"Step 5 of 5, decode: 2 tokens (1 each of {names})" in explorer.shown_caption
    explorer.ran = None  # what was recorded here is not what the next test expects


def test_the_hook_is_gone_even_after_a_failure(explorer: CacheExplorer) -> None:
    model = explorer.model
    with pytest.raises(ValueError, match="room for 4"):
        record_steps(model, [[5] * 9], 2, 0, 4)
    assert not model._forward_pre_hooks


# -- what is drawn --------------------------------------------------------------------------------


def test_the_newest_token_shows_its_position_and_its_slot(
    explorer: CacheExplorer, lengths: list[int]
) -> None:
    row_len = explorer.run.row_len
    for step in range(2, 6):
        turn(explorer, step=step)
        for row, length in enumerate(lengths):
            position = length + step - 2
            slot = row * row_len + position
            assert words(explorer, f"run{row}.at") == [str(position)]
            assert words(explorer, f"run{row}.slot") == [f"{row} · {row_len} + {position} = {slot}"]
            first = row * row_len
            reads = f"{first} to {slot}"
            assert words(explorer, f"run{row}.reads") == [reads]
            for number, said in ((f"slot{slot}.n", slot), (f"slot{slot}.at", position)):
                item = explorer.shown.items[number]
                assert item.text == str(said) and item.attributes["font-weight"] == "bold"


def test_tips_say_what_a_slot_holds(explorer: CacheExplorer) -> None:
    turn(explorer, step=3)
    run = explorer.run
    for slot, stored in run.stored.items():
        tip = explorer.shown.items[f"slot{slot}"].tip
        row = slot // run.row_len
        if stored.step > 3:
            assert tip == f"slot {slot}: reserved for {'ABC'[row]}, not written yet"
            continue
        kind = "prefill" if stored.step == 1 else "decode"
        assert tip == (
            f"slot {slot}: K and V of “{run.labels[stored.token]}” of {'ABC'[row]}, at position "
            f"{stored.position}, written in step {stored.step} ({kind})"
        )
        assert tip in tips(explorer)


@pytest.mark.parametrize("step", range(6))
def test_cells_are_free_stored_or_new_as_in_the_cache(
    explorer: CacheExplorer, lengths: list[int], step: int
) -> None:
    turn(explorer, step=step)
    used = [n + step - 1 if step else 0 for n in lengths]
    cells = items(explorer, r"slot\d+")
    assert len(cells) == explorer.run.num_slots
    for slot in range(explorer.run.num_slots):
        row, position = divmod(slot, explorer.run.row_len)
        look = cells[f"slot{slot}"].attributes
        assert (look["fill"] == HATCHED) is (position >= used[row])
        new = position < used[row] and (step == 1 or position == used[row] - 1)
        assert (look.get("stroke-width") == 2.6) is new
    assert f"{sum(used)} of {explorer.run.num_slots} slots are used" in explorer.shown_caption or (
        step == 0
    )


def test_bars_are_the_distribution(explorer: CacheExplorer) -> None:
    turn(explorer, step=3)
    for row in range(3):
        token, p = explorer.run.steps[2].best[row][0]
        label = explorer.run.labels[token]
        assert words(explorer, f"run{row}.next") == [f"{percent(p)} “{label}”"]
        whole = place(explorer, f"run{row}.bar.track")[2]
        assert place(explorer, f"run{row}.bar")[2] == pytest.approx(max(whole * p, 0.5))
        tip = next(tip for tip in tips(explorer) if tip.startswith(f"next: {label} {percent(p)} ·"))
        assert tip.count("·") >= 5


def test_parts_of_a_prompt_ask_for_no_token(explorer: CacheExplorer, lengths: list[int]) -> None:
    turn(explorer, chunk=4, step=2)
    assert sorted(lengths)[0] < 4 < sorted(lengths)[1]
    assert "not asked for: more of the prompt follows" in words(explorer, "run0.next")
    assert "waits" in words(explorer, "run2.runs")[0] and not items(explorer, r"run\d\.bar")


def test_account_counts_tokens_and_bytes(explorer: CacheExplorer, lengths: list[int]) -> None:
    again, kib = 0, explorer.run.spec.bytes_per_token / 1024
    for step in range(explorer.num_steps):
        turn(explorer, step=step)
        used = sum(n + step - 1 for n in lengths) if step else 0
        again += used  # without a cache every step runs all of it
        said = [words(explorer, f"sum{i}.n")[0] for i in range(4)]
        reserved = explorer.run.num_slots * kib
        assert said == [f"{used}", f"{again}", f"{used * kib:.0f} KiB", f"{reserved:.0f} KiB"]
    turn(explorer, chunk=4, step=2)  # without a cache there are no chunks: a prompt runs once
    ran = sum(min(n, 8) for n in lengths)
    assert [words(explorer, f"sum{i}.n")[0] for i in range(2)] == [f"{ran}"] * 2


def test_caption_says_what_ran_where_and_how_much_is_used(
    explorer: CacheExplorer, lengths: list[int]
) -> None:
    a, b, c = lengths
    length, slots = explorer.run.row_len, explorer.run.num_slots
    captions = [explorer.caption(step) for step in range(explorer.num_steps)]
    kib = slots * explorer.run.spec.bytes_per_token // 1024
    assert captions[0] == (
        f"Step 0 of 5: 3 rows of {length} slots are reserved in each of 4 layers, {kib} KiB, and "
        f"no slot is used; prompts of {a}, {b} and {c} tokens wait."
    )
    label = explorer.run.labels[explorer.run.steps[0].parts[2].ids[-1]]
    assert captions[1] == (
        f"Step 1 of 5, prefill: {a + b + c} tokens ({a} of A, {b} of B and {c} of C) run in one "
        f"forward; “{label}” of C has position {c - 1} and is written to slot 2 · {length} + "
        f"{c - 1} = {2 * length + c - 1}, in every layer; {a + b + c} of {slots} slots are used."
    )
    for i, caption in enumerate(captions[2:], 1):
        assert caption.startswith(f"Step {i + 1} of 5, decode: 3 tokens (1 each of A, B and C)")
        assert (
            f"position {c + i - 1} and is written to slot 2 · {length} + {c + i - 1} =" in caption
        )


@pytest.mark.parametrize(
    ("p", "said"),
    [(0.0, "< 1 %"), (0.0049, "< 1 %"), (0.43, "43 %"), (0.994, "99 %"), (1.0, "> 99 %")],
)
def test_per_cents_never_claim_what_is_not_so(p: float, said: str) -> None:
    assert percent(p) == said


@pytest.mark.parametrize("prompts", [["A"], ["A", "Once upon a time " * 3], ["Mia", "A", "Ben"]])
def test_one_to_three_prompts_are_readable(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompts: list[str]
) -> None:
    explorer = CacheExplorer(model, tokenizer, prompts, new_tokens=3)
    assert explorer.run.num_rows == len(prompts) == len(items(explorer, r"row\d"))
    for step in range(explorer.num_steps):
        check_places(turn(explorer, step).shown)
    assert ("1 token of A runs" in explorer.shown_caption) is (len(prompts) == 1)


# -- knobs and prompts ------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "slots"), [(1, 4), (3, 4), (4, 8), (23, 24)])
def test_rows_are_rounded_up_to_four_slots(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, length: int, slots: int
) -> None:
    prompt = tokenizer.decode(tokenizer.encode("Anna had a red kite. " * 9).ids[:length])
    explorer = CacheExplorer(model, tokenizer, [prompt, "A"], new_tokens=1)
    assert explorer.run.row_len == slots and explorer.num_steps == 2


def test_recorded_parts_are_tensors_of_the_batch_that_ran(model: Qwen3ForCausalLM) -> None:
    with watched(model) as seen:
        steps = record_steps(model, [[5, 6, 7], [8]], 3, 2, 8)
    assert len(seen) == len(steps)
    for batch, step in zip(seen, steps, strict=True):
        parts = step.parts.values()
        assert batch.slot_mapping is not None
        slots = torch.tensor([slot for part in parts for slot in part.slots])
        assert torch.equal(batch.slot_mapping, slots)
        assert batch.input_ids.tolist() == [token for part in parts for token in part.ids]


def test_the_engine_runs_when_a_prompt_or_the_chunk_changes_and_at_no_step(
    explorer: CacheExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []

    def counted(*args: Any) -> Any:
        runs.append(args)
        return record_steps(*args)

    monkeypatch.setattr(cache_steps, "record_steps", counted)
    for step in range(explorer.num_steps):
        turn(explorer, step=step)
    assert not runs
    turn(explorer, chunk=5)
    turn(explorer, B="Mia saw a dog.")
    assert len(runs) == 2
