"""Introduced in notebook 03. Our engine and transformers' two ways of serving, as contenders.

Knows `LLMEngine` here; `generate` with padding and the continuous batching manager there.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tutorial_engine.bench.contenders import import_transformers
from tutorial_engine.bench.serving import Asked, Tokens, longest_request
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams

STEP_TOKENS = 512  # tokens per forward: ours and that of transformers' scheduler
PATIENCE = 1.0  # seconds between two looks at whether another engine's thread still lives


def serving_config(requests: Sequence[Asked]) -> EngineConfig:
    """The engine's settings for the race: a row for every request, and a budget of 512 tokens.

    All run at once, for more rows make a forward cheaper per token; a row holds the longest
    request. 512 tokens are enough for matmuls at full speed, and few enough that those who decode
    already do not wait long.
    """
    max_len = -(-longest_request(requests) // 64) * 64
    return EngineConfig(
        max_num_seqs=len(requests),
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=max_len,
    )


class OurServer:
    """This engine, on rows unless told; made once, as a server is, and used for every run."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        config: EngineConfig,
        memory: KVMemory | None = None,
    ) -> None:
        self.engine = LLMEngine(model, config=config, memory=memory)

    def serve(self, requests: Sequence[Asked]) -> Sequence[Tokens]:
        """As Server.serve."""
        params = [SamplingParams(max_tokens=one.new_tokens, ignore_eos=True) for one in requests]
        outputs = self.engine.generate([one.prompt for one in requests], params)
        return [output.outputs[0].token_ids for output in outputs]


class PaddedTransformers:
    """transformers' `generate`: one batch, padded on the left, until the longest is done.

    What the shorter ones get beyond what they wanted is thrown away.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def serve(self, requests: Sequence[Asked]) -> Sequence[Tokens]:
        """As Server.serve."""
        self.model.set_attn_implementation("sdpa")
        width = max(len(one.prompt) for one in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(requests):
            ids[row, width - len(one.prompt) :] = torch.tensor(one.prompt)
            mask[row, width - len(one.prompt) :] = 1
        config = import_transformers().GenerationConfig(
            max_new_tokens=max(one.new_tokens for one in requests),
            do_sample=False,
            pad_token_id=0,
            disable_compile=True,
        )
        out = self.model.generate(ids, attention_mask=mask, generation_config=config)
        new = out[:, width:].tolist()
        return [tuple(row[: one.new_tokens]) for row, one in zip(new, requests, strict=True)]


class ContinuousTransformers:
    """transformers' continuous batching: its scheduler thread, paged K/V, sdpa attention.

    The manager and its cache (blocks for exactly these requests) are made in the first run and
    kept; the thread is started by every run, as its own `generate_batch` does.
    """

    def __init__(self, model: Any, requests: Sequence[Asked]) -> None:
        generation = import_transformers().generation
        page = generation.ContinuousBatchingConfig().page_size
        self.model = model
        self.config = generation.ContinuousBatchingConfig(
            num_blocks=len(requests) * -(-longest_request(requests) // page) + 1,
            max_batch_tokens=STEP_TOKENS,
            max_requests_per_batch=len(requests),
            allow_block_sharing=False,  # no two prompts begin alike
            auto_switch_to_flash=False,
        )

    @torch.inference_mode(False)  # its tensors are made here and written by its own thread
    def serve(self, requests: Sequence[Asked]) -> Sequence[Tokens]:
        """As Server.serve. RuntimeError when its thread ends before all is done."""
        self.model.set_attn_implementation("sdpa")
        greedy = import_transformers().GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1
        )
        done: dict[str, Tokens] = {}
        with self.model.continuous_batching_context_manager(
            greedy, continuous_batching_config=self.config, persistent_manager=True
        ) as manager:
            for i, one in enumerate(requests):
                manager.add_request(list(one.prompt), str(i), max_new_tokens=one.new_tokens)
            while len(done) < len(requests):
                result = manager.get_result(timeout=PATIENCE)
                if result is None and not manager.is_running():
                    raise RuntimeError("the thread of the continuous batching manager has ended")
                if result is not None and result.error is not None:
                    raise RuntimeError(f"request {result.request_id}: {result.error}")
                if result is not None and result.is_finished():
                    done[result.request_id] = tuple(result.generated_tokens)
        return [done[str(i)] for i in range(len(requests))]

    def close(self) -> None:
        """Give its cache back."""
        self.model.destroy_cached_continuous_batching_manager()
