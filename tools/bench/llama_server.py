"""llama.cpp as a server: several sequences in one `llama_decode`.

Drives its batch interface as its own server does: every sequence that decodes gets its token, the
room that is left goes to prompts, and a new one begins as soon as there is room.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tools.bench.llama_cpp import LlamaCpp
from tools.bench.serving import Asked, Tokens, longest_request


@dataclass
class _Slot:
    """One sequence: what it wants, how much of it is in the cache, and what came."""

    seq_id: int
    asked: Asked
    num_cached: int = 0
    tokens: list[int] = field(default_factory=list)

    def next_ids(self, room: int) -> Sequence[int]:
        """The next tokens to run: its newest one, or up to `room` of its prompt."""
        if self.tokens:
            return self.tokens[-1:]
        return self.asked.prompt[self.num_cached : self.num_cached + room]

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self.asked.new_tokens


class LlamaServer(LlamaCpp):
    """llama.cpp with one sequence per request, in a context made once; its defaults otherwise."""

    def __init__(self, file: Path, dtype: torch.dtype, requests: Sequence[Asked]) -> None:
        super().__init__(file, dtype, longest_request(requests), num_seqs=len(requests))
        self._room = self._lib.llama_n_batch(self._context)
        self._batch = self._lib.llama_batch_init(self._room, 0, 1)

    def serve(self, requests: Sequence[Asked]) -> Sequence[Tokens]:
        """As Server.serve. ValueError when llama.cpp refuses a batch."""
        self._forget()
        slots = [_Slot(i, one) for i, one in enumerate(requests)]
        while left := [slot for slot in slots if not slot.is_done]:
            self._step(left)
        return [tuple(slot.tokens) for slot in slots]

    def _step(self, slots: Sequence[_Slot]) -> None:
        """One batch: decodes first, then prompts; a token for each that has run all it has."""
        batch, self._batch.n_tokens = self._batch, 0
        rows: list[tuple[_Slot, int]] = []  # (slot, row whose logits choose its next token)
        for slot in sorted(slots, key=lambda slot: not slot.tokens):
            for token in slot.next_ids(self._room - batch.n_tokens):
                self._add(token, slot.num_cached, slot.seq_id)
                slot.num_cached += 1
            if slot.num_cached == len(slot.asked.prompt) + len(slot.tokens):
                batch.logits[batch.n_tokens - 1] = 1
                rows.append((slot, batch.n_tokens - 1))
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise ValueError(f"llama.cpp gave status {status} for {batch.n_tokens} tokens")
        for slot, row in rows:
            slot.tokens.append(int(self._logits(row).argmax()))

    def _add(self, token: int, position: int, seq_id: int) -> None:
        batch, i = self._batch, self._batch.n_tokens
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, 0
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq_id
        batch.n_tokens += 1

    def close(self) -> None:
        """As LlamaCpp.close."""
        if self._context:
            self._lib.llama_batch_free(self._batch)
        super().close()
