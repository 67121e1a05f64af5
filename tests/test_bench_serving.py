"""The race of servers is fair in what it asks of all; each server serves its own way."""

import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_bench import FakeLlama, fake_gguf

import tutorial_engine.bench.__main__ as command
from tutorial_engine.bench import allocation_cost, memory_cost, report, servers, serving
from tutorial_engine.bench.contenders import load_transformers
from tutorial_engine.bench.llama_server import LlamaServer
from tutorial_engine.bench.scheduler_cost import engine_in_decode, measure_step_cost
from tutorial_engine.bench.serving import (
    Agreement,
    Asked,
    agreement,
    measure_serving,
    ragged_requests,
)
from tutorial_engine.bench.shapes import SHAPES
from tutorial_engine.engine.generate import generate
from tutorial_engine.model.checkpoint import TINY, load_model
from tutorial_engine.sampling.params import SamplingParams

SMALL = [Asked((5, 6, 7), 9), Asked(tuple(range(40, 61)), 2), Asked((8,), 5)]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return load_transformers(TINY, torch.float32)


def alone(model: Any, requests: Sequence[Asked]) -> list[tuple[int, ...]]:
    """What each request gets when it is the only one."""
    params = [SamplingParams(max_tokens=one.new_tokens, ignore_eos=True) for one in requests]
    pairs = zip(requests, params, strict=True)
    outputs = (generate(model, [one.prompt], own)[0] for one, own in pairs)
    return [output.outputs[0].token_ids for output in outputs]


# -- the race -------------------------------------------------------------------------------------


class Fake:
    """A server that says `tokens` as often as wanted, and takes so many seconds in its runs."""

    def __init__(
        self, name: str, log: list[str], clock: "Clock", seconds: Sequence[float], token: int = 1
    ) -> None:
        self.name, self.log, self.clock, self.token = name, log, clock, token
        self.seconds = iter([100.0, *seconds])  # the first run is the warm-up
        self.asked: list[list[Asked]] = []

    def serve(self, requests: Sequence[Asked]) -> list[tuple[int, ...]]:
        self.log.append(self.name)
        self.asked.append(list(requests))
        self.clock.now += next(self.seconds)
        return [(self.token,) * one.new_tokens for one in requests]


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    fake = SimpleNamespace(perf_counter=lambda: made.now, sleep=lambda seconds: None)
    monkeypatch.setattr(serving, "time", fake)
    return made


ASKED = [Asked((1, 2), 10), Asked((3,), 2)]


def test_rounds_are_interleaved_and_the_warm_up_is_short_and_not_counted(clock: Clock) -> None:
    log: list[str] = []
    took = {"transformers": (4.0, 9.0, 6.0), "plain": (1.0, 1.0, 2.0), "ours": (2.0, 3.0, 1.0)}
    fakes = {name: Fake(name[0], log, clock, seconds) for name, seconds in took.items()}
    result = measure_serving(fakes, ASKED, 3, "ours")
    assert "".join(log) == "tpo" + "tpo" + "pot" + "otp"
    for fake in fakes.values():
        assert [one.new_tokens for one in fake.asked[0]] == [serving.WARM_UP_TOKENS, 2]
        assert fake.asked[1:] == [ASKED] * 3
    assert result.samples == {name: list(seconds) for name, seconds in took.items()}
    assert result.seconds == {"transformers": 6.0, "plain": 1.0, "ours": 2.0}
    assert result.ratio == {"transformers": 1.0, "plain": 6.0, "ours": 3.0}
    assert result.wanted_per_second["ours"] == 12 / 2.0, "tokens that were wanted, by all seconds"
    assert (result.num_requests, result.prompt_tokens, result.wanted_tokens) == (2, 3, 12)


def test_answers_are_compared_request_by_request(clock: Clock) -> None:
    log: list[str] = []
    fakes = {
        "transformers": Fake("t", log, clock, [1.0], token=2),
        "ours": Fake("o", log, clock, [1.0]),
    }
    result = measure_serving(fakes, ASKED, 1, "ours")
    assert result.agreement == {"transformers": Agreement(0, 0), "ours": Agreement(2, 12)}
    own, reference = [(1, 2, 3), (4, 5), (6,)], [(1, 2, 9), (4, 5), (7,)]
    assert agreement(own, reference) == Agreement(1, 4)


def test_fewer_tokens_than_wanted_are_no_way_to_win(clock: Clock) -> None:
    lazy = Fake("o", [], clock, [1.0])
    lazy.serve = lambda requests: [(1,), (1, 1)]  # type: ignore[method-assign]
    race = {"transformers": Fake("t", [], clock, [1.0]), "ours": lazy}
    with pytest.raises(ValueError, match=r"ours gave \[1, 2\] tokens where \[4, 2\] were asked"):
        measure_serving(race, ASKED, 1, "ours")


