"""Introduced in notebook A1. What each rank does: the whole engine, on its part of the model.

Every rank has its own scheduler, which sees the same requests and the same tokens and so decides
the same; only the sums in the model go from rank to rank. Knows engine and pages from outside, and
one RankGroup; knows no process but its own.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.checks import at_least_one
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.intake import Prompt, prompt_token_ids
from tutorial_engine.engine.request import ScheduledRequest
from tutorial_engine.engine.runner import ModelOutput, ModelRunner
from tutorial_engine.lab.ledger import ForcedSampler
from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer, resolve_checkpoint
from tutorial_engine.model.fast import use_fast_layers
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.parallel.report import ParallelReport
from tutorial_engine.parallel.tensor_parallel import (
    ParallelError,
    RankGroup,
    Traffic,
    replicated_parameters,
    shard,
)
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Recorder, Trace

PROMPTS = (
    "Once upon a time Anna had a red kite.",
    "Tom and Mia went to the park.",
    "One day a little dog",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TIMES = ("time", "arrival")  # of events: each rank has its own clock


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks are told to do: these prompts through an engine on pages, or ValueError.

    `forced` tokens per prompt are said in place of the sampled ones. `timeout_s` is for what ranks
    do together. `compare`: rank 0 runs all of it once more, alone.
    """

    prompts: Sequence[Prompt] = PROMPTS
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=16))
    checkpoint: str = str(TINY)
    forced: Sequence[Sequence[int]] | None = None
    block_size: int = 16
    max_num_batched_tokens: int = 512
    dtype: str = "float32"
    device: str = "cpu"
    timeout_s: float = 20.0
    compare: bool = True

    def __post_init__(self) -> None:
        at_least_one("block_size", self.block_size)
        if self.params.n > 1:
            raise ValueError(f"one continuation a prompt here; n is {self.params.n}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {sorted(DTYPES)}, got {self.dtype!r}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")


