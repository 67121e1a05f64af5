"""The checks of the exercises on a GPU: sequences end to end, a step's size, what a graph reads.

No GPU is needed. `GpuMemory` is a memory in small whose freed places are given away again.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tutorial_engine.engine.replay import SHORTEST
from tutorial_engine.learn.exercises.facts import AsIs
from tutorial_engine.learn.exercises.judge import Slips, judge, read_numbers, slips_of
from tutorial_engine.learn.exercises.verdict import CannotBe, Verdict, must_answer
from tutorial_engine.learn.parts.holder import whole_numbers

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
        gives `cu_seqlens` without its first 0; it has S + 1 numbers, and the first sequence begins
        at 0
    starts.append(len(slots)) → starts.append(length)
        gives the length of each sequence in `cu_seqlens`; these numbers say where each one begins
    for p in range(length) → for p in range(len(table) * block_size)
        gives all slots of a sequence's blocks; the slots behind its length have no token
    table[p // block_size] * block_size + p % block_size → table[p // block_size]
        gives the numbers of blocks; slots are asked for, and a block has `block_size` of them
    table[p // block_size] * block_size + p % block_size → table[p // block_size] + p % block_size
        gives block + offset; a slot counts the `block_size` slots of each block before it
        ▸ table[p // block_size] * block_size + p % block_size
    table[p // block_size] * block_size + p % block_size → p
        gives positions; `table` says in which block a position lies
    for p in range(length) → for p in [min(p, length - 1) for p in range(max(lens))]
        fills each sequence up to the longest; end to end, each has as many slots as tokens
    [starts, slots] → [slots, starts]
        gives the slots first, and `cu_seqlens` second; `cu_seqlens` comes first
    """,
)
TABLES = (
    ([[2]], [1], 2),  # its block is not full
    ([[2]], [2], 2),  # its block is full
    ([[3, 0]], [3], 2),  # the second block lies before the first
    ([[1], [0]], [1, 2], 2),  # two sequences
    ([[3], [0, 2]], [1, 4], 2),
    ([[4, 1, 2]], [3], 1),  # one token in a block
    ([[5, 2], [7], [1, 6, 3]], [7, 4, 9], 4),
)


def _two_lists(answer: Any) -> list[list[int]]:
    pair = answer if isinstance(answer, tuple | list) else ()
    found = [numbers for item in pair if (numbers := whole_numbers(item)) is not None]
    if len(pair) != 2 or len(found) != 2:
        raise CannotBe(
            "it must return two lists of whole numbers, cu_seqlens and the slots; "
            f"it returned {answer!r:.60}"
        )
    return found


def check_end_to_end(function: EndToEnd) -> Verdict:
    """Check a learner's end_to_end(tables, lens, block_size) → cu_seqlens, slots."""
    return judge(
        *("end_to_end", function, right_end_to_end, list(TABLES), END_TO_END_SLIPS),
        "end_to_end: one call over 20 slots gives what attention of each sequence gives",
        read=_two_lists,
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
        rounds the rows up also where their number is a power of two; 4 sequences have room in 4
        rows
    (max(lens) - 1).bit_length() → max(lens).bit_length()
        rounds the longest context up also where it is a power of two; 128 tokens have room in 128
    (len(lens) - 1).bit_length() → len(lens).bit_length()
    (max(lens) - 1).bit_length() → max(lens).bit_length()
        rounds both up also where a number is a power of two; a power of two has room for itself
    1 << (len(lens) - 1).bit_length() → len(lens)
        does not round the number of sequences up; both numbers are rounded up to a power of two
    1 << (max(lens) - 1).bit_length() → max(lens)
        does not round the longest context up; both numbers are rounded up to a power of two
    max(64, 1 << (max(lens) - 1).bit_length()) → 1 << (max(lens) - 1).bit_length()
        gives contexts below 64 a size below 64; the context is 64 at least
    1 << (max(lens) - 1).bit_length() → 1 << (sum(lens) - 1).bit_length()
        takes the sum of the lengths for the longest context; each row has room for the longest one
        alone
    1 << (max(lens) - 1).bit_length() → 1 << (lens[0] - 1).bit_length()
        takes the first length for the longest one; the longest context may be any of them
    sum(lens) / (rows * longest) → sum(lens) / (len(lens) * longest)
        counts the unused part of the real rows alone; the added rows are copied, too
    1 - sum(lens) / (rows * longest) → (len(lens) * longest - sum(lens)) / (rows * longest)
        counts the slots of the added rows as used; no sequence needs them
    sum(lens) / (rows * longest) → max(lens) / longest
        gives the unused part of the longest row; the others have lengths of their own
    1 - sum(lens) / (rows * longest) → sum(lens) / (rows * longest)
        gives the used part; the part that nobody needs is asked for
    1 - sum(lens) / (rows * longest) → rows * longest - sum(lens)
        gives the number of unused slots; their part of all slots is asked for
    1 - sum(lens) / (rows * longest) → round(1 - sum(lens) / (rows * longest), 2)
        rounds the unused part to two digits; the part is asked for as it is
    """,
)
LENGTHS = (
    [64],  # a power of two has room for itself
    [16],  # 64 at least
    [65],
    [128],
    [64, 64],
    [9, 64, 8],  # 4 rows for 3 sequences, and the longest is not the first
    [100],
    [40, 129, 7],
    [64, 64, 64, 64],
    [20, 30],
    [500, 60, 61, 62, 63],
)


def check_size(function: Callable[[list[int]], tuple[int, int, float]]) -> Verdict:
    """Check a learner's size(lens) → rows, longest context, unused part of a recorded step."""
    return judge(
        *("size", function, right_size, [(lens,) for lens in LENGTHS], SIZE_SLIPS),
        "size: both are rounded up, and every slot of the size is read",
        read=read_numbers(3),
    )


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


class _SharedMemory(GpuMemory):
    """Other programs use it, too: after a recording, whatever place is free is given to them."""

    def __init__(self) -> None:
        super().__init__(256)
        self._others: list[Tensor] = []
        self._read: list[tuple[int, list[int]]] = []  # place and numbers of what is recorded

    def tensor(self, numbers: Iterable[int]) -> Tensor:
        if self.num_recordings:
            self._others.append(super().tensor([0] * 8))
        return super().tensor(numbers)

    def record(self, function: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], Tensor]:
        self._read += [(self.place_of(tensor), tensor.tolist()) for tensor in tensors]
        return super().record(function, *tensors)

    def given_back(self) -> list[list[int]]:
        """What lay in the places that a recording reads, and that are free now."""
        taken = [range(start, start + size) for start, size in self._taken.items()]
        return [held for place, held in self._read if not any(place in used for used in taken)]


