"""What a learner wrote in one notebook runs in a later one; what is not right stays out."""

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from tokenizers import Tokenizer

from tools.publish.build import make_notebook, sources
from tutorial_engine.learn import OwnServer
from tutorial_engine.learn.earlier import bring
from tutorial_engine.learn.own_engine import IN_01, OwnEngine
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams

NOTEBOOKS = {name[:2]: name for name in sources()}


@pytest.fixture
def mine(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> OwnEngine:
    return OwnEngine(model, tokenizer, cached=True)


def saved(folder: Path, solved: bool, edit: Callable[[str], str] = str, of: str = "01") -> str:
    """A notebook as a learner's file, each code cell edited."""
    notebook: NotebookNode = make_notebook(sources()[NOTEBOOKS[of]], solved)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = edit(cell.source)
    nbformat.write(notebook, folder / f"my_{of}.ipynb")
    return str(folder / f"my_{of}.ipynb")


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
    missing = str(tmp_path / "01_none.ipynb")
    for notebook, why in (
        (saved(tmp_path, solved=False), ""),
        (missing, f" (there is no file {missing})"),
    ):
        found = bring(mine, notebook)
        assert repr(found) == f"☐ the package's run for: {', '.join(IN_01)}{why}"
        assert not mine.parts.own


def test_what_is_wrong_or_cannot_run_is_told_and_stays_out(mine: OwnEngine, tmp_path: Path) -> None:
    def spoil(source: str) -> str:
        if source.startswith("def rope"):
            return source.replace("a * cos - b * sin", "a * cos + b * sin")
        return "this is no Python" if source.startswith("def project") else source

    said = repr(bring(mine, saved(tmp_path, True, spoil)))
    assert "✘ rope" in said and "'this is no Python' of my_01.ipynb raised SyntaxError" in said
    assert said.endswith("☐ the package's run for: project, rope, layer")
    assert set(mine.parts.own) == {"window_mask", "attention", "kv_head"}


def test_parts_of_all_earlier_notebooks_serve_in_the_engine(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = OwnServer(model, tokenizer, memory="pages", num_blocks=10, block_size=4)
    parts = {
        "01": IN_01,
        "02": ("keep_top_p",),
        "03": ("num_tokens_to_run", "plan_step", "ttft_and_tpot"),
    }
    for number, names in parts.items():
        for solved, mark in ((False, "☐ the package's run for"), (True, "✔ yours from notebook")):
            found = bring(server, saved(tmp_path, solved, of=number))
            assert repr(found).startswith(mark) and repr(found).endswith(f": {', '.join(names)}")
    drawn = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=1)
    server.serve(["Once upon a time", "Ben had a blue ball."], drawn)
    said = capsys.readouterr().out
    assert said.endswith("✔ 2 of 2 requests have the tokens that they have alone.\n")
    for name in (name for names in parts.values() for name in names):
        assert f"{name} (" in said
    only = bring(OwnServer(model, tokenizer), saved(tmp_path, True, of="03"), "plan_step")
    assert repr(only) == "✔ yours from notebook 03: plan_step"


@pytest.mark.parametrize("has_static", [False, True])
def test_of_two_caches_the_later_one_runs_and_a_file_may_have_one_alone(
    mine: OwnEngine, tmp_path: Path, has_static: bool
) -> None:
    def edit(source: str) -> str:
        return "" if source.startswith("class MyStaticCache") and not has_static else source

    cache = "MyStaticCache" if has_static else "MyCache"
    names = (cache, "run_new", "keep_top_p", "why_finished")
    found = bring(mine, saved(tmp_path, True, edit, of="02"))
    assert repr(found) == f"✔ yours from notebook 02: {', '.join(names)}"
    assert set(mine.parts.own) == set(names)


def test_a_file_without_a_number_is_refused(mine: OwnEngine) -> None:
    with pytest.raises(ValueError, match=r"must have one of \['01', '02', '03'\] in its name"):
        bring(mine, "none.ipynb")
