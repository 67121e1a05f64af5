"""What an editor, mypy and a prompt with tab completion know of the package."""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import tutorial_engine
from tutorial_engine import LLM, EngineArgs
from tutorial_engine.doors import lazy_exports

ROOT = Path(__file__).parent.parent
LAZY = ["tutorial_engine", *(f"tutorial_engine.{room}" for room in ("lab", "viz", "learn"))]

SCRIPT = """
from tutorial_engine import LLM, SamplingParams
from tutorial_engine.trace import Recorder
from tutorial_engine.viz import timeline

run = Recorder()
llm = LLM(max_num_seqs=8, trace=run)
for out in llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=5)):
    print(out.outputs[0].text.strip())
timeline(run.trace()).save("pictures", "run")
"""
SLIPS = {  # what the user wrote, and what mypy says
    "max_tokens=5": ("max_token=5", 'Unexpected keyword argument "max_token"'),
    "max_num_seqs=8": ('max_num_seqs="8"', 'Argument "max_num_seqs" to "LLM" has incompatible'),
    "out.outputs[0].text": ("out.text", '"RequestOutput" has no attribute "text"'),
    "import LLM,": ("import LMM as LLM,", 'has no attribute "LMM"'),
    "timeline(run.trace())": ("timeline(llm)", 'Argument 1 to "timeline" has incompatible'),
}
SETTINGS = """
[mypy]
strict = True
follow_imports = skip
[mypy-tutorial_engine.*]
follow_imports = silent
"""


def test_mypy_knows_what_a_users_script_calls(tmp_path: Path) -> None:
    """What the package imports is left out: of transformers alone mypy would read 2,500 files."""
    package, site = Path(tutorial_engine.__file__).parent, tmp_path / "site-packages"
    assert (package / "py.typed").is_file(), "what is installed without it is Any"
    site.mkdir()
    (site / "tutorial_engine").symlink_to(package)
    texts = [SCRIPT]
    for right, (wrong, _) in SLIPS.items():
        assert right in SCRIPT
        texts.append(SCRIPT.replace(right, wrong))
    names = [f"script_{number}.py" for number in range(len(texts))]
    for name, text in zip(names, texts, strict=True):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "mypy.ini").write_text(SETTINGS, encoding="utf-8")
    options = ["--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *names],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = done.stdout
    assert "script_0.py" not in said, said
    for name, (_, words) in zip(names[1:], SLIPS.values(), strict=True):
        assert re.search(f"^{name}.*{re.escape(words)}", said, re.M), (name, said)


@pytest.mark.parametrize("name", LAZY)
def test_a_room_shows_what_it_hands_out(name: str) -> None:
    room = importlib.import_module(name)
    assert set(room.__all__) <= {*dir(room)}, "tab completion asks dir()"
    assert "TYPE_CHECKING" not in dir(room)
    for public in room.__all__:
        assert getattr(room, public) is not None
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'timelin'"):
        room.timelin  # noqa: B018


def test_a_file_of_viz_is_found_from_the_name_that_a_notebook_imports() -> None:
    """Its own name, or that of the function beside it that it belongs to."""
    tree = ast.parse(inspect.getsource(importlib.import_module("tutorial_engine.viz")))
    lines = [line for line in ast.walk(tree) if isinstance(line, ast.ImportFrom)]
    for line in lines:
        _, _, folder, file, *_ = [*(line.module or "").split("."), "", "", ""]
        names = {re.sub("(?<=[a-z])(?=[A-Z])", "_", one.name).lower() for one in line.names}
        assert folder not in ("views", "explorers") or file in names, (line.module, names)


def test_a_picture_without_the_extra_says_which_one_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As after a plain install, which has no matplotlib."""
    (tmp_path / "bare_room.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from no_such_plots import timeline\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("bare_room")
    get, _ = lazy_exports("bare_room")
    says = r"bare_room\.timeline needs no_such_plots, .*install 'tutorial-engine\[notebooks\]'"
    with pytest.raises(ModuleNotFoundError, match=says):
        get("timeline")


@pytest.mark.parametrize("use_jedi", [True, False])
def test_completion_shows_what_llm_takes(use_jedi: bool) -> None:
    """As a notebook asks for it after `LLM(max`."""
    shell = InteractiveShell()
    shell.user_ns["LLM"] = LLM
    shell.Completer.use_jedi = use_jedi
    with provisionalcompleter():
        found = {one.text for one in shell.Completer.completions("LLM(max", 7)}
    assert {"max_model_len=", "max_num_seqs="} <= found


def test_llm_takes_what_engine_args_take() -> None:
    assert inspect.signature(LLM) == inspect.signature(EngineArgs)


def test_the_package_says_its_version_and_what_can_be_called() -> None:
    command = [sys.executable, "-m", "tutorial_engine"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"tutorial_engine {tutorial_engine.__version__}")
    assert f"version: {tutorial_engine.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    named = re.findall(r"python -m (\S+)", said)
    assert "tutorial_engine.lab.doctor" in named
    assert all(importlib.util.find_spec(name) for name in named)
