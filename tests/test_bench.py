"""The benchmark is fair in what it asks of all, checks all answers, and writes what it measured."""

import copy
import json
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import load_reference, save_random
from engines import random_model

import tools.bench.__main__ as command
from tools.bench import contenders, llama, memory, on_gpu, plots, race, record
from tools.bench.race import Agreement, Answer, Asked
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.generate import generate
from tutorial_engine.lab import roofline
from tutorial_engine.lab.on_gpu import GpuStep
from tutorial_engine.lab.roofline import Roofline, forward_bytes, forward_flops, weight_bytes
from tutorial_engine.model.checkpoint import TINY, load_model
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams

SMALL = [Asked((5, 6, 7), 9), Asked(tuple(range(40, 61)), 2), Asked((8,), 5)]


@pytest.fixture(autouse=True)
def small_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No llama.cpp, even where it is installed, and everything as small as it can be."""
    for package in llama.PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
    probe = partial(roofline.roofline_probe, num_bytes=2**22)
    monkeypatch.setattr(command, "roofline_probe", probe)
    part = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 2800}
    shapes = {"qwen3-0.6b": {**contenders.SHAPES["qwen3-0.6b"], **part}}
    monkeypatch.setattr(memory, "SHAPES", shapes)
    sizes = {"PREFIX": 32, "OWN": 8, "NEW": 3, "BATCH": 2, "CONTEXT": 40, "LAYERS": 1}
    for name, value in {**sizes, "RUNNING": (2, 3), "STEPS": 3}.items():
        monkeypatch.setattr(memory, name, value)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return contenders.load_transformers(TINY, torch.float32)


def alone(model: CausalLM, requests: Sequence[Asked]) -> list[tuple[int, ...]]:
    """What each request gets when it is the only one."""
    found = []
    for one in requests:
        params = SamplingParams(max_tokens=one.new_tokens, ignore_eos=True)
        found.append(tuple(generate(model, [one.prompt], params)[0].outputs[0].token_ids))
    return found


def tokens_of(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


# -- the race -------------------------------------------------------------------------------------


class Fake:
    """Says `token` as often as wanted, and takes so many seconds, the warm-up first."""

    def __init__(self, name: str, log: list[str], seconds: Sequence[float], token: int = 1) -> None:
        self.name, self.log, self.token = name, log, token
        self.seconds = iter([100.0, *seconds])
        self.asked: list[list[Asked]] = []

    def serve(self, requests: Sequence[Asked]) -> list[Answer]:
        self.log.append(self.name)
        self.asked.append(list(requests))
        Clock.now += next(self.seconds)
        return [Answer((self.token,) * one.new_tokens) for one in requests]


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(perf_counter=lambda: Clock.now, sleep=lambda seconds: None)
    monkeypatch.setattr(race, "time", fake)


ASKED = [Asked((1, 2), 10), Asked((3,), 2)]


@pytest.mark.usefixtures("clock")
def test_rounds_are_interleaved_and_the_warm_up_is_short_and_not_counted() -> None:
    log: list[str] = []
    took = {"transformers": [4.0, 9.0, 6.0], "plain": [1.0, 1.0, 2.0], "ours": [2.0, 3.0, 1.0]}
    fakes = {name: Fake(name[0], log, seconds) for name, seconds in took.items()}
    probes = iter([Roofline(5.0, 1.0), Roofline(1.0, 2.0), Roofline(2.0, 9.0)])
    result = race.race(fakes, ASKED, 3, probe=lambda: next(probes))
    assert "".join(log) == "tpo" + "tpo" + "pot" + "otp"
    for fake in fakes.values():
        assert [one.new_tokens for one in fake.asked[0]] == [race.WARM_UP_TOKENS, 2]
        assert fake.asked[1:] == [ASKED] * 3
    assert result.samples == took and result.roofline == Roofline(2.0, 2.0)
    found = command.report.many_requests(result, "ours")
    assert found["seconds"] == {"transformers": 6.0, "plain": 1.0, "ours": 2.0}
    table = [line.split(" | ")[1:4] for line in record.many("two", found)]
    assert [cell.strip() for cell in table[0]] == ["seconds", "tokens/s", "× transformers"]
    assert [cell.strip() for cell in table[4]] == ["2 (1–3)", "6 (4–12)", "3.00"], "ours"
    assert (found["num_requests"], found["prompt_tokens"], found["wanted_tokens"]) == (2, 3, 12)


@pytest.mark.usefixtures("clock")
def test_only_an_optional_contender_may_fail_and_at_any_time() -> None:
    class Breaks(Fake):
        def serve(self, requests: Sequence[Asked]) -> list[Answer]:
            if len(self.asked) == 2:
                raise MemoryError("no block is free")
            return super().serve(requests)

    def field() -> dict[str, Fake]:
        kinds = {"transformers": Fake, "llama.cpp": Breaks, "ours": Fake}
        return {name: kind(name[0], log, [2.0] * 3) for name, kind in kinds.items()}

    log: list[str] = []
    result = race.race(field(), ASKED, 3, optional={"llama.cpp"})
    assert "".join(log) == "tlo" + "tlo" + "ot" + "ot"
    assert result.failed == {"llama.cpp": "MemoryError: no block is free"}
    assert result.samples.keys() == result.answers.keys() == {"transformers", "ours"}
    lines = [*record.many("two", command.report.many_requests(result, "ours"))]
    assert "- llama.cpp could not run: MemoryError: no block is free" in lines
    with pytest.raises(MemoryError):
        race.race(field(), ASKED, 3)


@pytest.mark.usefixtures("clock")
def test_doing_less_work_is_no_way_to_win_and_answers_are_compared() -> None:
    field = {"transformers": Fake("t", [], [1.0], token=2), "ours": Fake("o", [], [1.0])}
    result = race.race(field, ASKED, 1)
    assert result.agreement("ours") == {"transformers": (0, 0), "ours": (2, 12)}
    pairs = [Answer((1, 2, 3)), Answer((4, 5))], [Answer((1, 2, 9)), Answer((4, 5))]
    assert race.agreement(*pairs) == Agreement(1, 4)
    lazy = SimpleNamespace(serve=lambda requests: [Answer((1,)), Answer((1, 1))])
    with pytest.raises(ValueError, match=r"ours gave \[1, 2\] tokens where \[4, 2\] were asked"):
        race.race({"ours": lazy}, ASKED, 1)
    backwards = SimpleNamespace(serve=lambda requests: [Answer((1, 1), (0.2, 0.1))])
    with pytest.raises(ValueError, match="times that do not rise"):
        race.race({"ours": backwards}, [Asked((1,), 2)], 1)
    assert Answer((1, 2, 3), (10.0, 11.0, 14.0)).per_token == 2.0, "decode, without the prefill"


# -- the contenders -------------------------------------------------------------------------------


def test_everybody_gives_each_request_what_it_gets_alone(theirs: Any) -> None:
    model = load_model(TINY)
    wanted = alone(model, SMALL)
    config = contenders.serving_config(SMALL)
    assert config.max_num_seqs == 3 and config.max_model_len == 64
    ours = contenders.OurServer(model, config)
    pages = memory.pages_for(model, config, prefix_caching=True)
    assert pages.storage.num_slots == config.max_num_seqs * config.max_model_len
    cold = memory.ColdServer(model, config, pages)
    continuous = contenders.ContinuousTransformers(theirs, SMALL)
    with torch.inference_mode():  # as in the race
        for server in (ours, cold, contenders.Transformers(theirs), continuous):
            for _ in range(2):  # a run leaves nothing behind
                assert tokens_of(server.serve(SMALL)) == wanted
        continuous.close()
        kinds = [contenders.Transformers(theirs, *k) for k in (("eager", False), ("sdpa", True))]
        for one in (contenders.Ours(model), contenders.Transformers(theirs), *kinds):
            for asked, tokens in zip(SMALL, wanted, strict=True):
                (answer,) = one.serve([asked])
                assert answer.tokens == tokens and len(answer.seconds) == len(tokens)


def test_transformers_runs_what_each_is_named_for(
    theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str, tuple[int, ...]]] = []
    real = theirs.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        cache = type(kwargs["past_key_values"]).__name__
        shape = tuple(kwargs["input_ids"].shape)
        seen.append((theirs.config._attn_implementation, cache, shape))
        return real(*args, **kwargs)

    monkeypatch.setattr(theirs, "forward", spy)
    for attention, static in (("eager", False), ("sdpa", True)):
        seen.clear()
        contenders.Transformers(theirs, attention, static).serve([Asked((1, 2), 3)])
        cache = "StaticCache" if static else "DynamicCache"
        assert [one[:2] for one in seen] == [(attention, cache)] * 3
    seen.clear()
    contenders.Transformers(theirs).serve(SMALL)
    assert [shape for _, _, shape in seen] == [(3, 21), *[(3, 1)] * 8], "until the longest is done"


def test_on_a_gpu_ours_runs_in_four_ways(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the GPU itself: who runs, what is told of a step, and what a first run is."""
    model, asked = load_model(TINY), SMALL[:1]
    args = SimpleNamespace(
        device="cuda", lengths=[3], new_tokens=9, serving_rounds=1, dtype="float32"
    )
    everyone, notes = command.for_one_request(
        session := command.Session(args, None, theirs, model, ExitStack())  # type: ignore[arg-type]
    )
    names = ["ours", "ours eager", "ours pages", "ours pages eager"]
    assert [*everyone] == ["transformers", "transformers static", *names]
    static = everyone["transformers static"]
    assert isinstance(static, contenders.Transformers) and static.compiled and static.static_cache
    assert notes["llama.cpp"].startswith("left out") and "pages, decode steps replayed" in str(
        notes
    )
    for name in names:
        one = everyone[name]
        assert isinstance(one, contenders.OurStream)
        assert one.engine.config.cuda_graphs == ("eager" not in name)
        assert isinstance(one.engine.memory, PagedKVCache) == ("pages" in name)
        (answer,) = one.serve(asked)
        assert [answer.tokens] == alone(model, asked) and len(answer.seconds) == 9

    def look(run: Any) -> GpuStep:
        n = len(run()[0].tokens)  # so many launches a token, and a prefill of 50
        return GpuStep("", 3e-3 * n + 1, 7 * n + 50, 2e-3 * n + 0.5)

    monkeypatch.setattr(on_gpu, "profile_step", look)
    found = on_gpu.steps({"ours": everyone["ours"]}, asked)
    figures: Any = record.stored()["tiny-float32-intel.json"]
    figures["checks"][0]["warm_up"] = {"ours": 87.0}
    page = "\n".join(record.section(figures | {"gpu_steps": [found | {"context": 128}]}))
    told = "ours: 7 launches a token; the GPU works 2.00 of 3.00 ms and waits 33%; warm-up 87.0 s"
    assert page.count(told) == 1 and found["context"] == 3
    serving = command.serve(session, SMALL)
    session.stack.close()
    assert [*serving["first_run"]][-4:] == names and serving["failed"] == {}
    assert {one["requests"] for one in serving["agreement"].values()} == {3}
    lines = [*record.many("three", serving)]
    ran = 1 / serving["first_run"]["ours pages"]
    assert "first run, tokens/s" in lines[0]
    assert any("ours pages " in line and f" {record.short(16 * ran)} " in line for line in lines)


