"""What a learner wrote in notebook 01 runs in a later notebook; what is not right stays out."""

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from tokenizers import Tokenizer

from tutorial_engine.learn.build import make_notebook, sources
from tutorial_engine.learn.earlier import bring
from tutorial_engine.learn.own import IN_01, OwnEngine
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

FIRST = "01_attention_rope"


@pytest.fixture
def mine(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> OwnEngine:
    return OwnEngine(model, tokenizer, cached=True)


def saved(folder: Path, solved: bool, edit: Callable[[str], str] = str) -> str:
    """Notebook 01 as a learner's file, each code cell edited."""
    notebook: NotebookNode = make_notebook(sources()[FIRST], solved)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = edit(cell.source)
    nbformat.write(notebook, folder / "my_01.ipynb")
    return str(folder / "my_01.ipynb")


def test_right_answers_come_along(mine: OwnEngine, tmp_path: Path) -> None:
    found = bring(mine, saved(tmp_path, solved=True))
    assert repr(found) == f"✔ yours from notebook 01: {', '.join(IN_01)}"
    assert set(mine.parts.own) == set(IN_01)
    theirs = mine.parts.own["attention"]
    assert theirs.__code__.co_filename == "my_01.ipynb"
    request = mine.generate("Once upon a time Anna had a red kite.")
    assert len(request.output_token_ids) == 24 and mine.parts.calls["attention"] > 0


def test_open_exercises_and_a_missing_file_leave_the_package_in_place(
    mine: OwnEngine, tmp_path: Path
) -> None:
    for notebook in (saved(tmp_path, solved=False), str(tmp_path / "none.ipynb")):
        found = bring(mine, notebook)
        assert repr(found) == f"☐ the package's run for: {', '.join(IN_01)}"
        assert not mine.parts.own


def test_what_is_wrong_or_cannot_run_is_told_and_stays_out(mine: OwnEngine, tmp_path: Path) -> None:
    def spoil(source: str) -> str:
        if source.startswith("def rope"):
            return source.replace("a * cos - b * sin", "a * cos + b * sin")
        return "this is no Python" if source.startswith("def project") else source

    said = repr(bring(mine, saved(tmp_path, True, spoil)))
    assert "✘ rope" in said and "'this is no Python' of my_01.ipynb raised SyntaxError" in said
    assert said.endswith("☐ the package's run for: rope, project, layer")
    assert set(mine.parts.own) == {"window_mask", "attention", "kv_head"}
