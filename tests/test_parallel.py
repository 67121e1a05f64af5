"""Tensor parallelism: parts add up to the whole, ranks agree bit by bit, a dead one is told of.

What is about weights runs in threads of one process, which sum as ranks do; what is about ranks
runs in real processes over gloo.
"""

import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
from checkpoints import QWEN3_06B, fp32_tolerance, largest_difference, random_sequences, save_random
from engines import VOCAB, random_model
from torch import Tensor
from torch.multiprocessing import ProcessExitedException, start_processes

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.generate import generate
from tutorial_engine.lab.ledger import REFERENCE, SAFE_MARGIN, ledger, our_paths
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY, load_model
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.fast import use_fast_layers
from tutorial_engine.model.layers import Linear
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.parallel import ranks, tensor_parallel
from tutorial_engine.parallel.__main__ import main
from tutorial_engine.parallel.job import PROMPTS, Job, run_rank, serve, shared_seeds
from tutorial_engine.parallel.ranks import parallel_paths, run_ranks
from tutorial_engine.parallel.report import ParallelReport
from tutorial_engine.parallel.tensor_parallel import (
    ParallelError,
    RowParallelLinear,
    Traffic,
    check_divides,
    replicated_parameters,
    shard,
    shard_config,
)
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Scheduled, StepEnded, Trace
from tutorial_engine.trace.history import replay

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SHAPES: dict[str, dict[str, Any]] = {
    "4/2 heads": {},
    "attention bias": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
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


class Threads:
    """Ranks as threads of this process: each sum waits for all of them, as an all-reduce does."""

    def __init__(self, size: int) -> None:
        self.size, self._parts = size, [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._parts[rank] = value
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts

    def run(self, work: Callable[["ThreadRank"], Any]) -> list[Any]:
        """work(rank) of all ranks at once → its results, by rank."""
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                results[rank] = work(ThreadRank(rank, self))
            except BaseException as error:
                results[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


class ThreadRank:
    """What a RankGroup offers, for one of these threads."""

    def __init__(self, rank: int, threads: Threads) -> None:
        self.rank, self.size, self.threads = rank, threads.size, threads
        self.backend, self.device, self.traffic = "threads", torch.device("cpu"), Traffic()

    def all_reduce(self, x: Tensor) -> Tensor:
        calls, num_bytes = self.traffic
        self.traffic = Traffic(calls + 1, num_bytes + x.numel() * x.element_size())
        return sum(self.threads.exchange(self.rank, x))  # type: ignore[return-value]

    def gather(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        return self.threads.exchange(self.rank, tuple(values))


def in_threads(job: Job, size: int = 2) -> list[ParallelReport]:
    """The report of every rank, from threads."""
    return [report for report, _ in Threads(size).run(lambda rank: run_rank(job, rank))]


def hidden_of(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    with torch.inference_mode():
        return model(batch)


def on_ranks(model: Qwen3ForCausalLM, size: int, batch: Batch) -> list[Tensor]:
    """The hidden states that each rank gets."""
    return Threads(size).run(
        lambda rank: hidden_of(shard(model, rank.rank, size, rank.all_reduce), batch)
    )


# -- shares of the weights ------------------------------------------------------------------------

BATCH = Batch.from_sequences(random_sequences([5, 1, 9], VOCAB))


@every_shape
def test_the_ranks_give_what_the_whole_model_gives(shape: str) -> None:
    model = random_model(**SHAPES[shape])
    want = hidden_of(model, BATCH)
    for got in on_ranks(model, 2, BATCH):
        assert largest_difference(got, want) <= fp32_tolerance(want)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_number_of_ranks_that_divides_will_do(size: int) -> None:
    model = random_model(num_key_value_heads=4, attention_bias=True)
    want = hidden_of(model, BATCH)
    got = on_ranks(model, size, BATCH)
    assert len(got) == size
    assert all(largest_difference(one, want) <= fp32_tolerance(want) for one in got)


@pytest.mark.parametrize("module", ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"])
def test_another_cut_of_any_weight_would_be_seen(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two ranks swap their shares of one projection: heads and columns no longer fit."""
    model = random_model()
    want = hidden_of(model, BATCH)
    whole = tensor_parallel._part_of

    def swapped(name: str, weight: Tensor, config: ModelConfig, rank: int, size: int) -> Tensor:
        return whole(name, weight, config, 1 - rank if module in name else rank, size)

    monkeypatch.setattr(tensor_parallel, "_part_of", swapped)
    assert largest_difference(on_ranks(model, 2, BATCH)[0], want) > 100 * fp32_tolerance(want)


@every_shape
def test_every_weight_is_on_one_rank_or_on_all(shape: str) -> None:
    model = random_model(**SHAPES[shape])
    parts = [shard(model, rank, 2, lambda x: x) for rank in range(2)]
    sizes = [part.num_parameters() for part in parts]
    assert sizes[0] == sizes[1]
    assert sum(sizes) == model.num_parameters() + replicated_parameters(model)


def test_q_k_and_v_each_give_their_own_rows() -> None:
    """Rows of 4/2 heads of 16: q is 0 .. 63, k 64 .. 95, v 96 .. 127."""
    model = random_model(attention_bias=True)
    whole = model.model.layers[1].self_attn.qkv_proj
    part = shard(model, 1, 2, lambda x: x, prepack=False).model.layers[1].self_attn.qkv_proj
    rows = [*range(32, 64), *range(80, 96), *range(112, 128)]
    assert torch.equal(part.weight, whole.weight[rows])
    assert torch.equal(part.bias, whole.bias[rows])


def test_the_output_bias_is_added_to_the_sum_once() -> None:
    linear = Linear(4, 3, bias=True)
    linear.weight.data.normal_()
    linear.bias.data.fill_(5.0)
    x = torch.randn(2, 4)
    want = x @ linear.weight.T * 10 + 5
    got = RowParallelLinear(linear, lambda part: part * 10)(x)  # as if ten ranks had the same part
    assert torch.allclose(got, want, atol=1e-5)


def test_a_prepacked_model_is_cut_as_a_plain_one() -> None:
    plain = random_model(tie_word_embeddings=True, attention_bias=True)
    packed = random_model(tie_word_embeddings=True, attention_bias=True)
    use_fast_layers(packed, pack_from=0)
    for rank in range(2):
        a, b = (shard(model, rank, 2, lambda x: x, prepack=False) for model in (plain, packed))
        for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
            assert torch.equal(p, q), name


def test_cutting_leaves_the_model_as_it_was() -> None:
    model = random_model(attention_bias=True)
    before, names = hidden_of(model, BATCH), [name for name, _ in model.named_parameters()]
    shard(model, 0, 2, lambda x: x)
    assert torch.equal(hidden_of(model, BATCH), before)
    assert [name for name, _ in model.named_parameters()] == names


def test_a_tied_head_is_the_ranks_own_embedding() -> None:
    model = random_model(tie_word_embeddings=True)
    part = shard(model, 1, 2, lambda x: x, prepack=False)
    assert part.lm_head.weight is part.model.embed_tokens.weight
    assert torch.equal(part.lm_head.weight, model.model.embed_tokens.weight)


def test_two_sums_a_layer_of_a_hidden_state_a_token() -> None:
    model = random_model()

    def traffic(rank: ThreadRank) -> Traffic:
        hidden_of(shard(model, rank.rank, 2, rank.all_reduce), BATCH)
        return rank.traffic

    want = Traffic(2 * 3, 2 * 3 * 15 * 48 * 4)  # layers, tokens, hidden size, bytes of fp32
    assert Threads(2).run(traffic) == [want, want]


@pytest.mark.parametrize(
    ("changes", "size", "said"),
    [
        ({}, 4, "4 does not divide num_key_value_heads 2: .* among 1, 2 ranks"),
        ({"num_attention_heads": 6}, 4, "num_attention_heads 6 and num_key_value_heads 2"),
        ({"intermediate_size": 81}, 2, "intermediate_size 81: .* among 1 rank$"),
        ({}, 0, "tp_size must be a whole number of at least 1, got 0"),
        ({}, True, "tp_size must be"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_numbers(
    changes: dict[str, int], size: int, said: str
) -> None:
    model = random_model(**changes)
    for refuse in (
        lambda: check_divides(model.config, size),
        lambda: shard_config(model.config, size),
        lambda: shard(model, 0, size, lambda x: x),
    ):
        with pytest.raises(ValueError, match=said):
            refuse()
    with pytest.raises(ValueError, match=r"rank 2 is none of 0 .. 1"):
        shard(random_model(), 2, 2, lambda x: x)


# -- K and V --------------------------------------------------------------------------------------


def test_a_share_of_the_config_is_divided_once() -> None:
    own = shard_config(QWEN3_06B, 4)
    assert (own.num_attention_heads, own.num_key_value_heads, own.head_dim) == (4, 2, 128)
    assert own.intermediate_size == 768 and own.hidden_size == QWEN3_06B.hidden_size
    assert KVCacheSpec.from_model(own) == KVCacheSpec.from_model(QWEN3_06B, tp_size=4)


def test_every_kind_of_memory_has_this_ranks_heads_alone() -> None:
    whole = random_model(num_key_value_heads=4).config
    own = shard_config(whole, 2)
    made = [
        PagedKVCache.from_config(own, num_blocks=4).storage,
        PagedKVCache.from_config(whole, num_blocks=4, tp_size=2).storage,
        CellKVCache.from_config(own, 64).storage,
        CellKVCache.from_config(whole, 64, tp_size=2).storage,
        StaticKVCache.from_config(own, max_len=64).storage,
        StaticKVCache.from_config(whole, max_len=64, tp_size=2).storage,
    ]
    full = PagedKVCache.from_config(whole, num_blocks=4).storage.num_bytes
    assert {storage.spec.num_kv_heads for storage in made} == {2}
    assert {2 * storage.num_bytes for storage in made} == {full}


def test_a_rank_keeps_the_keys_and_values_of_its_own_heads() -> None:
    model, prompts = random_model(num_key_value_heads=4), random_sequences([9, 5], VOCAB)
    kept: list[PagedKVCache] = []
    from_config = PagedKVCache.from_config

    def keep(*args: Any, **options: Any) -> PagedKVCache:
        kept.append(from_config(*args, **options))
        kept[-1].storage.k.fill_(float("nan"))
        kept[-1].storage.v.fill_(float("nan"))
        return kept[-1]

    job = Job(prompts=prompts, params=SamplingParams(max_tokens=1), block_size=4, compare=False)

    def work(rank: ThreadRank) -> int:
        part = shard(model, rank.rank, 2, rank.all_reduce)
        serve(part, prompts, [job.params] * 2, job)
        return part.config.num_key_value_heads

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedKVCache, "from_config", keep)
        serve(model, prompts, [job.params] * 2, job)
        whole = kept.pop()
        assert Threads(2).run(work) == [2, 2]
    written = ~whole.storage.k[0, :, 0, 0].isnan()  # slots first
    assert int(written.sum()) == 14
    firsts = whole.storage.k[:, written]  # [layers, tokens, heads, D]
    for memory in kept:
        own = memory.storage.k[:, written]
        here = [i for i in (0, 2) if torch.allclose(own, firsts[:, :, i : i + 2], atol=1e-4)]
        assert len(here) == 1
        values = whole.storage.v[:, written][:, :, here[0] : here[0] + 2]
        assert torch.allclose(memory.storage.v[:, written], values, atol=1e-4)
        kept_heads = memory.storage.k.shape[2]
        assert kept_heads == 2


# -- the engine on every rank ---------------------------------------------------------------------


def test_a_forward_that_fails_on_a_rank_is_not_run_again() -> None:
    """Alone it would add up other tokens than the rank that waits."""
    calls = 0

    def fails_at_third(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError("no room")
        return x

    model = shard(random_model(), 0, 2, fails_at_third)
    prompts = random_sequences([5, 3], VOCAB)
    with pytest.raises(ParallelError, match=r"cannot be run again \(MemoryError: no room\)"):
        serve(model, prompts, [SamplingParams()] * 2, Job())
    assert calls == 3


def test_ranks_without_a_seed_draw_rank_0s() -> None:
    params = SamplingParams(temperature=1.0)
    seeds = Threads(2).run(lambda rank: shared_seeds(params, 5, rank))
    assert seeds[0] == seeds[1] and len({own.seed for own in seeds[0]}) == 5
    greedy, seeded = SamplingParams(), SamplingParams(temperature=1.0, seed=7)
    assert shared_seeds(greedy, 2, None) == [greedy] * 2  # nothing to agree on
    assert shared_seeds(seeded, 2, None) == [seeded] * 2


def test_a_rank_that_draws_its_own_tokens_would_be_seen() -> None:
    params = SamplingParams(max_tokens=3, temperature=1.0)
    seeds = iter((1, 2))

    def another(*_: Any) -> list[SamplingParams]:
        return [replace(params, seed=next(seeds))] * 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tutorial_engine.parallel.job.shared_seeds", another)
        report = in_threads(Job(params=params, compare=True))[0]
    assert not report.ranks_agree and not report.ok
    assert "bit by bit, and the same events: ✘" in report.summary()


def test_what_differs_from_one_rank_is_told() -> None:
    report = in_threads(Job(params=SamplingParams(max_tokens=3)))[0]
    assert report.ok and report.logits_equal and report.tokens_equal
    assert not replace(report, max_difference=0.1).ok
    assert not replace(report, max_difference=float("nan")).ok
    assert not replace(report, tokens_alone=()).ok
    unknown = replace(report, max_difference=None, largest_logit=None, tokens_alone=None)
    assert unknown.ok and unknown.logits_equal is None
    assert unknown.summary().count("not run") == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "int8"}, "dtype must be one of .* got 'int8'"),
        ({"timeout_s": 0}, "timeout_s must be positive, got 0"),
        ({"block_size": 0}, "block_size must be .* got 0"),
        ({"params": SamplingParams(n=2, temperature=1.0)}, "n is 2"),
    ],
)
def test_a_job_that_cannot_be_done_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Job(**changes)


def test_refused_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(ranks, "start_processes", never)
    with pytest.raises(ValueError, match=r"tp_size 4 does not divide num_attention_heads 6"):
        run_ranks(4)
    with pytest.raises(ValueError, match=r"among 1, 2 ranks"):
        parallel_paths(TINY, tp_size=3)["3 ranks"]([[1, 2]], 2)
    with pytest.raises(ValueError, match=r"no folder"):
        run_ranks(2, Job(checkpoint="nowhere"))
    if torch.cuda.device_count() < 2:
        with pytest.raises(ValueError, match=r"2 ranks on 'cuda' need a GPU each"):
            run_ranks(2, Job(device="cuda"))


def told(folder: Path, codes: Sequence[int | None], **errors: str) -> Exception:
    """What is made of exit codes, and of what ranks wrote."""
    for rank, text in errors.items():
        (folder / f"error.{rank[1:]}").write_text(text)
    return ranks._what_went_wrong(folder, codes)


def test_what_the_user_got_wrong_stays_a_value_error(tmp_path: Path) -> None:
    error = told(tmp_path, [1, None], r0="ValueError: too long")
    assert type(error) is ValueError and str(error) == "too long"


def test_a_killed_rank_comes_first_in_the_error(tmp_path: Path) -> None:
    codes = [1, -signal.SIGKILL, None]
    error = told(tmp_path, codes, r0="ValueError: waited in vain")
    assert isinstance(error, ParallelError)
    assert str(error).splitlines() == [
        "rank 1 was killed (SIGKILL)",
        "rank 0 says: ValueError: waited in vain",
        "rank 2 said nothing within 2 s of that, and was ended",
    ]


def test_a_rank_that_said_nothing_is_shown_by_its_last_lines(tmp_path: Path) -> None:
    assert "if __name__ ==" in str(told(tmp_path, [1, 0])), "it did not even begin"
    (tmp_path / "output.1").touch()
    assert str(told(tmp_path, [0, 3])) == "rank 1 ended with exit code 3. It wrote nothing."
    (tmp_path / "output.1").write_text("\n".join(f"line {i}." for i in range(40)))
    error = str(told(tmp_path, [0, 3]))
    assert error.startswith("rank 1 ended with exit code 3.") and "line 27." not in error
    assert error.endswith("line 38.\nline 39.")


# -- real processes -------------------------------------------------------------------------------

LONG_S = 180.0  # for what takes 6 to 9 s on an idle machine, most of it imports of torch


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes over gloo that do many jobs → a folder with a report of each, and the error."""
    folder = tmp_path_factory.mktemp("pair")
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    jobs = {
        name: Job(
            checkpoint=str(save_random(folder / name, **changes)),
            prompts=random_sequences([9, 1, 13], VOCAB),
            params=greedy,
            max_num_batched_tokens=8,
            block_size=4,
        )
        for name, changes in SHAPES.items()
    }
    jobs["no seed"] = replace(
        jobs["4/2 heads"], params=replace(greedy, temperature=1.0, logprobs=2)
    )
    jobs["bf16"] = Job(params=greedy, dtype="bfloat16")
    context = start_processes(faults.several_jobs, (folder, jobs), 2, join=False, daemon=True)
    with pytest.raises(ProcessExitedException, match="process 1 terminated with signal SIGKILL"):
        while not context.join(2 * LONG_S, grace_period=5):
            pass
    return folder


def report_of(folder: Path, name: str) -> ParallelReport:
    return pickle.loads((folder / f"{name}.pickle").read_bytes())


@every_shape
def test_two_processes_give_the_logits_and_tokens_of_one(pair: Path, shape: str) -> None:
    report = report_of(pair, shape)
    assert report.backend == "gloo" and report.tp_size == 2
    assert report.ranks_agree, "bit by bit, or they could sample different tokens"
    assert report.logits_equal and report.tokens_equal
    assert report.max_difference is not None and report.max_difference > 0, "it was summed"
    assert [len(ids) for ids in report.token_ids] == [6, 6, 6]
    if not SHAPES[shape].get("tie_word_embeddings"):  # those repeat themselves
        assert len({token for ids in report.token_ids for token in ids}) >= 4


@every_shape
def test_bytes_and_sums_are_those_of_the_shape(pair: Path, shape: str) -> None:
    report = report_of(pair, shape)
    model = load_model(pair / shape)
    layers = model.config.num_hidden_layers
    assert report.traffic.calls == 2 * layers * report.num_forwards
    assert report.traffic.bytes == report.num_tokens * 2 * layers * 48 * 4
    assert report.num_tokens == 9 + 1 + 13 + 3 * 5
    assert report.weight_bytes_alone == 4 * model.num_parameters()
    total = report.weight_bytes_alone + report.replicated_bytes
    assert report.weight_bytes == (total // 2, total // 2)
    assert report.kv_bytes == (report.kv_bytes_alone // 2,) * 2
    slots = 4 * (4 + 2 + 5)  # blocks of 4 for 15, 7 and 19 tokens
    assert report.kv_bytes_alone == KVCacheSpec.from_model(model.config).bytes_per_token * slots


def test_ranks_sample_the_same_without_a_seed(pair: Path) -> None:
    report = report_of(pair, "no seed")
    assert report.ranks_agree and report.tokens_equal
    assert report.token_ids != report_of(pair, "4/2 heads").token_ids, "it was sampled"


def test_ranks_agree_in_bf16_too(pair: Path) -> None:
    report = report_of(pair, "bf16")
    assert report.ranks_agree and report.dtype == "bfloat16"
    assert report.traffic.bytes == report.num_tokens * 2 * 4 * 192 * 2


def test_a_killed_rank_becomes_an_error_on_the_other_at_once(pair: Path) -> None:
    seconds, said = (pair / "error").read_text().split(" ", 1)
    assert float(seconds) < 15, "half of the timeout; and at once, the second time"
    assert said.startswith("rank 0 of 2 could not finish all-reduce ")
    assert "at most 30): rank 1 died, hangs or does something else" in said


def test_torchrun_runs_it(tmp_path: Path, model: Qwen3ForCausalLM) -> None:
    file = tmp_path / "report.json"
    local = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", *local),
            *("-m", "tutorial_engine.parallel", "--json", str(file)),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=LONG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert "✘" not in done.stdout and "not run" not in done.stdout
    assert report["tokens_alone"] == report["token_ids"] and len(set(report["logits_digests"])) == 1
    alone = generate(model, report["prompt_token_ids"], SamplingParams(max_tokens=16))
    assert [[*one.outputs[0].token_ids] for one in alone] == report["token_ids"]
    assert len(PROMPTS) == len(report["texts"]) and all(report["texts"])
    trace = Trace.from_json(json.dumps(report["trace"]))
    run = [e.num_tokens for e in trace.events if isinstance(e, StepEnded)]
    assert (len(run), sum(run)) == (report["num_forwards"], report["num_tokens"])
    slots = (len(e.slots) for e in trace.events if isinstance(e, Scheduled))
    assert sum(slots) == report["num_tokens"] and not replay(trace.events).running


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After the test no process and no folder of it is there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    assert not multiprocessing.active_children() and not list(tmp_path.glob("ranks-*"))


@pytest.mark.usefixtures("nothing_left")
def test_a_killed_rank_is_named_at_the_command_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "rank_process", faults.rank_1_dies)
    assert main(["--ranks", "2"]) == 1
    assert "ParallelError: rank 1 was killed (SIGKILL)" in capfd.readouterr().err


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_waits_for_one_that_hangs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "rank_process", faults.rank_1_hangs)
    with pytest.raises(ParallelError, match=r"rank 0 says: .* could not finish all-reduce 20") as e:
        run_ranks(2, Job(timeout_s=2), LONG_S)
    assert "rank 1 said nothing" in str(e.value) and "was killed" not in str(e.value)
    waited = re.search(r"after ([\d.]+) s, at most 2\)", str(e.value))
    assert waited and 1.5 <= float(waited[1]) <= 6


@pytest.mark.usefixtures("nothing_left")
def test_ranks_that_take_too_long_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIDS", str(tmp_path))
    monkeypatch.setattr(ranks, "rank_process", faults.all_hang)
    with pytest.raises(ParallelError, match=r"2 ranks were not done after 3 s and were ended"):
        run_ranks(2, Job(timeout_s=100), timeout_s=3)


@pytest.mark.parametrize("json_path", ["no/such/folder/a.json", "."])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    json_path: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutorial_engine.parallel.__main__.run_ranks", None)
    with pytest.raises(SystemExit):
        main(["--json", json_path])
    assert f"--json {json_path}: this file cannot be written" in capfd.readouterr().err


def test_the_summary_can_be_printed_where_only_ascii_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = in_threads(Job(params=SamplingParams(max_tokens=3)))[0]
    monkeypatch.setattr("tutorial_engine.parallel.__main__.run_ranks", lambda *_: report)
    with (tmp_path / "out").open("w", encoding="ascii") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert main(["--json", str(tmp_path / "report.json")]) == 0
    assert "2 ranks" in (tmp_path / "out").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["tp_size"] == 2


@pytest.mark.parametrize("stopped", [False, sys.platform == "linux"])
def test_ranks_end_with_a_parent_that_is_killed(tmp_path: Path, stopped: bool) -> None:
    """It cannot end them itself: they must see that it is gone; if they cannot, the system does."""
    script = "import faults; from tutorial_engine.parallel import ranks\n"
    script += "ranks.rank_process = faults.all_hang; ranks.run_ranks()"
    env = {**os.environ, "PIDS": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with subprocess.Popen([sys.executable, "-c", script], env=env) as parent:
        start = time.monotonic()
        while len(pids := os.listdir(tmp_path)) < 2 and time.monotonic() - start < LONG_S:
            time.sleep(0.1)
        for pid in pids if stopped else ():
            os.kill(int(pid), signal.SIGSTOP)
        parent.kill()
    assert len(pids) == 2
    start = time.monotonic()
    while any(is_alive(pid) for pid in pids) and time.monotonic() - start < LONG_S:
        time.sleep(0.1)
    assert not any(is_alive(pid) for pid in pids)


def is_alive(pid: str) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout
    return bool(state.strip()) and not state.startswith("Z")


@pytest.mark.usefixtures("nothing_left")
def test_two_ranks_are_a_row_of_the_ledger(model: Qwen3ForCausalLM) -> None:
    paths = {**our_paths(model), **parallel_paths(TINY)}
    paths = {name: paths[name] for name in (REFERENCE, "two ranks")}
    prompts = random_sequences([7, 2, 12], model.config.vocab_size)
    rows = ledger(paths, prompts, 5)
    assert rows[1].path == "two ranks" and rows[1].within and rows[1].difference > 0
    assert rows[1].ok or rows[0].margin <= SAFE_MARGIN
    assert rows[1].steps == 15
