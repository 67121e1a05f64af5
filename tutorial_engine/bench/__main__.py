"""Introduced in notebook 02. The command line: `python -m tutorial_engine.bench --help`.

Knows which contenders there are and in which order things happen; the parts are its neighbours.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tutorial_engine.bench import llama_cpp, report
from tutorial_engine.bench.contenders import Ours, Transformers, load_transformers
from tutorial_engine.bench.measure import PEER, Contender, Measurement, Workload, measure
from tutorial_engine.bench.roofline import roofline_probe
from tutorial_engine.bench.shapes import SHAPES, Folders, checkpoint_folders
from tutorial_engine.checkpoint import load_model
from tutorial_engine.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OURS, LLAMA = report.OURS, report.LLAMA
PLAIN = f"{OURS}, not packed"
EAGER, STATIC = f"{PEER} eager", f"{PEER} static"
NO_FLASH = f"{LLAMA}, no flash"


class Session(NamedTuple):
    """All contenders over the same weights, and a note on each: its settings."""

    contenders: dict[str, Contender]
    notes: dict[str, str]


def load_session(args: argparse.Namespace, folders: Folders, stack: ExitStack) -> Session:
    """Load everyone; what must be closed afterwards goes on the stack."""
    dtype = DTYPES[args.dtype]
    theirs = load_transformers(folders.weights, dtype)
    contenders: dict[str, Contender] = {
        PEER: Transformers(theirs),
        EAGER: Transformers(theirs, attention="eager"),
        STATIC: Transformers(theirs, static_cache=True),
    }
    notes = {
        PEER: "generate, sdpa attention, dynamic cache",
        EAGER: "generate, eager attention, dynamic cache",
        STATIC: "generate, sdpa attention, static cache, not compiled",
    }
    llamas, told = load_llamas(args, folders, stack)
    contenders.update(llamas)
    notes.update(told)
    if args.all:
        contenders[PLAIN] = Ours(load_model(folders.weights, dtype=dtype, prepack=False))
        notes[PLAIN] = "generate.stream, weights as loaded"
    model = load_model(folders.weights, dtype=dtype)
    contenders[OURS] = Ours(model)
    packed = "prepacked" if model.lm_head.is_packed else "cannot be prepacked here"
    notes[OURS] = f"generate.stream, static cache, weights {packed}"
    return Session(contenders, notes)


def load_llamas(
    args: argparse.Namespace, folders: Folders, stack: ExitStack
) -> tuple[dict[str, Contender], dict[str, str]]:
    """llama.cpp, with --all also without flash attention; where it cannot run, only a note."""
    missing = llama_cpp.why_not()
    if missing:
        return {}, {LLAMA: missing}
    contenders: dict[str, Contender] = {}
    notes = {}
    file, dtype = folders.converted / f"model-{args.dtype}.gguf", DTYPES[args.dtype]
    max_len = max(args.lengths) + args.new_tokens
    try:
        llama_cpp.write_gguf(folders.weights, file, dtype)
        for name in (LLAMA, NO_FLASH) if args.all else (LLAMA,):
            llama = llama_cpp.LlamaCpp(file, dtype, max_len, flash=name == LLAMA)
            stack.callback(llama.close)
            contenders[name], notes[name] = llama, llama.told
    except ValueError as error:
        return {}, {LLAMA: f"skipped: {error}"}
    return contenders, notes


def check_lengths(lengths: Sequence[int], new_tokens: int, config: ModelConfig) -> None:
    """ValueError for prompts that the model cannot take, or not with the new tokens behind them."""
    limit = config.max_position_embeddings - new_tokens
    bad = [n for n in lengths if not 1 <= n <= limit]
    if bad:
        raise ValueError(
            f"lengths must be from 1 to {limit} tokens (and {new_tokens} new ones), got {bad}"
        )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Load all contenders, time every context, print its lines as they come → the figures."""
    with ExitStack() as stack:
        folders = stack.enter_context(checkpoint_folders(args.shape, args.checkpoint))
        config = ModelConfig.from_pretrained(folders.weights)
        check_lengths(args.lengths, args.new_tokens, config)
        contenders, notes = load_session(args, folders, stack)
        dtype = DTYPES[args.dtype]
        probe = roofline_probe(dtype)
        names = list(contenders)
        print("\n".join(f"  {name}: {note}" for name, note in notes.items()))
        done: list[Measurement] = []
        for length in sorted(set(args.lengths)):  # rising: a static cache may be kept and grow
            workload = Workload.of_length(length, config.vocab_size, args.new_tokens)
            optional = set(names) - {PEER, OURS, PLAIN}
            measured = measure(contenders, workload, args.rounds, optional, probe)
            print("\n" + report.table(config, dtype.itemsize, measured), flush=True)
            done.append(measured)
    return {"contenders": notes, **report.figures(config, dtype.itemsize, done)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; what cannot work exits with a word."""
    parser = argparse.ArgumentParser(
        prog="python -m tutorial_engine.bench", description="our speed beside others', in one run"
    )
    parser.add_argument("--shape", choices=["tiny", *SHAPES], default="tiny")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512], metavar="N")
    parser.add_argument("--new-tokens", type=int, default=16, metavar="N", help="after each prompt")
    parser.add_argument("--rounds", type=int, default=9, help="more rounds, steadier medians")
    parser.add_argument(
        "--checkpoint", type=Path, help="folder to read, or to make shape and GGUF in and keep them"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument(
        "--all", action="store_true", help="also plain weights here, plain attention in llama.cpp"
    )
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    if args.new_tokens < 2:
        parser.error(f"--new-tokens must be at least 2 to time a decode, got {args.new_tokens}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, measure, print, write JSON if asked; 1 when it could not be run."""
    args = parse(argv)
    told = report.machine(args.dtype)
    print(f"{args.shape}: " + ", ".join(f"{key} {value}" for key, value in told.items()))
    try:
        figures = run(args)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if args.json:
        settings = {
            "shape": args.shape,
            "lengths": sorted(set(args.lengths)),
            "new_tokens": args.new_tokens,
            "rounds": args.rounds,
            "peer": PEER,
            "ours": OURS,
        }
        figures = {"machine": told, "settings": settings, **figures}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
