"""The numbers of the exam's questions: drawn, and each answer computed by the package.

`NUMBERS` has a function for each question that needs numbers. It gets the generator to draw with,
and returns what stands in the blanks of docs/teaching/exam.toml; "picture" is a picture to read.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.publish.cheat_sheet import found
from tutorial_engine.cache import CellTable, KVCacheSpec, PagedKVCache, StaticKVCache
from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.paged import num_blocks_in
from tutorial_engine.engine import EngineConfig, LLMEngine, VirtualClock, percentile
from tutorial_engine.engine.request import RequestOutput
from tutorial_engine.lab.roofline import Roofline
from tutorial_engine.learn import steps
from tutorial_engine.model import Batch, causal_mask, load_model, load_tokenizer, naive_attention
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.model.rope import apply_rope
from tutorial_engine.sampling import SamplingParams
from tutorial_engine.sampling.sampler import min_p, top_k, top_p
from tutorial_engine.trace import Recorder, Trace, history
from tutorial_engine.trace.events import BlockTaken, Preempted, TokenSampled
from tutorial_engine.viz import block_view, throughput_latency, token_labels
from tutorial_engine.viz.run.scheduler_run import SchedulerRun
from tutorial_engine.viz.views.scheduler_view import SchedulerView
from tutorial_engine.viz.words import listed

Numbers = dict[str, Any]
PEOPLE, THINGS = "Anna Ben Mia Tom Lily Sam".split(), ("a red kite", "a blue ball", "a green hat")


@cache
def tiny() -> tuple[CausalLM, Tokenizer]:
    """The shipped model."""
    return load_model(), load_tokenizer()


def served(
    prompts: Sequence[Sequence[int]],
    wanted: Sequence[int],
    memory: PagedKVCache | None = None,
    prices: tuple[float, float] = (0.010, 0.001),
    **limits: Any,
) -> tuple[Trace, list[RequestOutput]]:
    """Requests A, B, ... that come at once, run by the engine on a virtual clock."""
    model, tokenizer = tiny()
    config = EngineConfig(**{"max_model_len": 64, **limits})
    trace = Recorder() if memory is None else memory.trace
    engine = LLMEngine(
        model, tokenizer, config, memory=memory, clock=VirtualClock(*prices), trace=trace
    )
    for i, (ids, n) in enumerate(zip(prompts, wanted, strict=True)):
        name = chr(ord("A") + i)
        engine.add_request(name, list(ids), SamplingParams(max_tokens=n, ignore_eos=True))
    outputs = sorted(engine.run(), key=lambda out: out.request_id)
    assert trace is not None
    return trace.trace(), outputs


def texts(draw: Random, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of stories, cut to these lengths."""
    story = " ".join(f"{who} had {draw.choice(THINGS)}." for who in draw.choices(PEOPLE, k=30))
    ids = tiny()[1].encode(story).ids
    begins = draw.sample(range(len(ids) - max(lengths)), len(lengths))
    return [ids[at : at + n] for at, n in zip(begins, lengths, strict=True)]


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


# -- 01 -------------------------------------------------------------------------------------------


def _shares(draw: Random) -> Numbers:
    scores, values = draw.sample([0, 2, 4], 3), draw.sample([10, 20, 30, 40, 60], 3)
    hidden, far = 2 * draw.randint(4, 6), draw.choice([70, 80, 90])
    q = torch.tensor([1.0, 0, 0, 0])[None, None]
    k = torch.tensor([[float(s), 0, 0, 0] for s in (*scores, hidden)])[:, None]
    v = torch.eye(4)[:, None]  # the output is the shares
    got = naive_attention(q, k, v, torch.tensor([[True] * 3 + [False]])).out[0, 0]
    out = float(got @ torch.tensor([float(x) for x in (*values, far)]))
    names = table(["key", 0, 1, 2, 3], [["q · k", *scores, hidden], ["value", *values, far]])
    told = ", ".join(f"{float(one):.2f}" for one in got)
    return {"given": names, "shares": told, "out": f"{out:.1f}"}


def _pairs(draw: Random) -> Numbers:
    new, old, window = draw.randint(3, 4), draw.randint(4, 7), 3
    mask = causal_mask(new, old + new)
    near = mask & ~causal_mask(new, old + new).tril(old - window)
    kept = sum(min(window, old + i + 1) for i in range(new))
    assert int(near.sum()) == kept
    counts = {"new": new, "old": old, "all": new * (old + new), "window": window}
    counts["before"] = window - 1
    return counts | {"allowed": int(mask.sum()), "near": kept}


def _mask(draw: Random) -> Numbers:
    new, old = 3, draw.randint(3, 5)
    right = causal_mask(new, old + new)
    kinds: dict[str, Tensor] = {
        "right": right,
        "upper left": torch.ones(new, old + new).bool().tril(),
        "no mask": torch.ones(new, old + new).bool(),
    }
    order = draw.sample([*kinds], 3)
    named = dict(zip("XYZ", order, strict=True))
    letter = {kind: name for name, kind in named.items()}
    return {
        "new": new,
        "old": old,
        "right": letter["right"],
        "upper": letter["upper left"],
        "none": letter["no mask"],
        "drawn": "\n\n".join(_drawn(name, kinds[kind], old) for name, kind in named.items()),
    }


def _drawn(name: str, mask: Tensor, old: int) -> str:
    """Rows are queries, columns keys."""
    rows = [f"{name}  key    {' '.join(map(str, range(mask.shape[1])))}"]
    rows += [
        f"   query {old + i} {' '.join('x' if one else '.' for one in row)}"
        for i, row in enumerate(mask.tolist())
    ]
    return "\n".join(rows)


def _heads(draw: Random) -> Numbers:
    kv, group = draw.choice([4, 8]), draw.choice([2, 4])
    h = draw.randrange(group + 1, kv * group)
    k = torch.zeros(1, kv, 2)
    v = torch.arange(float(kv))[None, :, None]  # the value says which head it is
    reads = int(naive_attention(torch.zeros(1, kv * group, 2), k, v).out[0, h, 0])
    return {"heads": kv * group, "kv": kv, "h": h, "reads": reads, "times": group}


def _rope(draw: Random) -> Numbers:
    angle, distance, first = draw.choice([15, 20, 30]), draw.choice([2, 3]), draw.randint(4, 9)
    more = draw.choice([100, 400])
    q = torch.tensor([1.0, 0.0])[None, None]

    def score(at: int) -> float:
        turns = torch.tensor([float(angle * p) for p in (at + distance, at)]).deg2rad()[
            :, None, None
        ]
        both = apply_rope(q.repeat(2, 1, 1), turns.cos(), turns.sin())
        return float((both[0] * both[1]).sum())

    assert abs(score(first) - score(first + more)) < 1e-4
    return {
        "angle": angle,
        "later": first + distance,
        "earlier": first,
        "turn": angle * distance,
        "score": f"{score(first):.2f}",
        "more": more,
    }


def _cost(draw: Random) -> Numbers:
    prompt, new = draw.choice([20, 30, 40]), draw.choice([5, 8, 10])
    (ids,) = texts(draw, [prompt])
    ran = list[int]()
    for n in range(new):  # without a cache: the whole text each time
        batch = Batch.from_sequences([[*ids, *ids[:n]]])
        ran.append(len(batch.input_ids))
    trace, _ = served([ids], [new])
    kept = sum(sum(step.values()) for step in steps(trace))
    return {"prompt": prompt, "new": new, "without": sum(ran), "with": kept, "last": ran[-1]}


# -- 02 -------------------------------------------------------------------------------------------


