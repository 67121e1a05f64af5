"""The benchmark runs, is fair in what it asks of both, and writes what it measured."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tutorial_engine import bench
from tutorial_engine.bench import Ours, Transformers, Workload, measure, prefill_workload
from tutorial_engine.checkpoint import TINY, load_model

CONTENDERS = {"transformers", "plain", "prepacked"}


def test_figures_are_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    code = bench.main(["--rounds", "1", "--lengths", "8", "24", "--json", str(file)])
    assert code == 0
    figures = json.loads(file.read_text())
    machine, rows = figures["machine"], figures["rows"]
    assert machine["threads"] == torch.get_num_threads()
    assert machine["torch"] == torch.__version__ and machine["transformers"]
    assert machine["processor"] and machine["dtype"] == "float32"
    assert figures["settings"] == {"shape": "tiny", "rounds": 1, "peer": "transformers"}
    assert [row["workload"] for row in rows] == ["prefill 8", "prefill 24"]
    for row in rows:
        speed, ratio = row["tokens_per_second"], row["ratio"]
        assert speed.keys() == ratio.keys() == CONTENDERS
        assert ratio["transformers"] == 1
        for name in CONTENDERS:
            assert ratio[name] == pytest.approx(speed[name] / speed["transformers"])
            assert row["logit_difference"][name] < 1e-3
    table = capsys.readouterr().out
    assert machine["processor"] in table and "prefill 24" in table and "prepacked" in table


def test_table_alone_is_printed_without_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--rounds", "1", "--lengths", "4", "--dtype", "bfloat16"]) == 0
    assert "dtype bfloat16" in capsys.readouterr().out


def test_both_sides_compute_the_last_row_only() -> None:
    ids = [3, 1, 4, 1, 5]
    theirs, ours = Transformers(TINY, torch.float32), Ours(load_model(TINY))
    whole = theirs.model(torch.tensor([ids])).logits[0]
    assert ours.prefill(ids).shape == theirs.prefill(ids).shape == (1, whole.shape[-1])
    torch.testing.assert_close(theirs.prefill(ids), whole[-1:], atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.prefill(ids), whole[-1:], atol=1e-4, rtol=1e-4)
    assert theirs.model.config._attn_implementation == "sdpa"


def test_all_contenders_get_the_same_prompt() -> None:
    asked: list[list[int]] = []

    class Spy:
        def prefill(self, ids: Any) -> torch.Tensor:
            asked.append(list(ids))
            return torch.zeros(1, 3)

    workload = prefill_workload({"a": Spy(), "b": Spy()}, 6, vocab_size=50)
    for run in workload.runs.values():
        run()
    assert asked[0] == asked[1] and len(asked[0]) == 6 == workload.tokens


def test_rounds_are_interleaved_and_everyone_is_first_in_turn() -> None:
    order: list[str] = []

    def runner(name: str, value: float) -> Any:
        return lambda: order.append(name) or torch.tensor([value])

    runs = {
        "transformers": runner("t", 1.0),
        "plain": runner("p", 1.5),
        "prepacked": runner("k", 1),
    }
    row = measure(Workload("nothing", 10, runs), rounds=3)
    assert "".join(order) == "tpk" + "tpk" + "pkt" + "ktp"
    assert row.logit_difference == {"transformers": 0.0, "plain": 0.5, "prepacked": 0.0}


def test_random_checkpoint_of_a_shape_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {**bench.SHAPES["qwen3-0.6b"], "vocab_size": 40, "hidden_size": 32}
    small |= {"intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    monkeypatch.setitem(bench.SHAPES, "qwen3-0.6b", small)
    folder = tmp_path / "weights"
    command = ["--shape", "qwen3-0.6b", "--rounds", "1", "--lengths", "4"]
    assert bench.main([*command, "--checkpoint", str(folder)]) == 0
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert bench.main([*command, "--checkpoint", str(folder)]) == 0
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert load_model(folder).config.head_dim == 8


def test_missing_transformers_is_said_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert bench.main(["--rounds", "1", "--lengths", "4"]) == 1
    error = capsys.readouterr().err
    assert "transformers" in error and "pip install -e '.[notebooks]'" in error


def test_lengths_beyond_the_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--rounds", "1", "--lengths", "4", "9999"]) == 1
    assert "from 1 to 1024 tokens, got [9999]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["--rounds", "0"])