def test_a_gpu_that_is_not_here_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--device", "cuda"]) == 1
    assert "bench: device 'cuda': PyTorch finds no GPU here" in capsys.readouterr().err
    monkeypatch.setattr(roofline, "MATMUL_ON_GPU", (4, 8, 8))
    probe = roofline.roofline_probe(num_bytes=2**16, passes=1, device="meta")
    assert probe().peak_flops > 0, "its buffers are where it is told"


def test_random_weights_of_a_shape_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48}
    small |= {"num_hidden_layers": 2, "head_dim": 8}
    shape = {**contenders.SHAPES["qwen3-0.6b"], **small}
    monkeypatch.setitem(contenders.SHAPES, "qwen3-0.6b", shape)
    stamps = []
    for _ in range(2):
        with contenders.checkpoint_folders("qwen3-0.6b", tmp_path / "weights") as folders:
            assert folders.weights == folders.converted == tmp_path / "weights"
            stamps.append((folders.weights / "model.safetensors").stat().st_mtime_ns)
            assert load_model(folders.weights).config.head_dim == 8
    assert stamps[0] == stamps[1]
    with contenders.checkpoint_folders("tiny", None) as folders:
        assert folders.weights == TINY != folders.converted, "nothing is written beside the weights"


# -- llama.cpp, which is not here: the race checks its tokens where it runs ------------------------


