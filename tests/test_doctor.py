"""The doctor: every failure that it knows is marked, explained, and told by the exit code."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import edit_tensors

from tutorial_engine.lab import doctor
from tutorial_engine.lab.doctor import (
    GIB,
    Mark,
    check_memory,
    check_requirements,
    check_threads,
    free_memory,
    self_test,
    usable_cores,
)
from tutorial_engine.model.checkpoint import TINY

ROOT = Path(__file__).parent.parent


def test_requirements_are_read_as_metadata_writes_them() -> None:
    findings = list(
        check_requirements(
            [
                "torch>=1.0",
                "no-such-package>=1.0",
                "tokenizers>=999",
                "no-such-notebook>=2; extra == 'notebooks'",
                'safetensors>=0.1 ; extra == "notebooks"',
                "no-such-test-tool>=1; extra == 'test'",
                "tutorial-engine[notebooks]; extra == 'test'",
            ]
        )
    )
    assert [(f.mark, f.what.split()[0]) for f in findings] == [
        (Mark.OK, "torch"),
        (Mark.FAIL, "no-such-package"),
        (Mark.FAIL, "tokenizers"),
        (Mark.WARN, "no-such-notebook"),
        (Mark.OK, "safetensors"),
    ]
    assert "--upgrade 'tokenizers>=999'" in findings[2].fix


def test_memory_is_judged_by_what_is_free(tmp_path: Path) -> None:
    for free, mark in (
        (None, Mark.OK),
        (4 * GIB, Mark.OK),
        (GIB * 3 // 4, Mark.WARN),
        (9, Mark.FAIL),
    ):
        finding = check_memory(free)
        assert finding.mark == mark and finding.what.startswith("memory: ")
        assert bool(finding.fix) == (mark != Mark.OK)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  2048 kB\nMemFree:  1 kB\nMemAvailable:   1024 kB\n")
    assert free_memory(meminfo) == 2**20
    assert free_memory(tmp_path / "nowhere") is None


def test_threads_and_a_containers_share_of_the_cores(tmp_path: Path) -> None:
    assert check_threads(2, 2).mark == Mark.OK
    crowded = check_threads(64, 2)
    assert crowded.mark == Mark.WARN and "OMP_NUM_THREADS=2" in crowded.fix
    all_cores, share = usable_cores(tmp_path / "nowhere"), tmp_path / "cpu.max"
    for text, cores in (("50000 100000", 1), ("max 100000", all_cores)):
        share.write_text(text + "\n")
        assert usable_cores(share) == cores


def test_model_that_does_not_fit_its_tokenizer_or_holds_no_numbers_fails(
    checkpoint: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    edit_tensors(copy, lambda t: t["lm_head.weight"][:256].zero_())  # ids 256.. alone are likely
    findings = list(self_test(copy))
    assert findings[-1].mark == Mark.FAIL and "tokenizer knows not all" in findings[-1].what
    edit_tensors(copy, lambda t: t["model.norm.weight"].fill_(torch.nan))
    (finding,) = self_test(copy)
    assert finding.mark == Mark.FAIL and "NaN" in finding.what
    (copy / "tokenizer.json").unlink()
    (finding,) = self_test(copy)
    assert finding.mark == Mark.FAIL and "no tokenizer.json" in finding.what


def test_fast_layers_that_differ_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tutorial_engine.model.fast.use_fast_layers",
        lambda model, pack_from: model.model.norm.weight.mul_(1.01),
    )
    last = list(self_test(TINY))[-1]
    assert last.mark == Mark.FAIL and "apart" in last.what and "fast=False" in last.fix


def test_report_names_the_fix_and_exits_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(["--checkpoint", str(tmp_path / "nowhere")]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = next(i for i, line in enumerate(lines) if line.startswith("FAIL  the model in"))
    assert lines[failed + 1].strip().startswith("to fix: give --checkpoint a folder with config")
    assert "install the package again" not in lines[failed + 1]
    assert lines[-1].endswith("1 failures")


def test_doctor_speaks_without_torch() -> None:
    # as on a machine where nothing is installed: no site-packages, and the same interpreter
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("VIRTUAL_ENV", None)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "tutorial_engine.lab.doctor"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "warn  tutorial-engine runs, but is not installed" in done.stdout
    assert "FAIL  the engine cannot be imported" in done.stdout
