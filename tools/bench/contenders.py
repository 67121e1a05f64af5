"""Our engine, transformers' two ways of serving, and the weights that all of them read.

Knows `LLMEngine` and `generate.stream` here; `generate` and the continuous batching manager there.
transformers is imported inside functions.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tools.bench.race import Answer, Asked, Tokens, longest_request
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.generate import stream
from tutorial_engine.engine.request import RequestOutput
from tutorial_engine.lab.real import real_model
from tutorial_engine.lab.sizing import QWEN3_06B
from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams

SHAPES = {"qwen3-0.6b": QWEN3_06B}  # random weights in the shape of a released model
TRAINED = {"tiny": lambda: TINY, "smollm2": real_model}
STEP_TOKENS = 512  # tokens per forward: ours and that of transformers' scheduler
PATIENCE = 1.0  # seconds between two looks at whether another engine's thread still lives


def stamped(stream: Callable[..., Iterator[RequestOutput]], request: Asked) -> Answer:
    """One request through a stream of ours, each token stamped when it comes."""
    params = SamplingParams(max_tokens=request.new_tokens, ignore_eos=True)
    seconds, token_ids = [], list[int]()
    began = time.perf_counter()
    for output in stream([request.prompt], params):
        seconds.append(time.perf_counter() - began)
        token_ids = output.outputs[0].token_ids
    return Answer(tuple(token_ids), tuple(seconds))


class Ours:
    """This engine for one request at a time: the plain loop of notebook 02, on rows."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    def serve(self, requests: Sequence[Asked]) -> Sequence[Answer]:
        return [stamped(partial(stream, self.model), request) for request in requests]


class OurServer:
    """This engine for many: on rows unless told; made once, as a server is, used in every run."""

    def __init__(
        self, model: CausalLM, config: EngineConfig, memory: KVMemory | None = None
    ) -> None:
        self.engine = LLMEngine(model, config=config, memory=memory)

    def serve(self, requests: Sequence[Asked]) -> Sequence[Answer]:
        params = [
            SamplingParams(max_tokens=request.new_tokens, ignore_eos=True) for request in requests
        ]
        outputs = self.engine.generate([request.prompt for request in requests], params)
        return [Answer(tuple(output.outputs[0].token_ids)) for output in outputs]


class OurStream(OurServer):
    """This engine for one request at a time."""

    def serve(self, requests: Sequence[Asked]) -> Sequence[Answer]:
        return [stamped(self.engine.stream, request) for request in requests]


def serving_config(requests: Sequence[Asked], cuda_graphs: bool = True) -> EngineConfig:
    """The engine's settings for the race: a row for every request, and a budget of 512 tokens.

    All run at once, for more rows make a forward cheaper per token. 512 tokens are enough for
    matmuls at full speed, and few enough that those who decode already do not wait long.
    """
    return EngineConfig(
        max_num_seqs=len(requests),
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=-(-longest_request(requests) // 64) * 64,
        cuda_graphs=cuda_graphs,
    )


class Transformers:
    """transformers' own `generate`, greedy: one batch, padded on the left, until the longest ends.

    What shorter ones get beyond what they wanted is thrown away; times are known of one request
    alone. `attention` is "sdpa" or "eager"; `static_cache` asks for its preallocated cache instead
    of the one that grows; with `compiled` transformers compiles its forward by itself, where it
    does that: on a GPU, with a static cache. Several of these may share one model.
    """

    def __init__(
        self,
        model: Any,
        attention: str = "sdpa",
        static_cache: bool = False,
        compiled: bool = False,
    ) -> None:
        self.model, self.attention, self.static_cache = model, attention, static_cache
        self.compiled = compiled

    def serve(self, requests: Sequence[Asked]) -> Sequence[Answer]:
        self.model.set_attn_implementation(self.attention)
        width = max(len(request.prompt) for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        config = import_transformers().GenerationConfig(
            max_new_tokens=max(request.new_tokens for request in requests),
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static" if self.static_cache else None,
            disable_compile=not self.compiled,
        )
        streamer = _Stamps() if len(requests) == 1 else None
        began = time.perf_counter()
        out = self.model.generate(
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            generation_config=config,
            streamer=streamer,
        )
        seconds = tuple(at - began for at in streamer.times[1:]) if streamer else ()
        new = out[:, width:].tolist()
        rows = zip(new, requests, strict=True)
        return [Answer(tuple(row[: request.new_tokens]), seconds) for row, request in rows]


class _Stamps:
    """What `generate` hands its tokens to, the prompt first: notes when they came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


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
    def serve(self, requests: Sequence[Asked]) -> Sequence[Answer]:
        self.model.set_attn_implementation("sdpa")
        greedy = import_transformers().GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1
        )
        done: dict[str, Tokens] = {}
        with self.model.continuous_batching_context_manager(
            greedy, continuous_batching_config=self.config, persistent_manager=True
        ) as manager:
            for i, request in enumerate(requests):
                manager.add_request(list(request.prompt), str(i), max_new_tokens=request.new_tokens)
            while len(done) < len(requests):
                result = manager.get_result(timeout=PATIENCE)
                if result is None and not manager.is_running():
                    raise RuntimeError("the thread of the continuous batching manager has ended")
                if result is not None and result.error is not None:
                    raise RuntimeError(f"request {result.request_id}: {result.error}")
                if result is not None and result.is_finished():
                    done[result.request_id] = tuple(result.generated_tokens)
        return [Answer(done[str(i)]) for i in range(len(requests))]

    def close(self) -> None:
        """Give its cache back."""
        self.model.destroy_cached_continuous_batching_manager()


# -- weights --------------------------------------------------------------------------------------


class Folders(NamedTuple):
    """Where the weights are, and where the same in other engines' formats may be written."""

    weights: Path
    converted: Path


@contextmanager
def checkpoint_folders(shape: str, folder: Path | None) -> Iterator[Folders]:
    """Trained weights, or random ones of a shape: in the folder, or in a temporary one.

    A finished folder is kept; what is converted is kept in the given folder, and in no other.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        if shape in TRAINED:
            yield Folders(folder or TRAINED[shape](), place)
            return
        if not (place / "model.safetensors").is_file():  # 1.2 GB, some ten seconds
            transformers = import_transformers()
            torch.manual_seed(0)
            config = transformers.Qwen3Config(**SHAPES[shape])
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.save_pretrained(place)
        yield Folders(place, place)


def load_transformers(folder: Path, dtype: torch.dtype, device: str = "cpu") -> Any:
    """The checkpoint as transformers' model, told to go on after an end-of-text token."""
    model = import_transformers().AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    )
    model.generation_config.eos_token_id = None  # what a call does not say is taken from here
    return model.to(device).eval()


def import_transformers() -> Any:
    """The transformers module; ValueError, with the command, where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            "the benchmark compares with transformers, which cannot be imported "
            f"({error}): python -m pip install -e '.[notebooks]'"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers
