"""Tensor parallelism: parts add up to the whole, ranks agree bit by bit, and no process is left.

What is about weights runs in threads of one process, which sum as ranks do; what is about
processes runs by torchrun, over gloo.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import QWEN3_06B, fp32_tolerance, largest_difference, random_sequences, save_random
from engines import VOCAB, random_model
from tokenizers import Tokenizer
from torch import Tensor, einsum
from torch.nn import functional
from torch.nn.functional import silu

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.engine.generate import generate
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY, load_model
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.parallel import job as job_module
from tutorial_engine.parallel import parallel_paths, run_ranks, tensor_parallel
from tutorial_engine.parallel.__main__ import main
from tutorial_engine.parallel.job import Job, run_rank
from tutorial_engine.parallel.report import ParallelReport
from tutorial_engine.parallel.sent import send
from tutorial_engine.parallel.tensor_parallel import (
    Traffic,
    replicated_parameters,
    shard,
    shard_config,
)
from tutorial_engine.sampling.params import SamplingParams

pytestmark = pytest.mark.slow

SHAPES: dict[str, dict[str, Any]] = {
    "4/2 heads": {},
    "attention bias": {"attention_bias": True},
    "as many K/V heads as heads": {"num_key_value_heads": 4},
    "head_dim 24, tied, bias": {
        "head_dim": 24,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "one layer, 12/4 heads": {
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 6,
    },
}
every_shape = pytest.mark.parametrize("shape", SHAPES)
LONG_S = 180.0  # for what takes 6 to 9 s on an idle machine, most of it imports of torch


class ThreadRank:
    """What a RankGroup offers, for one of several threads; `run` starts them."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._values, self._barrier = rank, len(values), values, barrier
        self.backend, self.device, self.traffic = "threads", torch.device("cpu"), Traffic()

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def all_reduce(self, x: Tensor) -> Tensor:
        calls, num_bytes = self.traffic
        self.traffic = Traffic(calls + 1, num_bytes + x.numel() * x.element_size())
        return sum(self.gather(x))  # type: ignore[return-value]


def in_threads(work: Callable[[Any], Any], size: int = 2) -> list[Any]:
    """work(rank) of all ranks at once → its results, by rank."""
    results, values, barrier = [None] * size, [None] * size, threading.Barrier(size, timeout=60)

    def run(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = work(ThreadRank(rank, values, barrier))
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in results, "a rank failed: see above"
    return results


def reports_of(job: Job, size: int = 2) -> list[ParallelReport]:
    return in_threads(lambda rank: run_rank(job, rank)[0], size)


def hidden_of(model: CausalLM, batch: Batch) -> Tensor:
    with torch.inference_mode():
        return model(batch)


def on_ranks(model: CausalLM, size: int = 2) -> list[Tensor]:
    """The hidden states that each rank gets."""
    return in_threads(
        lambda rank: hidden_of(shard(model, rank.rank, size, rank.all_reduce), BATCH), size
    )


# -- parts of the weights -------------------------------------------------------------------------

BATCH = Batch.from_sequences(random_sequences([5, 1, 9], VOCAB))


@pytest.mark.parametrize("size", [1, 2, 4])
@every_shape
def test_the_ranks_give_what_the_whole_model_gives(shape: str, size: int) -> None:
    model = random_model(**{"num_key_value_heads": 4, **SHAPES[shape]})
    want, names = hidden_of(model, BATCH), [name for name, _ in model.named_parameters()]
    for got in on_ranks(model, size):
        assert largest_difference(got, want) <= fp32_tolerance(want)
    assert torch.equal(hidden_of(model, BATCH), want), "the model stays as it was"
    assert [name for name, _ in model.named_parameters()] == names
    parts = [shard(model, rank, size, lambda x: x) for rank in range(size)]
    sizes = [sum(p.numel() for p in part.parameters()) for part in parts]
    whole = sum(p.numel() for p in model.parameters())
    assert sizes == [(whole + (size - 1) * replicated_parameters(model)) // size] * size
    tied = parts[-1].lm_head.weight is parts[-1].model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings


@pytest.mark.parametrize("module", ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"])
def test_another_cut_of_any_weight_would_be_seen(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two ranks swap their parts of one projection: heads and columns no longer fit."""
    model = random_model()
    want = hidden_of(model, BATCH)
    right = tensor_parallel._part_of

    def swapped(name: str, weight: Tensor, config: ModelConfig, rank: int, size: int) -> Tensor:
        return right(name, weight, config, 1 - rank if module in name else rank, size)

    monkeypatch.setattr(tensor_parallel, "_part_of", swapped)
    assert largest_difference(on_ranks(model)[0], want) > 100 * fp32_tolerance(want)


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, 4, "4 does not divide num_key_value_heads 2: .* among 1, 2 ranks"),
        ({"num_attention_heads": 6}, 4, "num_attention_heads 6 and num_key_value_heads 2"),
        ({"intermediate_size": 81}, 2, "intermediate_size 81: .* among 1 rank$"),
        ({}, 0, "tp_size must be a whole number of at least 1, got 0"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_numbers(
    changes: dict[str, int], size: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        shard(random_model(**changes), 0, size, lambda x: x)


def test_a_cache_of_a_rank_has_its_heads_alone() -> None:
    part = shard_config(QWEN3_06B, 4)
    assert (part.num_attention_heads, part.num_key_value_heads, part.head_dim) == (4, 2, 128)
    whole = KVCacheSpec.from_model(QWEN3_06B)
    assert KVCacheSpec.from_model(part) == replace(whole, num_kv_heads=whole.num_kv_heads // 4)


# -- the engine on every rank ---------------------------------------------------------------------


@every_shape
def test_two_ranks_give_the_logits_and_tokens_of_one(tmp_path: Path, shape: str) -> None:
    job = Job(
        checkpoint=str(save_random(tmp_path, **SHAPES[shape])),
        prompts=random_sequences([9, 1, 13], VOCAB),
        params=SamplingParams(max_tokens=6, ignore_eos=True),
        max_num_batched_tokens=8,
        block_size=4,
    )
    report, other = reports_of(job)
    assert report.ok and report.ranks_agree and report.logits_equal and report.tokens_equal
    assert report.max_difference > 0, "it was summed"
    assert report.seconds_alone is not None and min(report.seconds, report.seconds_alone) > 0
    assert other.seconds_alone is None
    assert other.logits_equal is None and other.token_ids == report.token_ids
    model = load_model(tmp_path, fast=False)
    layers, num_bytes = (
        model.config.num_hidden_layers,
        4 * sum(p.numel() for p in model.parameters()),
    )
    assert report.num_tokens == 9 + 1 + 13 + 3 * 5
    assert report.traffic == (2 * layers * report.num_forwards, 38 * 2 * layers * 48 * 4)
    assert f"bytes = 38 tokens · 2 · {layers} layers · 48 numbers · 4 bytes" in report.summary()
    assert report.weight_bytes_alone == num_bytes
    assert report.weight_bytes == ((num_bytes + report.replicated_bytes) // 2,) * 2
    slots = 4 * (4 + 2 + 5)  # blocks of 4 for 15, 7 and 19 tokens
    assert report.kv_bytes_alone == KVCacheSpec.from_model(model.config).bytes_per_token * slots
    assert report.kv_bytes == (report.kv_bytes_alone // 2,) * 2


def silu_of(x: Tensor) -> Tensor:
    return x * HALF * 2 / (1 + torch.exp(-x))


def rank_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, rank: int, num_ranks: int, sign: int = 1
) -> Tensor:
    """A learner's answer with a helper, a lambda, a constant, a module and a default of its own."""
    size = len(gate) // num_ranks
    own = slice(rank * size, (rank + 1) * size)
    inner = (lambda g: silu_of(x @ g.T))(gate[own]) * (x @ up[own].T)
    return sign * functional.linear(inner, down[:, own])


def gated(x: Tensor, *, gate: Callable[[Tensor], Tensor] = silu) -> Tensor:
    """By a name, by a module's attribute that has the same name, and by a default."""
    return silu(x) + functional.silu(x) + gate(x) + einsum("ij->ij", x)


def whole_mlp(*case: Any) -> Tensor:
    """Wrong: every rank computes all of it."""
    return rank_mlp(*case[:4], 0, 1)


def countdown(n: int) -> int:
    return n if n == 0 else countdown(n - 1)


HALF = 0.5


def test_a_learners_mlp_runs_in_the_ranks_and_a_wrong_one_is_seen() -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    plain = reports_of(Job(params=params))[0]
    report = reports_of(Job(params=params, mlp=send(rank_mlp)))[0]
    assert report.ok and report.token_ids == plain.token_ids and report.traffic == plain.traffic
    assert report.mlp_calls == 4 * report.num_forwards and plain.mlp_calls is None
    assert f"your MLP ran on each rank, {report.mlp_calls} times" in report.summary()
    assert "≤ 0.0001 (allowed: the largest logit / 10,000) ✔" in report.summary()
    assert (report.weight_bytes, report.kv_bytes) == (plain.weight_bytes, plain.kv_bytes)
    wrong = reports_of(Job(params=params, mlp=send(whole_mlp)))[0]
    assert wrong.ranks_agree and not wrong.logits_equal and not wrong.ok
    assert "one rank: too much (allowed" in wrong.summary()


def test_a_function_that_was_sent_does_what_it_did() -> None:
    draw = [torch.randn(3, 6), torch.randn(4, 6), torch.randn(4, 6), torch.randn(6, 4)]
    sent = pickle.loads(pickle.dumps(send(rank_mlp)))
    for rank in range(2):
        assert torch.equal(sent.received()(*draw, rank, 2), rank_mlp(*draw, rank, 2))
    assert send(countdown).received()(5) == 0

    def inside() -> list[Tensor]:
        return draw

    for function in (inside, len, torch.no_grad()(rank_mlp)):
        with pytest.raises(ValueError, match="cannot be sent: define it as a function of its own"):
            send(function)


class Gate:
    """What a notebook's class is: no other process has it."""

    double = staticmethod(lambda x: 2 * x)


def with_a_lambda(x: Tensor, f: Callable[[Tensor], Tensor] = lambda x: 2 * x) -> Tensor:
    return f(x)


def with_a_class(x: Tensor) -> Tensor:
    return Gate.double(x)


def with_a_function(x: Tensor, f: Callable[[Tensor], Tensor] = silu_of) -> Tensor:
    return f(x)


@pytest.mark.parametrize("function", [with_a_lambda, with_a_class, with_a_function])
def test_what_another_process_would_not_find_is_not_sent(function: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match=rf"{function.__name__} .*cannot be sent: "):
        send(function)


def test_what_is_imported_from_a_library_is_sent_by_name() -> None:
    x, sent = torch.randn(3, 4), send(gated)
    assert sent.others == {"silu": silu, "einsum": einsum}
    received = pickle.loads(pickle.dumps(sent)).received()
    assert received is not gated and torch.equal(received(x), gated(x))


def test_ranks_that_sample_otherwise_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=3, temperature=1.0)
    right = reports_of(Job(params=params))[0]
    assert right.ok, "rank 0 draws the seeds for all"
    for wrong in ({"max_difference": 0.1}, {"max_difference": float("nan")}, {"tokens_alone": ()}):
        assert not replace(right, **wrong).ok
    seeds = iter((1, 2))

    def another(*_: Any) -> list[SamplingParams]:
        return [replace(params, seed=next(seeds))] * 3

    monkeypatch.setattr(job_module, "shared_seeds", another)
    report = reports_of(Job(params=params))[0]
    assert not report.ranks_agree and not report.ok
    assert "bit by bit, and the same events: ✘" in report.summary()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Job(dtype="int8"), "dtype is float32, .* got 'int8'"),
        (lambda: Job(params=SamplingParams(n=2, temperature=1.0)), "n is 2"),
        (lambda: run_ranks(4), "tp_size 4 does not divide num_attention_heads 6"),
        (lambda: parallel_paths(TINY, 3)["3 ranks"]([[1, 2]], 2), "among 1, 2 ranks"),
        (lambda: run_ranks(2, Job(checkpoint="nowhere")), "no folder"),
        (lambda: run_ranks(2, Job(device="cuda")), "2 ranks on 'cuda' need a GPU each"),
    ],
)
def test_refused_before_any_process_starts(
    call: Callable[[], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=words):
        call()


# -- real processes -------------------------------------------------------------------------------


def test_the_command_line_shows_what_two_ranks_did(
    model: CausalLM, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "One day a little dog"
    asked = ["--max-tokens", "8", "--prompt", prompt]
    assert main(["--ranks", "2", *asked]) == 0
    said = capsys.readouterr().out
    (output,) = generate(model, [prompt], SamplingParams(max_tokens=8), tokenizer=tokenizer)
    assert said.splitlines()[-1] == f"0: {output.outputs[0].text!r}"
    assert said.count("✔") == 3 and "2 ranks over gloo, float32" in said
    assert main(["--ranks", "4", *asked]) == 1
    assert "this model can be shared among 1, 2 ranks" in capsys.readouterr().err


def test_a_rank_that_fails_is_shown_with_its_traceback() -> None:
    with pytest.raises(RuntimeError) as caught:
        run_ranks(2, Job(prompts=[""]), LONG_S)
    assert "run_rank(job, group)" in str(caught.value) and caught.value.__cause__ is None
    assert str(caught.value).endswith(
        "ValueError: the prompt is empty: a prompt needs at least one token"
    )


def processes_of(folder: Path) -> list[int]:
    """torchrun and its ranks that write to a folder below this one."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid=,stat=,args="], capture_output=True, text=True
    )
    lines = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    return [int(pid) for pid, stat, args in lines if str(folder) in args and stat[0] != "Z"]


@pytest.mark.parametrize("how", ["Ctrl-C", "a rank is killed"])
def test_no_process_is_left_over(tmp_path: Path, how: str) -> None:
    script = "from tutorial_engine.parallel import *; from tutorial_engine.parallel.job import *\n"
    script += "params = SamplingParams(max_tokens=30000, ignore_eos=True)\n"
    script += "job = Job(prompts=['One day'] * 500, params=params)\n"  # minutes
    script += "run_ranks(2, job, 999)"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=env, stderr=subprocess.PIPE, text=True
    ) as parent:
        start = time.monotonic()
        while len(pids := processes_of(tmp_path)) < 3 and time.monotonic() - start < LONG_S:
            time.sleep(0.2)
        assert len(pids) == 3, "torchrun and two ranks"
        time.sleep(1)  # they import torch, or have done so, and look for each other or run
        if how == "Ctrl-C":
            parent.send_signal(signal.SIGINT)
        else:
            os.kill(max(pids), signal.SIGKILL)
        _, error = parent.communicate(timeout=LONG_S)
    assert parent.returncode != 0
    assert ("KeyboardInterrupt" if how == "Ctrl-C" else "SIGKILL") in error
    assert processes_of(tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_ranks_that_take_too_long_are_ended() -> None:
    with pytest.raises(RuntimeError, match=r"2 ranks were not done after 0\.5 s"):
        run_ranks(2, timeout_s=0.5)
