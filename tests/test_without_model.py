"""A notebook that needs the real model, run where that is not here: what it showed stands."""

import json
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat import v4 as new

from tutorial_engine.learn import the_real_model, without_model
from tutorial_engine.learn.without_model import LINE, stored_outputs
from tutorial_engine.viz.drawing.picture import WIDGET_VIEW

NAME = "06_real_model.ipynb"
PNG = "aGVsbG8="  # nothing decodes it
ALT = {"image/png": {"alt": "A picture of 1 dot."}}
PICTURE = new.new_output(
    "display_data", {"image/png": PNG, "text/plain": "A picture of 1 dot."}, metadata=ALT
)
FIRST = f'''
import sys
from tutorial_engine.learn import the_real_model
folder = the_real_model("{NAME}")
print("run:", folder is not None)
with open("run", "a") as file:
    file.write("run")
'''.strip()


def said(text: str, name: str = "stdout") -> NotebookNode:
    return new.new_output("stream", name=name, text=text)


def value(text: str) -> NotebookNode:
    return new.new_output("execute_result", {"text/plain": text}, execution_count=1)


def notebook() -> NotebookNode:
    """Of each kind of cell one, with what it showed when it was built."""
    cells = [
        (FIRST, [said("run: True\n")]),
        ("folder.name", [value("'SmolLM2'")]),
        ("print(folder.name)\nplot(folder)", [said("SmolLM2\n"), PICTURE]),
        ("print('a note', file=sys.stderr)", [said("a note\n", "stderr")]),
        ("%%time\nlong(folder)", [said("Wall time: 3 s\n"), value("7")]),
        ("def broken(:", [said("it was whole once\n")]),
        ("import math", []),
    ]
    made = [new.new_code_cell(code, outputs=o, id=f"cell-{i}") for i, (code, o) in enumerate(cells)]
    made.insert(1, new.new_markdown_cell("Text.", id="text"))
    return new.new_notebook(cells=made)


def code_cells(one: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in one.cells if cell.cell_type == "code"]


def execute(one: NotebookNode, folder: Path) -> None:
    """In a kernel whose cache is below `folder`. A cell's id is sent along, as JupyterLab does."""
    client = NotebookClient(
        one, kernel_name="python3", resources={"metadata": {"path": str(folder)}}, timeout=60
    )

    def send_id(cell: NotebookNode, **_: object) -> None:
        client.kc.session.metadata = {"cellId": cell.id}

    client.on_cell_start = send_id
    there = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    client.execute(env=os.environ | there)


def shown(cell: NotebookNode) -> list[tuple[object, ...]]:
    """Its outputs; prints that came in pieces are one, and a value is shown like a picture."""
    found: list[tuple[object, ...]] = []
    for output in cell.outputs:
        if output.output_type != "stream":
            found.append((dict(output.data), dict(output.metadata)))
        elif found and found[-1][0] == output.name:
            found[-1] = (output.name, f"{found[-1][1]}{output.text}")
        else:
            found.append((output.name, output.text))
    return found


def line_and(outputs: list[NotebookNode]) -> list[tuple[object, ...]]:
    """What a cell shows without the model, if these outputs are stored."""
    return shown(NotebookNode(outputs=[said(f"{LINE}\n"), *outputs]))


def test_without_it_each_cell_says_what_to_do_and_what_it_showed(tmp_path: Path) -> None:
    built = notebook()
    nbformat.write(built, tmp_path / NAME)
    ran = notebook()
    code_cells(ran)[2].source = "print('changed')"  # it is known by its id
    others = ["print('new')", "def real_model(): return 'is brought'"]
    others += ["print(real_model())", "!echo make real"]
    ran.cells += [new.new_code_cell(source) for source in others]
    execute(ran, tmp_path)
    cells = code_cells(ran)
    assert not (tmp_path / "run").exists(), "no cell was run, nor the rest of the first"
    for cell, was in zip(cells, code_cells(built), strict=False):
        assert shown(cell) == line_and(was.outputs), cell.source
    unknown, *bring = cells[-4:]
    assert shown(unknown) == [("stdout", f"{LINE}\n")]
    ran_by = [[str(text).strip() for _, text in shown(cell)] for cell in bring]
    assert ran_by == [[], ["is brought"], ["make real"]], "what brings the model is run"

    # saved by JupyterLab as the learner's own, the line is not said twice in the next run
    nbformat.write(ran, tmp_path / "my_06.ipynb")
    (tmp_path / NAME).unlink()
    for cell in code_cells(built):
        again = {"outputs": stored_outputs(tmp_path / NAME, cell.id, "")}
        assert shown(nbformat.from_dict(again)) == shown(cell)


def test_with_it_nothing_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nbval runs the lesson itself, where the model is."""
    monkeypatch.setattr(without_model, "where_it_is", lambda: tmp_path)
    monkeypatch.setattr(without_model, "get_ipython", None)  # it is not even asked for
    assert the_real_model(NAME) == tmp_path


def test_a_learners_copy_comes_first_unless_it_shows_nothing(tmp_path: Path) -> None:
    path, mine = tmp_path / NAME, tmp_path / "my_06.ipynb"
    assert stored_outputs(path, "cell-1", "folder.name") == [], "there is no file"
    built = notebook()
    nbformat.write(built, path)
    for text in ("", "{}", "3", '{"cells": 1}', '{"cells": [{}]}'):
        mine.write_text(text, encoding="utf-8")
        (output,) = stored_outputs(path, "cell-1", "changed")
        assert output["data"] == {"text/plain": "'SmolLM2'"}
    copy = notebook()
    error = new.new_output("error", ename="NameError", evalue="folder", traceback=["folder"])
    cells = code_cells(copy)
    cells[1].outputs = [error]
    cells[2].outputs = [said("mine\n"), error]
    cells[3].outputs = []
    live = {WIDGET_VIEW: {"model_id": "0"}, "text/plain": "An explorer."}
    cells[4].outputs = [new.new_output("display_data", live)]
    nbformat.write(copy, mine)
    found = [stored_outputs(path, f"cell-{i}", "") for i in range(6)]
    assert found[1][0]["data"] == {"text/plain": "'SmolLM2'"}, "its error is not shown"
    assert [output["text"] for output in found[2]] == ["mine\n"]
    assert [output["text"] for output in found[3]] == ["a note\n"], "it was cleared"
    assert [output["data"] for output in found[4]] == [{"text/plain": "An explorer."}]
    assert json.loads(mine.read_text(encoding="utf-8"))["cells"], "it is read, never written"


@pytest.mark.parametrize("is_known", [True, False])
def test_where_there_are_no_cells_it_is_a_sentence(
    is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the package that knows the place is missing."""

    def nowhere() -> Path:
        raise ValueError("needs platformdirs")

    monkeypatch.setattr(
        without_model, "where_it_is", (lambda: tmp_path / "no") if is_known else nowhere
    )
    with pytest.raises(ValueError, match="not here: `make real` brings it"):
        the_real_model(NAME)