MakeStep = Callable[[GpuMemory], Step]
FILLS = ([3, 5], [8, 1], [2, 7])
CALLS = (  # the lengths that are asked for, one after the other; how many steps are made before
    (FILLS[:1], 1),
    (FILLS[:2], 1),
    (FILLS, 1),
    (FILLS[:1], 2),  # the first step is asked when there is a second one
)


def _made(make_step: MakeStep, gpu: GpuMemory) -> Step:
    step = make_step(gpu)
    must_answer("make_step", step, make_step)
    if not callable(step):
        raise CannotBe(f"it must return the function step(new_lens); it returned {step!r:.60}")
    return step


def _last_answer(make_step: MakeStep, calls: Sequence[list[int]], num_steps: int) -> Any:
    """What the first step sees in its last call, while other tensors come into the memory."""
    gpu, answer = _SharedMemory(), None
    steps = [_made(make_step, gpu) for _ in range(num_steps)]
    others = [gpu.tensor([0, 0]), gpu.tensor([0] * 8)]
    for lens in calls:
        answer = steps[0](lens)
        must_answer("step", answer, make_step)
        others.append(gpu.tensor([0] * 8))
    return answer.int() if isinstance(answer, Tensor) else answer


def _as_called(calls: Sequence[list[int]], num_steps: int) -> dict[str, object]:
    asked = AsIs(", ".join(f"step({lens})" for lens in calls))
    again = {"before": AsIs("make_step(gpu) was called a second time")} if num_steps > 1 else {}
    return {**again, "asked": asked}


def check_step(function: MakeStep) -> Verdict:
    """Check a learner's make_step(gpu) → step(lens), which replays what it recorded."""

    def given_back(_: object, calls: object, num_steps: int) -> str | None:
        gpu = _SharedMemory()
        steps = [_made(function, gpu) for _ in range(num_steps)]
        held = " and ".join(map(str, gpu.given_back())) if steps else ""
        read = f"the place of {held}, which the recording reads: nothing referred to that tensor"
        return read if held else None

    def not_replayed(function: MakeStep) -> str:
        gpu = _SharedMemory()
        step = _made(function, gpu)
        recorded, before = gpu.num_recordings, gpu.num_replays  # it may have tried its step
        for lens in FILLS:
            step(lens)
        again, replays = gpu.num_recordings - recorded, gpu.num_replays - before
        if (recorded, again, replays) == (1, 0, len(FILLS)):
            return ""
        return (
            f"the answers are right, but they are not {len(FILLS)} replays of 1 recording: "
            f"make_step recorded {recorded} times, three calls of its step {again} times, "
            f"with {replays} replays"
        )

    return judge(
        *("make_step", function, right_step, CALLS, {}),
        "make_step: three replays are right, although other tensors come in between",
        call=_last_answer,
        inputs=_as_called,
        also={"given back": given_back},
        then=not_replayed,
    )
