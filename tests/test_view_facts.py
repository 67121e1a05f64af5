"""What a picture tells is what the engine did, what the model does, or what was measured."""

import math
import random
import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import matplotlib
import pytest
import torch
from checkpoints import QWEN3_06B
from engines import random_model
from inputs import (
    K,
    Q,
    V,
    dial_point,
    kv_numbers,
    pool_picture,
    recorded_batches,
    recorded_softmax,
)
from matplotlib.colors import to_hex
from tokenizers import Tokenizer
from traces import (
    CASES,
    OTHER,
    POLICIES,
    TWIN,
    Case,
    Paged,
    box,
    crowd,
    items,
    new_cells,
    run_cells,
    served,
    seven,
)
from transformers import AutoModelForCausalLM

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.engine.scheduler import Scheduler, StepPlan
from tutorial_engine.lab.layouts import ORDERS, KVLayout, layouts
from tutorial_engine.model.attention import NaiveAttention, naive_attention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace import events
from tutorial_engine.trace.events import (
    Preempted,
    Recorder,
    TokenSampled,
)
from tutorial_engine.trace.pool import CELLS, ROWS
from tutorial_engine.viz.drawing.parts import part_of, shade
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import look, tint
from tutorial_engine.viz.drawing.scene import HATCHED
from tutorial_engine.viz.drawing.style import PAPER
from tutorial_engine.viz.run import cell_steps
from tutorial_engine.viz.run.cell_steps import describe, find_changes, take_snapshot
from tutorial_engine.viz.run.run import Run
from tutorial_engine.viz.run.scheduler_run import SchedulerRun
from tutorial_engine.viz.run.shape_walk import meta_shape_walk, shape_walk
from tutorial_engine.viz.tokens import token_labels
from tutorial_engine.viz.views.block_view import BlockView
from tutorial_engine.viz.views.cell_view import cells_scene, heat_scale
from tutorial_engine.viz.views.flat_batch import flat_batch
from tutorial_engine.viz.views.gqa_picture import gqa_picture
from tutorial_engine.viz.views.layouts_picture import LAYERS, layouts_picture
from tutorial_engine.viz.views.places import IDLE, WASTED, Held, places, read_places
from tutorial_engine.viz.views.qkv_picture import far_value, qkv_picture, recorded_projection
from tutorial_engine.viz.views.running_softmax_picture import running_softmax_picture
from tutorial_engine.viz.views.three_token_picture import three_token_picture
from tutorial_engine.viz.views.timeline import timeline
from tutorial_engine.viz.views.two_steps_picture import recorded_two_steps, two_steps_picture
from tutorial_engine.viz.words import listed, signed

# -- timelines -------------------------------------------------------------------------------------


every_policy = pytest.mark.parametrize("policy", POLICIES)


@every_policy
def test_every_share_of_every_step_is_a_box(policy: str) -> None:
    trace = crowd(policy)
    order = [e.request_id for e in trace.events if isinstance(e, events.Added)]
    wanted = {
        f"box.{order.index(e.request_id)}.{e.step}"
        for e in trace.events
        if isinstance(e, events.Scheduled)
    }
    assert {
        name for name in items(timeline(trace)) if re.fullmatch(r"box\.\d+\.\d+", name)
    } == wanted
    assert len(wanted) > 60


@every_policy
def test_a_run_agrees_with_the_replayed_queues(policy: str) -> None:
    run, stalls = Run.of(crowd(policy)), 0
    for step in run.steps:
        shares = {life.request_id: life.shares.get(step.number) for life in run.lives}
        there = {name: share for name, share in shares.items() if share is not None}
        for name, share in there.items():
            if name in step.after.waiting:
                assert share.kind == "waits"
            elif name in step.after.running:
                assert share.num_tokens or share.kind == "stalls"
            stalls += share.kind == "stalls"
        assert sum(share.num_tokens for share in there.values()) == step.num_tokens
    assert (stalls > 0) == (policy == "prefill first")


@every_policy
def test_metrics_read_from_the_trace_are_the_engines_own(policy: str) -> None:
    for rate in (0.0, 40.0):
        trace, outputs = served(policy, 6, rate, 5)
        assert {life.request_id: life.metrics for life in Run.of(trace).lives} == {
            one.request_id: one.metrics for one in outputs
        }


# -- places ----------------------------------------------------------------------------------------


