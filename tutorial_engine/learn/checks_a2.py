"""The checks of the exercises on a GPU: sequences end to end, a step's size, what a graph reads.

No GPU is needed. `GpuMemory` is a memory in small whose freed places are given away again.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tutorial_engine.engine.replay import SHORTEST
from tutorial_engine.learn.judge import Slips, alike, judge, read_numbers, slips_of
from tutorial_engine.learn.parts import whole_numbers, whole_tokens
from tutorial_engine.learn.verdict import CannotBe, Verdict

# -- exercise 1: sequences end to end -------------------------------------------------------------

# (block tables, context lengths, block size) → (where each begins, and the end; all slots)
EndToEnd = Callable[[list[list[int]], list[int], int], tuple[list[int], list[int]]]


def right_end_to_end(
    tables: Sequence[Sequence[int]], lens: Sequence[int], block_size: int
) -> list[list[int]]:
    """Where each sequence begins in the list of all slots (and its end), and the list."""
    starts, slots = [0], []
    for table, length in zip(tables, lens, strict=True):
        for p in range(length):
            slots.append(table[p // block_size] * block_size + p % block_size)
        starts.append(len(slots))
    return [starts, slots]


END_TO_END_SLIPS: Slips = slips_of(
    right_end_to_end,
    """
    starts, slots = [0], [] → starts, slots = [], []
        the first sequence begins at 0: cu_seqlens has one number more than there are sequences
    starts.append(len(slots)) → starts.append(length)
        cu_seqlens says where each one begins, not how long it is: add the lengths up
    for p in range(length) → for p in range(len(table) * block_size)
        the last block is not full: what lies behind the length was never written
    table[p // block_size] * block_size + p % block_size → table[p // block_size]
        this is the number of a block: its slots are block * block_size + offset
    table[p // block_size] * block_size + p % block_size → table[p // block_size] + p % block_size
        before a block lie block * block_size slots, not block
    table[p // block_size] * block_size + p % block_size → p
        position p lies in block table[p // block_size], not in slot p
    for p in range(length) → for p in [min(p, length - 1) for p in range(max(lens))]
        nothing is padded here: each sequence has as many slots as tokens
    """,
)
TABLES = (
    ([[5, 2], [7], [1, 6, 3]], [7, 4, 9], 4),
    ([[3], [0, 2]], [1, 4], 2),
    ([[4, 1, 2]], [3], 1),
)


def _two_lists(answer: Any) -> list[list[int]]:
    pair = answer if isinstance(answer, tuple | list) else ()
    found = [numbers for one in pair if (numbers := whole_numbers(one)) is not None]
    if len(pair) != 2 or len(found) != 2:
        raise CannotBe(
            "return two lists: each of cu_seqlens and slots is one list of whole numbers"
        )
    return found


def _wrong_lists(got: list[list[int]], want: list[list[int]], *_: object) -> str:
    if got == want[::-1]:
        return "first cu_seqlens, then the slots"
    pairs = zip(("cu_seqlens", "slots"), got, want, strict=True)
    name, mine, right = next((name, a, b) for name, a, b in pairs if a != b)
    if len(mine) != len(right):
        return f"{name} has {len(right)} numbers here, got {len(mine)}: {mine}"
    i = next(i for i, (a, b) in enumerate(zip(mine, right, strict=True)) if a != b)
    return f"{name}[{i}] is {right[i]}, got {mine[i]}: {mine}"


def check_end_to_end(function: EndToEnd) -> Verdict:
    """Check a learner's end_to_end(tables, lens, block_size) → cu_seqlens, slots."""
    return judge(
        *("end_to_end", function, right_end_to_end, list(TABLES), END_TO_END_SLIPS),
        "end_to_end: one call over 20 slots gives what attention of each sequence gives",
        read=_two_lists,
        otherwise=_wrong_lists,
        where=lambda got, tables, lens, size: f"tables {tables}, lengths {lens}, blocks of {size}",
        explain={
            IndexError: "p counts from 0 in each sequence, its block is table[p // block_size]"
        },
    )


# -- exercise 2: the size of a step ---------------------------------------------------------------


def right_size(lens: Sequence[int]) -> list[float]:
    """Rows and longest context of the smallest recorded step with room, and its unused part."""
    rows = 1 << (len(lens) - 1).bit_length()
    longest = max(64, 1 << (max(lens) - 1).bit_length())
    return [rows, longest, 1 - sum(lens) / (rows * longest)]


assert SHORTEST == 64, "as the exercise says"
SIZE_SLIPS: Slips = slips_of(
    right_size,
    """
    (len(lens) - 1).bit_length() → len(lens).bit_length()
        a power of two has room for itself: 4 sequences need 4 rows, not 8
    (max(lens) - 1).bit_length() → max(lens).bit_length()
        a power of two has room for itself: 128 tokens need a size of 128, not of 256
    (len(lens) - 1).bit_length() → len(lens).bit_length()
    (max(lens) - 1).bit_length() → max(lens).bit_length()
        a power of two has room for itself: 4 sequences need 4 rows, 128 tokens a size of 128
    1 << (len(lens) - 1).bit_length() → len(lens)
        the number of sequences is rounded up, too
    max(64, 1 << (max(lens) - 1).bit_length()) → 1 << (max(lens) - 1).bit_length()
        no size has a context below 64
    1 << (max(lens) - 1).bit_length() → 1 << (sum(lens) - 1).bit_length()
        each row has room for the longest context, not for all of them together
    sum(lens) / (rows * longest) → sum(lens) / (len(lens) * longest)
        rows that are too many cost as much as the others
    1 - sum(lens) / (rows * longest) → (len(lens) * longest - sum(lens)) / (rows * longest)
        all slots of the rows that are too many are unused, too
    1 << (max(lens) - 1).bit_length() → 1 << (lens[0] - 1).bit_length()
        the longest context need not be the first
    sum(lens) / (rows * longest) → max(lens) / longest
        each row has its own length: add them up
    1 - sum(lens) / (rows * longest) → sum(lens) / (rows * longest)
        this is the part that is needed
    1 - sum(lens) / (rows * longest) → rows * longest - sum(lens)
        this is a number of slots: divide by all slots of the size
    """,
)
LENGTHS = ([100], [40, 129, 7], [64, 64, 64, 64], [20, 30], [500, 60, 61, 62, 63])


def check_size(function: Callable[[list[int]], tuple[int, int, float]]) -> Verdict:
    """Check a learner's size(lens) → rows, longest context, unused part of a recorded step."""
    return judge(
        *("size", function, right_size, [(lens,) for lens in LENGTHS], SIZE_SLIPS),
        "size: both are rounded up, and every slot of the size is read",
        read=read_numbers(3),
        where=lambda got, lens: f"contexts of {lens}, got {_plain(got)}",
        otherwise=_wrong_size,
    )


def _plain(got: Any) -> Any:
    """Numbers as one writes them: 2, not 2.0."""
    items = got if isinstance(got, list) else []
    return [one if (n := whole_tokens(one)) is None else n for one in items] or got


def _wrong_size(got: Any, want: list[float], *_: object) -> str:
    if not isinstance(got, list) or len(got) != 3:
        return "return three numbers: rows, longest context, unused part"
    names = ("the rows", "the longest context", "the unused part (0 .. 1, not rounded)")
    pairs = zip(names, got, want, strict=True)
    name, right = next((name, right) for name, mine, right in pairs if not alike(mine, right))
    return f"{name} should be {right:.10g}"


# -- exercise 3: what a graph reads ---------------------------------------------------------------


class GpuMemory:
    """A memory in small that does two things as a GPU's does under PyTorch.

    The place of a tensor that nobody knows any more is given to the next one; and a recording knows
    places, no tensors. ValueError when it is full.
    """

    def __init__(self, num_numbers: int = 64) -> None:
        self._numbers = torch.zeros(num_numbers, dtype=torch.int64)
        self._taken: dict[int, int] = {}  # first place -> how many
        self.num_recordings = self.num_replays = 0

    def tensor(self, numbers: Iterable[int]) -> Tensor:
        """A tensor of these numbers, in the first place that is free.

        The place is free again when nobody knows the tensor or a view of it.
        """
        values = torch.tensor(list(numbers))
        size = len(values)
        ends = (start + count for start, count in self._taken.items())
        for start in sorted({0, *ends}):
            used = any(a < start + size and start < a + n for a, n in self._taken.items())
            if not used and start + size <= len(self._numbers):
                self._taken[start] = size
                place = self._numbers.numpy()[start : start + size]
                weakref.finalize(place, self._taken.pop, start)  # a tensor's views hold it, too
                return torch.from_numpy(place).copy_(values)
        raise ValueError(f"no place for {size} numbers: keep fewer tensors")

    def place_of(self, tensor: Tensor) -> int:
        """Where a tensor begins. ValueError if it does not lie in this memory."""
        if not isinstance(tensor, Tensor):
            raise ValueError(f"a recording reads tensors, got {tensor!r}: make it with gpu.tensor")
        place = (tensor.data_ptr() - self._numbers.data_ptr()) // self._numbers.itemsize
        if not 0 <= place < len(self._numbers):
            raise ValueError(f"{tensor} does not lie in the GPU's memory: make it with gpu.tensor")
        return place

    def numbers(self, count: int) -> list[int]:
        """What lies at the first so many places."""
        return self._numbers[:count].tolist()

    def record(self, function: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], Tensor]:
        """A function that computes the same again, from what lies at these tensors' places."""
        places = [(self.place_of(tensor), len(tensor)) for tensor in tensors]
        self.num_recordings += 1

        def replay() -> Tensor:
            self.num_replays += 1
            return function(*(self._numbers[start : start + size] for start, size in places))

        return replay


Step = Callable[[list[int]], Tensor]  # lens → which of 8 positions each sequence sees


def right_step(gpu: GpuMemory) -> Step:
    """A step that keeps what its recording reads."""
    lens = gpu.tensor([1, 1])
    positions = gpu.tensor(range(8))
    replay = gpu.record(lambda lens, positions: positions < lens[:, None], lens, positions)

    def step(new_lens: list[int], kept: object = positions) -> Tensor:
        lens.copy_(torch.tensor(new_lens))
        return replay()

    return step


STEP_SLIPS: Slips = slips_of(
    right_step,
    """
    , kept: object = positions →
        the place of `positions` was given away, because nothing refers to it any more: keep the
        tensor itself, not a copy, as long as the step lives
    lens.copy_(torch.tensor(new_lens)) → lens = gpu.tensor(new_lens)
        the recording reads the place of the first lens: keep that tensor, and fill it
    return replay() → return torch.arange(8) < lens[:, None]
        the step is computed again, one launch after the other: nothing is replayed
    return replay() → return gpu.record(lambda a, b: b < a[:, None], lens, positions)()
        each call of the step records it again: record once, in make_step, and then only replay
    """,
)
FILLS = ([3, 5], [8, 1], [2, 7])


class _SharedMemory(GpuMemory):
    """Other programs use it, too: after a recording, whatever place is free is given to them."""

    def __init__(self) -> None:
        super().__init__(256)
        self._others: list[Tensor] = []

    def tensor(self, numbers: Iterable[int]) -> Tensor:
        if self.num_recordings:
            self._others.append(super().tensor([0] * 8))
        return super().tensor(numbers)


def _steps(make_step: Callable[[GpuMemory], Step | None], fills: Sequence[list[int]]) -> object:
    """What each step sees, while other tensors come, and after a second step was made.

    Then its replays and recordings, and the recordings that were made before.
    """
    gpu, seen = _SharedMemory(), []
    step = make_step(gpu)
    if not callable(step):
        return step
    others, before = [gpu.tensor([0, 0])], gpu.num_replays  # make_step may have tried its step
    recorded = gpu.num_recordings
    for lens in fills:
        answer = step(lens)
        seen.append(answer.int().tolist() if isinstance(answer, Tensor) else answer)
        others.append(gpu.tensor([0] * 8))
    counts = [gpu.num_replays - before, gpu.num_recordings - recorded, recorded]
    others += [make_step(gpu), gpu.tensor([0] * 8)]  # type: ignore[list-item]
    answer = step(fills[0])
    return [*seen, answer.int().tolist() if isinstance(answer, Tensor) else answer, *counts]


def check_step(function: Callable[[GpuMemory], Step]) -> Verdict:
    """Check a learner's make_step(gpu) → step(lens), which replays what it recorded."""
    return judge(
        *("make_step", function, right_step, [(FILLS,)], STEP_SLIPS),
        "make_step: three replays are right, although other tensors come in between",
        call=_steps,
        otherwise=_what_is_wrong,
    )


def _what_is_wrong(got: object, want: list[Any], fills: Sequence[list[int]]) -> str:
    if not isinstance(got, list):
        return "return the function step(new_lens)"
    if got[:3] == want[:3] and got[3] != want[3]:
        return (
            "after make_step was called again, the first step is wrong: each step keeps what it "
            "needs by itself, not in one variable for all"
        )
    for lens, mine, right in zip(fills, got, want, strict=False):
        if mine != right:
            return f"step({lens}) must give {right}, one row for each sequence, got {mine}"
    replays, again, recorded = got[-3:]
    if again or recorded != 1:
        return (
            "record once, in make_step, and only replay in step: make_step recorded "
            f"{recorded} times, and {len(fills)} calls of its step {again} times"
        )
    return f"{len(fills)} calls of the step must be {len(fills)} replays, got {replays}"