class FakeWriter:
    """gguf.GGUFWriter: keeps what it is told."""

    def __init__(self, file: Path, arch: str) -> None:
        self.file, self.told, self.tensors = file, {"arch": arch}, {}

    def add_tensor(self, name: str, data: Any, raw_dtype: str) -> None:
        self.tensors[name] = (raw_dtype, data.shape, data.tobytes())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("add_"):
            return lambda value: self.told.__setitem__(name[4:], value)
        return lambda: self.file.touch()


@pytest.fixture
def gguf(monkeypatch: pytest.MonkeyPatch) -> list[FakeWriter]:
    made: list[FakeWriter] = []
    module: Any = ModuleType("gguf")
    module.GGUFWriter = lambda *args: made.append(FakeWriter(*args)) or made[-1]
    module.GGMLQuantizationType = SimpleNamespace(F32="F32", BF16="BF16")
    monkeypatch.setitem(sys.modules, "gguf", module)
    return made


@pytest.mark.parametrize("variant", [{}, {"tie_word_embeddings": True, "head_dim": 20}])
def test_gguf_holds_the_weights_under_llama_cpps_names(
    variant: dict[str, Any], tmp_path: Path, gguf: list[FakeWriter]
) -> None:
    folder, file = save_random(tmp_path / "weights", **variant), tmp_path / "model.gguf"
    for dtype, kind in ((torch.float32, "F32"), (torch.bfloat16, "BF16")):
        llama.write_gguf(folder, file, dtype)
        file.unlink()
        written = dict(gguf[-1].tensors)
        for name, weight in load_reference(folder, dtype).state_dict().items():
            if name == "lm_head.weight" and variant.get("tie_word_embeddings"):
                continue
            layer = name.split(".")
            theirs = llama.WHOLE.get(name) or f"blk.{layer[2]}.{llama.PARTS[layer[-2]]}.weight"
            own, shape, data = written.pop(theirs)
            assert own == (kind if weight.ndim == 2 else "F32")
            expected = (weight.float() if own == "F32" else weight).contiguous()
            assert data == expected.view(torch.uint8).numpy().tobytes()
            assert shape == (*weight.shape[:-1], weight.shape[-1] * expected.itemsize)
        assert not written
    told = gguf[0].told
    assert (told["arch"], told["tokenizer_model"]) == ("qwen3", "no_vocab")
    assert (told["block_count"], told["head_count"], told["head_count_kv"]) == (3, 4, 2)
    assert told["key_length"] == told["value_length"] == variant.get("head_dim", 16)
    assert (told["rope_freq_base"], told["vocab_size"]) == (10_000.0, 97)
    with pytest.raises(ValueError, match="without biases"):
        llama.write_gguf(save_random(tmp_path / "b", attention_bias=True), file, torch.float32)


