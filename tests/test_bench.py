"""The benchmark runs, is fair in what it asks of all, and writes what it measured."""

import builtins
import ctypes
import json
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import load_reference, save_random
from torch import Tensor

import tutorial_engine.bench.__main__ as command
from tutorial_engine.bench import llama_cpp, report, roofline, shapes
from tutorial_engine.bench.contenders import Ours, TimedStreamer, Transformers, load_transformers
from tutorial_engine.bench.measure import (
    Generated,
    Workload,
    equal_start,
    measure,
)
from tutorial_engine.bench.roofline import Roofline, forward_bytes, forward_flops, weight_bytes
from tutorial_engine.engine.generate import generate
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import make_runner
from tutorial_engine.model.checkpoint import TINY, load_model
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.sampling.params import SamplingParams

QUICK = [
    "--rounds",
    "1",
    "--new-tokens",
    "3",
    "--requests",
    "0",
]  # of the ragged: test_bench_serving
THEIRS = {"transformers", "transformers eager", "transformers static"}


@pytest.fixture(autouse=True)
def small_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No llama.cpp, even where it is installed, and a small buffer for the bandwidth."""
    for package in llama_cpp.PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(
        command, "roofline_probe", partial(roofline.roofline_probe, num_bytes=2**22)
    )


def prompt_of(length: int, vocab_size: int = 512) -> list[int]:
    return random.Random(length).choices(range(vocab_size), k=length)


# -- the command ----------------------------------------------------------------------------------


def test_figures_are_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert command.main([*QUICK, "--lengths", "24", "8", "--all", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    machine, settings = figures["machine"], figures["settings"]
    assert machine["threads"] == torch.get_num_threads()
    assert machine["torch"] == torch.__version__ and machine["transformers"]
    assert machine["processor"] and machine["dtype"] == "float32"
    assert settings == {
        **{"shape": "tiny", "lengths": [8, 24], "new_tokens": 3, "rounds": 1},
        **{"serving_rounds": 3},
        **{"peer": "transformers", "ours": "ours"},
    }
    phases = [(row["phase"], row["context"]) for row in figures["rows"]]
    assert phases == [("prefill", 8), ("decode", 8), ("prefill", 24), ("decode", 24)]
    for row in figures["rows"]:
        seconds, ratio = row["seconds"], row["ratio"]
        assert seconds.keys() == ratio.keys() == THEIRS | {"ours", "ours, not packed"}
        assert ratio["transformers"] == 1
        tokens = row["context"] if row["phase"] == "prefill" else 1
        for name in seconds:
            assert ratio[name] == pytest.approx(seconds["transformers"] / seconds[name])
            assert row["tokens_per_second"][name] == pytest.approx(tokens / seconds[name])
            assert row["samples"][name] == [seconds[name]]
    for check in figures["checks"]:
        assert check["failed"] == {}
        assert set(check["tokens_equal"].values()) == {3}
        assert max(check["logit_difference"].values()) < 1e-3
    config = ModelConfig.from_pretrained(TINY)
    for i, limits in enumerate(figures["rooflines"]):  # of the same runs, one for each length
        prefill, decode = figures["floors"][2 * i : 2 * i + 2]
        n = limits["context"]
        assert prefill["seconds"] == forward_flops(config, n) / limits["peak_flops"]
        assert decode["seconds"] == weight_bytes(config) / limits["bandwidth"]
        assert decode["with_cache"] == forward_bytes(config, 1, n) / limits["bandwidth"]
    for row, floor in zip(figures["rows"], figures["floors"], strict=True):
        assert (row["phase"], row["context"]) == (floor["phase"], floor["context"])
        for name, times in floor["times"].items():
            assert times == pytest.approx(row["seconds"][name] / floor["seconds"])
    table = capsys.readouterr().out
    assert machine["processor"] in table and "context 24: prefill" in table
    assert "transformers static" in table and "floor of decode" in table


def test_without_llama_cpp_the_report_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*QUICK, "--lengths", "4", "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "llama.cpp: not installed, skipped (python -m pip install llama-cpp-python" in said
    assert "dtype bfloat16" in said and "not packed" not in said


def test_llama_cpp_that_does_not_load_is_skipped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libgomp is missing")

    monkeypatch.setattr("importlib.import_module", broken)
    assert "cannot be imported (libgomp is missing), skipped" in llama_cpp.why_not()


def test_random_checkpoint_of_a_shape_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {**shapes.SHAPES["qwen3-0.6b"], "vocab_size": 40, "hidden_size": 32}
    small |= {"intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    monkeypatch.setitem(shapes.SHAPES, "qwen3-0.6b", small)
    with shapes.checkpoint_folders("qwen3-0.6b", tmp_path / "weights") as folders:
        assert folders.weights == folders.converted == tmp_path / "weights"
    made = (tmp_path / "weights" / "model.safetensors").stat().st_mtime_ns
    weights = ["--checkpoint", str(tmp_path / "weights")]
    assert command.main(["--shape", "qwen3-0.6b", *QUICK, "--lengths", "4", *weights]) == 0
    assert (tmp_path / "weights" / "model.safetensors").stat().st_mtime_ns == made
    assert load_model(tmp_path / "weights").config.head_dim == 8


def test_nothing_is_written_beside_the_shipped_weights() -> None:
    with shapes.checkpoint_folders("tiny", None) as folders:
        assert folders.weights == TINY != folders.converted
        assert folders.converted.is_dir()
    assert not folders.converted.exists()


def test_missing_transformers_is_said_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert command.main([*QUICK, "--lengths", "4"]) == 1
    error = capsys.readouterr().err
    assert "transformers" in error and "pip install -e '.[notebooks]'" in error


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*QUICK, "--lengths", "4", "1022"]) == 1
    said = capsys.readouterr().err
    assert "from 1 to 1021 tokens (and 3 new ones), got [1022]" in said
    wrongs = (["--rounds", "0"], ["--new-tokens", "1"], ["--serving-rounds", "0"])
    for wrong in (*wrongs, ["--requests", "-1"]):
        with pytest.raises(SystemExit):
            command.main(wrong)
        assert f"{wrong[0]} must be at least" in capsys.readouterr().err


# -- the contenders -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs() -> Any:
    return load_transformers(TINY, torch.float32)


def test_every_variant_says_what_the_model_says(theirs: Any) -> None:
    ids = prompt_of(21)
    model = load_model(TINY)
    whole = theirs(torch.tensor([ids])).logits[0]
    (want,) = generate(model, [ids], SamplingParams(max_tokens=9, ignore_eos=True))
    variants = [Transformers(theirs, a, s) for a in ("sdpa", "eager") for s in (False, True)]
    for contender in (Ours(model), Ours(load_model(TINY, fast=False)), *variants):
        logits = contender.last_logits(ids)
        assert logits.shape == (1, whole.shape[-1]) and logits.dtype == torch.float32
        torch.testing.assert_close(logits, whole[-1:], atol=1e-4, rtol=1e-4)
        assert contender.generate(ids, 9).tokens == want.outputs[0].token_ids


def test_variants_of_one_model_run_what_they_are_named_for(
    theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    real = theirs.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        cache = type(kwargs["past_key_values"]).__name__
        seen.append((theirs.config._attn_implementation, cache))
        return real(*args, **kwargs)

    monkeypatch.setattr(theirs, "forward", spy)
    for attention, static in (("eager", False), ("sdpa", True), ("sdpa", False)):
        seen.clear()
        Transformers(theirs, attention, static).generate([1, 2], 3)
        assert seen == [(attention, "StaticCache" if static else "DynamicCache")] * 3


def test_end_of_text_ends_no_run(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(TINY)
    assert model.config.eos_token_ids == (0,)
    model.lm_head.forward = lambda x: torch.eye(1, 512).repeat(len(x), 1)
    assert Ours(model).generate([5, 6], 4).tokens == (0, 0, 0, 0)
    monkeypatch.setattr(theirs.lm_head, "forward", lambda x: torch.eye(1, 512).expand(1, 1, -1))
    assert Transformers(theirs).generate([5, 6], 4).tokens == (0, 0, 0, 0)


def test_streamer_notes_tokens_and_not_the_prompt() -> None:
    streamer = TimedStreamer()
    streamer.put(torch.tensor([[1, 2, 3]]))
    streamer.put(torch.tensor([7]))
    streamer.put(torch.tensor([8]))
    streamer.end()
    assert streamer.tokens == [7, 8] and len(streamer.times) == 2
    assert streamer.times[0] <= streamer.times[1]


# -- the race -------------------------------------------------------------------------------------


class Runner:
    """A contender that takes exactly so long and says exactly this."""

    def __init__(
        self, name: str, log: list[str], tokens: Sequence[int] = (1, 1, 1), logit: float = 0.0
    ) -> None:
        self.name, self.log, self.tokens, self.logit = name, log, tuple(tokens), logit
        self.prompts: list[tuple[int, ...]] = []
        self.first = iter(range(2, 100))

    def generate(self, ids: Sequence[int], new_tokens: int) -> Generated:
        self.log.append(self.name)
        self.prompts.append(tuple(ids))
        first = float(next(self.first))
        return Generated(self.tokens, tuple(first + 0.5 * i for i in range(len(self.tokens))))

    def last_logits(self, ids: Sequence[int]) -> Tensor:
        self.prompts.append(tuple(ids))
        return torch.tensor([[self.logit, 1.0]])


def test_rounds_are_interleaved_and_everyone_is_first_in_turn() -> None:
    log: list[str] = []
    runners = {name: Runner(name[0], log) for name in ("transformers", "plain", "ours")}
    workload = Workload.of_length(6, 50, 3)
    probes = iter([Roofline(5.0, 1.0), Roofline(1.0, 2.0), Roofline(2.0, 9.0)])
    result = measure(runners, workload, 3, probe=lambda: next(probes))
    assert "".join(log) == "tpo" + "tpo" + "pot" + "otp"
    assert {p for r in runners.values() for p in r.prompts} == {workload.prompt}
    assert result.roofline == Roofline(2.0, 2.0)
    # the run that warms up took 2 s to its first token, the timed ones 3, 4 and 5
    assert result.prefill.samples["ours"] == [3.0, 4.0, 5.0]
    assert result.prefill.seconds["ours"] == 4.0
    assert result.prefill.tokens_per_second["ours"] == 6 / 4.0
    assert result.decode.seconds["plain"] == 0.5
    assert result.decode.tokens_per_second["plain"] == 2.0


def test_answers_are_compared_with_the_peers() -> None:
    log: list[str] = []
    runners = {
        "transformers": Runner("t", log, (4, 5, 6)),
        "ours": Runner("o", log, (4, 5, 7), logit=-0.25),
    }
    check = measure(runners, Workload((1, 2), 3), 1).check
    assert check.logit_difference == {"transformers": 0.0, "ours": 0.25}
    assert check.tokens_equal == {"transformers": 3, "ours": 2}
    assert equal_start([1, 2, 3], [9, 2, 3]) == 0


def test_doing_less_work_is_no_way_to_win() -> None:
    log: list[str] = []
    lazy = {"transformers": Runner("t", log), "ours": Runner("o", log, (1, 1))}
    with pytest.raises(ValueError, match="ours gave 2 tokens at 2 times where 3 were asked for"):
        measure(lazy, Workload((1,), 3), 1)
    small = Runner("o", log)
    small.last_logits = lambda ids: torch.zeros(1, 1)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="logits of different shapes"):
        measure({"transformers": Runner("t", log), "ours": small}, Workload((1,), 3), 1)


def test_a_clock_that_does_not_rise_is_refused() -> None:
    runner = Runner("t", [])
    runner.generate = lambda ids, n: Generated((1, 1), (0.2, 0.1))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="times that do not rise"):
        measure({"transformers": runner}, Workload((1,), 2), 1)


def test_only_an_optional_contender_may_fail() -> None:
    log: list[str] = []

    class Broken(Runner):
        def generate(self, ids: Sequence[int], new_tokens: int) -> Generated:
            raise NotImplementedError("no such cache on the CPU")

    race = {"transformers": Runner("t", log), "static": Broken("s", log), "ours": Runner("o", log)}
    result = measure(race, Workload((1,), 3), 2, optional={"static"})
    assert result.check.failed == {"static": "NotImplementedError: no such cache on the CPU"}
    assert result.decode.seconds.keys() == result.check.tokens_equal.keys()
    assert result.decode.seconds.keys() == {"transformers", "ours"} and log == [*"to"] * 2 + [*"ot"]
    table = report.table(ModelConfig.from_pretrained(TINY), 4, result)
    assert "static could not run: NotImplementedError" in table and "floor" not in table
    with pytest.raises(NotImplementedError):
        measure(race, Workload((1,), 3), 1)


def test_decode_is_timed_from_the_first_token_on() -> None:
    assert Generated((1, 2, 3), (10.0, 11.0, 14.0)).per_token == 2.0
    with pytest.raises(ValueError, match=r"--new-tokens must be at least 2 .* got 1"):
        Workload.of_length(4, 10, 1)


# -- llama.cpp, which is not here: our own model plays its interface -------------------------------


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


def fake_gguf(monkeypatch: pytest.MonkeyPatch) -> list[FakeWriter]:
    made: list[FakeWriter] = []
    module = ModuleType("gguf")
    module.GGUFWriter = lambda *args: made.append(FakeWriter(*args)) or made[-1]  # type: ignore
    module.GGMLQuantizationType = SimpleNamespace(F32="F32", BF16="BF16")  # type: ignore
    monkeypatch.setitem(sys.modules, "gguf", module)
    return made


class FakeLlama(ModuleType):
    """The functions of llama_cpp that the benchmark calls, over our own tiny model."""

    LLAMA_FLASH_ATTN_TYPE_DISABLED, GGML_TYPE_F32, GGML_TYPE_F16 = 0, 0, 1

    def __init__(self, loads: bool = True) -> None:
        super().__init__("llama_cpp")
        self.model, self.loads, self.open = load_model(TINY), loads, 0
        self.params = SimpleNamespace(flash_attn_type=-1)
        self.llama_log_callback = lambda function: function
        self.llama_log_set = lambda *_: None
        self.llama_backend_init = lambda: None
        self.llama_model_default_params = self.llama_get_memory = lambda *_: SimpleNamespace()
        self.llama_context_default_params = lambda: self.params
        self.llama_model_get_vocab = lambda model: None
        self.llama_vocab_n_tokens = lambda vocab: 512
        self.llama_batch_get_one = lambda array, n: list(array)[:n]
        self.llama_free = self.llama_model_free = self._free

    def _free(self, handle: Any) -> None:
        assert handle == 7
        self.open -= 1

    def llama_model_load_from_file(self, file: bytes, params: Any) -> int | None:
        self.open += self.loads
        return 7 if self.loads else None

    def llama_init_from_model(self, model: int, params: Any) -> int:
        self.open += 1
        return 7

    def llama_memory_clear(self, memory: Any, data: bool) -> None:
        rows = self.params.n_seq_max
        self.runner = make_runner(self.model, num_seqs=rows, max_len=self.params.n_ctx // rows)
        self.requests = [Request(str(i), []) for i in range(rows)]

    def llama_decode(self, context: int, ids: list[int]) -> int:
        (request,) = self.requests
        request.token_ids += ids
        if request.num_tokens > self.params.n_ctx:
            return 1
        logits = self.runner.run([request])
        self.logits = (ctypes.c_float * 512)(*logits[0].tolist())
        return 0

    def llama_get_logits_ith(self, context: int, row: int) -> Any:
        assert row == -1
        return ctypes.cast(self.logits, ctypes.POINTER(ctypes.c_float))


def test_llama_cpp_races_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = fake_gguf(monkeypatch)
    llama = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", llama)
    file = tmp_path / "bench.json"
    assert command.main([*QUICK, "--lengths", "8", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["rows"][0]["seconds"].keys() == THEIRS | {"llama.cpp", "ours"}
    assert figures["checks"][0]["tokens_equal"]["llama.cpp"] == 3
    assert figures["contenders"]["llama.cpp"].startswith("F32 weights, F32 K/V, flash attention")
    assert "×llama." in capsys.readouterr().out
    assert llama.open == 0, "context and model were freed"
    assert llama.params.n_ctx == llama.params.n_batch == 11
    assert llama.params.n_threads == llama.params.n_threads_batch == torch.get_num_threads()
    assert made[0].file.name == "model-float32.part" and not made[0].file.exists()


def test_llama_cpp_that_cannot_load_the_weights_does_not_end_the_race(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_gguf(monkeypatch)
    monkeypatch.setitem(sys.modules, "llama_cpp", FakeLlama(loads=False))
    assert command.main([*QUICK, "--lengths", "4"]) == 0
    assert "llama.cpp: skipped: llama.cpp cannot load" in capsys.readouterr().out


def test_llama_cpp_forgets_between_runs_and_says_when_it_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    llama = llama_cpp.LlamaCpp(Path("model.gguf"), torch.bfloat16, 20, flash=False)
    assert library.params.flash_attn_type == 0 and library.params.type_k == 1
    assert "BF16 weights, F16 K/V, plain attention" in llama.told
    ids, ours = prompt_of(10), Ours(load_model(TINY))
    assert llama.generate(ids, 4).tokens == ours.generate(ids, 4).tokens
    first = llama.last_logits(ids)
    assert llama.generate(ids, 4).tokens == ours.generate(ids, 4).tokens
    torch.testing.assert_close(first, ours.last_logits(ids))
    with pytest.raises(ValueError, match="status 1 for 21 tokens"):
        llama.last_logits(prompt_of(21))
    monkeypatch.setitem(sys.modules, "llama_cpp", FakeLlama(loads=False))
    with pytest.raises(ValueError, match=r"cannot load model\.gguf: delete it"):
        llama_cpp.LlamaCpp(Path("model.gguf"), torch.float32, 20)


@pytest.mark.parametrize("variant", [{}, {"tie_word_embeddings": True, "head_dim": 20}])
def test_gguf_holds_the_weights_under_llama_cpps_names(
    variant: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_random(tmp_path / "weights", **variant)
    made, file = fake_gguf(monkeypatch), tmp_path / "model.gguf"
    for dtype, kind in ((torch.float32, "F32"), (torch.bfloat16, "BF16")):
        llama_cpp.write_gguf(folder, file, dtype)
        llama_cpp.write_gguf(folder, file, dtype)  # it is there: nothing is written
        file.unlink()
        written = dict(made[-1].tensors)
        weights = load_reference(folder, dtype).state_dict()
        names = {"embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}
        parts = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
        parts |= {f"{p}_proj": f"attn_{p}" for p in "qkv"} | {"o_proj": "attn_output"}
        parts |= {f"{p}_norm": f"attn_{p}_norm" for p in "qk"}
        parts |= {f"{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")}
        for name, weight in weights.items():
            words = name.split(".")
            if words[1] == "layers":
                theirs = f"blk.{words[2]}.{parts[words[-2]]}.weight"
            elif name == "lm_head.weight" and variant.get("tie_word_embeddings"):
                continue
            else:
                theirs = next(n for part, n in names.items() if part in name) + ".weight"
            own, shape, data = written.pop(theirs)
            assert own == (kind if weight.ndim == 2 else "F32")
            expected = (weight.float() if own == "F32" else weight).contiguous()
            assert data == expected.view(torch.uint8).numpy().tobytes()
            assert shape == (*weight.shape[:-1], weight.shape[-1] * expected.itemsize)
        assert not written
    assert len(made) == 2
    told = made[0].told
    assert told["arch"] == "qwen3" and told["tokenizer_model"] == "no_vocab"
    assert (told["block_count"], told["head_count"], told["head_count_kv"]) == (3, 4, 2)
    assert told["key_length"] == told["value_length"] == variant.get("head_dim", 16)
    assert (told["rope_freq_base"], told["vocab_size"]) == (10_000.0, 97)


def test_gguf_refuses_what_it_cannot_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gguf(monkeypatch)
    folder = save_random(tmp_path, attention_bias=True)
    with pytest.raises(ValueError, match="attention_bias"):
        llama_cpp.write_gguf(folder, tmp_path / "model.gguf", torch.float32)
    assert not list(tmp_path.glob("model.gguf*"))