def _price(draw: Random) -> Numbers:
    layers, kv = draw.choice([24, 28, 32]), draw.choice([4, 8])
    head_dim, group = draw.choice([64, 128]), draw.choice([2, 4])
    context, room = draw.choice([2048, 4096, 8192]), draw.choice([10, 12, 16])
    sizes: Numbers = {"k_head_dim": head_dim, "v_head_dim": head_dim, "dtype": torch.bfloat16}
    spec = KVCacheSpec(num_layers=layers, num_kv_heads=kv, **sizes)
    each = spec.bytes_per_token * context
    return {
        "layers": layers,
        "heads": kv * group,
        "kv": kv,
        "head_dim": head_dim,
        "context": f"{context:,}",
        "room": room,
        "token": f"{spec.bytes_per_token:,}",
        "each": f"{each / 2**20:,.0f}",
        "users": room * 2**30 // each,
        "group": group,
    }


def _slots(draw: Random) -> Numbers:
    length, cached = draw.choice([16, 32]), [draw.randint(3, 6), 0, draw.randint(7, 9)]
    new = [1, draw.randint(3, 4), 2]
    memory = StaticKVCache.from_config(tiny()[0].config, max_seqs=3, max_len=length)
    given = list[int]()
    for name, old, more in zip("ABC", cached, new, strict=True):
        memory.allocate(name, range(old), 0, old)
        taken = memory.allocate(name, range(old + more), old, more)
        assert taken is not None, "there is a row for each"
        given += taken.new_slots
    rows = [["row", 0, 1, 2], ["cached tokens", *cached], ["new tokens", *new]]
    return {
        "length": length,
        "given": table(rows[0], rows[1:]),
        "slots": ", ".join(map(str, given)),
    }


def _roofline(draw: Random) -> Numbers:
    weights, bandwidth = draw.choice([2, 4, 8]), draw.choice([0.5, 1, 2])
    batch = draw.choice([8, 16])
    machine = Roofline(bandwidth * 1e12, draw.choice([100, 200, 300]) * 1e12)
    read = 2 * weights * 1e9 / machine.bandwidth
    work = 2 * weights * 1e9 * batch / machine.peak_flops
    assert work < read
    return {
        "weights": weights,
        "bandwidth": f"{bandwidth:g}",
        "peak": f"{machine.peak_flops / 1e12:g}",
        "batch": batch,
        "one": f"{1000 * read:g}",
        "work": f"{1000 * work:.2g}",
        "ridge": f"{machine.ridge:,.0f}",
    }


def _filters(draw: Random) -> Numbers:
    percent = draw.choice([(50, 25, 15, 6, 4), (40, 30, 14, 10, 6), (60, 20, 12, 5, 3)])
    logits = torch.tensor(percent).log()[None]

    def left(k: int, p: float, least: float) -> list[int]:
        kept = (top_k(logits, k), top_p(logits, p), min_p(logits, least))
        return [int(one.isfinite().sum()) for one in kept]

    every = [(k, p, least) for k in (3, 4) for p in (0.6, 0.7, 0.85) for least in (0.1, 0.2, 0.3)]
    k, p, least = draw.choice([one for one in every if len({*left(*one)}) == 3])
    return {
        "given": table(["token", *"abcde"], [["probability", *(f"{x / 100:g}" for x in percent)]]),
        "k": k,
        "p": p,
        "least": least,
        "left": listed(map(str, left(k, p, least))),
        "border": f"{least * percent[0] / 100:.2g}",
    }


# -- 03 -------------------------------------------------------------------------------------------


def _plan(draw: Random) -> Numbers:
    lengths, wanted = [draw.randint(9, 11), draw.randint(5, 7), draw.randint(2, 4)], [4, 3, 3]
    budget, places = 8, 2
    limits: Numbers = {"max_num_batched_tokens": budget, "max_num_seqs": places}
    trace, _ = served(texts(draw, lengths), wanted, **limits)
    ran = steps(trace)[:5]
    got = [[*step.by_request(TokenSampled)] for step in history(trace)][:5]
    rows = [
        [i, *(one.get(name, "–") for name in "ABC"), ", ".join(names) or "nobody"]
        for i, (one, names) in enumerate(zip(ran, got, strict=True))
    ]
    head = ["step", "A", "B", "C", "new token for"]
    empty = table(head, [[i, "", "", "", ""] for i in range(5)])
    told = dict(zip("abc", lengths, strict=True)) | {"budget": budget, "places": places}
    return told | {"empty": empty, "filled": table(head, rows)}