# -- the memories, and a step without its forward --------------------------------------------------


def gather_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where slots are scattered, values are read in another order."""
    read = KVStorage.read_slots

    def mistaken(self: KVStorage, layer: int, slots: Any, keep: bool = False) -> Any:
        k, v = read(self, layer, slots, keep)
        axis = next(i for i, size in enumerate(v.shape) if size == k.shape[-3])
        return k, v if isinstance(slots, slice) else v.flip(axis)

    monkeypatch.setattr(KVStorage, "read_slots", mistaken)


def test_wrong_answers_are_no_way_to_win(monkeypatch: pytest.MonkeyPatch) -> None:
    model, long = load_model(TINY), [one._replace(new_tokens=40) for one in SMALL]
    result = memory.race_layouts(model, long, 1)
    assert result.agreement("rows") == dict.fromkeys(("rows", "pages"), Agreement(3, 120))
    gather_wrongly(monkeypatch)
    with pytest.raises(ValueError, match=r"pages: only .* are those of rows: one is wrong"):
        memory.race_layouts(model, long, 1)
    with pytest.raises(ValueError, match="rows and pages disagree by"):
        memory.race_long_contexts(random_model(), 3, 50, rounds=1)


def test_a_shared_prefix_is_found_and_changes_no_answer() -> None:
    result = memory.race_prefix_cache(load_model(TINY), 30, 1)
    assert result.agreement("no prefix cache")["prefix cache"] == Agreement(30, 90)


def test_long_contexts_are_scattered_on_pages_and_answer_alike() -> None:
    model = random_model()
    result = memory.race_long_contexts(model, 3, 50, rounds=2)
    ways = ["rows", "pages", "in place, loop", "in place, many blocks"]
    assert result.agreement("rows") == dict.fromkeys(ways, Agreement(3, 3))
    asked = [Asked((number,) * 50, 1) for number in range(3)]
    config = contenders.serving_config(asked)
    pages = memory.pages_for(model, config, prefix_caching=False)
    step = memory.fill(pages, asked)
    assert not any(isinstance(one.allocation.context_slots, slice) for one in step)
    pages.check_integrity()


def test_a_step_is_timed_in_decode_without_a_forward() -> None:
    engine = memory.engine_in_decode(5, 6)
    for _ in range(6):
        assert len(engine.step()) == 5
        engine.check_integrity()
    cost = memory.measure_step_cost(8, steps=4)
    assert cost["running"] == 8 and len(cost["samples"]) == 4 and cost["step"] > 0


# -- the command, the page and the picture ---------------------------------------------------------

QUICK = ["--rounds", "1", "--new-tokens", "3"]


def test_the_command_and_the_page_say_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a whole run, with everybody in it who is here."""
    file = tmp_path / "bench.json"
    asked = [*QUICK, "--lengths", "24", "8", "--requests", "3", "--serving-rounds", "1"]
    assert command.main([*asked, "--json", str(file)]) == 0
    said = capsys.readouterr()
    assert "one request of 24 tokens" in said.err and "3 ragged requests" in said.err
    assert "(python -m pip install llama-cpp" in said.out and "goal ≥" in said.out
    figures = json.loads(file.read_text())
    machine, config = figures["machine"], ModelConfig.from_pretrained(TINY)
    assert machine["threads"] == torch.get_num_threads() and machine["dtype"] == "float32"
    assert figures["settings"]["lengths"] == [8, 24]
    phases = [(row["phase"], row["context"]) for row in figures["rows"]]
    assert phases == [("prefill", 8), ("decode", 8), ("prefill", 24), ("decode", 24)]
    theirs = {"transformers", "transformers eager", "transformers static"}
    everybody = theirs | {"ours"}
    for row, floor in zip(figures["rows"], figures["floors"], strict=True):
        seconds, ours = row["seconds"], row["seconds"]["ours"]
        assert seconds.keys() == everybody
        assert {key: row[key] for key in ("phase", "context")}.items() <= floor.items()
        (table,) = re.findall(
            rf"^\| {row['phase']} at {row['context']} .*\n((?:\|.*\n)+)", said.out, re.M
        )
        (line,) = re.findall(r"^\| ours +\|(.*)\|$", table, re.M)
        ms, *speed, ratio, over, same = (cell.strip() for cell in line.split(" | "))
        assert ms.startswith(f"{record.short(1000 * ours)} (") and same == "3 of 3"
        assert ratio == f"{seconds['transformers'] / ours:.2f}"
        assert over == f"{ours / floor['seconds']:.2f}"
        fast = record.short(row["context"] / ours)
        assert [one.split()[0] for one in speed] == [fast] * (row["phase"] == "prefill")
    for check in figures["checks"]:
        assert check["failed"] == {} and set(check["tokens_equal"].values()) == {3}
    for i, limits in enumerate(figures["rooflines"]):  # of the same rounds, one for each length
        prefill, decode = figures["floors"][2 * i : 2 * i + 2]
        n = limits["context"]
        assert prefill["seconds"] == forward_flops(config, n) / limits["peak_flops"]
        assert decode["seconds"] == weight_bytes(config) / limits["bandwidth"]
        assert decode["with_cache"] == forward_bytes(config, 1, n) / limits["bandwidth"]
    serving = figures["serving"]
    names = {"transformers", "transformers continuous", "ours"}
    whole = {"requests": 3, "tokens": serving["wanted_tokens"]}
    assert serving["agreement"] == dict.fromkeys(names, whole) and serving["failed"] == {}
    assert figures["memory"]["shared"] == 0.8 and len(figures["step_costs"]) == 2

    page = record.page({"a.json": figures})
    assert said.out.replace(f"--json {file}", "--json docs/bench/a.json") in page + "\n"


