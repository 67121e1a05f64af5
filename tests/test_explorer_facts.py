"""What each explorer shows is what the engine wrote, read and chose, step by step."""

import random
import re
from typing import Any

import pytest
import torch
from explorers import caption_of, items, message_of, tips, turn, words
from inputs import PROMPTS
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tutorial_engine.engine.generate import generate
from tutorial_engine.lab.dial import Dial
from tutorial_engine.learn import OwnServer, check_num_tokens, check_plan, own_scheduler
from tutorial_engine.learn.own_scheduler import plan_step as right
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import Sampler, filter_logits
from tutorial_engine.trace.events import TokenSampled
from tutorial_engine.trace.pool import CELLS, ROWS
from tutorial_engine.viz.attention_explorer import AttentionExplorer, attention_weights
from tutorial_engine.viz.block_explorer import BlockExplorer
from tutorial_engine.viz.cache_explorer import CacheExplorer
from tutorial_engine.viz.calculator import MemoryCalculator, preset
from tutorial_engine.viz.cell_explorer import (
    AGAIN,
    APPEND,
    OPERATIONS,
    RESET,
    CellExplorer,
)
from tutorial_engine.viz.dial_explorer import DialExplorer
from tutorial_engine.viz.recorded import ALL_AT_ONCE, LATE_LONG, ONE_BY_ONE
from tutorial_engine.viz.sampling_explorer import MOST_DRAWS, SamplingExplorer
from tutorial_engine.viz.scene import HATCHED
from tutorial_engine.viz.scheduler_explorer import (
    CLASSES,
    DETAILS,
    MINE,
    STEPS,
    SchedulerExplorer,
)
from tutorial_engine.viz.scheduler_view import COLUMNS, OVER
from tutorial_engine.viz.tokens import token_label, token_labels
from tutorial_engine.viz.words import counted, percent

# -- attention and RoPE ----------------------------------------------------------------------------


KITE = "Anna had a red kite. Ben had a hat. Anna"


@pytest.fixture
def attention(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> AttentionExplorer:
    return AttentionExplorer(model, tokenizer, KITE)


def test_weights_are_those_of_transformers(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(KITE).ids
    reference = AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32, attn_implementation="eager"
    )
    theirs = reference(torch.tensor([ids]), output_attentions=True).attentions
    ours = attention_weights(model, ids)
    assert ours.shape == (4, 6, len(ids), len(ids))
    assert (ours - torch.cat(theirs)).abs().max() < 1e-4


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (3, 5), (2, 1)])
def test_tips_and_captions_hold_the_weights_that_the_engine_returned(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    attention: AttentionExplorer,
    layer: int,
    head: int,
) -> None:
    ids = tokenizer.encode(KITE).ids
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


@pytest.mark.parametrize(
    ("prompt", "layer", "head"),
    [
        ("Once upon a time Rado had an old coat. One day R", 3, 3),
        ("Once upon a time Anna had a red kite. Ben had a blue ball. One day Anna", 3, 3),
    ],
)
def test_what_the_model_predicts_stands_beside_what_the_head_looks_at(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompt: str, layer: int, head: int
) -> None:
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


AS_TYPED = dict(zip("ABC", PROMPTS, strict=True))


@pytest.fixture(scope="module")
def shared_cache(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> CacheExplorer:
    return CacheExplorer(model, tokenizer, PROMPTS, new_tokens=5)


@pytest.fixture
def cache(shared_cache: CacheExplorer) -> CacheExplorer:
    """An cache as it is when new, without running the engine for every test."""
    return turn(shared_cache, step=0, **AS_TYPED, chunk=0)


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


@pytest.mark.parametrize("chunk", [0, 4])
def test_slot_is_row_times_length_plus_position(cache: CacheExplorer, chunk: int) -> None:
    turn(cache, chunk=chunk)
    length = cache.run.row_len
    for step in cache.run.steps:
        for row, part in step.parts.items():
            assert part.slots == tuple(row * length + position for position in part.positions)
            assert part.reads == (row * length, part.positions[-1] + 1)
    for slot, stored in cache.run.stored.items():
        assert stored.position == slot % length
    assert any(slot != one.position for slot, one in cache.run.stored.items())


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


@pytest.fixture(scope="module")
def shared_sampling() -> SamplingExplorer:
    return SamplingExplorer(load_model(), load_tokenizer(), FLAT)


@pytest.fixture
def sampling(shared_sampling: SamplingExplorer) -> SamplingExplorer:
    """The tiny model at a flat place, every filter off, at the last step."""
    shared_sampling._set_draws(10)
    return turn(shared_sampling, 4, prompt=FLAT, **NO_FILTER)


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


def test_nothing_is_lost_without_a_filter(sampling: SamplingExplorer) -> None:
    turn(sampling, 4, **NO_FILTER)
    assert sampling.stages[4].mass == 1 and "lost" not in caption_of(sampling)


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


def test_draws_are_those_of_the_engines_sampler(sampling: SamplingExplorer) -> None:
    turn(sampling, temperature=1.5, top_k=9, seed=7)
    sampler = Sampler(SamplingParams(temperature=1.5, top_k=9, seed=7))
    want = [sampler.sample(sampling.logits).token_id for _ in range(20)]
    sampling.buttons["draw"].click()
    assert sampling.draws(4) == want
    assert words(sampling, "draws") == ["20 draws, seed 7"]
    for i, token in enumerate(sampling.shown_ids):
        count = want.count(token)
        assert words(sampling, rf"drawn{i}\.n") == ([str(count)] if count else [])
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


@pytest.fixture
def calculator() -> MemoryCalculator:
    return MemoryCalculator(preset("Qwen3-0.6B"))


def test_lines_are_as_vllm_logs_them(calculator: MemoryCalculator) -> None:
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


@pytest.fixture(scope="module")
def shared_cells(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> CellExplorer:
    return CellExplorer(model, tokenizer)


@pytest.fixture
def cells(shared_cells: CellExplorer) -> CellExplorer:
    """An cells as it is when new."""
    shared_cells.buttons[AGAIN].click()
    return turn(shared_cells, shared_cells.num_steps - 1)


def press(cells: CellExplorer, name: str, **knobs: Any) -> str:
    """As a learner does it; the message that is shown then."""
    turn(cells, **knobs).buttons[name].click()
    return message_of(cells)


@pytest.mark.parametrize("number", range(3))
def test_text_is_the_tables_after_any_operations(cells: CellExplorer, number: int) -> None:
    """The rest of the picture is drawn from the same snapshot as in test_view_facts."""
    draw, refused = random.Random(number), 0
    for _ in range(24):
        knobs: dict[str, Any] = {
            "seq": draw.randint(0, 3),
            "dst": draw.randint(0, 3),
            "p0": draw.randint(-1, 5),
            "p1": draw.choice([-1, -1, draw.randint(0, 9)]),
            "delta": draw.randint(-3, 3),
            "text": draw.choice([" Ella", " red kite", " a"]),
        }
        name = draw.choice([n for n in OPERATIONS if n != RESET] + [APPEND, APPEND])
        knobs = {knob: knobs[knob] for knob in OPERATIONS[name][0]}
        steps, table = cells.num_steps, repr(cells.cache.table)
        if press(cells, name, **knobs):
            refused += 1
            assert (cells.num_steps, repr(cells.cache.table)) == (steps, table)
        else:
            assert cells.num_steps == steps + 1 == cells.slider.max + 1
        cells.cache.check_integrity()
        for cell in range(cells.num_cells):
            pos = cells.cache.table[cell].pos
            assert words(cells, rf"row\.{cell}\.pos") == ["–" if pos is None else str(pos)]
        for seq in cells.cache.table.seq_ids:
            order = cells.cache.table.cells_of(seq)
            shown = [words(cells, rf"text\.{seq}\.{cell}\.token")[0] for cell in order]
            assert shown == [cells.labels[cell] for cell in order]
    assert refused < 16


@pytest.mark.parametrize(
    ("name", "knobs", "says"),
    [
        ("seq_add", {"seq": 1, "p0": 2, "delta": -1}, "(1, 2, −1, −1): sequences [0, 1] share"),
        (APPEND, {"seq": 0, "text": "One day Anna and Ben"}, "cell each, 2 of 8 are empty"),
        (APPEND, {"seq": 0, "text": ""}, "there is no text"),
        ("seq_unshare", {"seq": 1}, "sequence 1 shares 4 cells, 2 are empty"),
        ("seq_add", {"seq": 1, "p0": 4, "delta": 999}, "positions end at 999"),
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


KITE_STORY = "Once upon a time Anna had a red kite."


FIVE = [
    KITE_STORY,
    "Ben had a blue ball.",
    f"{KITE_STORY} Ben had a blue ball.",
    "One day",
    f"{KITE_STORY} The",
]


WANTED = (10, 6, 8, 12, 5)


POSITIONS = [CELLS, 1, 2, 4, 8, 16, ROWS]


every_position = pytest.mark.parametrize("position", POSITIONS)


def new_dial(model: Qwen3ForCausalLM, tokenizer: Tokenizer, **options: Any) -> DialExplorer:
    return DialExplorer(model, tokenizer, FIVE, WANTED, **options)


@pytest.fixture(scope="module")
def shared_dial(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> DialExplorer:
    dial = new_dial(model, tokenizer)
    for position in POSITIONS:
        turn(dial, block_size=position)
    return dial


@pytest.fixture
def dial(shared_dial: DialExplorer) -> DialExplorer:
    """An dial at rows and step 0 that has been everywhere."""
    return turn(shared_dial, 0, block_size=ROWS)


@every_position
def test_every_position_gives_the_tokens_of_generate_alone(
    dial: DialExplorer, position: Any
) -> None:
    turn(dial, block_size=position)
    point = dial.point
    assert point.position == position and point.tokens_equal and not dial.error
    for prompt, number, alone in zip(FIVE, WANTED, dial.dial.expected, strict=True):
        params = SamplingParams(max_tokens=number)
        (output,) = generate(dial.dial.model, prompt, params, tokenizer=dial.dial.tokenizer)
        assert output.outputs[0].token_ids == alone


def test_the_engine_runs_once_at_each_position_and_only_on_demand(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    at = Dial.at

    def noted(self: Dial, position: Any) -> Any:
        asked.append(position)
        return at(self, position)

    monkeypatch.setattr(Dial, "at", noted)
    dial = new_dial(model, tokenizer, block_size=8)
    for position in (4, CELLS, 4, 8, CELLS):
        turn(dial, 3, block_size=position)
    assert asked == [8, 4, CELLS] and set(dial.points) == {8, 4, CELLS}


# -- the scheduler ---------------------------------------------------------------------------------


AS_NEW = {"policy": "one rule", "budget": 8, "max_num_seqs": 3, "arrivals": ALL_AT_ONCE}
AS_NEW |= {"show": DETAILS}


@pytest.fixture(scope="module")
def shared_scheduler(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> SchedulerExplorer:
    return SchedulerExplorer(model, tokenizer, PROMPTS)


@pytest.fixture
def scheduler(shared_scheduler: SchedulerExplorer) -> SchedulerExplorer:
    """An scheduler as it is when new."""
    return turn(shared_scheduler, step=0, **AS_NEW)


def test_requests_come_when_the_pattern_says(scheduler: SchedulerExplorer) -> None:
    came = {}
    for pattern in (ALL_AT_ONCE, ONE_BY_ONE, LATE_LONG):
        turn(scheduler, arrivals=pattern)
        came[pattern] = [scheduler.run.came(name) for name in scheduler.run.lives]
    assert came == {ALL_AT_ONCE: [0, 0, 0], ONE_BY_ONE: [0, 3, 6], LATE_LONG: [0, 0, 0, 4]}


FIVE = [*PROMPTS, "Tom saw a dog.", "Mia had a red hat."]


@pytest.fixture
def five(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> SchedulerExplorer:
    """As notebook 03 opens it."""
    server = OwnServer(model, tokenizer)
    mine = server.as_written
    return SchedulerExplorer(model, tokenizer, FIVE, [6, 3, 5, 8, 4], max_num_seqs=2, mine=mine)


def test_the_four_policies_take_four_numbers_of_steps(five: SchedulerExplorer) -> None:
    took = {policy: turn(five, policy=policy).num_steps for policy in CLASSES}
    assert len({*took.values()}) == 4 and min(took, key=lambda policy: took[policy]) == "one rule"


def test_a_pool_has_room_for_the_longest_prompt_wherever_its_knobs_stand(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
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


def test_who_stalls_is_told_whether_there_was_budget(five: SchedulerExplorer) -> None:
    server: Any = five.mine.__self__  # type: ignore[union-attr]
    rules = {
        "no budget is left": own_scheduler.waiting_first,
        "the policy gave nothing": lambda *work: dict([*right(*work).items()][-1:]),
    }
    for why, rule in rules.items():

        def plan_step(*work: Any, rule: Any = rule) -> Any:
            return rule(*work)

        assert server.use(plan_step, check_plan).verdict.ok is False
        turn(five, policy="one rule")
        turn(five, policy=MINE)
        stalls = [(n, s) for s in range(five.num_steps) for n in five.run.doing("stalls", s)]
        assert stalls
        for name, step in stalls:
            assert five.run.outcome(name, step) == f"runs nothing: {why}"
            assert f"stall{'s' * (len(five.run.doing('stalls', step)) == 1)}: {why}" in (
                five.caption(step)
            )


@pytest.mark.parametrize("step", [0, 4])
def test_a_rule_of_ones_own_that_fails_is_shown_up_to_there(
    five: SchedulerExplorer, step: int
) -> None:
    asked = [0]

    def plan_step(*work: Any) -> dict[str, int]:
        asked[0] += 1
        return {} if asked[0] > step else right(*work)

    before = turn(five, policy="static batching").num_steps
    plugged = five.mine.__self__.use(plan_step, check_plan)  # type: ignore[union-attr]
    assert plugged.verdict.ok is False
    asked[0] = 0
    turn(five, policy=MINE)
    said = f"It stops before step {step}: your plan_step gave {{}}, which no step can run"
    assert said in (five.note if step else five.error)
    assert five.num_steps == (step or before)


def test_a_rule_that_gives_tokens_only_to_who_has_no_place_is_told_so(
    five: SchedulerExplorer,
) -> None:
    def plan_step(running: Any, waiting: Any, budget: int, max_num_seqs: int) -> dict[str, int]:
        return right([], [*waiting, *running], budget, max_num_seqs)

    assert five.mine.__self__.use(plan_step, check_plan).verdict.ok is False  # type: ignore[union-attr]
    turn(five, policy=MINE)
    assert five.note.endswith(
        "It stops before step 2: your plan_step gave {'C': 3, 'D': 5}, but all places are taken, "
        "by A and B, who get nothing"
    )


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
        gone = [name for name in run.lives if not items(scheduler, f"asked.{name}.known")]
        assert set(gone) == {*run.over(step), *run.to_come(step)}


# -- blocks ----------------------------------------------------------------------------------------


def test_the_explorer_of_notebook_05_evicts_at_7_blocks_and_preempts_at_5(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    prompts = [PROMPTS[0], "Once upon a time Anna had a blue ball.", PROMPTS[2]]
    explorer = BlockExplorer(model, tokenizer, prompts)

    def told(word: str) -> dict[int, str]:
        steps = enumerate(explorer.run.steps)
        return {i: fact for i, step in steps for fact in step.facts if word in fact}

    explorer.set(num_blocks=8)
    assert not told("evicted") and not told("preempted")
    explorer.set(num_blocks=7)
    assert told("evicted").keys() == {8} and told("evicted")[8].startswith("C takes block 2")
    for num_blocks in (7, 6):
        explorer.set(num_blocks=num_blocks)
        assert not told("preempted")
    explorer.set(num_blocks=5)
    assert told("preempted").keys() == {9} and told("preempted")[9].startswith("C is preempted")
    explorer.set(num_blocks=24)
    assert told("finds")[3].startswith("B finds 4 tokens")
    explorer.set(block_size=1)
    assert told("finds")[3].startswith("B finds 7 tokens")
