"""Introduced in notebook 01. The files of a checkpoint: where they are, what tensors they hold.

Knows folders, hub ids, safetensors and their index; knows no parameter of ours and no arithmetic.
No pickle and no remote code is ever opened.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open


def resolve_checkpoint(path_or_id: str | Path) -> Path:
    """The folder of a checkpoint: a local one, or a hub id downloaded (or found in the hub cache).

    ValueError, saying how to go on, when it is neither.
    """
    folder = Path(path_or_id)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{str(folder)!r} is a file; give the folder that holds config.json")
    name = str(path_or_id)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(
            f"no folder {name!r}, and hub ids look like owner/name, as in 'Qwen/Qwen3-0.6B'"
        )
    from huggingface_hub import snapshot_download  # 0.3 s, and only hub ids need it

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=["*.json", "*.jinja", "*.safetensors"], ignore_patterns=["*/*"]
            )
        )
    except Exception as error:  # the hub client raises many kinds, all meaning "could not get it"
        raise ValueError(
            f"could not get {name!r} from the hub ({type(error).__name__}: {error}). Offline? Use "
            "a local folder, or checkpoint.TINY, which ships with the package"
        ) from error


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it, for a single or a sharded checkpoint."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        weight_map = _weight_map(index)
        lost = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
        if lost:
            raise ValueError(f"the index of {str(folder)!r} names files that are not there: {lost}")
        files = sorted({folder / name for name in weight_map.values()})
    elif single.is_file():
        files = [single]
    else:
        other = sorted(p.name for p in folder.glob("*.bin"))
        hint = f"; {other} are pickles, which this loader never opens" if other else ""
        raise ValueError(f"no model.safetensors (or its index) in {str(folder)!r}{hint}")
    found: dict[str, Path] = {}
    for file in files:
        with open_tensors(file) as tensors:
            for name in tensors.keys():
                if name in found:
                    raise ValueError(f"{name!r} is in both {found[name].name} and {file.name}")
                found[name] = file
    return found


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index of a sharded checkpoint says."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise TypeError("weight_map must map names to file names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a safetensors index ({error!r})") from None
    return weight_map


@contextmanager
def open_tensors(file: Path) -> Iterator:
    """A safetensors file, open inside the block. ValueError when it is damaged."""
    try:
        with safe_open(str(file), framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{str(file)!r} is damaged or no safetensors file: {error}") from error


def tensor_shapes(files: dict[str, Path]) -> dict[str, list[int]]:
    """Shape of every tensor, from the headers alone."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(set(files.values())):
        with open_tensors(file) as tensors:
            for name in tensors.keys():
                shapes[name] = tensors.get_slice(name).get_shape()
    return shapes
