"""Blocks against a slow and obvious model, with stand-ins for keys and values; and
with planted bugs, which must all be seen. long_run.py runs as many operations as you like.
"""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.learn.stories.bugs import Zoo, edited, planted

Tokens = tuple[int, ...]


class SlowBlocks:
    """What a BlockManager should do, said plainly: lists, and whole beginnings in place of hashes.

    `known[block]` is all that the block stands for: its tokens and everything before them.
    """

    def __init__(self, num_blocks: int, size: int, caching: bool) -> None:
        self.size, self.caching = size, caching
        self.free = list(range(num_blocks))
        self.known: dict[int, Tokens] = {}
        self.tables: dict[str, list[int]] = {}

    def users(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables.values())

    def needed(self, num_tokens: int) -> int:
        return len(range(0, num_tokens, self.size))

    def found(self, tokens: Tokens) -> list[int]:
        hits: list[int] = []
        first_wins = reversed(self.known.items())
        by_tokens = {known: block for block, known in first_wins}
        while self.caching and (len(hits) + 1) * self.size <= len(tokens) - 1:
            block = by_tokens.get(tokens[: (len(hits) + 1) * self.size])
            if block is None:
                break
            hits.append(block)
        return hits

    def new(self) -> int:
        block = self.free.pop(0)
        self.known.pop(block, None)
        return block

    def admit(self, name: str, tokens: Tokens, num_new: int) -> int | None:
        hits = self.found(tokens)
        left = [block for block in self.free if block not in hits]
        if self.needed(len(tokens)) - len(hits) > len(left):
            return None
        self.free = left
        run_now = self.needed(min(len(hits) * self.size + num_new, len(tokens)))
        self.tables[name] = hits + [self.new() for _ in range(run_now - len(hits))]
        return len(hits) * self.size

    def extend(self, name: str, start: int, end: int) -> bool:
        table = self.tables[name]
        index = start // self.size
        must_copy = index < len(table) and (
            self.users(table[index]) > 1 or table[index] in self.known
        )
        missing = max(self.needed(end) - len(table), 0)
        if missing + must_copy > len(self.free):
            return False
        if must_copy:
            source, table[index] = table[index], self.new()
            self.give_back([source])
        table += [self.new() for _ in range(missing)]
        return True

    def give_back(self, blocks: Sequence[int]) -> None:
        """To the front of the queue what nobody can find, to its end the rest."""
        gone = [block for block in blocks if not self.users(block)]
        nameless = [block for block in gone if block not in self.known]
        self.free = nameless + self.free + [block for block in gone if block in self.known]

    def promise(self, name: str, tokens: Tokens, start: int, end: int) -> None:
        full = range(start // self.size, end // self.size)  # after this step
        for index in full if self.caching else ():
            self.known[self.tables[name][index]] = tokens[: (index + 1) * self.size]

    def take_back(self, name: str, start: int) -> None:
        """The forward failed: whatever the table has from here on was never written."""
        for block in self.tables[name][start // self.size :]:
            self.known.pop(block, None)

    def fork(self, parent: str, child: str, num_tokens: int) -> None:
        self.tables[child] = self.tables[parent][: self.needed(num_tokens)]

    def drop(self, name: str) -> None:
        self.give_back(self.tables.pop(name)[::-1])

    def reset(self) -> None:
        self.known.clear()
        self.free.sort()


class Pair:
    """A BlockManager and its slow model, driven alike and compared after everything.

    `content[block]` stands for the keys and values: at each offset the whole beginning that they
    were computed from. What a request reads must be its own beginning, whoever else was here.
    """

    def __init__(self, num_blocks: int, size: int, caching: bool = True) -> None:
        self.content: list[list[Tokens | None]] = [[None] * size for _ in range(num_blocks)]
        self.real = BlockManager(num_blocks, size, prefix_caching=caching, copy=self.copy)
        self.slow = SlowBlocks(num_blocks, size, caching)
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self.names = 0

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        self.content[target] = self.content[source][:num_tokens] + [None] * (
            self.real.block_size - num_tokens
        )
        self.counts["copies"] += 1

    def pick(self, number: int) -> str | None:
        return sorted(self.tokens)[number % len(self.tokens)] if self.tokens else None

    def name(self) -> str:
        self.names += 1
        return f"r{self.names:06}"

    def unchanged(self, before: object) -> None:
        assert snapshot(self.real) == before, "it failed, and something is another"

    # ---- operations

    def come(self, tokens: Sequence[int], num_new: int) -> str | None:
        name, before = self.name(), snapshot(self.real)
        got = self.real.admit(name, list(tokens), num_new)
        assert got == self.slow.admit(name, tuple(tokens), num_new), f"{got} tokens found"
        self.counts["asked"] += 1
        if got is None:
            self.counts["refused"] += 1
            self.unchanged(before)
            return None
        self.counts["hits"] += got > 0
        self.tokens[name], self.computed[name] = list(tokens), got
        return name

    def run(self, number: int, most: int, forward_works: bool = True, more: int = 0) -> None:
        """A step of one request; with `more` another one like it is admitted to the same step."""
        name = self.pick(number)
        if name is None:
            return
        tokens, start = self.tokens[name], self.computed[name]
        end = min(start + most, len(tokens))
        before = snapshot(self.real)
        done = self.real.extend(name, start, end)
        assert done == self.slow.extend(name, start, end), f"extend gave {done}"
        if not done:
            self.counts["refused"] += 1
            return self.unchanged(before)
        self.real.cache_full_blocks(name, tokens, end)
        again = snapshot(self.real)
        assert self.real.extend(name, start, end)
        self.real.cache_full_blocks(name, tokens, end)
        self.unchanged(again)
        self.slow.promise(name, tuple(tokens), start, end)
        other = self.come([*tokens[:end], *[1] * more], most) if more else None
        size, table = self.real.block_size, self.real.tables[name]
        if forward_works:
            for position in range(start, end):
                read = tuple(tokens[: position + 1])
                self.content[table[position // size]][position % size] = read
            self.computed[name] = end
            self.real.commit(name, end)
            if other is not None:
                self.counts["found in the same step"] += self.computed[other] > start
            if end == len(tokens):  # it says something, which is not run yet
                tokens.append(number % 2)
        else:
            if other is not None:
                self.leave(sorted(self.tokens).index(other))
            self.real.commit(name, start)
            self.slow.take_back(name, start)
            self.counts["taken back"] += 1

    def fork(self, number: int, less: int, more: Sequence[int]) -> None:
        parent = self.pick(number)
        if parent is None:
            return
        shared = max(self.computed[parent] - less, 0)
        if shared:
            child = self.name()
            self.real.fork(parent, child, shared)
            self.slow.fork(parent, child, shared)
            self.tokens[child] = [*self.tokens[parent][:shared], *more, 1]
            self.computed[child] = shared
            self.counts["forks"] += 1

    def leave(self, number: int) -> None:
        name = self.pick(number)
        if name is not None:
            self.real.free(name)
            self.slow.drop(name)
            del self.tokens[name], self.computed[name]

    def reset(self) -> None:
        before = snapshot(self.real)
        if self.tokens:
            with pytest.raises(ValueError, match="are in use"):
                self.real.reset()
            return self.unchanged(before)
        self.real.reset()
        self.slow.reset()
        self.counts["resets"] += 1

    # ---- comparison

    def check(self) -> None:
        real, slow = self.real, self.slow
        real.check_integrity()
        assert real.tables == slow.tables
        assert list(real.free_queue) == slow.free, "free blocks, or their order"
        known = {
            block: self.chain(beginning)[-1] for block, beginning in slow.known.items() if beginning
        }
        assert {n: b.hash for n, b in enumerate(real.blocks) if b.hash is not None} == known
        size = real.block_size
        for name, tokens in self.tokens.items():
            table = real.tables[name]
            for position in range(self.computed[name]):
                read = self.content[table[position // size]][position % size]
                assert read == tuple(tokens[: position + 1]), f"{name} reads {read} at {position}"

    def chain(self, tokens: Tokens) -> list[bytes]:
        size, keys = self.real.block_size, []
        for end in range(size, len(tokens) + 1, size):
            keys.append(self.real.hash_of(keys[-1] if keys else None, tokens[end - size : end]))
        return keys


def snapshot(real: BlockManager) -> object:
    """All that a manager knows, by value."""
    blocks = [(block.ref_cnt, block.hash) for block in real.blocks]
    tables = {name: tuple(table) for name, table in real.tables.items()}
    chains = {name: tuple(chain.hashes) for name, chain in real._chains.items()}
    return blocks, tables, chains, list(real.free_queue), dict(real.cached)


def drive(draw: random.Random, operations: int) -> Counter[str]:
    """Random operations on a random pool; what happened. AssertionError if anything is wrong."""
    pair = Pair(draw.randint(1, 20), draw.choice([1, 2, 3, 4]), draw.random() < 0.85)

    def some_tokens(low: int, high: int) -> list[int]:
        return [int(draw.random() < 0.25) for _ in range(draw.randint(low, high))]

    for _ in range(operations):
        kind, number = draw.random(), draw.randrange(1000)
        if kind < 0.25:
            pair.come(some_tokens(1, 4 * pair.real.block_size), draw.choice([1, 99, 99]))
        elif kind < 0.72:
            most, more = draw.choice([1, 1, 3, 99]), draw.choice([0, 0, 1, 5])
            pair.run(number, most, draw.random() < 0.8, more)
        elif kind < 0.83:
            pair.fork(number, draw.randint(0, 2), some_tokens(0, 2))
        elif kind < 0.99:
            pair.leave(number)
        else:
            pair.reset()
        pair.check()
    pair.counts["operations"] += operations
    while pair.tokens:
        pair.leave(0)
        pair.check()
    assert pair.real.num_free == pair.real.num_blocks, "blocks leaked"
    return pair.counts


def test_random_operations_do_what_the_slow_model_does() -> None:
    counts: Counter[str] = Counter()
    for seed in range(80):
        counts += drive(random.Random(seed), 150)
    for what in ("hits", "copies", "forks", "refused", "found in the same step", "taken back"):
        assert counts[what] >= 100, counts
    assert counts["resets"] >= 5, counts


# -- hashes ---------------------------------------------------------------------------------------


def test_a_hash_is_that_of_the_tokens_and_the_salt_everywhere() -> None:
    one, other = BlockManager(8, 4), BlockManager(8, 4, salt="another model")
    keys = {one.hash_of(None, [1, 2]), one.hash_of(None, [258]), other.hash_of(None, [1, 2])}
    assert len(keys) == 3
    # always the same one, on every machine of this byte order: no hash() of Python's
    assert one.hash_of(None, [1, 2]) == BlockManager(1, 2).hash_of(None, (1, 2))


# -- planted bugs ---------------------------------------------------------------------------------

BUGS: Zoo = {
    "evicts its own beginning": edited(
        BlockManager,
        "admit",
        ("for hit in hits:\n        self._share(seq_id, hit)", "pass"),
        (
            "return num_found",
            """new, self.tables[seq_id] = self.tables[seq_id], []
    for hit in hits:
        self._share(seq_id, hit)
    self.tables[seq_id] += new
    return num_found""",
        ),
    ),
    "found blocks are not counted": edited(
        BlockManager, "admit", (" + sum(self.blocks[hit].ref_cnt == 0 for hit in hits)", "")
    ),
    "cached before a step computes it": edited(
        BlockManager,
        "cache_full_blocks",
        (
            "range(len(chain), num_tokens // size)",
            "range(len(chain), min(len(token_ids) // size, len(self.tables[seq_id])))",
        ),
    ),
    "a promise is kept": edited(
        BlockManager, "_take_back", ("len(chain.hashes) > chain.num_written", "False")
    ),
    "heads are freed first": edited(BlockManager, "_give_back", ("in reversed(table)", "in table")),
    "nameless blocks are freed last": edited(BlockManager, "_give_back", (", last=False", "")),
    "a shared block is written": edited(
        BlockManager, "_is_own", ("self.blocks[block].ref_cnt == 1 and ", "")
    ),
    "a copy that is one token short": edited(
        BlockManager,
        "_copy_on_write",
        ("self._copy(", "num_tokens -= 1\n    self._copy("),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str) -> None:
    with planted(name, BUGS), pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(80):
            drive(random.Random(seed), 100)
