"""Paged attention of one query, recorded block by block.

A recorder stands in the place of the engine's attention. Knows `NaivePagedAttention` and its pools;
draws nothing.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.paged_attention import NaivePagedAttention, tables_of
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.viz.tokens import token_labels

NEW_TOKENS = 6  # of each request, before the query that is watched


class SoftmaxStep(NamedTuple):
    """One block of one query's attention: its scores q·k/√D, and the sums after it.

    m: the largest score so far; `total` = Σ exp(score − m), which papers call l; acc = Σ exp(score
    − m) · v [D]. `correction` = exp(old m − m) has multiplied both sums of the blocks before (None
    for the first).
    """

    block: int  # its number in the pool
    scores: tuple[float, ...]
    m: float
    total: float
    correction: float | None
    acc: tuple[float, ...]

    @property
    def answer(self) -> list[float]:
        """acc / l: attention over the blocks so far."""
        return [number / self.total for number in self.acc]


class RecordedSoftmax(NamedTuple):
    """A query's way through its blocks, what the model's attention returned, and where it was.

    `whole`: softmax over all tokens at once, of the same query [D]. `labels`: the tokens.
    """

    layer: int
    head: int
    block_size: int
    labels: tuple[str, ...]
    steps: tuple[SoftmaxStep, ...]
    returned: tuple[float, ...]
    whole: tuple[float, ...]

    def distance(self, step: int) -> float:
        """The largest difference of acc / l after that block to softmax over all at once."""
        return largest_difference(self.steps[step].answer, self.whole)


class _Recorder(NaivePagedAttention):
    """The same attention; of one sequence, layer and head it keeps how the last query went."""

    def __init__(self, memory: PagedKVCache, seq_id: str, layer: int, head: int) -> None:
        super().__init__(memory)
        self.seq_id, self.layer, self.head = seq_id, layer, head
        self.steps: list[SoftmaxStep] = []
        self.returned = self.whole = torch.empty(0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        out = super().attend(layer, q, k, v, batch)
        if layer == self.layer and self.seq_id in batch.seq_ids:
            index = batch.seq_ids.index(self.seq_id)
            last = batch.query_start_loc[index + 1] - 1
            kv_head = self.head * self._pools[layer][0].shape[1] // q.shape[1]
            k_pool, v_pool = (pool[:, kv_head].float() for pool in self._pools[layer])
            table, n = tables_of(self.memory, batch)[index], batch.context_lens[index]
            query = q[last, self.head].float()
            self.returned = out[last, self.head].float()
            self.steps = _steps(query, k_pool, v_pool, table, n)
            keys, values = (  # gathered, to compare
                torch.cat([pool[block] for block in table])[:n] for pool in (k_pool, v_pool)
            )
            self.whole = torch.softmax(keys @ query / math.sqrt(len(query)), 0) @ values
        return out


def _steps(
    query: Tensor, k_pool: Tensor, v_pool: Tensor, table: Sequence[int], n: int
) -> list[SoftmaxStep]:
    """The running softmax of one query [D] over pools [blocks, block_size, D]."""
    size, found = k_pool.shape[1], list[SoftmaxStep]()
    m, total, acc = -math.inf, 0.0, torch.zeros_like(v_pool[0, 0])
    for start, block in zip(range(0, n, size), table, strict=False):
        filled = min(size, n - start)
        scores = k_pool[block, :filled] @ query / math.sqrt(len(query))
        new_m = max(m, float(scores.max()))
        p, correction = torch.exp(scores - new_m), math.exp(m - new_m)
        m, total = new_m, total * correction + float(p.sum())
        acc = acc * correction + p @ v_pool[block, :filled]
        first = None if not found else correction
        after = m, total, first, tuple(acc.tolist())
        found.append(SoftmaxStep(block, tuple(scores.tolist()), *after))
    return found


def record_softmax(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    layer: int,
    head: int,
    block_size: int = 4,
) -> RecordedSoftmax:
    """Serve all prompts together on pages with paged attention; what A's last query did.

    A is the first prompt. ValueError for a layer or head that there is not.
    """
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    if not (0 <= layer < layers and 0 <= head < heads):
        raise ValueError(
            f"the model has layers 0 .. {layers - 1} and heads 0 .. {heads - 1}; got layer "
            f"{layer}, head {head}"
        )
    lengths = [len(tokenizer.encode(text).ids) + NEW_TOKENS for text in prompts]
    memory = PagedKVCache.from_config(
        model.config,
        block_size=block_size,
        num_blocks=sum(-(-length // block_size) for length in lengths),
        dtype=model.dtype,
        device=model.device,
    )
    recorder = _Recorder(memory, "A", layer, head)
    engine = LLMEngine(
        model,
        tokenizer,
        EngineConfig(max_num_seqs=len(prompts), max_model_len=max(lengths)),
        memory=memory,
        clock=VirtualClock(),
        runner=ModelRunner(model, memory.storage, recorder),
    )
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    for i, text in enumerate(prompts):
        engine.add_request(chr(ord("A") + i), text, params)
    (first,) = (output for output in engine.run() if output.request_id == "A")
    ids = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    many = sum(len(step.scores) for step in recorder.steps)
    return RecordedSoftmax(
        layer,
        head,
        block_size,
        tuple(token_labels(tokenizer, ids[:many])),
        tuple(recorder.steps),
        tuple(recorder.returned.tolist()),
        tuple(recorder.whole.tolist()),
    )


def largest_difference(some: Sequence[float], others: Sequence[float]) -> float:
    """How far two answers are apart in the number that differs most."""
    return max(abs(a - b) for a, b in zip(some, others, strict=True))