def test_the_page_of_record_is_made_from_the_figures_beside_it() -> None:
    page = record.page(record.stored())
    assert (record.FOLDER / record.PAGE).read_text() == page, "python -m tools.bench.record"


@pytest.mark.parametrize(
    "goal, where, up",
    [
        ("decode at 128, transformers", "rows/1/seconds/transformers", True),
        ("64 ragged requests, transformers", "serving/seconds/ours", False),
        ("ragged requests on pages", "memory/ragged/seconds/rows", True),
        ("8 contexts of 2048", "memory/long_context/seconds/pages", False),
        ("a step without its forward, per request of 256", "step_costs/1/step", False),
    ],
)
def test_each_goal_follows_what_was_measured(goal: str, where: str, up: bool) -> None:
    for factor in (0.01, 100.0):
        figures: Any = copy.deepcopy(record.stored()["tiny-float32-intel.json"])
        *path, last = where.split("/")
        place = figures
        for key in path:
            place = place[int(key) if isinstance(place, list) else key]
        place[last] *= factor
        (verdict,) = [one for one in record.verdicts(figures) if one.what.startswith(goal)]
        assert verdict.is_met is ((factor > 1) == up)
        assert str(verdict).startswith("✔" if verdict.is_met else "✘")


def test_a_goal_that_is_not_met_is_told_for_each_shape() -> None:
    figures: Any = record.stored()["tiny-float32-intel.json"]
    figures["settings"]["shape"] = "smollm2"
    decode = figures["rows"][1]["seconds"]
    for factor, mark in ((1.4, "✘"), (1.6, "✔")):
        decode["transformers"] = factor * decode["ours"]
        told = f"- {mark} decode at 128, transformers: {factor:.2f}× (goal ≥ 1.5×)"
        assert told in record.section(figures)


