"""Decode steps that are replayed: on a GPU one launch for all layers.

A GPU runs a decode step in less time than Python needs to ask for it. So a step of each size is
recorded once (a CUDA graph), over tensors that stay where they are; afterwards these are filled,
and the recording is played. The logits are not part of it: it need not keep memory for them.
Without CUDA the function itself is called in place of a recording: sizes, tensors and filling are
the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.request import ScheduledRequest
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.model.attention import KVCache
from tutorial_engine.model.batch import Batch, EndToEnd, Slots
from tutorial_engine.model.batched_attention import BatchedAttention
from tutorial_engine.model.decoder import CausalLM

SHORTEST = 64  # tokens: no size has a shorter context
MOST_SLOTS = 2**17  # that a size reads: beyond it the GPU has work enough, and memory would grow

Compute = Callable[[], Tensor]
Record = Callable[[Compute], Compute]  # from a function to what does the same again


class Size(NamedTuple):
    """A step has at most so many sequences, none with a longer context; both are powers of two."""

    num_seqs: int
    longest: int

    @classmethod
    def of(cls, num_seqs: int, longest: int) -> "Size":
        """The smallest one in which a step has room."""
        return cls(_power_of_two(num_seqs), max(SHORTEST, _power_of_two(longest)))

    @property
    def num_slots(self) -> int:
        """Slots that a step of this size reads, needed or not."""
        return self.num_seqs * self.longest


@dataclass(frozen=True, kw_only=True)
class FixedBatch(Batch):
    """A decode step whose tensors stay where they are: given, where Batch computes them."""

    # a field() has no default: without it Batch's own property would be one
    end_to_end: EndToEnd = field()
    padded: tuple[Tensor, Tensor] = field()


class RecordedStep:
    """A decode step of one size: its tensors, and what plays it once it is recorded.

    Rows that are too many repeat the one with the shortest context: they read what it reads, and
    write the same numbers to the same slot.
    """

    def __init__(self, model: CausalLM, attention: BatchedAttention, size: Size) -> None:
        self.model, self.attention, self.size = model, attention, size
        n, device = size.num_seqs, model.device
        # ids, positions and new slots of each row, its context's length and start, and all slots
        self.parts = [n, n, n, n, n + 1, size.num_slots]
        self.staged = torch.zeros(sum(self.parts), dtype=torch.int64)
        if device.type == "cuda":
            self.staged = self.staged.pin_memory()  # then the copy need not wait
        self.numbers = self.staged.to(device, copy=True)
        self._fill([0] * n, [0] * n, [0] * n, [slice(0, 1)] * n)  # reads and writes the first slot
        # a recording reads these, too: they live as long as it does
        self.query_starts = torch.arange(n + 1, dtype=torch.int32, device=device)
        self.at = torch.arange(size.longest, device=device)
        self.play: Compute | None = None

    def compute(self) -> Tensor:
        ids, positions, new_slots, lens, starts, slots = self.numbers.split(self.parts)
        n, longest = self.size
        batch = FixedBatch(
            ids,
            positions,
            tuple(range(n + 1)),
            slot_mapping=new_slots,
            end_to_end=EndToEnd(slots, self.query_starts, starts.to(torch.int32), 1, longest),
            padded=(slots.view(n, longest), self.at < lens[:, None]),
        )
        return self.model(batch, self.attention)

    def run(self, scheduled: Sequence[ScheduledRequest], record: Record) -> Tensor:
        """Hidden states [S, hidden] of a step that has room here, good until the next one.

        The first time it is recorded, by `record`, which may run it once more: that writes the same
        numbers again.
        """
        shortest = min(scheduled, key=lambda item: len_of(item.allocation.context_slots))
        rows = [*scheduled, *[shortest] * (self.size.num_seqs - len(scheduled))]
        self._fill(
            [item.token_ids[0] for item in rows],
            [item.allocation.first_position for item in rows],
            [item.allocation.new_slots[0] for item in rows],
            [item.allocation.context_slots for item in rows],
        )
        if self.play is None:
            self.play = record(self.compute)
        return self.play()[: len(scheduled)]

    def _fill(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        new_slots: Sequence[int],
        contexts: Sequence[Slots],
    ) -> None:
        """What the step runs, in one copy. Slots lie end to end, or padded with the last one."""
        lens = [len_of(slots) for slots in contexts]
        short = [*ids, *positions, *new_slots, *lens, *accumulate(lens, initial=0)]
        if self.numbers.is_cuda:
            torch.cuda.current_stream(self.numbers.device).synchronize()  # is the last copy over?
        self.staged[: len(short)] = torch.tensor(short)
        at, table = 0, self.staged[len(short) :]
        for slots, n in zip(contexts, lens, strict=True):
            row = torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
            table[at : at + n] = row
            if self.attention.varlen is None:
                table[at + n : at + self.size.longest] = row[-1]
            at += n if self.attention.varlen else self.size.longest
        self.numbers.copy_(self.staged, non_blocking=True)


class ReplayRunner(ModelRunner):
    """A ModelRunner whose decode steps are replayed, where all sequences go into one call.

    A step with prefill runs as it comes, and so does one of more than MOST_SLOTS. A size is
    recorded when it is needed first, or by `warm_up`. All recordings work in the same memory: that
    of the largest size, which is keys and values of MOST_SLOTS in ONE layer at most (0.5 GiB for
    Qwen3-0.6B in bf16; up to twice as much if small sizes came first). Each size also has tensors
    of its own: a few numbers for each slot that it reads, on the GPU and in main memory.
    """

    def __init__(
        self,
        model: CausalLM,
        storage: KVCache,
        attention: BatchedAttention | None = None,
    ) -> None:
        super().__init__(model, storage, attention)
        self.recorded: dict[Size, RecordedStep] = {}
        self.num_replays = 0
        on_gpu = model.device.type == "cuda"
        self._record: Record = CudaGraphs(model.device) if on_gpu else as_it_is

    def hidden_states(self, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        lens = [len_of(item.allocation.context_slots) for item in scheduled]
        size = Size.of(len(scheduled), max(lens))
        is_decode = all(item.num_tokens == 1 for item in scheduled)
        if not is_decode or not self._fits(size):
            return super().hidden_states(scheduled)
        self.num_replays += 1
        return self._step(size).run(scheduled, self._record)

    def _fits(self, size: Size) -> bool:
        return isinstance(self.attention, BatchedAttention) and size.num_slots <= MOST_SLOTS

    def _step(self, size: Size) -> RecordedStep:
        if size not in self.recorded:
            assert isinstance(self.attention, BatchedAttention), "_fits has looked"
            self.recorded[size] = RecordedStep(self.model, self.attention, size)
        return self.recorded[size]

    @torch.inference_mode()
    def warm_up(self, num_seqs: int, max_len: int) -> None:
        """Record every size up to so many sequences of so many tokens, with a bar.

        To record a step it is run once, over the first slot: what lies there comes back.
        """
        storage, first = self.storage, torch.zeros(1, dtype=torch.int64, device=self.model.device)
        assert isinstance(storage, KVStorage), "slots are what it reads"
        layers = range(storage.spec.num_layers)
        kept = [[x.clone() for x in storage.read_slots(i, slice(0, 1))] for i in layers]
        largest = Size.of(num_seqs, max_len)
        counts = [2**i for i in range(largest.num_seqs.bit_length())]
        lengths = [2**i for i in range(largest.longest.bit_length())]
        sizes = {Size.of(n, longest) for n in counts for longest in lengths}
        for size in tqdm(sorted(filter(self._fits, sizes), reverse=True), unit="size"):
            step = self._step(size)
            step.play = step.play or self._record(step.compute)
        for i, (k, v) in zip(layers, kept, strict=True):
            storage.write_slots(i, first, k, v)


def as_it_is(compute: Compute) -> Compute:
    """Without CUDA: nothing is recorded, the function is called again."""
    return compute


class CudaGraphs:
    """Records functions as CUDA graphs, in one piece of memory for all of them.

    The stream is its own: PyTorch's default one lies on the device that recorded first, and on
    another device it would record nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Compute:
        with torch.cuda.device(self._device):
            self._beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._beside):  # what libraries make when they are first called
                compute()
            torch.cuda.current_stream().wait_stream(self._beside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._beside):
                out = compute()

        def play() -> Tensor:
            graph.replay()
            return out

        return play


def len_of(slots: Slots) -> int:
    """How many they are."""
    return slots.stop - slots.start if isinstance(slots, slice) else slots.numel()


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
