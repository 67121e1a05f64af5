"""A run on pages: the pool after each step, in words and numbers.

Knows events, tables, reference counts and hashes; draws nothing. A step is shown as it left the
pool: its K and V are written, and who ended in it is gone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, Self

from tutorial_engine.trace import events
from tutorial_engine.trace.events import EngineState, Trace
from tutorial_engine.trace.history import Replay, Step
from tutorial_engine.viz.run.run import Run
from tutorial_engine.viz.tokens import cut_label
from tutorial_engine.viz.words import counted, listed, verb

DIGITS = 4  # of a hash, in a picture
KINDS = {  # of a slot that a request has -> in tips
    "cached": "its K and V are there",
    "written": "written in this step",
    "known": "not run yet, the slot is reserved",
    "empty": "the slot is reserved, no token yet",
}
BlockEvent = (
    events.BlockTaken
    | events.BlockShared
    | events.BlockCopied
    | events.BlockCached
    | events.BlockFreed
)


class Lost(NamedTuple):
    """What a preempted request had until a step took it away."""

    step: int
    blocks: tuple[int, ...]
    num_tokens: int


class Hashed(NamedTuple):
    """What a hash stands for: a block of tokens, after the block that has the hash `parent`."""

    token_ids: tuple[int, ...]
    parent: str | None


class Owner(NamedTuple):
    """A request that has a block, as this entry of its table; `filled` slots have its K and V."""

    name: str
    entry: int
    filled: int


class BlockStep:
    """The pool at the end of a step, and what happened to it since the step `before`.

    `run` is the replay up to there; it goes on to the end of this step. `held` request -> its
    tokens with K and V; `free` in the order in which blocks go; `touched` block -> what happened to
    it, in words; `facts` all that happened, in sentences; `cached_by` block -> who filled it last,
    of those that can be found.
    """

    def __init__(self, step: Step, run: Replay, before: "BlockStep | None", num_blocks: int):
        self.step, self._run = step, run
        self.touched: dict[int, list[str]] = {}
        self.facts: list[str] = []
        self.cached_by: dict[int, str] = dict(before.cached_by) if before else {}
        self.lost: dict[str, Lost] = dict(before.lost) if before else {}
        self._forked: dict[str, int] = dict(before._forked) if before else {}
        self._blocks: dict[tuple[type[events.Event], str], list[int]] = {}  # of (what, whom)
        self._evicted: dict[int, str] = {}  # block -> the hash that it has lost
        self._forks: dict[tuple[str, int, tuple[int, ...]], list[str]] = {}  # what -> who
        for event in step.events:
            if isinstance(event, BlockEvent):
                self._note(event)
            elif isinstance(event, events.RequestEvent):
                self._tell(event)
            run.apply(event)
        self._close()
        here = self.state.unfinished().requests
        self.tables = {name: r.table for name, r in here.items() if r.table}
        self.held = {
            name: r.num_computed_tokens if r.status == "running" else self._forked[name]
            for name, r in here.items()
            if r.table
        }
        self.hashes = dict(run.hashes)
        self.free = run.free_queue(num_blocks)

    @property
    def state(self) -> EngineState:
        """Queues and requests after the step."""
        return self.step.after

    @property
    def copies(self) -> list[events.BlockCopied]:
        """Blocks that were copied to be written."""
        return [event for event in self.step.events if isinstance(event, events.BlockCopied)]

    def is_written(self, name: str, position: int) -> bool:
        """Did this step write the K and V of the token?"""
        event = self.step.scheduled.get(name) if name in self.held else None
        return event is not None and 0 <= position - event.first_position < len(event.slots)

    def _note(self, event: BlockEvent) -> None:
        """A block comes to a request, or goes."""
        name, block, hash_ = event.request_id, event.block, self._run.hashes.get(event.block)
        if isinstance(event, events.BlockTaken | events.BlockCopied) and event.evicted and hash_:
            self._evicted[block] = hash_
            self._touch(block, f"{hash_[:DIGITS]} evicted")
        match event:
            case events.BlockTaken():
                words = "taken"
            case events.BlockShared():
                words = "shared" if self._run.ref_cnts.get(block) else "found again"
            case events.BlockCopied(source=source):
                words = f"copy of {source}"
                to = ", ".join(str(copy.block) for copy in self.copies if copy.source == source)
                self._touch(source, f"copied to {to}")
                self._say_copied(event)
            case events.BlockCached():
                words, self.cached_by[block] = "cached now", name
            case events.BlockFreed():
                words = f"left by {name}"
        self._touch(block, words)
        self._blocks.setdefault((type(event), name), []).append(block)

    def _tell(self, event: events.RequestEvent) -> None:
        """What came to pass with a request, and with the blocks that it got or left just now."""
        name = event.request_id
        match event:
            case events.Admitted(num_cached=found):
                if (blocks := self._pop(events.BlockShared, name)) and found:
                    self.facts.append(f"{name} finds {found} tokens in {blocks_said(blocks)}")
            case events.Scheduled():
                if blocks := self._pop(events.BlockTaken, name):
                    self.facts.append(f"{name} takes {blocks_said(blocks)}{self._loss(blocks)}")
            case events.Forked(parent_id=parent, num_tokens=many):
                shared = tuple(self._pop(events.BlockShared, name))
                self._forks.setdefault((parent, many, shared), []).append(name)
                self._forked[name] = many
            case events.Preempted(step=step):
                done = self._run.state.requests[name].num_computed_tokens
                self.lost[name] = Lost(step, tuple(self._pop(events.BlockFreed, name)), done)
                what = f"{blocks_said(self.lost[name].blocks)} ({done} tokens)"
                self.facts.append(f"{name} is preempted and loses {what}")
            case events.Finished(reason=reason):
                blocks = self._pop(events.BlockFreed, name)
                leaves = f" and leaves {blocks_said(blocks)}" if blocks else ""
                self.facts.append(f"{name} ends ({reason}){leaves}")

    def _close(self) -> None:
        """What is told last: forks, blocks given back by those who wait, blocks that are full."""
        for (parent, many, shared), names in self._forks.items():
            how = f"{many} tokens in {blocks_said(shared)} are shared" if shared else "no tokens"
            self.facts.append(f"{verb(names, 'is', 'are')} forked from {parent}: {how}")
        cached = []
        for (what, name), blocks in self._blocks.items():
            if what is events.BlockFreed:
                self.facts.append(f"{name} gives back {blocks_said(blocks)}")
            elif what is events.BlockCached:
                cached += blocks
        if cached:
            are = "is" if len(cached) == 1 else "are"
            self.facts.append(f"{blocks_said(cached)} {are} full and can be found from now on")

    def _say_copied(self, event: events.BlockCopied) -> None:
        """Why, and what of: somebody else has the block, or could find it."""
        name, source, requests = event.request_id, event.source, self._run.state.requests
        others = [who for who, r in requests.items() if source in r.table and who != name]
        why = f"{verb(others, 'has', 'have')} too" if others else "others may find"
        copies, loss = counted(len(event.slots), "token"), self._loss([event.block])
        self.facts.append(
            f"{name} is to write to block {source}, which {why}: it copies {copies} to block "
            f"{event.block}{loss}"
        )

    def _pop(self, what: type[events.Event], name: str) -> list[int]:
        return self._blocks.pop((what, name), [])

    def _loss(self, blocks: Iterable[int]) -> str:
        """Which hashes were lost with these blocks, in words."""
        gone = [self._evicted[block][:DIGITS] for block in blocks if block in self._evicted]
        return f" (evicted: {listed(gone)})" if gone else ""

    def _touch(self, block: int, words: str) -> None:
        known = self.touched.setdefault(block, [])
        known += [words] if words not in known else []


class BlockRun(Run):
    """A run on pages: the blocks after each step, and what is said of them."""

    @classmethod
    def of(cls, trace: Trace, labels: Mapping[int, str] | None = None) -> Self:
        """ValueError for a trace of another memory, and for one without a finished step."""
        run = super().of(trace, labels)
        if not {"block_size", "num_blocks"} <= run.settings.keys():
            raise ValueError(
                "this trace is not of an engine on pages (its settings have no block_size and "
                "num_blocks): give the engine memory=PagedKVCache.from_config(...)"
            )
        return run

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return int(self.settings["block_size"] or 0)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return int(self.settings["num_blocks"] or 0)

    @property
    def prefix_caching(self) -> bool:
        """Can full blocks be found by their hash?"""
        return bool(self.settings.get("prefix_caching"))

    @cached_property
    def blocks(self) -> list[BlockStep]:
        """The pool after each step."""
        run, found = Replay(), list[BlockStep]()
        for step in self.steps:
            before = found[-1] if found else None
            found.append(BlockStep(step, run, before, self.num_blocks))
        return found

    @cached_property
    def hashed(self) -> dict[str, Hashed]:
        """Hash -> the tokens that it stands for, and the hash before it."""
        found, names = dict[str, Hashed](), dict[tuple[int, ...], str]()
        for step in self.steps:
            for event in step.planning:
                if isinstance(event, events.BlockCached):
                    request = step.planned.requests[event.request_id]
                    if event.block not in request.table:
                        continue  # of a plan that was broken off
                    start = request.table.index(event.block) * self.block_size
                    end, ids = start + self.block_size, request.token_ids
                    names[ids[:end]] = event.hash
                    found[event.hash] = Hashed(ids[start:end], names.get(ids[:start]))
        return found

    @property
    def families(self) -> list[str]:
        """Requests as they came, each followed by those that were forked from it."""
        parents = [name for name in self.names if name not in self.forks]
        return [
            name
            for parent in parents
            for name in (parent, *(child for child in self.forks if self.forks[child] == parent))
        ]

    def is_shown(self, name: str, step: int) -> bool:
        """Is the request there after the step, or did it end in it?"""
        after, before = self.steps[step].after, self.over(step - 1) if step else {}
        there = name in after.waiting or name in after.running
        return there or (name in self.over(step) and name not in before)

    def owners(self, step: int) -> dict[int, list[Owner]]:
        """Block -> who has it after a step, in the order in which they came."""
        now, found, size = self.blocks[step], dict[int, list[Owner]](), self.block_size
        for name in self.names:
            for index, block in enumerate(now.tables.get(name, ())):
                filled = min(max(now.held[name] - index * size, 0), size)
                found.setdefault(block, []).append(Owner(name, index, filled))
        return found

    def caption(self, step: int, is_told: bool = False) -> str:
        """One sentence: who has how much, what is wasted, what is free, and what happened.

        The last part is left out where it is told elsewhere.
        """
        now = self.blocks[step]
        parts = [f"Step {step} of {self.last}: {self._in_use(step)}", self._free(step)]
        waits: dict[str, list[str]] = {}
        for name in now.state.waiting:
            waits.setdefault(self.waits(step, name), []).append(name)
        parts += [f"{verb(names, 'waits', 'wait')} {how}" for how, names in waits.items()]
        happened = ", ".join(now.facts) or "no block changes hands"
        parts += [] if is_told else [f"in this step {happened}"]
        return "; ".join(parts) + "."

    def why_idle(self, step: int, name: str) -> str:
        """What is said of a request that does not run."""
        now = self.blocks[step]
        if name in (over := self.over(step)):
            return f"is over ({over[name]}) and has no blocks"
        if name in now.state.requests:
            return f"waits {self.waits(step, name)}"
        return "is not here yet"

    def waits(self, step: int, name: str) -> str:
        """With what a request waits, or what it has lost, in words."""
        now = self.blocks[step]
        request = now.state.requests[name]
        if request.table:
            return f"with {now.held[name]} shared tokens"
        if request.status == "preempted":
            step, blocks, many = now.lost[name]
            took = f"without a block: in step {step} it lost {blocks_said(blocks)}"
            kept = min(self._findable(now, request.token_ids), many)
            if kept:
                return f"{took} (of {many} computed tokens {kept} can still be found)"
            return f"{took} ({many} computed tokens are lost)"
        many = len(request.token_ids)
        if found := self._findable(now, request.token_ids):
            return f"with {many} tokens, of which {found} can be found"
        need = counted(-(-many // self.block_size), "block")
        return f"with {counted(many, 'token')} to run ({need})"

    def _findable(self, now: BlockStep, ids: tuple[int, ...]) -> int:
        """How many tokens of this beginning are in blocks that can be found; one is left to run."""
        there = {self.hashed.get(key): key for key in now.hashes.values()}
        size, parent = self.block_size, None
        for end in range(size, len(ids), size):
            parent = there.get(Hashed(ids[end - size : end], parent))
            if parent is None:
                return end - size
        return max(len(ids) - 1, 0) // size * size

    def _in_use(self, step: int) -> str:
        """Blocks in use, the tokens in them, and the slots that are not filled."""
        now, owners = self.blocks[step], self.owners(step)
        if not owners:
            return "no block is in use"
        stored = sum(max(owner.filled for owner in holders) for holders in owners.values())
        groups, twice = set(), 0
        for holders in owners.values():
            both = min(sorted(owner.filled for owner in holders)[-2:]) if len(holders) > 1 else 0
            twice += both
            groups |= {tuple(owner.name for owner in holders)} if both else set()
        whom = listed(groups.pop()) if len(groups) == 1 else "several"
        each, many = sum(now.held.values()), counted(len(now.tables), "request")
        once = f" ({twice} of them stored once for {whom}; counted by request they are {each})"
        is_one, slots = len(owners) == 1, len(owners) * self.block_size
        its = f"{slots - stored} of {'its' if is_one else 'their'} {slots} slots"
        return (
            f"{len(owners)} of {self.num_blocks} blocks hold{'s' * is_one} "
            f"{counted(stored, 'token')} of {many}{once * (twice > 0)}; {its} "
            f"{'is' if slots - stored == 1 else 'are'} reserved but empty"
        )

    def _free(self, step: int) -> str:
        now = self.blocks[step]
        found = sum(block in now.hashes for block in now.free)
        findable = f", {found} of them still findable" if found else ""
        findable = " and still findable" if found == len(now.free) == 1 else findable
        are = "is" if len(now.free) == 1 else "are"
        return f"{counted(len(now.free), 'block')} {are} free{findable}"

    # -- what hovering says -----------------------------------------------------------------------

    def about_token(self, step: int, name: str, position: int) -> str:
        """How the slot of a token is found, with the numbers."""
        now, size = self.blocks[step], self.block_size
        entry, offset = divmod(position, size)
        block = now.tables[name][entry]
        ids = now.state.requests[name].token_ids
        word = f" “{cut_label(self.label(ids[position]), 24)}”" if position < len(ids) else ""
        kind = self.token_kind(step, name, position)
        return (
            f"{name}, position {position}{word}: {position} = {entry}·{size} + {offset} → entry "
            f"{entry} of its table, block {block}, offset {offset} → slot {block}·{size} + {offset}"
            f" = {block * size + offset}; {KINDS[kind]}"
        )

    def token_kind(self, step: int, name: str, position: int) -> str:
        """What a slot holds: "cached" K and V, "written" now, a "known" token, or "empty"."""
        now = self.blocks[step]
        if now.is_written(name, position):
            return "written"
        if position < now.held[name]:
            return "cached"
        return "known" if position < len(now.state.requests[name].token_ids) else "empty"

    def about_block(self, step: int, block: int) -> str:
        """Its holders, positions, tokens, hash and the one before it, and what just happened."""
        now, holders = self.blocks[step], self.owners(step).get(block, [])
        parts, hash_ = [f"block {block}"], now.hashes.get(block)
        ids: tuple[int, ...] = ()
        if holders:
            first = holders[0].entry * self.block_size
            who = f"ref {len(holders)}: {listed(owner.name for owner in holders)}"
            parts += [who, f"positions {first}–{first + self.block_size - 1}"]
            ids = now.state.requests[holders[0].name].token_ids[first : first + holders[0].filled]
        else:
            place = now.free.index(block)
            parts.append("free, goes next" if not place else f"free, {place} go before it")
            ids = self.hashed[hash_].token_ids if hash_ else ()
        words = "|".join(cut_label(self.label(token), 12) for token in ids)
        parts += [cut_label(words, 48)] if words else []
        if hash_:
            parts.append(f"hash {hash_} ← {self.hashed[hash_].parent or 'root'}")
        elif self.prefix_caching and holders and holders[0].filled == self.block_size:
            parts.append("an equal block is the one to be found")
        return " · ".join((*parts, *now.touched.get(block, ())))


def without_hashes(trace: Trace) -> Trace:
    """The same run, and nothing is said of who could find which block again."""
    found: list[events.Event] = []
    for event in trace.events:
        if isinstance(event, events.BlockTaken | events.BlockCopied):
            found.append(replace(event, evicted=False))
        elif not isinstance(event, events.BlockCached | events.BlockForgotten):
            found.append(event)
    return Trace({**trace.settings, "prefix_caching": False}, tuple(found))


def blocks_said(blocks: Iterable[int]) -> str:
    """`block 3`, `blocks 3, 4 and 7`, `blocks 0 to 7 and 9`."""
    runs: list[list[int]] = []  # each counts up or down by ones
    for block in blocks:
        last = runs[-1] if runs else []
        if (
            last
            and abs(block - last[-1]) == 1
            and block - last[0] == (block - last[-1]) * len(last)
        ):
            last.append(block)
        else:
            runs.append([block])
    numbers = []
    for r in runs:
        long = [f"{r[0]} to {r[-1]}"]
        numbers += long if len(r) > 3 else [str(block) for block in r]
    if not numbers:
        return "no block"
    many = sum(map(len, runs)) > 1
    return f"{'blocks' if many else 'block'} {listed(numbers)}"
