"""What ranks did together: tokens, bytes, sums, and who agreed.

Knows numbers; knows no process and no tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tutorial_engine.lab.ledger import bound_of
from tutorial_engine.parallel.tensor_parallel import Traffic


@dataclass(frozen=True, kw_only=True)
class ParallelReport:
    """What the ranks did. Bytes are of weights (as stored) and of K/V pages, per rank, and `alone`.

    `replicated_bytes` of each rank's weights are the same on all. `traffic` is one rank's, over
    `num_forwards` that ran `num_tokens`. A digest per rank: of its logits and its events.
    `seconds` of serving, without loading. `mlp_calls`: how often a learner's MLP ran on a rank,
    None without one. `kv_bytes_alone` and the last four are rank 0's second run, without the
    others; if there was none, the sum of the ranks' bytes, and None.
    """

    tp_size: int
    backend: str
    dtype: str
    sizes: Mapping[str, int]  # of the whole model, by its config's names
    prompt_token_ids: tuple[tuple[int, ...], ...]
    token_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    weight_bytes: tuple[int, ...]
    weight_bytes_alone: int
    replicated_bytes: int
    kv_bytes: tuple[int, ...]
    kv_bytes_alone: int
    num_forwards: int
    num_tokens: int
    traffic: Traffic
    digests: tuple[str, ...]
    seconds: float
    mlp_calls: int | None = None
    max_difference: float | None = None
    largest_logit: float | None = None
    tokens_alone: tuple[tuple[int, ...], ...] | None = None
    seconds_alone: float | None = None

    @property
    def ranks_agree(self) -> bool:
        """All ranks had the same logits, bit by bit, and recorded the same events."""
        return len(set(self.digests)) == 1

    @property
    def tolerance(self) -> float | None:
        """1e-4 · max(1, largest logit of one rank's run); None if that was not run."""
        return None if self.largest_logit is None else 1e-4 * max(1.0, self.largest_logit)

    @property
    def logits_equal(self) -> bool | None:
        """Logits within the tolerance of one rank's; None if that was not run."""
        if self.max_difference is None or self.tolerance is None:
            return None
        return self.max_difference <= self.tolerance

    @property
    def tokens_equal(self) -> bool | None:
        """The tokens are those of one rank; None if that was not run."""
        return None if self.tokens_alone is None else self.tokens_alone == self.token_ids

    @property
    def ok(self) -> bool:
        """The ranks agree, and nothing that was compared with one rank differs."""
        return self.ranks_agree and False not in (self.logits_equal, self.tokens_equal)

    def summary(self) -> str:
        """What matters, in integers and verdicts, a line each."""
        layers, marks = self.sizes["num_hidden_layers"], {True: "✔", False: "✘", None: "not run"}
        itemsize = getattr(torch, self.dtype).itemsize
        difference, bound = self.max_difference, "not run"
        if difference is not None:
            bound = f"≤ {bound_of(difference):g}" if self.logits_equal else "too much"
        ranks = [
            f"rank {rank}: {weights:,} bytes of weights, {kv:,} of K/V"
            for rank, (weights, kv) in enumerate(zip(self.weight_bytes, self.kv_bytes, strict=True))
        ]
        mine = [] if self.mlp_calls is None else [self.mlp_calls]
        return "\n".join(
            [
                f"{self.tp_size} ranks over {self.backend}, {self.dtype}",
                *ranks,
                f"alone:  {self.weight_bytes_alone:,} bytes of weights, {self.kv_bytes_alone:,} "
                f"of K/V ({self.replicated_bytes:,} of the weights are on every rank)",
                f"{self.num_tokens} tokens in {self.num_forwards} forwards: {self.traffic.calls} "
                f"all-reduces = 2 · {layers} layers · {self.num_forwards}",
                f"their sums: {self.traffic.bytes:,} bytes = {self.num_tokens} tokens · "
                f"2 · {layers} layers · {self.sizes['hidden_size']} numbers · {itemsize} bytes",
                *(f"your MLP ran on each rank, {calls} times" for calls in mine),
                f"all ranks the same logits, bit by bit, and the same events: "
                f"{marks[self.ranks_agree]}",
                f"max |Δ logit| against one rank: {bound} (allowed: the largest logit / 10,000) "
                f"{marks[self.logits_equal]}",
                f"tokens equal to one rank's: {marks[self.tokens_equal]}",
            ]
        )
