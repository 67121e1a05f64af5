"""Introduced in notebook 04. The slots of a sequence that is not one row, as a forward reads them.

Knows slot numbers; knows no block, no cell and no sequence.
"""

import torch

from tutorial_engine.model.batch import Slots


class SlotNumbers:
    """The slots of a sequence by position, in `slots`: a list that its owner makes longer.

    The same numbers stand in a tensor that grows by doubling, so that a token more costs one number
    and no copy. Any other change is a `replace`.
    """

    def __init__(self, slots: list[int], device: torch.device) -> None:
        self.slots, self._device = slots, device
        self._run = 0  # leading slots that are neighbours
        self._known = 0  # leading slots that stand in the tensor
        self._tensor = torch.empty(0, dtype=torch.int64)
        self._array = self._tensor.numpy()

    def first(self, n: int) -> Slots:
        """The first n slots: a slice if they are neighbours, else a view [n] that is only read."""
        slots = self.slots
        while self._run < len(slots) and slots[self._run] == slots[0] + self._run:
            self._run += 1
        if n <= self._run:
            return slice(slots[0], slots[0] + n) if n else slice(0, 0)
        if self._known < len(slots):
            if len(slots) > len(self._array):
                self._grow(2 * len(slots))  # so that each is copied about once in all
            self._array[self._known : len(slots)] = slots[self._known :]
            self._known = len(slots)
        return self._tensor[:n].to(self._device)

    def replace(self, start: int, slots: list[int]) -> None:
        """In place of those from position `start` on come these."""
        self.slots[start:] = slots
        self._run, self._known = min(self._run, start), min(self._known, start)

    def check_integrity(self) -> None:
        """AssertionError if slice or tensor are not what the list says."""
        got = self.first(len(self.slots))
        told = list(range(got.start, got.stop)) if isinstance(got, slice) else got.tolist()
        assert told == self.slots, f"the slots are {self.slots}, the tensor says {told}"

    def _grow(self, length: int) -> None:
        with torch.inference_mode(False):  # wherever it is made, it can be written anywhere
            tensor = torch.empty(max(64, length), dtype=torch.int64)
        tensor[: self._known] = self._tensor[: self._known]
        # the same memory as an array, into which one number is written fifty times faster
        self._tensor, self._array = tensor, tensor.numpy()