class RankRunner(ModelRunner):
    """A ModelRunner that keeps the logits of every request, and never runs a forward twice.

    Where a forward fails on one rank, the others wait in the middle of theirs: running again, alone
    or not, would add up what does not belong together. So any fault ends the run.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.logits: dict[str, list[Tensor]] = {}  # request_id -> [V] of each of its tokens

    @torch.inference_mode()
    def run(self, scheduled: Sequence[ScheduledRequest]) -> ModelOutput:
        """As ModelRunner.run; ParallelError for any fault."""
        try:
            output = self.run_once(scheduled)
        except ParallelError:
            raise
        except Exception as fault:
            told = f"{type(fault).__name__}: {fault}"
            raise ParallelError(f"a forward failed, and cannot be run again ({told})") from fault
        for one, row in zip(output.ready, output.logits, strict=True):
            self.logits.setdefault(one.request.request_id, []).append(row.cpu())
        return output


class Served(NamedTuple):
    """What one engine did: tokens, text, logits [tokens, V] of each prompt; events and counts."""

    token_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    logits: list[Tensor]
    trace: Trace
    kv_bytes: int
    num_forwards: int
    num_tokens: int


def run_rank(job: Job, group: RankGroup) -> tuple[ParallelReport, list[Tensor]]:
    """This rank's part of a job → what came of it (with no comparison but on rank 0), and logits.

    Every rank reads the whole checkpoint and keeps its part of it.
    """
    start, before = time.monotonic(), group.traffic
    whole = load_model(job.checkpoint, group.device, DTYPES[job.dtype], fast=False)
    has_tokenizer = (resolve_checkpoint(job.checkpoint) / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(job.checkpoint) if has_tokenizer else None
    prompts = prompt_token_ids(job.prompts, tokenizer)
    params = shared_seeds(job.params, len(prompts), group)
    model = shard(whole, group.rank, group.size, group.all_reduce)
    itemsize, num_alone = model.dtype.itemsize, whole.num_parameters()
    replicated, sizes = replicated_parameters(whole), asdict(whole.config)
    compare = job.compare and group.rank == 0
    if not compare:
        del whole
    served = serve(model, prompts, params, job, tokenizer)
    traffic = Traffic(*(now - then for now, then in zip(group.traffic, before, strict=True)))
    own_bytes = (model.num_parameters() * itemsize, served.kv_bytes)
    digests = (_digest_of_logits(served.logits), _digest_of_events(served.trace))
    notes = group.gather([*own_bytes, *digests])
    weights, kv, logits_digests, event_digests = zip(*notes, strict=True)
    report = ParallelReport(
        tp_size=group.size,
        backend=group.backend,
        dtype=job.dtype,
        sizes={k: v for k, v in sizes.items() if isinstance(v, int)},
        block_size=job.block_size,
        prompt_token_ids=tuple(tuple(ids) for ids in prompts),
        token_ids=served.token_ids,
        texts=served.texts,
        weight_bytes=weights,
        weight_bytes_alone=num_alone * itemsize,
        replicated_bytes=replicated * itemsize,
        kv_bytes=kv,
        kv_bytes_alone=sum(kv),  # every K/V head is on one rank
        num_forwards=served.num_forwards,
        num_tokens=served.num_tokens,
        traffic=traffic,
        logits_digests=tuple(f"{digest:016x}" for digest in logits_digests),
        event_digests=tuple(f"{digest:016x}" for digest in event_digests),
        trace=served.trace,
        seconds=time.monotonic() - start,
    )
    if compare:
        use_fast_layers(whole)
        report = _against(report, served, serve(whole, prompts, params, job, tokenizer))
    return report, served.logits


def serve(
    model: Qwen3ForCausalLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    job: Job,
    tokenizer: Tokenizer | None = None,
) -> Served:
    """All prompts through one engine on pages, with a pool that has room for all of them."""
    longest = [len(ids) + own.max_tokens for ids, own in zip(prompts, params, strict=True)]
    recorder = Recorder()
    memory = PagedKVCache.from_config(
        model.config,
        block_size=job.block_size,
        num_blocks=sum(-(-length // job.block_size) for length in longest),
        dtype=model.dtype,
        device=model.device,
        trace=recorder,
    )
    runner = RankRunner(model, memory.storage)
    config = EngineConfig(max_model_len=None, max_num_batched_tokens=job.max_num_batched_tokens)
    engine = LLMEngine(model, tokenizer, config, memory=memory, runner=runner)
    for i, (ids, own) in enumerate(zip(prompts, params, strict=True)):
        sampler = None if job.forced is None else ForcedSampler(own, job.forced[i])
        engine.add_request(ids, own, str(i), sampler=sampler)
    outputs = sorted(engine.run(), key=lambda output: int(output.request_id))
    engine.check_integrity()
    if failed := [output.error for output in outputs if output.error is not None]:
        raise ParallelError(f"a request failed: {failed[0]}")
    return Served(
        tuple(output.outputs[0].token_ids for output in outputs),
        tuple(output.outputs[0].text for output in outputs),
        [torch.stack(runner.logits[output.request_id]) for output in outputs],
        recorder.trace(),
        memory.storage.num_bytes,
        runner.num_forwards,
        runner.num_tokens,
    )


def shared_seeds(params: SamplingParams, count: int, group: RankGroup) -> list[SamplingParams]:
    """The params of `count` requests, the same on all ranks.

    Without a seed, each rank would draw tokens of its own; so rank 0 draws the seeds for all.
    """
    if params.temperature == 0 or params.seed is not None:
        return [params] * count
    drawn = group.gather([secrets.randbits(62) for _ in range(count)])
    return [replace(params, seed=seed) for seed in drawn[0]]


def _against(report: ParallelReport, served: Served, alone: Served) -> ParallelReport:
    """The report, with what one rank gave: compared as long as both had the same tokens before."""
    differences, largest = [], []
    pairs = zip(served.token_ids, alone.token_ids, served.logits, alone.logits, strict=True)
    for ours, theirs, got, want in pairs:
        same = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(want)
        )
        steps = min(same + 1, len(got), len(want))
        differences.append((got[:steps] - want[:steps]).abs().max())
        largest.append(want[:steps].abs().max())
    return replace(
        report,
        max_difference=float(torch.stack(differences).max()),  # NaN, if there is one
        largest_logit=float(torch.stack(largest).max()),
        tokens_alone=alone.token_ids,
    )


def _digest_of_logits(logits: Sequence[Tensor]) -> int:
    return _digest(b"".join(one.contiguous().numpy().tobytes() for one in logits))


def _digest_of_events(trace: Trace) -> int:
    """Of what happened in which order, whenever it was."""
    told = [
        [type(event).__name__, {k: v for k, v in asdict(event).items() if k not in TIMES}]
        for event in trace.events
    ]
    return _digest(json.dumps(told).encode())


def _digest(data: bytes) -> int:
    """63 bits of SHA-256, which an int64 tensor can carry to the others."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 1
