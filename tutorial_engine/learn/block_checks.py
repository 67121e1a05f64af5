"""Introduced in notebook 04. The checks of the exercises on blocks: eviction, a bug to be found."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from tokenizers import Tokenizer

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.learn.bugs_04 import BLOCK_SIZE, StaleBlocks, pages, scenes, serve
from tutorial_engine.learn.own_memory import free as right_free
from tutorial_engine.learn.own_memory import take as right_take
from tutorial_engine.learn.parts import listed, whole
from tutorial_engine.learn.verdict import Verdict, guarded, has_gap, not_done
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.trace.events import Added, BlockCached, BlockShared, BlockTaken

# ---- eviction


def check_free(free: Callable[..., object]) -> Verdict:
    """Check free(table, ref_cnt, free_queue): by hand, then beside the package's BlockManager."""
    return _checked("free", free, _free_by_hand, partial(_beside_ours, free, right_take))


def check_take(take: Callable[..., object]) -> Verdict:
    """Check take(free_queue, names, cached) → block, in the same two ways."""
    return _checked("take", take, _take_by_hand, partial(_beside_ours, right_free, take))


def _checked(
    name: str,
    part: Callable[..., object],
    by_hand: Callable[[Callable[..., object]], Verdict | None],
    beside_ours: Callable[[int], str],
) -> Verdict:
    def run() -> Verdict:
        bad = by_hand(part)
        if bad is not None:
            return bad
        difference = next(filter(None, map(beside_ours, range(10))), "")
        if difference:
            return Verdict(False, f"{name}: {difference}")
        return Verdict(True, f"{name}: queue and cache are always as the package has them")

    return guarded(name, run, part)


def _free_by_hand(free: Callable[..., object]) -> Verdict | None:
    ref_cnt, queue = dict.fromkeys((0, 1, 2, 3), 1), [7, 8]
    got = free([0, 1, 2, 3], ref_cnt, queue)
    if queue == [7, 8] and set(ref_cnt.values()) == {1}:
        if has_gap(free):
            return Verdict(None, "not done yet: there is still a `...` in free")
        return Verdict(
            False,
            "free: neither ref_cnt nor free_queue has changed; change them in place: count down "
            "in ref_cnt, and append to free_queue",
        )
    told = f"free: the table [0, 1, 2, 3] and the queue [7, 8] became the queue {queue}"
    if listed(got) and queue == [7, 8]:
        return Verdict(
            False,
            f"{told}; `free_queue = free_queue + ...` makes a new list that nobody else sees: "
            "change it in place, free_queue.append(block)",
        )
    why = {
        (7, 8, 0, 1, 2, 3): "head first: after 7 and 8, block 0 is taken next, and then whoever "
        "has this prefix finds nothing, though 1, 2 and 3 are still there; last block first",
        (3, 2, 1, 0, 7, 8): "put them at the end: 7 and 8 have been free for longer",
        (0, 1, 2, 3, 7, 8): "put them at the end, the last block first",
        (7, 8): "four blocks are nobody's now: free_queue must get them, and `free_queue = "
        "free_queue + ...` makes a new list that nobody else sees: change it in place",
    }
    if queue != [7, 8, 3, 2, 1, 0]:
        known = why.get(tuple(queue), "expected [7, 8, 3, 2, 1, 0]")
        return Verdict(False, f"{told}; {known}")
    if any(ref_cnt.values()):
        return Verdict(
            False, f"free: nobody holds these blocks, ref_cnt says {ref_cnt}; expected 0"
        )
    ref_cnt, queue = {0: 2, 1: 2, 4: 1}, [7]
    free([0, 1, 4], ref_cnt, queue)
    if 0 in queue or 1 in queue:
        return Verdict(False, "free: block 0 is in another's table still (ref_cnt 2); not free")
    counts = {block: ref_cnt.get(block, 0) for block in (0, 1, 4)}
    if queue != [7, 4] or counts != {0: 1, 1: 1, 4: 0}:
        return Verdict(
            False,
            f"free: of the table [0, 1, 4] another holds 0 and 1, and now ref_cnt is {counts} and "
            f"the queue {queue}; expected {{0: 1, 1: 1, 4: 0}} and [7, 4]",
        )
    return None