@every_policy
def test_a_place_is_the_row_that_the_engine_gave(policy: str) -> None:
    found = read_places(seven(policy))
    for s, step in enumerate(found.run.steps):
        column = [line[s] for line in found.grid]
        held = {one.request_id: p for p, one in enumerate(column) if isinstance(one, Held)}
        requests = step.planned.requests
        assert held == {name: requests[name].table[0] for name in step.planned.running}
        free = {one for one in column if isinstance(one, str)}
        assert free <= {WASTED if step.planned.waiting else IDLE}
        for one in column:
            if isinstance(one, Held):
                life = found.run.lives[one.request]
                assert life.request_id == one.request_id and life.shares[s].kind == one.kind
                assert one.is_last == (life.end_step == s)


@every_policy
def test_every_place_of_every_step_is_counted_and_who_holds_it_drawn(policy: str) -> None:
    found, picture = read_places(seven(policy)), places({policy: seven(policy)})
    kinds = ("prefill", "decode", "recompute", "stalls", IDLE, WASTED)
    assert sum(found.count(kind) for kind in kinds) == found.total
    assert (found.count("stalls") > 0) == (policy == "prefill first")
    wasted = found.count(WASTED) + found.count("stalls")
    assert f"“{policy}” {wasted} of {found.total}" in picture.caption
    held = {
        f"box.0.{p}.{s}"
        for p, line in enumerate(found.grid)
        for s, one in enumerate(line)
        if isinstance(one, Held)
    }
    assert {name for name in items(picture) if re.fullmatch(r"box\.0\.\d+\.\d+", name)} == held


# -- pages -----------------------------------------------------------------------------------------


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed {case.seed}")


