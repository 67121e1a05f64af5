"""Our engine and transformers', each generating its own way, timed.

Knows `generate.stream` here and `model.generate` there. transformers is imported inside functions.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.bench.measure import Generated
from tutorial_engine.engine.generate import stream
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import make_runner
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams

INSTALL = "python -m pip install -e '.[notebooks]'"


class Ours:
    """This engine, prepacked or plain, as the loaded model is: cache, loop, sampler and all."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self.model = model

    def generate(self, ids: Sequence[int], new_tokens: int) -> Generated:
        """As Contender.generate."""
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        tokens, seconds = [], []
        began = time.perf_counter()
        for output in stream(self.model, [ids], params):
            seconds.append(time.perf_counter() - began)
            assert output.token is not None, "each brings a token"
            tokens.append(output.token.token_id)
        return Generated(tuple(tokens), tuple(seconds))

    def last_logits(self, ids: Sequence[int]) -> Tensor:
        """As Contender.last_logits."""
        return make_runner(self.model, max_len=len(ids) + 1).run([Request("0", ids)])


class Transformers:
    """transformers' own `generate`: greedy, no end of text, so many tokens.

    `attention` is "sdpa" or "eager". `static_cache` asks for its preallocated cache instead of the
    one that grows; nothing is compiled. Several of these may share one model.
    """

    def __init__(self, model: Any, attention: str = "sdpa", static_cache: bool = False) -> None:
        self.model, self.attention, self.static_cache = model, attention, static_cache

    def generate(self, ids: Sequence[int], new_tokens: int) -> Generated:
        """As Contender.generate; the times are those at which a streamer gets its tokens."""
        streamer = TimedStreamer()
        prompt, settings = self._prepare(ids, new_tokens)
        began = time.perf_counter()
        self.model.generate(prompt, streamer=streamer, **settings)
        return Generated(tuple(streamer.tokens), tuple(t - began for t in streamer.times))

    def last_logits(self, ids: Sequence[int]) -> Tensor:
        """As Contender.last_logits."""
        prompt, settings = self._prepare(ids, 1)
        settings["generation_config"].update(output_logits=True, return_dict_in_generate=True)
        out = self.model.generate(prompt, **settings)
        return out.logits[0].float()

    def _prepare(self, ids: Sequence[int], new_tokens: int) -> tuple[Tensor, dict[str, Any]]:
        """Prompt and keyword arguments for `generate`, made before the clock runs."""
        transformers = import_transformers()
        self.model.set_attn_implementation(self.attention)
        prompt = torch.tensor([ids])
        config = transformers.GenerationConfig(
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static" if self.static_cache else None,
            disable_compile=True,
        )
        mask = torch.ones_like(prompt)
        return prompt, {"generation_config": config, "attention_mask": mask}


class TimedStreamer:
    """What transformers' `generate` hands its tokens to: notes when each came."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._prompt_is_to_come = True

    def put(self, value: Tensor) -> None:
        """Called with the prompt first, then with each new token."""
        now = time.perf_counter()
        if self._prompt_is_to_come:
            self._prompt_is_to_come = False
            return
        self.tokens += value.tolist()
        self.times.append(now)

    def end(self) -> None:
        """Called when the last token has come."""


def load_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """The checkpoint as transformers' model, told to go on after an end-of-text token."""
    model = import_transformers().AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    )
    model.generation_config.eos_token_id = None  # what a call does not say is taken from here
    return model.eval()


def import_transformers() -> Any:
    """The transformers module; ValueError, with the command, where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            "the benchmark compares with transformers, which cannot be imported "
            f"({error}): {INSTALL}"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers
