"""The doctor: every failure that it knows is marked, explained, and told by the exit code."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from checkpoints import edit_tensors
from conftest import MakeCheckpoint

from tutorial_engine.lab import doctor
from tutorial_engine.lab.doctor import (
    GIB,
    NEW_TOKENS,
    PROMPT,
    Finding,
    Mark,
    check_requirements,
    check_room,
    check_threads,
    check_torch,
    free_memory,
    self_test,
    usable_cores,
)
from tutorial_engine.model.checkpoint import TINY

ROOT = Path(__file__).parent.parent


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def marks(findings: list[Finding]) -> set[Mark]:
    return {finding.mark for finding in findings}


@pytest.mark.parametrize(
    ("installed", "mark"),
    [
        (None, Mark.FAIL),
        ("2.7.1", Mark.FAIL),
        ("2.8.0rc1", Mark.OK),
        ("2.13.0+cpu", Mark.OK),
        ("3", Mark.OK),
    ],
)
def test_package_is_judged_by_its_version(
    installed: str | None, mark: Mark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: installed)
    needed, wanted = check_requirements(["torch>=2.8", "torch>=2.8; extra == 'notebooks'"])
    assert needed.mark == mark and "torch" in needed.what
    assert bool(needed.fix) == (mark != Mark.OK)
    assert wanted.mark == (Mark.OK if mark == Mark.OK else Mark.WARN)


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


def test_projects_own_requirements_are_all_understood() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    notebooks = project["optional-dependencies"]["notebooks"]
    requirements = [
        *project["dependencies"],
        *(f"{requirement}; extra == 'notebooks'" for requirement in notebooks),
    ]
    findings = list(check_requirements(requirements))
    assert len(findings) == len(requirements)
    assert marks(findings) == {Mark.OK}


def test_room_is_judged_by_what_is_free(tmp_path: Path) -> None:
    for free, mark in (
        (None, Mark.OK),
        (4 * GIB, Mark.OK),
        (GIB * 3 // 4, Mark.WARN),
        (9, Mark.FAIL),
    ):
        finding = check_room("memory", free, GIB, "close other programs")
        assert finding.mark == mark and finding.what.startswith("memory: ")
        assert bool(finding.fix) == (mark != Mark.OK)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  2048 kB\nMemFree:  1 kB\nMemAvailable:   1024 kB\n")
    assert free_memory(meminfo) == 2**20
    assert free_memory(tmp_path / "nowhere") is None


def test_more_threads_than_cores_is_a_warning() -> None:
    assert check_threads(2, 2).mark == Mark.OK
    crowded = check_threads(64, 2)
    assert crowded.mark == Mark.WARN and "OMP_NUM_THREADS=2" in crowded.fix


@pytest.mark.parametrize(
    ("text", "at_most"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", 10**6)]
)
def test_a_containers_share_of_the_cores_counts(tmp_path: Path, text: str, at_most: int) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    all_cores = usable_cores(tmp_path / "nowhere")
    assert usable_cores(tmp_path / "cpu.max") == min(all_cores, at_most)


def test_torch_is_described() -> None:
    told = " | ".join(finding.what for finding in check_torch())
    for word in ("device: ", "processor: ", "bfloat16", "threads: "):
        assert word in told


def test_shipped_model_passes() -> None:
    findings = list(self_test(TINY))
    assert marks(findings) == {Mark.OK}, findings
    told = " | ".join(finding.what for finding in findings)
    assert PROMPT in told and f"{NEW_TOKENS} tokens in " in told and "logits agree" in told


def test_missing_model_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = self_test(tmp_path / "nowhere")
    assert finding.mark == Mark.FAIL and "nowhere" in finding.what
    assert "give --checkpoint a folder with config.json" in finding.fix
    monkeypatch.setattr("tutorial_engine.model.checkpoint.TINY", tmp_path / "nowhere")
    (finding,) = self_test(tmp_path / "nowhere")
    assert finding.mark == Mark.FAIL and "tutorial_engine.tiny.train" in finding.fix


def test_model_without_tokenizer_fails(make_checkpoint: MakeCheckpoint) -> None:
    (finding,) = self_test(make_checkpoint())
    assert finding.mark == Mark.FAIL and "no tokenizer.json" in finding.what


def test_model_that_speaks_beyond_its_tokenizer_fails(checkpoint: Path, tmp_path: Path) -> None:
    copy = copied(checkpoint, tmp_path)
    edit_tensors(copy, lambda t: t["lm_head.weight"][:256].zero_())  # ids 256.. alone are likely
    findings = list(self_test(copy))
    assert findings[-1].mark == Mark.FAIL and "tokenizer knows not all" in findings[-1].what


def test_model_with_weights_that_are_no_numbers_fails(checkpoint: Path, tmp_path: Path) -> None:
    copy = copied(checkpoint, tmp_path)
    edit_tensors(copy, lambda t: t["model.norm.weight"].fill_(torch.nan))
    (finding,) = self_test(copy)
    assert finding.mark == Mark.FAIL and "NaN" in finding.what


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
