"""The tokens of one forward pass, laid end to end without padding.

Knows which token belongs to which sequence and where it stands; knows no model and no cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Where tokens lie in a KV storage: a slice where the slots are neighbours, else their numbers [n].
Slots = slice | Tensor


class Allocation(NamedTuple):
    """What a cache says of a sequence's next tokens: the position of the first, and the slots.

    `new_slots` are those to write, one per token; `context_slots` those to read: positions
    0 .. last, the new ones included.
    """

    first_position: int
    new_slots: Sequence[int]
    context_slots: Slots


class EndToEnd(NamedTuple):
    """What all sequences of a batch read, one after the other, for a kernel that takes them so.

    `slots` [N]; sequence s has those from starts[s] to starts[s + 1], and its queries are those
    from query_starts[s] (int32 [S + 1] each; kernels say cu_seqlens).
    """

    slots: Tensor
    query_starts: Tensor
    starts: Tensor
    longest_query: int
    longest: int


@dataclass(frozen=True)
class Batch:
    """T tokens of S sequences, flat. Frozen, and passed to whoever needs it, never global.

    input_ids [T] and positions [T] are int64. `query_start_loc` has S + 1 entries: sequence s owns
    the tokens query_start_loc[s] .. query_start_loc[s + 1] − 1 (kernels say cu_seqlens). The other
    three are there when a cache is (notebook 02): `seq_ids` names the sequences for it,
    `slot_mapping` [T] says where each token's K and V go, `context_slots[s]` where those of
    positions 0 .. last lie.
    """

    input_ids: Tensor
    positions: Tensor
    query_start_loc: tuple[int, ...]
    seq_ids: tuple[str, ...] = ()
    slot_mapping: Tensor | None = None
    context_slots: tuple[Slots, ...] = ()

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[Sequence[int]],
        first_positions: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> "Batch":
        """Pack token id lists; sequence s counts its positions from first_positions[s] (0).

        ValueError for no sequence, an empty one, an id that is no whole number, or a negative
        position.
        """
        firsts = [0] * len(sequences) if first_positions is None else list(first_positions)
        ids, positions, starts = _end_to_end(sequences, firsts)
        for s, sequence in enumerate(sequences):
            bad = [i for i in sequence if not isinstance(i, int) or isinstance(i, bool) or i < 0]
            if bad:
                raise ValueError(f"sequence {s} holds {bad[0]!r}; token ids are whole numbers ≥ 0")
        return cls(torch.tensor(ids, device=device), torch.tensor(positions, device=device), starts)

    @classmethod
    def from_allocations(
        cls,
        sequences: Sequence[Sequence[int]],
        allocations: Sequence[Allocation],
        seq_ids: Sequence[str],
        device: torch.device | str = "cpu",
    ) -> "Batch":
        """Pack the tokens to run of each sequence, with the slots that a cache gave them.

        ValueError when there are not as many allocations, slots or ids as there must be.
        """
        firsts = [allocation.first_position for allocation in allocations]
        ids, positions, starts = _end_to_end(sequences, firsts)
        new_slots = [slot for allocation in allocations for slot in allocation.new_slots]
        if len(new_slots) != len(ids) or len(seq_ids) != len(sequences):
            raise ValueError(
                f"{len(ids)} tokens of {len(sequences)} sequences need as many slots and ids; got "
                f"{len(new_slots)} slots, {len(seq_ids)} ids"
            )
        # the rows of one tensor: one copy to the device
        input_ids, positions_, slot_mapping = torch.tensor(
            [ids, positions, new_slots], device=device
        ).unbind()
        contexts = _on(input_ids.device, [one.context_slots for one in allocations])
        return cls(input_ids, positions_, starts, tuple(seq_ids), slot_mapping, contexts)

    @property
    def num_tokens(self) -> int:
        """T, the tokens run in this forward."""
        return self.query_start_loc[-1]

    @property
    def num_seqs(self) -> int:
        """S, the sequences that they belong to."""
        return len(self.query_start_loc) - 1

    @cached_property  # every layer asks for it
    def query_lens(self) -> tuple[int, ...]:
        """Tokens of each sequence that run in this forward."""
        return tuple([end - start for start, end in pairwise(self.query_start_loc)])

    @cached_property
    def context_lens(self) -> tuple[int, ...]:
        """Tokens that each sequence reads, the new ones included; vLLM calls it seq_lens."""
        return tuple(
            slots.stop - slots.start if isinstance(slots, slice) else slots.numel()
            for slots in self.context_slots
        )

    @cached_property  # every layer asks for it
    def end_to_end(self) -> EndToEnd:
        """All that is read, in one piece."""
        lens, device = self.context_lens, self.input_ids.device
        numbers = [_numbers(slots, device) for slots in self.context_slots]
        starts = [self.query_start_loc, [0, *accumulate(lens)]]
        queries, keys = torch.tensor(starts, dtype=torch.int32, device=device).unbind()
        return EndToEnd(torch.cat(numbers), queries, keys, max(self.query_lens), max(lens))

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor]:
        """What all sequences read, `pad` of them."""
        return self.pad(range(self.num_seqs))

    def pad(self, seqs: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Slots of these [S, longest], and which of them count. Others repeat a sequence's last.

        So what is read there is a number: NaN times the weight 0 would be NaN.
        """
        lens, device = [self.context_lens[s] for s in seqs], self.input_ids.device
        at = torch.arange(max(lens), device=device)
        length = torch.tensor(lens, device=device)[:, None]
        rows = [_numbers(self.context_slots[s], device) for s in seqs]
        table = torch.stack([row[at.clamp(max=n - 1)] for row, n in zip(rows, lens, strict=True)])
        return table, at < length

    @property
    def last_token_indices(self) -> tuple[int, ...]:
        """Row of each sequence's last token: the rows whose logits choose the next tokens."""
        return tuple(end - 1 for end in self.query_start_loc[1:])


def _numbers(slots: Slots, device: torch.device) -> Tensor:
    if isinstance(slots, slice):
        return torch.arange(slots.start, slots.stop, device=device)
    return slots


def _on(device: torch.device, contexts: Sequence[Slots]) -> tuple[Slots, ...]:
    """Slots on the device of the batch: those that are numbers in one copy."""
    numbers = [slots for slots in contexts if isinstance(slots, Tensor)]
    if not numbers or all(slots.device == device for slots in numbers):
        return tuple(contexts)
    moved = iter(torch.cat(numbers).to(device).split([slots.numel() for slots in numbers]))
    return tuple(slots if isinstance(slots, slice) else next(moved) for slots in contexts)


def _end_to_end(
    sequences: Sequence[Sequence[int]], first_positions: Sequence[int]
) -> tuple[list[int], list[int], tuple[int, ...]]:
    """Ids and positions of all tokens, and where each sequence begins."""
    if not sequences:
        raise ValueError("a batch needs at least one sequence, got none")
    if len(first_positions) != len(sequences):
        raise ValueError(f"{len(sequences)} sequences but {len(first_positions)} first positions")
    ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    for s, (sequence, first) in enumerate(zip(sequences, first_positions, strict=True)):
        if len(sequence) == 0:
            raise ValueError(f"sequence {s} is empty: a prompt needs at least one token")
        if first < 0:
            raise ValueError(f"sequence {s} starts at position {first}; positions are ≥ 0")
        ids.extend(sequence)
        positions.extend(range(first, first + len(sequence)))
        starts.append(len(ids))
    return ids, positions, tuple(starts)