@every_case
def test_the_caption_counts_blocks_tokens_and_slots(case: Case) -> None:
    live = case.live()
    run, size = live.run, case.block_size
    for number, pool in zip(range(len(run.steps)), live.pools, strict=True):
        said, slots = run.caption(number), list[int]()
        for name, table in pool.tables.items():
            slots += [table[i // size] * size + i % size for i in range(pool.held[name])]
        used, stored = len(pool.ref_cnts), len(set(slots))
        if used:
            assert re.search(rf"{used} of {case.num_blocks} blocks holds? {stored} token", said)
            assert re.search(rf"{used * size - stored} of (its|their) {used * size} slots", said)
        else:
            assert "no block is in use" in said
        twice = sum(slots.count(slot) > 1 for slot in set(slots))
        assert (f"({twice} of them stored once for " in said) == (twice > 0)
        assert (f"; counted by request they are {len(slots)})" in said) == (twice > 0)
        found = sum(block in pool.hashes for block in pool.free)
        assert re.search(rf"; {len(pool.free)} blocks? (is|are) free", said)
        assert ("still findable" in said) == (found > 0)
        assert found < 2 or f"{found} of them still findable" in said


def test_a_step_that_was_broken_off_is_no_step_and_nothing_of_it_is_lost() -> None:
    live, now = Paged().add("A").step(2), {"bad": True}

    def interrupt(*_: Any) -> None:
        if now["bad"]:
            raise KeyboardInterrupt

    handle = live.model.register_forward_pre_hook(interrupt)
    live.add("B", TWIN)
    try:
        with pytest.raises(KeyboardInterrupt):
            live.step()
        now["bad"] = False
        run = live.finish().run
    finally:
        handle.remove()
    assert [now.tables for now in run.blocks] == [pool.tables for pool in live.pools]
    assert "B finds 8 tokens in blocks 0 and 1" in run.blocks[2].facts
    assert [i for i in range(12) if run.blocks[2].is_written("B", i)] == [8, 9]


@every_case
def test_the_picture_shows_the_tables_and_the_pool_of_the_live_engine(case: Case) -> None:
    live = case.live()
    run, size = live.run, case.block_size
    ran: dict[int, tuple[str, ...]] = {}  # block -> the tokens that it got last
    for number, pool in enumerate(live.pools):
        for request in run.steps[number].planned.requests.values():
            for index, block in enumerate(request.table):
                ran[block] = tuple(map(str, request.token_ids[index * size :][:size]))
        if number % 3:
            continue
        seen = items(BlockView(run, [number]).scene(number))
        filled = dict.fromkeys(range(case.num_blocks), 0)
        for name, table in pool.tables.items():
            shown = [seen[f"block.{i}.{name}"].text for i in range(len(table))]
            assert shown == [str(block) for block in table]
            for position in range(len(table) * size):
                hatched = seen[f"token.{position}.{name}"].attrib["fill"] == HATCHED
                assert hatched == (position >= pool.held[name])
            for index, block in enumerate(table):
                own = min(max(pool.held[name] - index * size, 0), size)
                filled[block] = max(filled[block], own)
        for block in range(case.num_blocks):
            count = pool.ref_cnts.get(block, 0)
            ref = seen[f"ref.{block}"].text if f"ref.{block}" in seen else ""
            assert ref == (f"ref {count}" if count else "next" if pool.free[0] == block else "")
            words = [e.text for k, e in seen.items() if k.startswith(f"words.{block}.")]
            found = any((pool.hashes.get(block, "none")[:4]) in (word or "") for word in words)
            assert found == (block in pool.hashes)
            fills = [seen[f"slot.{block * size + i}"].attrib["fill"] for i in range(size)]
            said = [e.text for i in range(size) if (e := seen.get(f"slot.{block * size + i}.word"))]
            assert tuple(said) in ((), ran.get(block)) and not (said and count)
            reserved = [bool(count) and i >= filled[block] for i in range(size)]
            assert [fill == HATCHED for fill in fills] == reserved
        queue = " ".join(e.text or "" for k, e in seen.items() if k.startswith("free."))
        assert re.findall(r"\d+", queue) == [str(block) for block in pool.free]


# -- steps of the scheduler ------------------------------------------------------------------------


THREE = {"A": [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], "B": [20] * 7, "C": [31, 32, 33]}


def three(policy: type[Scheduler] = Scheduler, **limits: int) -> SchedulerRun:
    """Three requests at once; a run's steps are the live engine's: test_trace.py."""
    limits = {"max_model_len": 24, "max_num_seqs": 3, "max_num_batched_tokens": 8} | limits
    recorder, config = Recorder(), EngineConfig(**limits)
    engine = LLMEngine(
        random_model(), config=config, scheduler=policy, clock=VirtualClock(), trace=recorder
    )
    for name, prompt in THREE.items():
        engine.add_request(name, prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    engine.run()
    return SchedulerRun.of(recorder.trace(), {})


@pytest.mark.parametrize("budget", [1, 3, 8, 11, 64])
def test_tokens_are_cached_written_known_or_sampled_and_nobody_stalls(budget: int) -> None:
    run = three(max_num_batched_tokens=budget)
    order = ["cached", "written", "known", "sampled"]
    seen: dict[str, int] = dict.fromkeys("ABC", 0)
    for step in run.steps:
        assert not run.doing("stalls", step.number), "the one rule does not do that"
        for name in step.planned.requests:
            kinds = run.token_kinds(name, step.number)
            if step.number and name in run.over(step.number - 1):
                assert kinds == ["gone"] * len(run.tokens[name])
                continue
            assert kinds == sorted(kinds, key=order.index)
            assert kinds.count("cached") == seen[name]
            seen[name] += kinds.count("written")
            assert kinds.count("sampled") == (name in step.by_request(TokenSampled))
            yields = "written" in kinds and "known" not in kinds
            assert (name in step.by_request(TokenSampled)) == yields
    assert seen == {name: len(ids) - 1 for name, ids in run.tokens.items()}  # the last never runs


class Polite(Scheduler):
    """Lets nobody join while somebody runs, and is not called OneByOne."""

    def may_admit(self, plan: StepPlan) -> bool:
        return super().may_admit(plan) and not self.running


WIDE, MIDDLE = {"max_num_batched_tokens": 64}, {"max_num_batched_tokens": 16}


@pytest.mark.parametrize(
    ("policy", "limits", "step", "why"),
    [
        (Scheduler, {}, 0, "no budget is left"),
        (Scheduler, {}, 2, ""),  # nobody waits
        (Scheduler, {"max_num_seqs": 2}, 2, "all 2 places are taken (max_num_seqs)"),
        (Scheduler, {"max_num_seqs": 1}, 1, "the place is taken (max_num_seqs)"),
        (OneByOne, {}, 1, "one runs at a time, and A is not done"),
        (StaticBatching, {"max_num_seqs": 2}, 1, "nobody joins before A and B are done"),
        (StaticBatching, {"max_num_seqs": 2}, 0, "no budget is left"),
        # B is of the batch: it does join before A is done
        (StaticBatching, {"max_num_seqs": 2, "max_num_batched_tokens": 4}, 1, "no budget is left"),
        (StaticBatching, {"max_num_seqs": 1}, 1, "nobody joins before A is done"),
        (
            PrefillFirst,
            MIDDLE,
            0,
            "B must run its 7 tokens in one step, and 6 of the budget are left",
        ),
        (Polite, WIDE, 1, "Polite admits nobody else, or no memory is free"),
    ],
)
def test_the_reason_is_the_one_that_the_policy_had(
    policy: type[Scheduler], limits: dict[str, int], step: int, why: str
) -> None:
    run = three(policy, **limits)
    assert run.why_waiting(step) == why
    if why:
        waiting = run.steps[step].planned.waiting
        assert f"{listed(waiting)} wait{'s' * (len(waiting) == 1)}: {why}" in run.caption(step)


def test_a_stall_is_explained_where_it_is_the_policys() -> None:
    run = three(PrefillFirst, max_num_batched_tokens=16)
    assert run.doing("stalls", 1) == ["A"]
    assert "A stalls: this step only prefills" in run.caption(1)
    assert run.outcome("A", 1) == "runs nothing: this step only prefills"


def test_who_gives_way_is_said_and_explains_the_queue() -> None:
    live = Paged(num_blocks=6).add("A", num_tokens=8).add("B", OTHER * 2, num_tokens=4)
    run = SchedulerRun.of(live.finish().trace, {})
    gave_way = {step.number: [*step.by_request(Preempted)] for step in run.steps}
    assert any(gave_way.values())
    for step, who in gave_way.items():
        if who:
            assert run.why_waiting(step) == "a step that preempts admits nobody"
            assert run.steps[step].planned.waiting[0] == who[-1]
            assert run.outcome(who[-1], step) == "gives way: no memory is free"
    assert "no memory is free" in {run.why_waiting(step) for step in range(run.last)}


# -- the flat batch --------------------------------------------------------------------------------


def allowed_cells(picture: Picture) -> set[tuple[int, int, int]]:
    """(sequence, row, column) of the cells that are not hatched."""
    found = set()
    for name, element in items(picture).items():
        if name.startswith("cell.") and not element.attrib["fill"].startswith("url("):
            s, row, column = (int(part) for part in name.split(".")[1:])
            found.add((s, row, column))
    return found


def test_the_mask_is_the_one_that_attention_used() -> None:
    """Without a cache all pairs with weight above 0 are drawn as allowed, and no other."""
    batch = Batch.from_sequences([[1, 2, 3, 4], [5], [6, 7]])
    seen = set()

    def observe(layer: int, s: int, weights: torch.Tensor) -> None:
        seen.update((s, r, c) for _, r, c in weights.nonzero().tolist())

    with torch.inference_mode():
        random_model()(batch, NaiveAttention(observe))
    assert allowed_cells(flat_batch(batch)) == seen and len(seen) == 10 + 1 + 3


def test_positions_and_slots_are_the_batches_own() -> None:
    batch, found = recorded_batches()[1], items(flat_batch(recorded_batches()[1]))
    assert batch.slot_mapping is not None
    rows = range(batch.num_tokens)
    assert [found[f"pos.{i}.word"].text for i in rows] == [str(p) for p in batch.positions.tolist()]
    slots = [str(slot) for slot in batch.slot_mapping.tolist()]
    assert [found[f"slot.{i}.word"].text for i in rows] == slots
    assert "head.slot" not in items(flat_batch(Batch.from_sequences([[1, 2]])))


# -- cells -----------------------------------------------------------------------------------------


def check_picture(picture: Picture, cells: CellKVCache, left_over: set[int]) -> None:
    """Every number and colour of the picture against the live table and shelves."""
    found, table = items(picture), cells.table
    assert float(found["head"].attrib["y"]) == float(found[f"row.{table.head}.cell"].attrib["y"])
    for cell in range(table.num_cells):
        pos, owners, shift = table[cell]
        assert found[f"row.{cell}.pos"].text == ("–" if pos is None else str(pos))
        assert found[f"row.{cell}.shift"].text == ("–" if pos is None else signed(shift))
        chips = {
            int(name.split(".")[2])
            for name in found
            if name.startswith(f"owner.{cell}.") and not name.endswith(".n")
        }
        assert chips == owners and (f"row.{cell}.owners" in found) == (not owners)
        assert (f"K.0.{cell}.lines" in found) == (pos is None and cell not in left_over)
        assert (f"V.1.{cell}.gone" in found) == (cell in left_over)
    for seq_id in table.seq_ids:
        order = [
            name.split(".")[2] for name in found
            if name.startswith(f"text.{seq_id}.") and name.endswith(".token")
        ]  # fmt: skip
        assert order == [str(cell) for cell in table.cells_of(seq_id)]


def check_colours(picture: Picture, cells: CellKVCache, scale: Any, left_over: set[int]) -> None:
    """Squares of the first and the last layer are the storage's numbers, evenly spaced."""
    found, colours = items(picture), matplotlib.colormaps["cividis"]
    for layer in (0, cells.storage.spec.num_layers - 1):
        both = cells.storage.read_slots(layer, slice(0, cells.table.num_cells))
        for kind, (name, x) in enumerate(zip("KV", both, strict=True)):
            low, high = scale[layer][kind]
            for cell in range(cells.table.num_cells):
                if cells.table[cell].pos is None and cell not in left_over:
                    continue
                for i in range(8):
                    number = float(x[cell, 0, i * x.shape[-1] // 8])
                    part = min(max((number - low) / (high - low), 0.0), 1.0)
                    want = to_hex(colours(part))
                    want = tint(want, 0.3) if cell in left_over else want
                    assert found[f"{name}.{layer}.{cell}.{i}"].attrib["fill"] == want


def test_a_shift_that_forgets_a_layer_is_seen() -> None:
    cells = new_cells()
    run_cells(cells, [5, 6, 7])
    start = take_snapshot(cells)
    cells.seq_add(0, 0, -1, 3)
    rest = cells.storage.k[1:].clone()
    cells.apply_shifts()
    cells.storage.k[1:] = rest
    assert "in 1 of 3 layers" in describe(take_snapshot(cells, before=start), start)


@pytest.mark.parametrize("number", range(4))
def test_picture_agrees_with_the_table_after_any_operations(number: int) -> None:
    draw, cells = random.Random(number), new_cells(10)
    before, left_over = take_snapshot(cells), set[int]()
    for step in range(60):
        used = {c for c in range(10) if cells.table[c].owners}
        seq, other = draw.sample(range(4), 2)
        p0, p1 = draw.randint(0, 6), draw.choice([-1, draw.randint(1, 12)])
        try:
            match draw.choice(["run", "run", "run", "rm", "cp", "add", "unshare", "shift", "keep"]):
                case "run":
                    run_cells(cells, [draw.randrange(97) for _ in range(draw.choice([1, 2]))], seq)
                case "rm":
                    cells.seq_rm(seq, p0, p1)
                case "cp":
                    cells.seq_cp(seq, other, p0, p1)
                case "add":
                    cells.seq_add(seq, p0, p1, draw.randint(-5, 5))
                case "unshare":
                    cells.seq_unshare(seq, p0, p1)
                case "shift":
                    cells.apply_shifts()
                case "keep" if draw.random() < 0.2:
                    cells.seq_keep(seq)
        except ValueError:
            pass  # refused: the picture shows that nothing changed
        now_used = {c for c in range(10) if cells.table[c].owners}
        left_over = (left_over | used) - now_used
        now = take_snapshot(cells, before=before)
        assert {c for c, row in enumerate(now.rows) if row.left_over} == left_over
        assert now.heat.isfinite().all((0, 1, 3)).tolist() == [
            c in now_used | left_over for c in range(10)
        ]
        if step % 6 == 0:
            scene = cells_scene(now, find_changes(before, now), "cells", heat_scale([now]))
            picture = Picture(scene.svg(), b"", describe(now, before))  # no PNG: it takes longest
            check_picture(picture, cells, left_over)
            check_colours(picture, cells, heat_scale([now]), left_over)
            used_words = f"{len(now_used)} of 10 cells are used"
            assert used_words in picture.caption or (not now_used and "empty" in picture.caption)
        before = now


def test_planted_bug_shelves_read_one_cell_further_are_caught() -> None:
    def shifted(cache: CellKVCache) -> torch.Tensor:
        return right_heat(cache).roll(1, 2)

    right_heat = cell_steps._heat
    with patch.object(cell_steps, "_heat", shifted), pytest.raises(AssertionError):
        test_picture_agrees_with_the_table_after_any_operations(0)


# -- one layer, q, k and v, and attention ----------------------------------------------------------


PROMPT = "Once upon a time <Anna> had a red $kite$."


def text(picture: Picture, name: str) -> str:
    return items(picture)[name].text or ""


@pytest.mark.parametrize(("layer", "token"), [(0, 4), (2, -1)])
def test_recorded_q_k_and_v_are_those_of_transformers(
    model: CausalLM, tokenizer: Tokenizer, layer: int, token: int
) -> None:
    ids = tokenizer.encode(PROMPT).ids
    token %= len(ids)
    theirs = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).model
    block = theirs.layers[layer]
    hidden = theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0, token]
    x = block.input_layernorm(hidden)
    found = recorded_projection(model, ids, token, layer)
    torch.testing.assert_close(found.x, x, atol=1e-4, rtol=1e-4)
    linears = (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)
    for linear, w, y in zip(linears, found.weights, found.results, strict=True):
        torch.testing.assert_close(w, linear.weight)
        torch.testing.assert_close(y, linear(x), atol=1e-4, rtol=1e-4)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("layer", [0, 3])
def test_numbers_of_the_picture_of_q_k_and_v_are_those_of_the_run(
    model: CausalLM, tokenizer: Tokenizer, layer: int
) -> None:
    ids = tokenizer.encode(PROMPT).ids
    place = token_labels(tokenizer, ids).index("$")
    picture = qkv_picture(model, tokenizer, ids, place, layer=layer)
    run = recorded_projection(model, ids, place, layer)

    def cells(name: str) -> list[float]:
        shown = (text(picture, f"{name}{i}.value") for i in (0, 1, 7, 9))
        return [float(word.replace("−", "-")) for word in shown]

    for x, w, product, i in zip(*map(cells, ("x", "w", "products")), (0, 1, 7, -1), strict=True):
        assert [x, w] == pytest.approx([run.x[i].item(), run.weights[0][36, i].item()], abs=0.006)
        assert product == pytest.approx(float(run.x[i] * run.weights[0][36, i]), abs=0.006)
    number = f"{float(run.results[0][36]):.2f}".replace("-", "−")
    assert text(picture, "sum.value") == number
    assert f"give {number}, number 4 of head 1 of q" in picture.caption
    found, far = items(picture), far_value(run.results)
    assert 0.08 < float((torch.cat(run.results).abs() > far).float().mean()) < 0.12
    for name, values in zip("qkv", run.results, strict=True):
        fills = [found[f"{name}{i}"].attrib["fill"] for i in range(len(values))]
        assert fills == [shade(part_of(value, (-far, far))) for value in values.tolist()]


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (16, 8), (8, 1)])
def test_query_heads_lead_to_the_head_that_attention_gives_them(heads: int, kv_heads: int) -> None:
    config = replace(QWEN3_06B, num_attention_heads=heads, num_key_value_heads=kv_heads)
    picture = gqa_picture(config)
    # one value for each K/V head: what a query head returns says which one it read
    k, v = torch.zeros(1, kv_heads, 2), torch.arange(kv_heads).float().view(1, kv_heads, 1)
    read = naive_attention(torch.zeros(1, heads, 2), k, v).out.flatten().int().tolist()
    found = items(picture)
    for h, g in enumerate(read):
        x, _, width, _ = box(found[f"kv{g}"])
        assert float(found[f"line{h}"].attrib["x2"]) == pytest.approx(x + width / 2, abs=0.02)
    wrong = sum(h % kv_heads != g for h, g in enumerate(read))
    assert (f"{wrong} of {heads} query heads would read" in picture.caption) == bool(wrong)


@pytest.mark.parametrize("values", [V, torch.tensor([[1.0, -2.0], [0.5, 3.0], [0.0, 0.25]])])
def test_numbers_of_the_three_tokens_are_those_of_attention(values: torch.Tensor) -> None:
    picture = three_token_picture(Q, K, values)
    found = naive_attention(Q[:, None], K[:, None], values[:, None])
    for i in range(3):
        for j in range(3):
            assert float(text(picture, f"score{i}{j}.value")) == float(Q[i] @ K[j])
        share = float(found.weights[0, -1, i])
        assert text(picture, f"percent{i}") == f"{100 * share:.0f} %"
        assert text(picture, f"mix{i}").startswith(f"{share:.3f} · (")
    x, y = found.out[-1, 0].tolist()
    assert text(picture, "out") == f"output = ({x:.1f}, {y:.1f})"
    assert picture.caption.endswith(f"give the output ({x:.1f}, {y:.1f}).")


# -- an induction head -----------------------------------------------------------------------------


COAT = "Once upon a time Rado had an old coat. One day R"
FIRST, SECOND = (1, (3, 5)), (3, 3)


class NoValues(NaiveAttention):
    """At one token the heads of step 1 read values of zero; keeps what step 2 looks at."""

    def __init__(self, token: int) -> None:
        super().__init__(lambda layer, _, weights: self.seen.update({layer: weights}))
        self.seen: dict[int, torch.Tensor] = {}
        self.token = token

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        out = super().attend(layer, q, k, v, batch)
        if layer == FIRST[0]:
            for head in FIRST[1]:
                out[self.token, head] = super().attend(layer, q, k, 0 * v, batch)[self.token, head]
        return out


def test_numbers_of_the_two_steps_are_those_of_the_model(
    model: CausalLM, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(COAT).ids
    run = recorded_two_steps(model, ids, FIRST, SECOND)
    assert (ids[run.before], ids[run.found]) == (ids[-1], tokenizer.token_to_id("a"))
    seen: dict[int, torch.Tensor] = {}
    naive = NaiveAttention(lambda layer, _, weights: seen.update({layer: weights}))
    probs = model.compute_logits(model(Batch.from_sequences([ids]), naive))[-1].softmax(-1)
    without = NoValues(run.found)
    changed = model.compute_logits(model(Batch.from_sequences([ids]), without))[-1].softmax(-1)
    firsts = [float(seen[1][head, run.found, run.before]) for head in FIRST[1]]
    assert run.first == pytest.approx(sum(firsts) / 2, abs=1e-4)
    numbers = {
        run.second: seen[3][3, -1, run.found],
        run.chance: probs[ids[run.found]],
        run.second_without: without.seen[3][3, -1, run.found],
        run.chance_without: changed[ids[run.found]],
    }
    assert [*numbers] == pytest.approx([float(one) for one in numbers.values()], abs=1e-4)
    assert run.second_without < run.second / 2 and run.chance_without < run.chance / 2
    picture = two_steps_picture(model, tokenizer, ids, FIRST, SECOND)
    said = {item.text for item in items(picture).values()}
    shown = {f"{one:.2f}" for one in numbers}
    assert shown <= said and all(one in picture.caption for one in shown)
    assert {"“a” after “·R”", f"the last “·R” finds it, share {run.second:.2f}"} <= said


# -- the running softmax ---------------------------------------------------------------------------


where = pytest.mark.parametrize(("layer", "head", "block_size"), [(0, 0, 4), (2, 5, 3), (3, 1, 8)])


@where
def test_each_step_has_the_sums_of_all_scores_so_far_and_the_last_the_models_answer(
    layer: int, head: int, block_size: int
) -> None:
    run, scores = recorded_softmax(layer, head, block_size), list[float]()
    old = -math.inf
    for step in run.steps:
        scores += step.scores
        assert step.m == max(scores)
        total = sum(math.exp(score - step.m) for score in scores)
        assert step.total == pytest.approx(total, rel=1e-5)
        if step.correction is not None:
            assert step.correction == pytest.approx(math.exp(old - step.m))
        old = step.m
    assert len(scores) == len(run.labels) and run.steps[0].correction is None
    for other in (run.whole, run.steps[-1].answer):
        torch.testing.assert_close(torch.tensor(run.returned), torch.tensor(other))
    assert run.distance(0) > 0.1 > 1e-4 > run.distance(-1)


@where
def test_the_picture_writes_the_numbers_of_each_block(
    layer: int, head: int, block_size: int
) -> None:
    run = recorded_softmax(layer, head, block_size)
    picture = running_softmax_picture(run)
    seen = items(picture)
    for i, step in enumerate(run.steps):
        assert seen[f"block.{i}.pool"].text == f"in block {step.block}"
        assert seen[f"m.{i}"].text == f"{step.m:.2f}".replace("-", "−")
        assert seen[f"l.{i}"].text == f"{step.total:.2f}"
        for at, score in enumerate(step.scores, i * block_size):
            assert seen[f"score.{at}"].text == f"{score:.2f}".replace("-", "−")
            part = float(seen[f"bar.{at}"].attrib["width"])
            whole = float(seen[f"bar.{at}.track"].attrib["width"])
            assert part == pytest.approx(max(whole * math.exp(score - step.m), 0.5), abs=0.01)
    risen = [s.correction for s in run.steps if s.correction is not None and s.correction < 1]
    assert all(f"multiplied by {one:.3g}" in picture.caption for one in risen)
    assert ("nothing is corrected" in picture.caption) == (not risen)
    assert seen[f"distance.{len(run.steps) - 1}"].text == "< 0.0001 ✔"


def test_an_answer_that_is_wrong_is_not_called_right() -> None:
    run = recorded_softmax()
    bad = run._replace(returned=tuple(number + 1 for number in run.returned))
    assert "differs by 1" in (items(running_softmax_picture(bad))["whole.below"].text or "")
    uncorrected = run.steps[-1]._replace(acc=tuple(2 * number for number in run.steps[-1].acc))
    bad = run._replace(steps=(*run.steps[:-1], uncorrected))
    assert "✔" not in running_softmax_picture(bad).caption


# -- shapes ----------------------------------------------------------------------------------------


def test_a_walk_leaves_no_weight_out(model: CausalLM) -> None:
    """Notebook 01 prints the walk itself."""
    tiny = shape_walk(model, Batch.from_sequences([list(range(1, 11))]))
    walks = {model.num_parameters(): (tiny, 4), 596_049_920: (meta_shape_walk(QWEN3_06B, 10), 28)}
    for wanted, (steps, layers) in walks.items():
        times = [layers if step.name.startswith(" ") else 1 for step in steps]
        assert sum(n * s.num_parameters for n, s in zip(times, steps, strict=True)) == wanted


# -- the cache in memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_every_number_stands_where_the_memory_has_it(order: str) -> None:
    """The memory itself, byte after byte, against colour and tip of each box."""
    kv = kv_numbers()
    picture = layouts_picture(layouts(kv), layer=1, token=2, num_tokens=kv.shape[2])
    layout, found = KVLayout(order, kv), items(picture)
    memory = torch.frombuffer(bytearray(layout.kv.untyped_storage().tolist()), dtype=torch.float32)
    for i, value in enumerate(memory.tolist()):
        layer, which, token, head, dim = (int(x) for x in (kv == value).nonzero()[0])
        fill = LAYERS[layer].light if which else LAYERS[layer].dark
        assert found[f"{order}.{i}"].attrib["fill"] == fill
        tip = f"byte {4 * i}: layer {layer}, {'KV'[which]} of token {token}, head {head}, number"
        assert f"{tip} {dim}" in picture.svg
    boxes = [box(found[f"{order}.{i}"]) for i in range(len(memory))]
    assert boxes == sorted(boxes, key=lambda b: (b[1], b[0])) and len(set(boxes)) == len(boxes)


# -- pools -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 6])
@pytest.mark.parametrize("position", [CELLS, 1, 4, 16, ROWS])
def test_each_slot_looks_like_what_is_in_it_and_thick_frames_are_around_the_new(
    position: object, step: int
) -> None:
    point = dial_point(position)
    now, picture = point.snapshots[step], pool_picture(point, step)
    found = items(picture)
    frames = [box(e) for name, e in found.items() if name.startswith("it.new")]
    for slot in range(128):
        who = list(now.tokens.get(slot, ()))
        looks = [look(point.names.index(name)) for name in who]
        want = PAPER if slot not in now.owners else looks[0].dark if who else HATCHED
        assert found[f"it.slot{slot}"].attrib["fill"] == want
        shared = [e.attrib["fill"] for n, e in found.items() if n.startswith(f"it.slot{slot}.sh")]
        assert set(shared) - {"none"} == {one.dark for one in looks[:2] if len(who) > 1}
        x, y, wide, high = box(found[f"it.slot{slot}"])
        middle = (x + wide / 2, y + high / 2)
        framed = any(a < middle[0] < a + c and b < middle[1] < b + d for a, b, c, d in frames)
        assert framed == (slot in now.new)
