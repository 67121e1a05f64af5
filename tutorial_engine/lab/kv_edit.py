"""A cached memory that one edits: K or V of some slots exchanged with those of another text.

Knows caches and runners from outside. Shapes: n tokens, H_kv, D.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutorial_engine.cache.rows import GrowingKVCache
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import Run, run_with_cache
from tutorial_engine.lab.ledger import loop_path
from tutorial_engine.model.attention import NoCache, SdpaAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM

KV = Mapping[int, tuple[Tensor, Tensor]]  # layer -> K, V [n, H_kv, D]


class _Noting(NoCache):
    """Keeps what was written, by layer."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        self.kv[layer] = k, v
        super().write(layer, k, v, batch)


@torch.inference_mode()
def memory_of(model: CausalLM, token_ids: Sequence[int]) -> KV:
    """K and V of each of these tokens, in every layer."""
    noting = _Noting()
    model(Batch.from_sequences([list(token_ids)], device=model.device), SdpaAttention(noting))
    return noting.kv


@dataclass(frozen=True)
class Exchange:
    """These slots of these layers get the K ("k"), V ("v") or both ("kv") of a donor.

    Of these K/V heads; None: of all.
    """

    donor: KV
    slots: Sequence[int]
    layers: Sequence[int]
    which: str
    heads: Sequence[int] | None = None

    def __call__(self, kv: KV) -> KV:
        """The memory with the donor's parts in it; the one that is given stays as it is."""
        return {layer: self.of_layer(layer, *pair) for layer, pair in kv.items()}

    def of_layer(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The same for one layer."""
        if layer not in self.layers:
            return k, v
        slots, heads = list(self.slots), range(k.shape[1]) if self.heads is None else self.heads
        k, v = k.clone(), v.clone()
        for name, x, new in zip("kv", (k, v), self.donor[layer], strict=True):
            for head in heads if name in self.which else ():
                x[slots, head] = new[slots, head]
        return k, v


@torch.inference_mode()
def next_logits(
    model: CausalLM, held: KV, token_ids: Sequence[int], edits: Sequence[Callable[[KV], KV]]
) -> Tensor:
    """Logits [edits, V] after these tokens, over a memory as each edit leaves it: one forward."""
    memories = [edit(held) for edit in edits]

    class Edited(NoCache):
        def read(self, layer: int, batch: Batch, s: int) -> tuple[Tensor, Tensor]:
            old, new = memories[s][layer], super().read(layer, batch, s)
            return torch.cat((old[0], new[0])), torch.cat((old[1], new[1]))

    count, num_held = len(edits), len(held[0][0])
    batch = Batch.from_sequences([[*token_ids]] * count, [num_held] * count, device=model.device)
    hidden = model(batch, SdpaAttention(Edited()))
    return model.compute_logits(hidden[len(token_ids) - 1 :: len(token_ids)])


def continued(
    model: CausalLM, token_ids: Sequence[int], edit: Callable[[KV], KV], num_tokens: int
) -> list[int]:
    """The greedy tokens after a prompt whose memory, all but its last token, was edited."""
    path = loop_path(lambda _: _over(model, edit))
    return path([list(token_ids)], num_tokens)[0].argmax(-1).tolist()


def _over(model: CausalLM, edit: Callable[[KV], KV]) -> Run:
    """Runs over a cache that gets the edited memory of a prompt before the prompt's last token."""
    cache = GrowingKVCache()
    run = run_with_cache(model, cache)

    def run_edited(requests: Sequence[Request]) -> Tensor:
        for request in requests:
            if not request.num_computed_tokens:
                _put(cache, request, edit(memory_of(model, request.token_ids[:-1])))
        return run(requests)

    return run_edited


def _put(cache: GrowingKVCache, request: Request, kv: KV) -> None:
    """Write a memory into a cache, as if its tokens had run there."""
    name, ids, count = request.request_id, request.token_ids, len(kv[0][0])
    room = cache.allocate(name, ids, 0, count)
    assert room is not None, "the cache is made for this sequence"
    batch = Batch.from_allocations([ids[:count]], [room], [name], kv[0][0].device)
    for layer, pair in kv.items():
        cache.storage.write(layer, *pair, batch)
    cache.commit(name, ids, count)
    request.num_computed_tokens = count