def _timeline(draw: Random) -> Numbers:
    lengths = [draw.randint(9, 11), draw.randint(5, 7), draw.randint(3, 5)]
    limits: Numbers = {"max_num_batched_tokens": 8, "max_num_seqs": 2}
    trace, outputs = served(texts(draw, lengths), [5, 3, 4], **limits)
    labels = dict(enumerate(token_labels(tiny()[1], [*range(512)])))
    run = SchedulerRun.of(trace, labels)
    ttft = outputs[2].metrics.ttft
    tpot = outputs[1].metrics.tpot
    assert ttft is not None and tpot is not None
    ran = steps(trace)
    first = next(i for i, one in enumerate(ran) if "C" in one)
    lasted = [10 + sum(one.values()) for one in ran[: first + 1]]
    assert sum(lasted) == round(1000 * ttft), "C reads its prompt in one step"
    return {
        "picture": SchedulerView(run, details=False)
        .scene(0)
        .picture("Requests A, B and C come at once; the budget is 8 tokens."),
        "lasted": " + ".join(map(str, lasted)),
        "ttft": f"{1000 * ttft:.0f}",
        "tpot": f"{1000 * tpot:.1f}",
        "first": first,
    }


def _budget(draw: Random) -> Numbers:
    forward, gap = draw.choice([8, 10, 12]), draw.choice([40, 50, 60])
    most = gap - forward

    def longest(size: int) -> float:
        ids = texts(draw, [4, 100])
        prices = (forward / 1000, 0.001)
        limits: Numbers = {"max_num_batched_tokens": size, "max_model_len": 160}
        _, outs = served(ids, [24, 2], prices=prices, **limits)
        return 1000 * max(outs[0].metrics.itl)

    assert longest(most) < gap + 1e-6 < longest(most + 1)
    prompt = draw.choice([600, 900, 1200])
    return {
        "forward": forward,
        "gap": gap,
        "most": most,
        "prompt": prompt,
        "chunks": math.ceil(prompt / (most - 1)),
        "left": most - 1,
    }


def _curve(draw: Random) -> Numbers:
    sizes, forward = [1, 2, 4, 8, 16], draw.choice([0.008, 0.010, 0.012])
    ids, points = texts(draw, [6] * 16), list[tuple[object, float, float]]()
    for size in sizes:
        _, outs = served(ids, [16] * 16, prices=(forward, 0.001), max_num_seqs=size)
        end = max(out.metrics.finished or 0.0 for out in outs)
        tpot = percentile([out.metrics.tpot or 0.0 for out in outs], 50)
        points.append((size, 256 / end, 1000 * tpot))
    at = draw.choice([1, 2, 3])
    promise = round((points[at][2] + points[at + 1][2]) / 2)
    return {
        "picture": throughput_latency({"this engine": points}, "TPOT", "max_num_seqs"),
        "promise": promise,
        "size": sizes[at],
        "speed": f"{points[at][1]:.0f}",
        "tpot": f"{points[at][2]:.0f}",
        "next": f"{points[at + 1][2]:.0f}",
    }


# -- 04 -------------------------------------------------------------------------------------------


def _blocks(draw: Random) -> Numbers:
    layers, kv, size = draw.choice([16, 24]), draw.choice([2, 4]), 16
    spec = KVCacheSpec(
        num_layers=layers, num_kv_heads=kv, k_head_dim=64, v_head_dim=64, dtype=torch.bfloat16
    )
    room, length = draw.choice([100, 150, 250]), draw.choice([512, 1024])
    number = num_blocks_in(room * 2**20, spec, size)
    return {
        "layers": layers,
        "kv": kv,
        "size": size,
        "room": room,
        "length": f"{length:,}",
        "block": f"{spec.bytes_per_token * size:,}",
        "number": f"{number:,}",
        "tokens": f"{number * size:,}",
        "times": f"{number * size / length:.2f}x",
    }