def _take_by_hand(take: Callable[..., object]) -> Verdict | None:
    queue, names, cached = [3, 5], {1: "one", 3: "three", 5: None}, {"one": 1, "three": 3}
    got = take(queue, names, cached)
    bad = not_done("take", got, take)
    if bad is not None:
        return bad
    if whole(got) != 3:
        return Verdict(False, f"take: got {got!r} of the queue [3, 5]; the first one is next: 3")
    if queue != [5]:
        return Verdict(
            False,
            f"take: the queue [3, 5] became {queue}; 3 is taken, expected [5] (in place: "
            "free_queue.pop(0))",
        )
    if "three" in cached:
        return Verdict(
            False,
            "take: block 3 is taken, and its old name still leads to it: whoever looks for that "
            "prefix will read another request's tokens (the freed-block bug)",
        )
    if cached != {"one": 1}:
        return Verdict(
            False, f"take: cached became {cached}; only block 3 is taken, or nothing is ever found"
        )
    if names.get(3) is not None:
        return Verdict(False, "take: names[3] still has the old name; block 3 is empty: None")
    if names.get(1) != "one":
        return Verdict(False, "take: names[1] has changed; only block 3 is taken")
    try:
        take([5], {5: None}, {})
    except KeyError as error:
        return Verdict(False, f"take: KeyError: {error}; block 5 has no name, nothing to forget")
    return None


def _beside_ours(free: Callable[..., object], take: Callable[..., object], seed: int) -> str:
    """40 random operations on both → where they differ first, or ""."""
    draw, ours = random.Random(seed), BlockManager(8, 2)
    queue, ref_cnt = list(range(8)), dict.fromkeys(range(8), 0)
    hash_of: dict[int, bytes | None] = dict.fromkeys(range(8))
    cached: dict[bytes, int] = {}
    for number in range(40):
        if ours.tables and draw.random() < 0.5:
            name = draw.choice(sorted(ours.tables))
            table = list(ours.tables[name])
            ours.free(name)
            free(table, ref_cnt, queue)
        else:
            tokens, name = draw.choices((0, 1), k=draw.randint(1, 11)), str(number)
            found = ours.admit(name, tokens)
            if found is None:
                continue
            table = ours.tables[name]
            for block in table[: found // 2]:
                ref_cnt[block] = ref_cnt.get(block, 0) + 1
                if block in queue:
                    queue.remove(block)
            for block in table[found // 2 :]:
                got = take(queue, hash_of, cached)
                if whole(got) != block:
                    return f"operation {number} (seed {seed}): take gave {got!r}, ours {block}"
                ref_cnt[block] = 1
            ours.commit(name, tokens, len(tokens))
            for block in table:
                if (key := ours.blocks[block].hash) is not None:
                    hash_of[block], cached[key] = key, block
        where = f"operation {number} (seed {seed}):"
        if queue != list(ours.free_queue):
            return f"{where} the queue is {queue}, ours {list(ours.free_queue)}"
        if cached != ours.cached or any(
            hash_of.get(b) != k.hash for b, k in enumerate(ours.blocks)
        ):
            return (
                f"{where} blocks {sorted(cached.values())} can be found, ours are "
                f"{sorted(ours.cached.values())}"
            )
        if any(ref_cnt.get(b, 0) != k.ref_cnt for b, k in enumerate(ours.blocks)):
            return f"{where} ref_cnt is {ref_cnt}, ours {[k.ref_cnt for k in ours.blocks]}"
    return ""


# ---- the freed-block bug in a log

PROMPTS = (tuple(range(40, 50)), tuple(range(60, 67)), (70, 71, 72))


class Line(NamedTuple):
    """What a request did to a block. `what`: "takes" it, "names" it when full, "finds" it by name.

    `name` is "" for a block that is taken.
    """

    step: int
    who: str
    what: str
    block: int
    name: str = ""


def stale_log(
    model: Qwen3ForCausalLM,
    blocks: type[BlockManager] = StaleBlocks,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[Line]:
    """The log of four requests, one after the other, in a pool so small that blocks come again."""
    scene = scenes(prompts)["small_pool"]
    memory = pages(model, scene.num_blocks, blocks)
    serve(model, memory, *scene[:3])
    names: dict[str, list[str]] = {}  # of the full blocks of a prompt
    log = []
    assert memory.trace is not None
    for event in memory.trace.events:
        at = event.step, getattr(event, "request_id", "")
        if isinstance(event, Added):
            ids, parent = event.prompt_token_ids, None
            names[event.request_id] = []
            for end in range(BLOCK_SIZE, len(ids) + 1, BLOCK_SIZE):
                parent = memory.blocks.hash_of(parent, ids[end - BLOCK_SIZE : end])
                names[event.request_id].append(parent.hex()[:4])
        elif isinstance(event, BlockTaken):
            log.append(Line(*at, "takes", event.block))
        elif isinstance(event, BlockShared):
            log.append(Line(*at, "finds", event.block, names[event.request_id].pop(0)))
        elif isinstance(event, BlockCached):
            log.append(Line(*at, "names", event.block, event.hash[:4]))
    return log


def wrong_texts(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    blocks: type[BlockManager],
    prompts: Sequence[Sequence[int]],
) -> list[tuple[str, str, str, str]]:
    """The requests of `stale_log` that get other tokens than alone: name, prompt, both texts."""
    scene = scenes(prompts)["small_pool"]
    got = serve(model, pages(model, scene.num_blocks, blocks), *scene[:3]).tokens
    alone, decode = serve(model, None, *scene[:3]).tokens, tokenizer.decode
    return [
        (name, decode(scene.prompts[name]), decode(got[name][0]), decode(want[0]))
        for name, want in alone.items()
        if got[name] != want
    ]


def log_text(log: Sequence[Line]) -> str:
    """A line for what each request did in a step."""
    lines = []
    for (step, who), own in groupby(log, key=lambda line: line[:2]):
        did = []
        for what, some in groupby(own, key=lambda line: line.what):
            blocks = ", ".join(
                f"{one.block} {one.name and f'as {one.name}'}".strip() for one in some
            )
            did.append(f"{what} {blocks}")
        lines.append(f"step {step:2}  {who} {'; '.join(did)}")
    return "\n".join(lines)


def right_stale(log: Sequence[Line]) -> list[Line]:
    """The lines that find a block under a name which is not that of its tokens now."""
    name_of: dict[int, str] = {}
    found = []
    for line in log:
        if line.what == "finds" and name_of.get(line.block) != line.name:
            found.append(line)
        elif line.what != "finds":
            name_of[line.block] = line.name
    return found


def _forgetting(log: Sequence[Line], forgets: str) -> list[Line]:
    """The answer of one to whom such lines say nothing."""
    return right_stale([line for line in log if line.what != forgets])


def _first_names(log: Sequence[Line]) -> list[Line]:
    names: dict[int, str] = {}
    for line in log:
        if line.what == "names":
            names.setdefault(line.block, line.name)
    return [line for line in log if line.what == "finds" and names.get(line.block) != line.name]


def _taken_again(log: Sequence[Line]) -> list[Line]:
    times = Counter[int]()
    found = []
    for line in log:
        times[line.block] += line.what == "takes"
        if line.what == "finds" and times[line.block] > 1:
            found.append(line)
    return found


STALE_MISTAKES: dict[str, Callable[[Sequence[Line]], list[Line]]] = {
    "a block that is taken has no name until it is full again: look at the lines that take": (
        lambda log: _forgetting(log, "takes")
    ),
    "a block that was taken again may be found under its new name": _taken_again,
    "a block has its newest name, not its first": _first_names,
    "the log has more than one of them: return all": lambda log: right_stale(log)[:1],
    "these are the lines that are right; return the others": lambda log: [
        line for line in log if line.what == "finds" and line not in right_stale(log)
    ],
    "these are all the lines that find a block": lambda log: [
        line for line in log if line.what == "finds"
    ],
    "a stale read is not there in every log: this is always empty": lambda log: [],
}


def _logs() -> list[list[Line]]:
    """Logs by hand: nothing stale; found before and after a block is full again; two at once."""
    begin = [Line(0, "A", "takes", 0), Line(0, "A", "takes", 1), Line(0, "A", "names", 0, "aa")]
    again = [Line(2, "B", "takes", 0), Line(3, "B", "names", 0, "bb")]
    return [
        [*begin, Line(1, "B", "finds", 0, "aa")],
        [*begin, again[0], Line(2, "C", "finds", 0, "aa")],
        [*begin, *again, Line(4, "C", "finds", 0, "bb"), Line(4, "D", "finds", 0, "aa")],
        [*begin, *again, Line(5, "C", "finds", 0, "aa"), Line(6, "D", "finds", 0, "aa")],
    ]


def check_stale(stale: Callable[..., object], log: Sequence[Line] = ()) -> Verdict:
    """Check stale(log) → the lines that find a block which does not hold what the name says.

    If it is right, the verdict tells what is stale in the log that is given.
    """

    def run() -> Verdict:
        logs, answers = _logs(), []
        for one in logs:
            answer = stale(list(one))
            bad = not_done("stale", answer, stale)
            if bad is not None:
                return bad
            if (got := listed(answer)) is None or not all(line in one for line in got):
                told = f"stale must return a list of lines of the log, got {answer!r}"
                return Verdict(False, told)
            answers.append(got)
        wants = [right_stale(log) for log in logs]
        if answers == wants:
            found = f"; in your log: {log_text(right_stale(log))}" if log else ""
            return Verdict(
                True, f"stale: {sum(map(len, wants))} stale reads in {len(logs)} logs{found}"
            )
        i = next(i for i, want in enumerate(wants) if answers[i] != want)
        said = log_text(answers[i]) or "nothing"
        told = f"stale: in this log\n{log_text(logs[i])}\nyour function found {said}"
        same = (
            words
            for words, wrong in STALE_MISTAKES.items()
            if [wrong(one) for one in logs] == answers
        )
        why = next(same, f"expected {log_text(wants[i]) or 'nothing'}")
        return Verdict(False, f"{told}; {why}")

    return guarded("stale", run, stale)
