"""The limits of an engine, as plain numbers.

Knows names and ranges; knows no request, no memory and no model.
"""

from dataclasses import dataclass

from tutorial_engine.checks import at_least_one


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits: requests that run at once, tokens per forward, tokens of one request, of a chunk.

    `max_model_len` is prompt + output (None: what model and memory allow). What a prompt runs in a
    step is capped by `long_prefill_token_threshold` (None: only by the budget); with chunked
    prefill off it runs whole or not yet. On a GPU decode steps are recorded and replayed, unless
    `cuda_graphs` is False. ValueError for sizes below 1.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int | None = 2048
    long_prefill_token_threshold: int | None = None
    enable_chunked_prefill: bool = True
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        at_least_one("max_num_seqs", self.max_num_seqs)
        at_least_one("max_num_batched_tokens", self.max_num_batched_tokens)
        for name in ("max_model_len", "long_prefill_token_threshold"):
            if getattr(self, name) is not None:
                at_least_one(name, getattr(self, name))
        for name in ("enable_chunked_prefill", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is True or False, got {getattr(self, name)!r}")
