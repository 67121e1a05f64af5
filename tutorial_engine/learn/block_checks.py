"""Introduced in notebook 04. The checks of the exercises on blocks: eviction, a bug to be found."""

import random
from collections.abc import Callable, Sequence
from functools import cache

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.learn.bugs_04 import Served, pages, scenes, serve
from tutorial_engine.learn.own_memory import free as right_free
from tutorial_engine.learn.own_memory import take as right_take
from tutorial_engine.learn.parts import listed, whole
from tutorial_engine.learn.verdict import Verdict, guarded, has_gap, is_open, not_done
from tutorial_engine.model.checkpoint import load_model
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

# ---- 3. eviction


def check_free(free: Callable[..., object]) -> Verdict:
    """Check free(table, ref_cnt, free_queue): by hand, then beside the package's BlockManager."""

    def run() -> Verdict:
        bad = _free_by_hand(free)
        if bad is not None:
            return bad
        difference = next(filter(None, (_beside_ours(free, right_take, s) for s in range(10))), "")
        if difference:
            return Verdict(False, f"free: {difference}")
        return Verdict(True, "free: the queue is always as the package has it")

    return guarded("free", run, free)


def check_take(take: Callable[..., object]) -> Verdict:
    """Check take(free_queue, hash_of, cached) → block, in the same two ways."""

    def run() -> Verdict:
        bad = _take_by_hand(take)
        if bad is not None:
            return bad
        difference = next(filter(None, (_beside_ours(right_free, take, s) for s in range(10))), "")
        if difference:
            return Verdict(False, f"take: {difference}")
        return Verdict(True, "take: queue and cache are always as the package has them")

    return guarded("take", run, take)


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
    queue, hash_of, cached = [3, 5], {1: "one", 3: "three", 5: None}, {"one": 1, "three": 3}
    got = take(queue, hash_of, cached)
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
            "take: block 3 is taken, and its old hash still leads to it: whoever looks for that "
            "prefix will read another request's tokens (the freed-block bug)",
        )
    if cached != {"one": 1}:
        return Verdict(
            False, f"take: cached became {cached}; only block 3 is taken, or nothing is ever found"
        )
    if hash_of.get(3) is not None:
        return Verdict(False, "take: hash_of[3] still has the old hash; block 3 is empty: None")
    if hash_of.get(1) != "one":
        return Verdict(False, "take: hash_of[1] has changed; only block 3 is taken")
    try:
        take([5], {5: None}, {})
    except KeyError as error:
        return Verdict(False, f"take: KeyError: {error}; block 5 has no hash, nothing to forget")
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


# ---- 4. the freed-block bug

BEGIN = {"A": "the first", "B": "the second", "D": "begins like A", "F": "begins like B"}
PROMPTS = (tuple(range(40, 50)), tuple(range(60, 67)), (70, 71, 72))


class _Told(Exception):
    """The verdict is clear in the middle of a run."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict


def _watched(blocks: type[BlockManager]) -> type[BlockManager]:
    """The class, with an eye on what its `forget` returns, and on what it leaves in the block."""

    def watch(self: BlockManager, block: int) -> bool:
        key = self.blocks[block].hash
        try:
            got: object = blocks.forget(self, block)
        except KeyError as error:
            if key is not None:
                raise
            told = f"forget raised KeyError: {error}: block {block} has no hash, nothing to forget"
            raise _Told(Verdict(False, f"mended: {told}")) from error
        if isinstance(got, bool) and got != (key is not None):
            had = "no hash" if key is None else "a hash, so that it could be found until now"
            told = f"forget returned {got} for a block that had {had}"
        elif got is None and key is None and not is_open(blocks.forget):
            return False  # nothing to forget, and nothing said: what counts comes later
        elif got is None and key not in self.cached:
            told = "it forgets, but does not return whether the block could be found"
        elif (bad := not_done("forget", got, blocks.forget)) is not None:
            raise _Told(bad)
        elif not isinstance(got, bool):
            told = f"return True or False: could it be found until now? Not {got!r}"
        elif self.blocks[block].hash in self.cached:
            told = f"block {block} is still found: nothing was forgotten"
        elif self.blocks[block].hash is not None:
            told = (
                f"block {block} keeps its name: nobody finds it in self.cached, but "
                "self.blocks[block].hash must become None as well, or it counts as full"
            )
        else:
            return got
        raise _Told(Verdict(False, f"mended: {told}"))

    return type(blocks.__name__, (blocks,), {"forget": watch})


@cache
def _shipped() -> Qwen3ForCausalLM:
    return load_model()


def check_mended(
    blocks: type[BlockManager],
    model: Qwen3ForCausalLM | None = None,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> Verdict:
    """Check a learner's mended block manager: four requests, one after the other, in 6 blocks.

    Each must say what it says alone on rows, and find as much as with the package's blocks. On the
    shipped model unless another is given.
    """

    def run() -> Verdict:
        if not (isinstance(blocks, type) and issubclass(blocks, BlockManager)):
            return Verdict(False, f"mended: hand over the class, a BlockManager; got {blocks!r}")
        one = _shipped() if model is None else model
        scene = scenes(prompts)["small_pool"]

        def through(kind: type[BlockManager]) -> Served:
            return serve(one, pages(one, scene.num_blocks, kind), *scene[:3])

        try:
            theirs = through(_watched(blocks))
        except _Told as told:
            return told.verdict
        said = f" (check_integrity: {theirs.complaint})" if theirs.complaint else ""
        for name, tokens in serve(one, None, *scene[:3]).tokens.items():
            got = theirs.tokens.get(name)
            if got is None:
                return Verdict(False, f"mended: {name} gets no answer{said}")
            if got != tokens:
                return Verdict(
                    False,
                    f"mended: {name} ({BEGIN[name]}) says {list(got[0])}, alone "
                    f"{list(tokens[0])}: it was given blocks with another's tokens{said}",
                )
        if said:
            return Verdict(False, f"mended: the tokens are right, the bookkeeping is not{said}")
        ours = through(BlockManager)
        if theirs.num_found != ours.num_found:
            return Verdict(
                False,
                f"mended: right tokens, but {theirs.num_found} are found in the cache where "
                f"{ours.num_found} can be: forget the hash of the block that is taken, no other",
            )
        n = len(ours.tokens)
        return Verdict(True, f"mended: {n} requests as if alone, {ours.num_found} tokens found")

    return guarded("forget", run, getattr(blocks, "forget", None))
