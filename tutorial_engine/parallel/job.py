"""What each rank does: the whole engine, on its part of the model.

Every rank has its own scheduler, which sees the same requests and the same tokens and so decides
the same; only the sums in the model go from rank to rank. Knows engine and pages from outside, and
one RankGroup; knows no process but its own.
"""

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.inputs import Prompt, list_of_prompts, token_ids_of
from tutorial_engine.lab.ledger import ForcedSampler
from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer, resolve_checkpoint
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.parallel.report import ParallelReport
from tutorial_engine.parallel.sent import Sent
from tutorial_engine.parallel.tensor_parallel import (
    RankGroup,
    Traffic,
    replicated_parameters,
    shard,
    with_mlp,
)
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Recorder, StepEnded, Trace

PROMPTS = (
    "Once upon a time Anna had a red kite.",
    "Tom and Mia went to the park.",
    "One day a little dog",
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks are told to do: these prompts through an engine on pages.

    `forced` tokens per prompt are said in place of the sampled ones. `compare`: rank 0 runs all of
    it once more, alone. `mlp`: a function that computes a rank's part of the MLP; see RankMLP.
    """

    prompts: Sequence[Prompt] = PROMPTS
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=16))
    checkpoint: str = str(TINY)
    forced: Sequence[Sequence[int]] | None = None
    block_size: int = 16
    max_num_batched_tokens: int = 512
    dtype: str = "float32"
    device: str = "cpu"
    compare: bool = True
    mlp: Sent | None = None

    def __post_init__(self) -> None:
        if self.params.n > 1:
            raise ValueError(f"one continuation a prompt here; n is {self.params.n}")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype is float32, bfloat16 or float16, got {self.dtype!r}")


class Served(NamedTuple):
    """What one engine did: tokens, text and logits [tokens, V] of each prompt; events; seconds."""

    token_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    logits: list[Tensor]
    trace: Trace
    kv_bytes: int
    seconds: float


def run_rank(job: Job, group: RankGroup) -> tuple[ParallelReport, list[Tensor]]:
    """This rank's part of a job → what came of it (with no comparison but on rank 0), and logits.

    Every rank reads the whole checkpoint and keeps its part of it.
    """
    before = group.traffic
    whole = load_model(job.checkpoint, group.device, getattr(torch, job.dtype), fast=False)
    has_tokenizer = (resolve_checkpoint(job.checkpoint) / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(job.checkpoint) if has_tokenizer else None
    prompts = [token_ids_of(prompt, tokenizer) for prompt in list_of_prompts(job.prompts)]
    params = shared_seeds(job.params, len(prompts), group)
    model = shard(whole, group.rank, group.size, group.all_reduce)
    weight_bytes_here = _num_bytes(model)
    given = None if job.mlp is None else with_mlp(model, whole, job.mlp.received(), group)
    served = serve(model, prompts, params, job, tokenizer)
    traffic = Traffic(*(now - then for now, then in zip(group.traffic, before, strict=True)))
    notes = group.gather((weight_bytes_here, served.kv_bytes, _digest(served)))
    weight_bytes, kv_bytes, digests = zip(*notes, strict=True)
    forwards = [e.num_tokens for e in served.trace.events if isinstance(e, StepEnded)]
    report = ParallelReport(
        tp_size=group.size,
        backend=group.backend,
        dtype=job.dtype,
        sizes={k: v for k, v in asdict(whole.config).items() if isinstance(v, int)},
        prompt_token_ids=tuple(map(tuple, prompts)),
        token_ids=served.token_ids,
        texts=served.texts,
        weight_bytes=weight_bytes,
        weight_bytes_alone=_num_bytes(whole),
        replicated_bytes=replicated_parameters(whole) * whole.dtype.itemsize,
        kv_bytes=kv_bytes,
        kv_bytes_alone=sum(kv_bytes),  # until rank 0's second run says it
        num_forwards=len(forwards),
        num_tokens=sum(forwards),
        traffic=traffic,
        digests=digests,
        seconds=served.seconds,
        mlp_calls=None if given is None else sum(mlp.calls for mlp in given),
    )
    if job.compare and group.rank == 0:
        report = _against(report, served, serve(whole, prompts, params, job, tokenizer))
    return report, served.logits


def serve(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    job: Job,
    tokenizer: Tokenizer | None = None,
) -> Served:
    """All prompts through one engine on pages, with a pool that has room for all of them."""
    lengths = [len(ids) + p.max_tokens for ids, p in zip(prompts, params, strict=True)]
    recorder = Recorder()
    memory = PagedKVCache.from_config(
        model.config,
        block_size=job.block_size,
        num_blocks=sum(-(-length // job.block_size) for length in lengths),
        dtype=model.dtype,
        device=model.device,
        trace=recorder,
    )
    config = EngineConfig(max_model_len=None, max_num_batched_tokens=job.max_num_batched_tokens)
    engine = LLMEngine(model, tokenizer, config, memory=memory)
    forced: Sequence[Any] = job.forced or [None] * len(prompts)
    samplers = [ForcedSampler(*pair) for pair in zip(params, forced, strict=True)]  # keep logits
    for i, sampler in enumerate(samplers):
        engine.add_request(str(i), prompts[i], params[i], sampler=sampler)
    start = time.monotonic()
    outputs = sorted(engine.run(), key=lambda output: int(output.request_id))
    seconds = time.monotonic() - start
    engine.check_integrity()
    if errors := [output.error for output in outputs if output.error is not None]:
        raise RuntimeError(f"a request failed: {errors[0]}")
    return Served(
        tuple(tuple(output.outputs[0].token_ids) for output in outputs),
        tuple(output.outputs[0].text for output in outputs),
        [torch.stack(sampler.logits).cpu() for sampler in samplers],
        recorder.trace(),
        memory.storage.num_bytes,
        seconds,
    )


def shared_seeds(params: SamplingParams, count: int, group: RankGroup) -> list[SamplingParams]:
    """The params of `count` requests, the same on all ranks.

    Without a seed, each rank would draw tokens of its own; so rank 0 draws the seeds for all.
    """
    if params.temperature == 0 or params.seed is not None:
        return [params] * count
    drawn = group.gather([secrets.randbits(62) for _ in range(count)])
    return [replace(params, seed=seed) for seed in drawn[0]]


def _num_bytes(model: CausalLM) -> int:
    return sum(weight.nbytes for weight in model.parameters())


def _against(report: ParallelReport, served: Served, alone: Served) -> ParallelReport:
    """The report, with what one rank gave: compared as long as both had the same tokens before."""
    differences, largest = [], []
    for i, want in enumerate(alone.logits):
        pairs = zip(served.token_ids[i], alone.token_ids[i], strict=False)
        steps = next((step for step, (a, b) in enumerate(pairs, 1) if a != b), len(want))
        want = want[:steps]
        differences.append((served.logits[i][:steps] - want).abs().max())
        largest.append(want.abs().max())
    return replace(
        report,
        max_difference=float(torch.stack(differences).max()),  # NaN, if there is one
        largest_logit=float(torch.stack(largest).max()),
        tokens_alone=alone.token_ids,
        kv_bytes_alone=alone.kv_bytes,
        seconds_alone=alone.seconds,
    )


def _digest(served: Served) -> str:
    """Of all logits, and of what happened in which order: each rank has its own clock."""
    digest = hashlib.sha256()
    for logits in served.logits:
        digest.update(logits.float().numpy().tobytes())
    for event in served.trace.events:
        known = {k: v for k, v in asdict(event).items() if k not in ("time", "arrival")}
        digest.update(f"{type(event).__name__} {known}".encode())
    return digest.hexdigest()[:16]