def _pages(draw: Random) -> Numbers:
    lengths, step = [draw.randint(6, 7), draw.randint(6, 7), draw.randint(2, 3)], 3
    memory = PagedKVCache.from_config(
        tiny()[0].config, num_blocks=10, block_size=4, prefix_caching=False, trace=Recorder()
    )
    trace, _ = served(texts(draw, lengths), [8, 8, 8], memory, max_num_batched_tokens=64)
    past = [*history(trace)]
    one = past[step].after.requests
    labels = dict(enumerate(token_labels(tiny()[1], [*range(512)])))
    who = draw.choice("AB")
    pos = one[who].num_computed_tokens - 1
    assert pos >= 8, "in its third block, behind the blocks of others"
    block = one[who].table[pos // 4]
    known = {name: one[name].num_computed_tokens for name in "ABC"}
    next_step, taken = next(
        (later.number, [*later.by_request(BlockTaken).values()])
        for later in past[step + 1 :]
        if later.by_request(BlockTaken)
    )
    free = sorted(set(range(10)) - {b for state in one.values() for b in state.table})
    empty = {name: len(one[name].table) * 4 - known[name] for name in "ABC"}
    return {
        "picture": block_view(trace, step, labels, simple=True),
        "who": who,
        "pos": pos,
        "logical": pos // 4,
        "block": block,
        "offset": pos % 4,
        "slot": block * 4 + pos % 4,
        "free": listed(map(str, free)) if free else "none",
        "empty": ", ".join(f"{name} {n}" for name, n in empty.items()),
        "step": next_step,
        "next": listed([f"{one.request_id} (block {one.block})" for one in taken]),
    }


def _cells(draw: Random) -> Numbers:
    a, shared, more = draw.choice([5, 6]), draw.choice([2, 3]), 2
    lost = draw.randrange(shared, a - 1)
    them = CellTable(9)
    them.place(them.find_slot(a) or [], "A", range(a))
    them.seq_cp("A", "B", 0, shared)
    them.place(them.find_slot(more) or [], "B", range(shared, shared + more))
    them.seq_rm("A", lost, lost + 1)
    said = str(them)
    (cell,) = them.find_slot(1) or [-1]
    seen = them.visible("B", shared + more)
    freed = them.seq_rm("A")
    return {
        "table": said,
        "cell": cell,
        "seen": listed(map(str, sorted(seen))),
        "freed": listed(map(str, sorted(freed))),
    }


def _softmax(draw: Random) -> Numbers:
    first, second = draw.choice([((1, 2), (4, 2)), ((2, 1), (3, 4)), ((0, 2), (3, 1))])
    values = draw.sample([1, 2, 3, 4, 5], 4)
    m1, m2 = max(first), max(*first, *second)
    l1 = sum(math.exp(s - m1) for s in first)
    factor = math.exp(m1 - m2)
    l2 = l1 * factor + sum(math.exp(s - m2) for s in second)
    acc1 = sum(math.exp(s - m1) * v for s, v in zip(first, values[:2], strict=True))
    acc2 = acc1 * factor + sum(
        math.exp(s - m2) * v for s, v in zip(second, values[2:], strict=True)
    )
    scores = torch.tensor([float(s) for s in (*first, *second)])
    whole = naive_attention(
        torch.ones(1, 1, 1), scores[:, None, None], torch.tensor(values).float()[:, None, None]
    ).out
    assert abs(float(whole) - acc2 / l2) < 1e-4
    rows = [["score", *first, *second], ["value", *values]]
    return {
        "given": table(["token", 0, 1, 2, 3], rows),
        "m1": m1,
        "l1": f"{l1:.2f}",
        "acc1": f"{acc1:.2f}",
        "m2": m2,
        "factor": f"{factor:.3f}",
        "l2": f"{l2:.2f}",
        "acc2": f"{acc2:.2f}",
        "out": f"{acc2 / l2:.2f}",
    }


# -- 05 and 06 ------------------------------------------------------------------------------------


def _prefix(draw: Random) -> Numbers:
    size, prompt = draw.choice([4, 8]), draw.choice([24, 32, 40])
    equal = draw.randrange(size + 1, prompt - 1)
    return {
        "size": size,
        "prompt": prompt,
        "equal": equal,
        "same": found(prompt, prompt, size),
        "other": found(prompt, equal, size),
        "run": prompt - found(prompt, equal, size),
    }


def _queue(draw: Random) -> Numbers:
    size, tokens, taken = 4, draw.choice([14, 15, 18]), draw.choice([6, 7])
    number = 8
    them = BlockManager(number, size)
    ids = [*range(tokens)]
    them.admit("A", ids)
    held = [*them.tables["A"]]
    them.cache_full_blocks("A", ids, tokens)
    them.commit("A", tokens)
    them.free("A")
    order = [*them.free_queue]
    them.admit("B", [1000 + i for i in range(taken * size)])
    kept = len(them.find([*ids, 0]))
    return {
        "number": number,
        "tokens": tokens,
        "table": ", ".join(map(str, held)),
        "others": listed(map(str, sorted(set(range(number)) - set(held)))),
        "order": ", ".join(map(str, order)),
        "taken": taken,
        "gone": ", ".join(map(str, order[:taken])),
        "kept": kept,
        "found": kept * size,
    }


def _preempt(draw: Random) -> Numbers:
    lengths = [draw.randint(9, 11), draw.randint(6, 8), draw.randint(5, 7)]
    memory = PagedKVCache.from_config(
        tiny()[0].config, num_blocks=8, block_size=4, prefix_caching=False, trace=Recorder()
    )
    trace, _ = served(texts(draw, lengths), [8, 8, 8], memory, max_num_batched_tokens=64)
    past = [*history(trace)]
    at = next(i for i, step in enumerate(past) if step.by_request(Preempted))
    who = next(iter(past[at].by_request(Preempted)))
    before = past[at].before.requests
    known = len(before[who].token_ids)
    again = next(step for step in past[at:] if who in step.scheduled).scheduled[who]
    assert len(again.slots) == known, "all of it, in one step"
    rows = [
        [name, one.num_prompt_tokens, one.num_computed_tokens, len(one.table)]
        for name, one in before.items()
        if one.table
    ]
    return {
        "given": table(["request", "prompt tokens", "computed tokens", "blocks"], rows),
        "who": who,
        "lost": before[who].num_computed_tokens,
        "blocks": len(before[who].table),
        "known": known,
    }


def _halves(draw: Random) -> Numbers:
    layers = draw.choice([24, 36, 48, 60])
    return {"layers": layers, "runs": math.ceil(math.log2(layers))}


def _turns(draw: Random) -> Numbers:
    first, answer, question = draw.randint(30, 45), draw.randint(10, 20), draw.randint(15, 25)
    cached, prompt = first + answer - 1, first + answer + question
    return {
        "first": first,
        "answer": answer,
        "prompt": prompt,
        "cached": cached,
        "found": found(prompt, cached, 16),
        "run": prompt - found(prompt, cached, 16),
        "blocks": found(prompt, cached, 16) // 16,
    }


NUMBERS: dict[str, Callable[[Random], Numbers]] = {
    one.__name__.lstrip("_"): one
    for one in (
        *(_shares, _pairs, _mask, _heads, _rope, _cost, _price, _slots, _roofline, _filters),
        *(_plan, _timeline, _budget, _curve, _blocks, _pages, _cells, _softmax),
        *(_prefix, _queue, _preempt, _halves, _turns),
    )
}