def test_what_cannot_be_measured_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="at most 128: leave them out with --requests 0"):
        race.ragged_requests(16, 512, 128)
    assert command.main([*QUICK, "--lengths", "4", "1022"]) == 1
    assert "from 1 to 1021 tokens (and 3 new ones), got [1022]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--new-tokens", "1"])
    assert "--new-tokens must be at least 2, got 1" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert command.main([*QUICK, "--lengths", "4"]) == 1
    assert "pip install -e '.[notebooks]'" in capsys.readouterr().err


def test_bars_are_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[Any] = []
    real = plots.finish
    monkeypatch.setattr(plots, "finish", lambda f, words: caught.extend(f.axes) or real(f, words))
    figures = record.stored()["qwen3-0.6b-float32-intel.json"]
    plots.bench_picture(figures)
    decode, prefill = ([r for r in figures["rows"] if r["phase"] == p] for p in plots.PHASES)
    for ax, rows in zip(caught, (decode, prefill), strict=False):
        for bars in ax.containers:
            name = bars.get_label()
            ms = [1000 * row["seconds"][name] for row in decode]
            speed = [row["context"] / row["seconds"][name] for row in prefill]
            wanted = ms if rows is decode else speed
            assert [bar.get_height() for bar in bars] == pytest.approx(wanted)
    serving = figures["serving"]
    speeds = [serving["wanted_tokens"] / seconds for seconds in serving["seconds"].values()]
    assert [one.patches[0].get_height() for one in caught[2].containers] == speeds
    looks = [bars.patches[0].get_hatch() for bars in caught[0].containers]
    assert len({*looks}) == len(looks) and looks[-1] is None, "they differ by more than colour"


def test_the_picture_is_written_or_the_reason_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = record.FOLDER / "tiny-float32-intel.json"
    for name in ("a.png", "a.svg"):
        assert plots.main([str(source), str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(SystemExit):
        plots.main([str(source), "bench.jpg"])
    (tmp_path / "empty.json").write_text('{"rows": []}')
    for wrong in ("none.json", "empty.json"):
        assert plots.main([str(tmp_path / wrong), str(tmp_path / "b.png")]) == 1
    said = capsys.readouterr().err
    assert "must end in .png or .svg, got 'bench.jpg'" in said and "no rows" in said
