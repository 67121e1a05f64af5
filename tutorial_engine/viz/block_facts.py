"""Introduced in notebook 04. Who owns which block after a step, in words and numbers.

Knows what block_steps read from a trace; draws nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tutorial_engine.trace import events
from tutorial_engine.trace.events import Trace
from tutorial_engine.viz.block_steps import BlockStep, Parents, blocks_said, plural, read
from tutorial_engine.viz.scheduler_steps import listed
from tutorial_engine.viz.tokens import cut_label

KINDS = {  # of a slot that a request has -> in tips
    "cached": "its K and V are there",
    "run": "written in this step",
    "known": "not run yet, the slot is reserved",
    "empty": "the slot is reserved, no token yet",
}


class Owner(NamedTuple):
    """A request that has a block, as this entry of its table; `filled` slots have its K and V."""

    name: str
    entry: int
    filled: int


@dataclass(frozen=True)
class BlockRun:
    """A recorded run on pages, and how its tokens are written. Facts for any step of it.

    ValueError for a trace of another memory, and for one without a finished step.
    """

    trace: Trace
    labels: Mapping[int, str]  # token id -> how it is written; those that are missing by number

    def __post_init__(self) -> None:
        settings = self.trace.settings
        if not {"block_size", "num_blocks"} <= settings.keys():
            raise ValueError(
                "this trace is not of an engine on pages (its settings have no block_size and "
                "num_blocks): give the engine memory=PagedKVCache.from_config(...)"
            )
        if not self.trace.num_steps:
            raise ValueError("no step of this trace ran to its end: there is nothing to draw")

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return int(self.trace.settings["block_size"] or 0)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return int(self.trace.settings["num_blocks"] or 0)

    @property
    def prefix_caching(self) -> bool:
        """Can full blocks be found by their hash?"""
        return bool(self.trace.settings.get("prefix_caching"))

    @cached_property
    def _read(self) -> tuple[list[BlockStep], Parents]:
        return read(self.trace, self.block_size, self.num_blocks)

    @property
    def steps(self) -> list[BlockStep]:
        """One for each forward."""
        return self._read[0]

    @property
    def last(self) -> int:
        """The number of the last step."""
        return len(self.steps) - 1

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All requests, in the order in which they came."""
        added = (event for event in self.trace.events if isinstance(event, events.Added))
        return tuple(dict.fromkeys(event.request_id for event in added))

    @cached_property
    def forks(self) -> dict[str, str]:
        """Request -> the one that it was forked from."""
        forked = (event for event in self.trace.events if isinstance(event, events.Forked))
        return {event.request_id: event.parent_id for event in forked}

    def parent(self, hash_: str) -> str | None:
        """The hash of the block before it; None for the first block of a sequence."""
        return self._read[1].get(hash_)

    def label(self, token_id: int) -> str:
        """How a token is written."""
        return self.labels.get(token_id, str(token_id))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-num_tokens // self.block_size)

    def owners(self, step: int) -> dict[int, list[Owner]]:
        """Block -> who has it after a step, in the order in which they came."""
        now, found, size = self.steps[step], dict[int, list[Owner]](), self.block_size
        for name in self.names:
            for index, block in enumerate(now.tables.get(name, ())):
                filled = min(max(now.held[name] - index * size, 0), size)
                found.setdefault(block, []).append(Owner(name, index, filled))
        return found

    def slot(self, step: int, name: str, position: int) -> int:
        """Where the K and V of a token lie: block · block_size + offset."""
        index, offset = divmod(position, self.block_size)
        return self.steps[step].tables[name][index] * self.block_size + offset

    def caption(self, step: int) -> str:
        """One sentence: who has how much, what is wasted, what is free, and what happened."""
        now = self.steps[step]
        parts = [f"Step {step} of 0–{self.last}: {self._in_use(step)}", self._free(step)]
        waits: dict[str, list[str]] = {}
        for name in now.state.waiting:
            waits.setdefault(self.waits(step, name), []).append(name)
        for how, names in waits.items():
            parts.append(f"{listed(names)} wait{'s' * (len(names) == 1)} {how}")
        happened = ", ".join(now.facts) or "no block changes hands"
        return "; ".join(part for part in (*parts, f"in this step {happened}") if part) + "."

    def waits(self, step: int, name: str) -> str:
        """With what a request waits, or what it has lost, in words."""
        now = self.steps[step]
        request, lost = now.state.requests[name], now.lost.get(name)
        if request.table:
            return f"with {now.held[name]} shared tokens"
        if lost is None:
            many = len(request.token_ids)
            return f"with {many} token{plural(many)} to run ({self._room(many)})"
        return (
            f"since step {lost.step} took {blocks_said(lost.blocks)} ({lost.num_tokens} computed "
            "tokens are lost)"
        )

    def _room(self, num_tokens: int) -> str:
        blocks = self.num_blocks_for(num_tokens)
        return f"{blocks} block{plural(blocks)}"

    def _in_use(self, step: int) -> str:
        """Blocks in use, the tokens in them, and the slots that are not filled."""
        now, owners = self.steps[step], self.owners(step)
        if not owners:
            return "no block is in use"
        tokens, requests = sum(now.held.values()), len(now.tables)
        stored = sum(max(owner.filled for owner in own) for own in owners.values())
        groups, twice = set(), 0
        for own in owners.values():
            both = min(sorted(owner.filled for owner in own)[-2:]) if len(own) > 1 else 0
            twice += both
            groups |= {tuple(owner.name for owner in own)} if both else set()
        whom = listed(groups.pop()) if len(groups) == 1 else "several"
        once = f" ({twice} of them stored once for {whom})" if twice else ""
        slots, one = len(owners) * self.block_size, len(owners) == 1
        empty = slots - stored
        are = "is" if empty == 1 else "are"
        return (
            f"{len(owners)} of {self.num_blocks} blocks hold{'s' * one} {tokens} "
            f"token{plural(tokens)} of {requests} request{plural(requests)}{once}; "
            f"{empty} of {'its' if one else 'their'} {slots} slots {are} reserved but empty"
        )

    def _free(self, step: int) -> str:
        now = self.steps[step]
        many, found = len(now.free), sum(block in now.hashes for block in now.free)
        findable = f", {found} of them still findable" if found else ""
        return f"{many} block{plural(many)} {'is' if many == 1 else 'are'} free{findable}"

    # -- what hovering says -----------------------------------------------------------------------

    def about_token(self, step: int, name: str, position: int) -> str:
        """How the slot of a token is found, with the numbers."""
        now, size = self.steps[step], self.block_size
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
        """What a slot holds: "cached" K and V, "run" in this step, a "known" token, or "empty"."""
        now = self.steps[step]
        if position in now.written.get(name, ()):
            return "run"
        if position < now.held[name]:
            return "cached"
        return "known" if position < len(now.state.requests[name].token_ids) else "empty"

    def about_block(self, step: int, block: int) -> str:
        """Its holders, positions, tokens, hash and the one before it, and what just happened."""
        now, own = self.steps[step], self.owners(step).get(block, [])
        parts = [f"block {block}"]
        if own:
            first = own[0].entry * self.block_size
            who = f"ref {len(own)}: {listed(owner.name for owner in own)}"
            parts += [who, f"positions {first}–{first + self.block_size - 1}"]
            ids = now.state.requests[own[0].name].token_ids[first : first + own[0].filled]
        else:
            place = now.free.index(block)
            parts.append("free, goes next" if not place else f"free, {place} go before it")
            ids = now.contents.get(block, ())
        words = "|".join(cut_label(self.label(token), 12) for token in ids)
        parts += [cut_label(words, 48)] if words else []
        if block in now.hashes:
            parts.append(f"hash {now.hashes[block]} ← {self.parent(now.hashes[block]) or 'root'}")
        elif self.prefix_caching and own and own[0].filled == self.block_size:
            parts.append("an equal block is the one to be found")
        return " · ".join((*parts, *now.touched.get(block, ())))
