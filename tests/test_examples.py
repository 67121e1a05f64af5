"""The scripts of examples/ say what vLLM said when they ran there with the import line changed.

examples/expected has vLLM's words: `python -m tools.vllm --keep` writes them.
"""

import ast
import runpy
import sys
from pathlib import Path

import pytest

from tools.vllm import examples

SCRIPTS = examples.scripts()


def test_there_are_five_short_ones_with_vllms_words_for_each() -> None:
    names = {script.stem for script in SCRIPTS}
    assert len(names) == 5
    assert names == {stored.stem for stored in examples.EXPECTED.glob("*.txt")}
    for script in SCRIPTS:
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 50, script.name


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_prints_what_it_printed_on_vllm(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    stored = (examples.EXPECTED / f"{script.stem}.txt").read_text(encoding="utf-8")
    assert examples.difference(capsys.readouterr().out, stored) == ""


CHAT = examples.SCRIPTS / "chat.py"


@pytest.mark.parametrize("script", [*SCRIPTS, CHAT], ids=lambda script: script.stem)
def test_only_the_import_line_differs_on_vllm(script: Path) -> None:
    here = script.read_text(encoding="utf-8")
    there = examples.for_vllm(here)
    pairs = zip(here.splitlines(), there.splitlines(), strict=True)
    assert [(a.split()[1], b.split()[1]) for a, b in pairs if a != b] == [
        ("tutorial_engine", "vllm")
    ]
    modules = {n.module for n in ast.walk(ast.parse(there)) if isinstance(n, ast.ImportFrom)}
    assert modules - {"jinja2"} == {"pathlib", "vllm"}, "nothing else of ours"
    assert "change `tutorial_engine` to `vllm`" in here
    with pytest.raises(ValueError, match=r"this one has 2"):
        examples.for_vllm(here * 2)