def test_only_an_optional_server_may_fail_and_at_any_time(clock: Clock) -> None:
    class Breaks(Fake):
        def serve(self, requests: Sequence[Asked]) -> list[tuple[int, ...]]:
            if len(self.asked) == 2:
                raise MemoryError("no block is free")
            return super().serve(requests)

    def race() -> dict[str, Fake]:
        names = ("transformers", "llama.cpp", "ours")
        kinds = {"llama.cpp": Breaks}
        return {name: kinds.get(name, Fake)(name[0], log, clock, [2.0] * 3) for name in names}

    log: list[str] = []
    result = measure_serving(race(), ASKED, 3, "ours", optional={"llama.cpp"})
    assert "".join(log) == "tlo" + "tlo" + "ot" + "ot"
    assert result.failed == {"llama.cpp": "MemoryError: no block is free"}
    for column in (result.seconds, result.ratio, result.samples, result.agreement):
        assert column.keys() == {"transformers", "ours"}
    table = report.serving_table(result)
    assert "llama.cpp could not run: MemoryError: no block is free" in table
    assert "×llama" not in table and "2 of 2, 12 of 12" in table
    with pytest.raises(MemoryError):
        measure_serving(race(), ASKED, 3, "ours")


def test_requests_are_ragged_the_same_every_time_and_fit_the_model() -> None:
    requests = ragged_requests(16, 512, 1024)
    assert requests == ragged_requests(16, 512, 1024) and len(requests) == 16
    assert all(16 <= len(one.prompt) <= 256 and 8 <= one.new_tokens <= 128 for one in requests)
    assert len({len(one.prompt) for one in requests}) > 10, "they are ragged"
    with pytest.raises(ValueError, match="the model at most 128: leave them out with --requests 0"):
        ragged_requests(16, 512, 128)


# -- the servers ----------------------------------------------------------------------------------


def test_our_server_gives_each_request_what_it_gets_alone() -> None:
    model = load_model(TINY)
    config = servers.serving_config(SMALL)
    assert config.max_num_seqs == 3 and config.max_model_len == 64
    server = servers.OurServer(model, config)
    for _ in range(2):  # a run leaves nothing behind
        assert server.serve(SMALL) == alone(model, SMALL)


def test_padding_is_on_the_left_and_changes_no_answer(
    theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.Size, list[int]]] = []
    real = theirs.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append((kwargs["input_ids"].shape, kwargs["attention_mask"].sum(1).tolist()))
        return real(*args, **kwargs)

    monkeypatch.setattr(theirs, "forward", spy)
    assert servers.PaddedTransformers(theirs).serve(SMALL) == alone(load_model(TINY), SMALL)
    assert seen[0] == ((3, 21), [3, 21, 1]), "one batch, as wide as the longest prompt"
    assert len(seen) == 9 and all(shape == (3, 1) for shape, _ in seen[1:]), (
        "all run until the longest is done"
    )


def test_continuous_batching_of_transformers_gives_each_what_it_wants(theirs: Any) -> None:
    server = servers.ContinuousTransformers(theirs, SMALL)
    with torch.inference_mode():  # as in the race
        try:
            for _ in range(2):
                assert server.serve(SMALL) == alone(load_model(TINY), SMALL)
        finally:
            server.close()
    assert not hasattr(theirs, "_cached_continuous_batching_manager")


class FakeBatchLlama(FakeLlama):
    """llama_cpp's batch interface over our own tiny model; keeps what it was asked."""

    def __init__(self, n_batch: int) -> None:
        super().__init__()
        self.n_batch, self.batches = n_batch, []
        self.llama_n_batch = lambda context: self.n_batch

    def llama_batch_init(self, n: int, embd: int, n_seq_max: int) -> Any:
        assert (n, embd, n_seq_max) == (self.n_batch, 0, 1)
        self.open += 1
        lists = {name: [None] * n for name in ("token", "pos", "logits", "n_seq_id")}
        return SimpleNamespace(**lists, seq_id=[[None] for _ in range(n)], n_tokens=0)

    def llama_batch_free(self, batch: Any) -> None:
        self.open -= 1

    def llama_decode(self, context: int, batch: Any) -> int:
        new: dict[int, int] = {}  # sequence -> its tokens in this batch
        ends: dict[int, int] = {}  # sequence -> where its last one stands
        for i in range(batch.n_tokens):
            (seq_id,) = batch.seq_id[i]
            request = self.requests[seq_id]
            assert batch.pos[i] == request.num_tokens and batch.n_seq_id[i] == 1
            request.token_ids.append(batch.token[i])
            new[seq_id], ends[seq_id] = new.get(seq_id, 0) + 1, i
        self.batches.append(new)
        logits = self.runner.run([self.requests[seq_id] for seq_id in new])
        pairs = zip(new, logits, strict=True)
        self.rows = {ends[s]: row for s, row in pairs if batch.logits[ends[s]]}
        return 0

    def llama_get_logits_ith(self, context: int, row: int) -> Any:
        self.logits_kept = (ctypes.c_float * 512)(*self.rows[row].tolist())
        return ctypes.cast(self.logits_kept, ctypes.POINTER(ctypes.c_float))


def test_llama_cpp_batches_continuously(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeBatchLlama(n_batch=8)
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    server = LlamaServer(Path("model.gguf"), torch.float32, SMALL)
    assert library.params.n_seq_max == 3 and library.params.n_ctx == 3 * 23
    for _ in range(2):
        library.batches.clear()
        assert server.serve(SMALL) == alone(library.model, SMALL)
    assert library.batches[:4] == [{0: 3, 1: 5}, {0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 2, 2: 1}]
    assert max(sum(batch.values()) for batch in library.batches) == 8, "no batch is too long"
    assert library.batches[-1] == {0: 1} and len(library.batches) == 9
    server.close()
    assert library.open == 0, "batch, context and model were freed"
    server = LlamaServer(Path("model.gguf"), torch.float32, SMALL)
    library.llama_decode = lambda context, batch: 1  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="status 1 for 8 tokens"):
        server.serve(SMALL)
    server.close()


# -- the scheduler's own cost ---------------------------------------------------------------------


def test_step_cost_is_that_of_steps_in_which_all_decode() -> None:
    engine = engine_in_decode(5, 6)
    calls = []
    engine.model.forward = lambda *_: calls.append(1)  # type: ignore[method-assign]
    for _ in range(6):
        assert len(engine.step()) == 5
        engine.check_integrity()
    assert all(request.num_new_tokens == 1 for request in engine.requests.values())
    assert not calls, "no forward is run"


def test_step_cost_is_per_running_request() -> None:
    cost = measure_step_cost(32, steps=4)
    assert cost.running == 32 and len(cost.samples) == 4
    parts = (cost.schedule, cost.batch, cost.update)
    assert all(0 < part < cost.bookkeeping for part in parts)
    assert min(cost.samples) <= cost.bookkeeping <= max(cost.samples)
    assert "32 running" in report.cost_table([cost])


# -- the command ----------------------------------------------------------------------------------


def test_command_races_servers_and_times_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = FakeBatchLlama(n_batch=512)
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    fake_gguf(monkeypatch)
    monkeypatch.setattr(command, "load_llamas", lambda *_: ({}, {}))  # test_bench has that race
    monkeypatch.setattr(command, "RUNNING", (2, 3))
    small: dict[str, Any] = {
        "PREFIX": 16,
        "OWN": 4,
        "NEW": 2,
        "BATCH": 2,
        "CONTEXT": 40,
        "LAYERS": 1,
    }
    part = {**SHAPES["qwen3-0.6b"], "hidden_size": 32, "intermediate_size": 32, "vocab_size": 2800}
    small |= {
        "SHAPES": {"qwen3-0.6b": part},
        "measure_allocation": lambda: allocation_cost.measure_allocation(2, 3),
    }
    for name, value in small.items():
        monkeypatch.setattr(memory_cost, name, value)
    file = tmp_path / "bench.json"
    asked = ["--lengths", "4", "--rounds", "1", "--new-tokens", "2", "--requests", "3"]
    assert command.main([*asked, "--serving-rounds", "1", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    race = figures["serving"]
    names = {"transformers", "transformers continuous", "llama.cpp", "ours"}
    assert race["seconds"].keys() == race["contenders"].keys() == names
    assert race["num_requests"] == 3 and race["failed"] == {}
    whole = {"requests": 3, "tokens": race["wanted_tokens"]}
    assert race["agreement"] == dict.fromkeys(names, whole)
    for name, seconds in race["seconds"].items():
        assert race["wanted_per_second"][name] == pytest.approx(race["wanted_tokens"] / seconds)
    assert [cost["running"] for cost in figures["step_costs"]] == [2, 3]
    memory = figures["memory"]
    assert memory["ragged"]["num_requests"] == 3 and memory["prefix"]["num_requests"] == 2
    assert memory["long_context"]["scattered"] == 1.0 and memory["shared"] == 0.8
    assert figures["settings"]["serving_rounds"] == 1
    said = capsys.readouterr().out
    assert "3 ragged requests" in said
    assert "µs per running request" in said and "3 running" in said
    assert "2 with 80% shared" in said and "batch 2 at 40" in said and "pages, blocks of 16" in said
    assert library.open == 0
