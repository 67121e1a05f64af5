"""Introduced in notebook 04. From the trace of an engine on pages to the pool after each step.

Knows events, tables, reference counts and hashes; draws nothing. A step is shown as it left the
pool: its K and V are written, and who ended in it is gone.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tutorial_engine.trace import events
from tutorial_engine.trace.events import Trace
from tutorial_engine.trace.history import EngineState, Replay, RequestState
from tutorial_engine.viz.scheduler_steps import listed

DIGITS = 4  # of a hash, in a picture
Parents = Mapping[str, str | None]


class Lost(NamedTuple):
    """What a preempted request had until a step took it away."""

    step: int
    blocks: tuple[int, ...]
    num_tokens: int


class BlockStep(NamedTuple):
    """The pool at the end of a step, and what happened to it since the step before.

    `held` request -> its tokens with K and V; `written` request -> the positions of this step;
    `free` in the order in which blocks go; `touched` block -> what happened to it, in words.
    """

    number: int
    state: EngineState
    ref_cnts: Mapping[int, int]
    hashes: Mapping[int, str]
    free: tuple[int, ...]
    held: Mapping[str, int]
    written: Mapping[str, range]
    touched: Mapping[int, tuple[str, ...]]
    copies: tuple[events.BlockCopied, ...]
    contents: Mapping[int, tuple[int, ...]]  # token ids that free blocks can still be found by
    lost: Mapping[str, Lost]
    ended: Mapping[str, str]  # who is over -> how; those of this step are in `facts`
    facts: tuple[str, ...]

    @property
    def tables(self) -> dict[str, tuple[int, ...]]:
        """Request -> its blocks, by position; only those that have any."""
        return {name: r.table for name, r in self.state.requests.items() if r.table}


class _Reader:
    """Follows a trace event by event and notes what a plain replay forgets."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.size, self.num_blocks, self.run = block_size, num_blocks, Replay()
        self.parents: dict[str, str | None] = {}  # hash -> the hash of the block before it
        self.found: list[BlockStep] = []
        self._names: dict[tuple[int, ...], str] = {}  # tokens from the start -> hash
        self._contents: dict[int, tuple[int, ...]] = {}
        self._forked: dict[str, int] = {}  # request -> the tokens that it was forked with
        self._lost: dict[str, Lost] = {}
        self._ended: dict[str, str] = {}
        self._begin()

    def _begin(self) -> None:
        self._scheduled: dict[str, events.Scheduled] = {}
        self._notes: dict[tuple[str, str], list[int]] = {}  # (what, request) -> blocks
        self._evicted: dict[int, str] = {}  # block -> the hash that it has lost
        self._touched: dict[int, list[str]] = {}
        self._copies: list[events.BlockCopied] = []
        self._said: list[str] = []
        self._forks: dict[tuple[str, int, tuple[int, ...]], list[str]] = {}  # what -> who
        self._cached: list[int] = []

    def read(self, event: events.Event) -> None:
        """One event more."""
        if isinstance(event, events.RequestEvent):
            request = self.run.state.requests.get(event.request_id)
            self._before(event, request)
        self.run.apply(event)
        match event:
            case events.StepBegan():
                self._scheduled.clear()  # of a step that was broken off
            case events.Scheduled(request_id=name):
                self._scheduled[name] = event
            case events.StepEnded():
                self.found.append(self._step())
                self._begin()

    def _before(self, event: events.RequestEvent, request: RequestState | None) -> None:
        """Note what an event is about to change."""
        name = event.request_id
        match event:
            case events.Added():
                for book in (self._lost, self._ended, self._forked):
                    book.pop(name, None)
            case events.BlockTaken(block=block, evicted=evicted):
                self._take(block, evicted, "taken")
                self._notes.setdefault(("takes", name), []).append(block)
            case events.BlockShared(block=block):
                self._touch(block, "shared" if self.run.ref_cnts.get(block) else "found again")
                self._notes.setdefault(("shares", name), []).append(block)
            case events.BlockCopied(source=source, block=block, evicted=evicted):
                self._take(block, evicted, f"copy of {source}")
                self._copies.append(event)
                self._say_copied(event)
            case events.BlockCached(block=block, hash=hash_):
                assert request is not None, "a request has the block"
                self._name(request, block, hash_)
                self._touch(block, "cached now")
                self._cached.append(block)
            case events.BlockFreed(block=block):
                assert request is not None, "a request has the block"
                known = self._contents.get(block, ()), self._tokens(request, block)
                self._contents[block] = max(known, key=len)
                self._touch(block, f"left by {name}")
                self._notes.setdefault(("leaves", name), []).append(block)
            case events.Admitted() | events.Forked() | events.Preempted() | events.Finished():
                self._say(event, request)

    def _say(self, event: events.RequestEvent, request: RequestState | None) -> None:
        """What came to pass with a request, with the blocks that were noted on the way."""
        name = event.request_id
        self._say_taken(but=name if isinstance(event, events.Admitted) else "")
        match event:
            case events.Admitted(num_cached=found):
                if (shared := self._notes.pop(("shares", name), [])) and found:
                    self._said.append(f"{name} finds {found} tokens in {blocks_said(shared)}")
                self._say_taken()
                self._lost.pop(name, None)
                self._forked.pop(name, None)
            case events.Forked(parent_id=parent, num_tokens=many):
                shared = self._notes.pop(("shares", name), [])
                self._forked[name] = many
                self._forks.setdefault((parent, many, tuple(shared)), []).append(name)
            case events.Preempted(step=step):
                left = self._notes.pop(("leaves", name), [])
                done = request.num_computed_tokens if request is not None else 0
                self._lost[name] = Lost(step, tuple(left), done)
                self._said.append(
                    f"{name} is preempted and loses {blocks_said(left)} ({done} tokens)"
                )
            case events.Finished(reason=reason):
                left = self._notes.pop(("leaves", name), [])
                self._ended[name] = reason
                self._lost.pop(name, None)
                what = f" and leaves {blocks_said(left)}" if left else ""
                self._said.append(f"{name} ends ({reason}){what}")

    def _say_copied(self, event: events.BlockCopied) -> None:
        """Why, and what of: somebody else has the block, or could find it."""
        name, source, many = event.request_id, event.source, len(event.slots)
        tables = self.run.state.requests.items()
        others = [who for who, r in tables if source in r.table and who != name]
        why = f"{listed(others)} ha{'s' if len(others) == 1 else 've'} too" if others else ""
        self._say_taken()
        self._said.append(
            f"{name} is to write to block {source}, which {why or 'others may find'}: it copies "
            f"{many} token{plural(many)} to block {event.block}{self._loss([event.block])}"
        )

    def _say_taken(self, but: str = "") -> None:
        """Blocks that were taken so far, by all but this one."""
        for what, who in [key for key in self._notes if key[0] == "takes"]:
            if who != but:
                blocks = self._notes.pop((what, who))
                self._said.append(f"{who} takes {blocks_said(blocks)}{self._loss(blocks)}")

    def _loss(self, blocks: Iterable[int]) -> str:
        """Which hashes were lost with these blocks, in words."""
        gone = [self._evicted[block][:DIGITS] for block in blocks if block in self._evicted]
        return f" (evicted: {listed(gone)})" if gone else ""

    def _take(self, block: int, evicted: bool, words: str) -> None:
        if evicted and block in self.run.hashes:
            self._evicted[block] = self.run.hashes[block]
            self._touch(block, f"{self.run.hashes[block][:DIGITS]} evicted")
        self._contents.pop(block, None)
        self._touch(block, words)

    def _touch(self, block: int, words: str) -> None:
        known = self._touched.setdefault(block, [])
        known += [words] if words not in known else []

    def _name(self, request: RequestState, block: int, hash_: str) -> None:
        """Which hash comes before this one: that of the same tokens without the last block."""
        end = (request.table.index(block) + 1) * self.size
        self._names[request.token_ids[:end]] = hash_
        self.parents[hash_] = self._names.get(request.token_ids[: end - self.size])

    def _tokens(self, request: RequestState, block: int) -> tuple[int, ...]:
        """What a request has computed into a block of its table."""
        start = request.table.index(block) * self.size
        return request.token_ids[start : min(start + self.size, request.num_computed_tokens)]

    def _step(self) -> BlockStep:
        """All as it is now."""
        self._say_taken()
        for (parent, many, shared), names in self._forks.items():
            what = f"{listed(names)} {'is' if len(names) == 1 else 'are'} forked from {parent}"
            how = f"{many} tokens in {blocks_said(shared)} are shared" if shared else "no tokens"
            self._said.append(f"{what}: {how}")
        for (what, name), blocks in self._notes.items():
            if what == "leaves":
                self._said.append(f"{name} gives back {blocks_said(blocks)}")
        if self._cached:
            are = "is" if len(self._cached) == 1 else "are"
            self._said.append(
                f"{blocks_said(self._cached)} {are} full and can be found from now on"
            )
        for source in dict.fromkeys(copy.source for copy in self._copies):
            targets = [str(copy.block) for copy in self._copies if copy.source == source]
            self._touch(source, f"copied to {', '.join(targets)}")
        run, state = self.run, self.run.state
        fresh = tuple(b for b in range(self.num_blocks) if b not in run.ref_cnts)
        held = {
            name: r.num_computed_tokens if r.status == "running" else self._forked.get(name, 0)
            for name, r in state.requests.items()
            if r.table
        }
        written = {
            name: range(event.first_position, event.first_position + len(event.slots))
            for name, event in self._scheduled.items()
            if name in held
        }
        return BlockStep(
            len(self.found),
            state,
            {block: count for block, count in run.ref_cnts.items() if count},
            dict(run.hashes),
            (*fresh, *run.free_queue),
            held,
            written,
            {block: tuple(words) for block, words in self._touched.items()},
            tuple(self._copies),
            {b: ids for b, ids in self._contents.items() if b in run.hashes},
            dict(self._lost),
            dict(self._ended),
            tuple(self._said),
        )


def read(trace: Trace, block_size: int, num_blocks: int) -> tuple[list[BlockStep], Parents]:
    """The pool at the end of each step, and for every hash the one of the block before it."""
    reader = _Reader(block_size, num_blocks)
    for event in trace.events:
        reader.read(event)
    return reader.found, reader.parents


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
    parts = ([f"{r[0]} to {r[-1]}"] if len(r) > 3 else [str(block) for block in r] for r in runs)
    numbers = [part for some in parts for part in some]
    many = sum(map(len, runs))
    return f"block{plural(many)} {listed(numbers)}" if numbers else "no block"


def plural(many: int) -> str:
    """The s of so many things."""
    return "" if many == 1 else "s"
