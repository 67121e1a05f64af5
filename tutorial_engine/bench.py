"""Introduced in notebook 01. Speed as a ratio to transformers': `python -m tutorial_engine.bench`.

Knows how to time two engines fairly: one process, the same weights, interleaved rounds, medians.
transformers is imported only by the functions that need it. Later notebooks add workloads.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tutorial_engine.batch import Batch
from tutorial_engine.checkpoint import TINY, load_model
from tutorial_engine.config import ModelConfig
from tutorial_engine.doctor import installed_version, processor_name
from tutorial_engine.model import Qwen3ForCausalLM

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
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PEER = "transformers"  # the column that the others are divided by


class Contender(Protocol):
    """One engine under one roof with the others. Later notebooks add methods, one per workload."""

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """A prompt of n ids in one forward → logits of its last token, [1, V] fp32."""
        ...


class Ours:
    """This engine, prepacked or plain, as the loaded model is."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self.model = model

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """As Contender.prefill."""
        hidden = self.model(Batch.from_sequences([ids]))
        return self.model.compute_logits(hidden[-1:])


class Transformers:
    """transformers with SDPA attention, asked for no more than we compute ourselves."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        transformers = import_transformers()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        ).eval()

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """As Contender.prefill: the last row only, no cache kept."""
        out = self.model(torch.tensor([ids]), logits_to_keep=1, use_cache=False)
        return out.logits[0].float()


class Workload(NamedTuple):
    """Something to time: its name, the tokens that one run counts for, a run per contender."""

    name: str
    tokens: int
    runs: Mapping[str, Callable[[], Tensor]]


class Row(NamedTuple):
    """One workload's result. Ratios are of the medians, above 1 = faster than the peer."""

    workload: str
    tokens_per_second: dict[str, float]
    ratio: dict[str, float]
    logit_difference: dict[str, float]  # largest, to the peer, so that nobody wins by being wrong


def prefill_workload(contenders: dict[str, Contender], length: int, vocab_size: int) -> Workload:
    """A prompt of `length` random ids, the same for all."""
    ids = random.Random(length).choices(range(vocab_size), k=length)
    runs = {name: partial(contender.prefill, ids) for name, contender in contenders.items()}
    return Workload(f"prefill {length}", length, runs)


@torch.inference_mode()
def measure(workload: Workload, rounds: int) -> Row:
    """Warm up once each, then `rounds` rounds in which each runs once, another one first each time.

    What slows the machine for a while so slows all of them.
    """
    results = {name: run() for name, run in workload.runs.items()}
    times: dict[str, list[float]] = {name: [] for name in workload.runs}
    names = list(times)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            began = time.perf_counter()
            workload.runs[name]()
            times[name].append(time.perf_counter() - began)
    median = {name: statistics.median(t) for name, t in times.items()}
    return Row(
        workload.name,
        {name: workload.tokens / seconds for name, seconds in median.items()},
        {name: median[PEER] / seconds for name, seconds in median.items()},
        {name: (r - results[PEER]).abs().max().item() for name, r in results.items()},
    )


def import_transformers() -> Any:
    """The transformers module; ValueError, with the command, where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"the benchmark compares with transformers, which cannot be imported ({error}): "
            "python -m pip install -e '.[notebooks]'"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


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
def checkpoint_folder(shape: str, folder: Path | None) -> Iterator[Path]:
    """Where the weights are: the shipped ones, the given folder, or a temporary one."""
    if shape == "tiny":
        yield folder or TINY
    elif folder is not None:
        make_checkpoint(folder, shape)
        yield folder
    else:
        with tempfile.TemporaryDirectory() as temporary:
            make_checkpoint(Path(temporary), shape)
            yield Path(temporary)


def machine(dtype: str) -> dict[str, Any]:
    """What a figure means nothing without: processor, threads, versions."""
    return {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": installed_version("transformers"),
    }


def run(args: argparse.Namespace) -> list[Row]:
    """Load all contenders, time every workload, print a line for each as it comes."""
    dtype = DTYPES[args.dtype]
    with checkpoint_folder(args.shape, args.checkpoint) as folder:
        contenders: dict[str, Contender] = {
            PEER: Transformers(folder, dtype),
            "plain": Ours(load_model(folder, dtype=dtype, prepack=False)),
            "prepacked": Ours(load_model(folder, dtype=dtype)),
        }
        config = ModelConfig.from_pretrained(folder)
    too_long = [n for n in args.lengths if not 1 <= n <= config.max_position_embeddings]
    if too_long:
        limit = config.max_position_embeddings
        raise ValueError(f"lengths must be from 1 to {limit} tokens, got {too_long}")
    print(f"{'tokens/s':<14}" + "".join(f"{name:>20}" for name in contenders))
    rows = []
    for length in args.lengths:
        row = measure(prefill_workload(contenders, length, config.vocab_size), args.rounds)
        cells = (f"{row.tokens_per_second[n]:.0f} ({row.ratio[n]:.2f}×)" for n in contenders)
        print(f"{row.workload:<14}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, measure, print, write JSON if asked; 1 when it could not be run."""
    parser = argparse.ArgumentParser(description="tokens per second, against transformers")
    parser.add_argument("--shape", choices=["tiny", *SHAPES], default="tiny")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512], metavar="N")
    parser.add_argument("--rounds", type=int, default=9, help="more rounds, steadier medians")
    parser.add_argument("--checkpoint", type=Path, help="folder to read, or to make the shape in")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    told = machine(args.dtype)
    print(f"{args.shape}: " + ", ".join(f"{key} {value}" for key, value in told.items()))
    try:
        rows = run(args)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if args.json:
        settings = {"shape": args.shape, "rounds": args.rounds, "peer": PEER}
        figures = {"machine": told, "settings": settings, "rows": [row._asdict() for row in rows]}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
