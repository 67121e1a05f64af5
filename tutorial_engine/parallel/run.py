"""Introduced in notebook 04. What each rank does: the whole engine, on its share of the model.

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

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.checks import at_least_one
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.model_runner import ModelRunner, Outcome
from tutorial_engine.engine.prompts import Prompt, prompt_token_ids
from tutorial_engine.engine.request import RequestOutput
from tutorial_engine.engine.scheduler import ScheduledRequest
from tutorial_engine.lab.engine_paths import ForcedSampler
from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer, resolve_checkpoint
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.parallel.report import ParallelReport
from tutorial_engine.parallel.tensor_parallel import (
    Fault,
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
TIMES = ("time", "arrival")  # of events: each rank has its own clock
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks are told to do: these prompts through an engine on pages, or ValueError.

    `forced` tokens per prompt are said in place of the sampled ones. `timeout_s` is for what ranks
    do together. `compare`: rank 0 runs all of it once more, alone. `fault` lets a rank go wrong.
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
    fault: Fault | None = None

    def __post_init__(self) -> None:
        at_least_one("block_size", self.block_size)
        if self.params.n > 1:
            raise ValueError(f"one continuation a prompt here; n is {self.params.n}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {sorted(DTYPES)}, got {self.dtype!r}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")
        if self.fault is not None and self.fault.kind not in ("kill", "hang"):
            raise ValueError(f"a fault is 'kill' or 'hang', got {self.fault.kind!r}")

    def to_json(self) -> str:
        """All of it, for a file."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """What to_json wrote."""
        raw = json.loads(text)
        raw["params"] = SamplingParams(**raw["params"])
        raw["fault"] = None if raw["fault"] is None else Fault(*raw["fault"])
        return cls(**raw)


class RankRunner(ModelRunner):
    """A ModelRunner that keeps the logits of every request, and never runs a forward twice.

    Where a forward fails on one rank, the others wait in the middle of theirs: running again, alone
    or not, would add up what does not belong together. So any fault ends the run.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.logits: dict[str, list[Tensor]] = {}  # request_id -> [V] of each of its tokens

    @torch.inference_mode()
    def run(self, scheduled: Sequence[ScheduledRequest]) -> Outcome:
        """As ModelRunner.run; ParallelError for any fault."""
        try:
            outcome = self._run(scheduled)
        except ParallelError:
            raise
        except Exception as fault:
            told = f"{type(fault).__name__}: {fault}"
            raise ParallelError(f"a forward failed, and cannot be run again ({told})") from fault
        for share, row in zip(outcome.ready, outcome.logits, strict=True):
            self.logits.setdefault(share.request.request_id, []).append(row.cpu())
        return outcome


class Served(NamedTuple):
    """What one engine did: outputs, logits [tokens, V] of each, its events and its bytes."""

    outputs: list[RequestOutput]
    logits: list[Tensor]
    trace: Trace
    kv_bytes: int
    num_slots: int
    num_forwards: int
    num_tokens: int


def serve(
    model: Qwen3ForCausalLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    job: Job,
    tokenizer: Tokenizer | None = None,
) -> Served:
    """All prompts through one engine on pages, with a pool that has room for all of them."""
    longest = [len(ids) + own.max_tokens for ids, own in zip(prompts, params, strict=True)]
    memory = PagedKVCache.from_config(
        model.config,
        block_size=job.block_size,
        num_blocks=sum(-(-length // job.block_size) for length in longest),
        dtype=model.dtype,
        device=model.device,
    )
    recorder = Recorder()
    config = EngineConfig(max_model_len=None, max_num_batched_tokens=job.max_num_batched_tokens)
    engine = LLMEngine(model, tokenizer, config, memory=memory, trace=recorder)
    runner = engine.model_runner = RankRunner(model, memory.storage)
    for i, (ids, own) in enumerate(zip(prompts, params, strict=True)):
        sampler = None if job.forced is None else ForcedSampler(own, job.forced[i])
        engine.add_request(ids, own, str(i), sampler=sampler)
    outputs = sorted(engine.run(), key=lambda output: int(output.request_id))
    engine.check_integrity()
    if failed := [output.error for output in outputs if output.error is not None]:
        raise ParallelError(f"a request failed: {failed[0]}")
    logits = [torch.stack(runner.logits[output.request_id]) for output in outputs]
    return Served(
        outputs, logits, recorder.trace(), memory.storage.num_bytes,
        memory.storage.num_slots, runner.num_forwards, runner.num_tokens,
    )  # fmt: skip


def shared_seeds(params: SamplingParams, count: int, group: RankGroup) -> list[SamplingParams]:
    """The params of `count` requests, the same on all ranks.

    Without a seed, each rank would draw tokens of its own; so rank 0 draws the seeds for all.
    """
    if params.temperature == 0 or params.seed is not None:
        return [params] * count
    drawn = group.gather([secrets.randbits(62) for _ in range(count)])
    return [replace(params, seed=seed) for seed in drawn[0]]


def run_rank(job: Job, group: RankGroup) -> tuple[ParallelReport, list[Tensor]]:
    """This rank's part of a job → what came of it (with no comparison but on rank 0), and logits.

    Every rank reads the whole checkpoint and keeps its share of it.
    """
    start, before = time.monotonic(), group.traffic
    whole = load_model(job.checkpoint, group.device, DTYPES[job.dtype], prepack=False)
    tokenizer = _tokenizer(job.checkpoint)
    prompts = prompt_token_ids(job.prompts, tokenizer)
    params = shared_seeds(job.params, len(prompts), group)
    model = shard(whole, group.rank, group.size, group.all_reduce)
    itemsize, num_alone = model.dtype.itemsize, whole.num_parameters()
    replicated, sizes = replicated_parameters(whole), asdict(whole.config)
    kv_alone = KVCacheSpec.from_model(whole.config, whole.dtype).bytes_per_token
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
        token_ids=_token_ids(served),
        texts=tuple(output.outputs[0].text for output in served.outputs),
        weight_bytes=weights,
        weight_bytes_alone=num_alone * itemsize,
        replicated_bytes=replicated * itemsize,
        kv_bytes=kv,
        kv_bytes_alone=kv_alone * served.num_slots,
        num_forwards=served.num_forwards,
        num_tokens=served.num_tokens,
        traffic=traffic,
        logits_digests=tuple(f"{digest:016x}" for digest in logits_digests),
        event_digests=tuple(f"{digest:016x}" for digest in event_digests),
        trace=served.trace,
        seconds=time.monotonic() - start,
    )
    if compare:
        whole.prepack()
        report = _against(report, served, serve(whole, prompts, params, job, tokenizer))
    return report, served.logits


def _against(report: ParallelReport, served: Served, alone: Served) -> ParallelReport:
    """The report, with what one rank gave: compared as long as both had the same tokens before."""
    differences, largest = [], []
    pairs = zip(_token_ids(served), _token_ids(alone), served.logits, alone.logits, strict=True)
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
        tokens_alone=_token_ids(alone),
    )


def _token_ids(served: Served) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(output.outputs[0].token_ids) for output in served.outputs)


def _tokenizer(checkpoint: str) -> Tokenizer | None:
    """The checkpoint's, if it has one; token ids can be run without."""
    there = (resolve_checkpoint(checkpoint) / "tokenizer.json").is_file()
    return load_tokenizer(checkpoint) if there else None


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
