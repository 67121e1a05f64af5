"""The copies that `make lab` makes: once, never written again, unknown to git."""

import asyncio
import re
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbformat import v4 as new

from tools import lab
from tools.lab import OwnCopies
from tools.mine import lessons, main, make_copies
from tools.publish.build import LESSONS, NOTEBOOKS, target

ROOT = Path(__file__).resolve().parents[1]


def write(path: Path, *cells: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new.new_notebook(cells=[new.new_markdown_cell(one) for one in cells]), path)


def test_each_lesson_is_copied_once_and_an_update_never_touches_a_copy(tmp_path: Path) -> None:
    write(tmp_path / "01_attention_rope.ipynb", "first")
    write(tmp_path / "appendix" / "A1_two_ranks.ipynb", "ranks")
    write(tmp_path / "Untitled.ipynb", "not a lesson")
    write(tmp_path / "family-name_01.ipynb", "not one either")
    (said,) = make_copies(tmp_path)
    assert "my_01.ipynb, my_A1.ipynb" in said
    mine = tmp_path / "my_01.ipynb"
    assert nbformat.read(mine, as_version=4).cells[0].source == "first"
    assert (tmp_path / "appendix" / "my_A1.ipynb").is_file()
    assert make_copies(tmp_path) == [], "nothing to make and nothing to say"

    notebook = nbformat.read(mine, as_version=4)  # the learner works, and JupyterLab saves it
    notebook.cells[0].source = "my answer"
    nbformat.write(notebook, mine)
    before = mine.read_bytes()
    assert make_copies(tmp_path) == [], "the learner's work does not make a copy older"
    write(tmp_path / "01_attention_rope.ipynb", "first, in better words")
    (said,) = make_copies(tmp_path)
    assert said.startswith("Lesson 01 is newer than your copy my_01.ipynb, which stays as it is.")
    assert mine.read_bytes() == before

    mine.rename(tmp_path / re.findall(r"my_old_\w+\.ipynb", said)[0])
    assert make_copies(tmp_path) == ["Your own copies, which no update touches: my_01.ipynb."]
    assert nbformat.read(mine, as_version=4).cells[0].source == "first, in better words"


@pytest.mark.parametrize("text", ["", "{}", "no JSON", '{"cells": 1, "nbformat": 4}'])
def test_a_file_that_is_no_notebook_stays(tmp_path: Path, text: str) -> None:
    write(tmp_path / "01_attention_rope.ipynb", "first")
    (tmp_path / "my_01.ipynb").write_text(text, encoding="utf-8")
    assert make_copies(tmp_path) == []
    assert (tmp_path / "my_01.ipynb").read_text(encoding="utf-8") == text


def test_lab_lists_the_copy_and_not_the_original_too(tmp_path: Path) -> None:
    for name in ("01_attention_rope", "02_kv_cache", "my_01", "solutions/01_attention_rope"):
        write(tmp_path / f"{name}.ipynb", name)
    (tmp_path / "src").mkdir()
    manager = OwnCopies(root_dir=str(tmp_path))

    def names(path: str) -> set[str]:
        return {entry["name"] for entry in asyncio.run(manager.get(path))["content"]}

    assert names("") == {"02_kv_cache.ipynb", "my_01.ipynb", "solutions"}
    assert names("solutions") == {"01_attention_rope.ipynb"}
    original = asyncio.run(manager.get("01_attention_rope.ipynb"))
    assert original["content"]["cells"][0]["source"] == "01_attention_rope", "a link opens it"


def test_lab_is_started_on_the_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "01_attention_rope.ipynb", "first")
    given: list[str] = []
    monkeypatch.setattr("jupyterlab.labapp.main", given.extend)
    monkeypatch.setattr("sys.argv", ["lab", str(tmp_path), "--no-browser"])
    lab.main()
    assert (tmp_path / "my_01.ipynb").is_file()
    assert given[0] == f"--notebook-dir={tmp_path}" and given[-1] == "--no-browser"
    assert f"--ServerApp.contents_manager_class=tools.lab.{OwnCopies.__name__}" in given


def test_every_lesson_is_found_and_git_ignores_its_copies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = dict(lessons(NOTEBOOKS))
    assert found == {one.code: target(one.notebook, solved=False) for one in LESSONS}
    copies = [path.with_name(f"my_{code}.ipynb") for code, path in found.items()]
    copies += [path.with_name(f"my_old_{code}.ipynb") for code, path in found.items()]
    asked = subprocess.run(
        ["git", "check-ignore", *map(str, copies)], cwd=ROOT, capture_output=True, text=True
    )
    if asked.returncode == 128:
        pytest.skip("this is no clone")
    assert len(asked.stdout.splitlines()) == len(copies)
    write(tmp_path / "02_kv_cache.ipynb", "cache")
    monkeypatch.setattr("sys.argv", ["mine", str(tmp_path)])
    main()
    assert "my_02.ipynb" in capsys.readouterr().out
