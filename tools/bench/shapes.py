"""The weights of the race: the shipped ones, or random in a real shape.

Speed does not depend on what the weights say. Knows files; runs nothing.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.bench.contenders import import_transformers
from tutorial_engine.model.checkpoint import TINY

SHAPES: dict[str, dict[str, Any]] = {  # random weights in the shape of a released model
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }
}


class Folders(NamedTuple):
    """Where the weights are, and where the same in other engines' formats may be written."""

    weights: Path
    converted: Path


def make_checkpoint(folder: Path, shape: str) -> None:
    """Save random bf16 weights of SHAPES[shape] with transformers; a finished folder is kept.

    1.2 GB and some ten seconds for qwen3-0.6b.
    """
    if (folder / "model.safetensors").is_file():
        return
    transformers = import_transformers()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SHAPES[shape])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


@contextmanager
def checkpoint_folders(shape: str, folder: Path | None) -> Iterator[Folders]:
    """The shipped weights, or those of the given folder, or a temporary one.

    What is converted is kept in the given folder, and in no other.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        if shape == "tiny":
            yield Folders(folder or TINY, place)
        else:
            make_checkpoint(place, shape)
            yield Folders(place, place)
