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

from tutorial_engine.bench import llama_cpp, report, servers
from tutorial_engine.bench.contenders import Ours, Transformers, load_transformers
from tutorial_engine.bench.goals import verdicts
from tutorial_engine.bench.llama_server import LlamaServer
from tutorial_engine.bench.measure import PEER, Contender, Measurement, Workload, measure
from tutorial_engine.bench.memory_cost import measure_memory
from tutorial_engine.bench.roofline import roofline_probe
from tutorial_engine.bench.scheduler_cost import RUNNING, measure_step_cost
from tutorial_engine.bench.serving import (
    Asked,
    Server,
    measure_serving,
    ragged_requests,
)
from tutorial_engine.bench.shapes import SHAPES, Folders, checkpoint_folders
from tutorial_engine.model.checkpoint import load_model
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.layers import Linear
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OURS, LLAMA = report.OURS, report.LLAMA
PLAIN = f"{OURS}, not packed"
EAGER, STATIC = f"{PEER} eager", f"{PEER} static"
NO_FLASH = f"{LLAMA}, no flash"
CONTINUOUS = f"{PEER} continuous"
REQUESTS = {"tiny": 64}  # shape -> ragged requests, unless told; 16 for the large ones


class Session(NamedTuple):
    """All contenders over the same weights, a note on each (its settings), and the two models."""

    contenders: dict[str, Contender]
    notes: dict[str, str]
    theirs: Any
    ours: Qwen3ForCausalLM


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
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    packed = f"{sum(linear.is_packed for linear in linears)} of {len(linears)} linears prepacked"
    notes[OURS] = f"generate.stream, static cache, {packed}"
    return Session(contenders, notes, theirs, model)


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


def load_servers(
    args: argparse.Namespace,
    folders: Folders,
    session: Session,
    requests: Sequence[Asked],
    stack: ExitStack,
) -> tuple[dict[str, Server], dict[str, str]]:
    """Everyone for the ragged workload over the session's weights, and a note on each."""
    continuous = servers.ContinuousTransformers(session.theirs, requests)
    stack.callback(continuous.close)
    contenders: dict[str, Server] = {
        PEER: servers.PaddedTransformers(session.theirs),
        CONTINUOUS: continuous,
    }
    notes = {
        PEER: "generate, one batch padded on the left, until the longest is done",
        CONTINUOUS: "continuous batching manager, paged sdpa",
    }
    missing = llama_cpp.why_not()
    if missing:
        notes[LLAMA] = missing
    else:
        file = folders.converted / f"model-{args.dtype}.gguf"
        try:
            llama = LlamaServer(file, DTYPES[args.dtype], requests)
            stack.callback(llama.close)
            contenders[LLAMA] = llama
            notes[LLAMA] = f"{llama.told}, one sequence per request"
        except ValueError as error:
            notes[LLAMA] = f"skipped: {error}"
    config = servers.serving_config(requests)
    contenders[OURS] = servers.OurServer(session.ours, config)
    notes[OURS] = (
        f"LLMEngine, {config.max_num_seqs} rows of {config.max_model_len}, "
        f"{config.max_num_batched_tokens} tokens per step"
    )
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
    """Load all contenders, time every workload, print its lines as they come → the figures."""
    with ExitStack() as stack:
        folders = stack.enter_context(checkpoint_folders(args.shape, args.checkpoint))
        config = ModelConfig.from_pretrained(folders.weights)
        check_lengths(args.lengths, args.new_tokens, config)
        requests = asked_for(args, config)
        session = load_session(args, folders, stack)
        dtype = DTYPES[args.dtype]
        probe = roofline_probe(dtype)
        contenders, names = session.contenders, list(session.contenders)
        _tell(session.notes)
        done: list[Measurement] = []
        for length in sorted(set(args.lengths)):  # rising: a static cache may be kept and grow
            workload = Workload.of_length(length, config.vocab_size, args.new_tokens)
            optional = set(names) - {PEER, OURS, PLAIN}
            measured = measure(contenders, workload, args.rounds, optional, probe)
            print("\n" + report.table(config, dtype.itemsize, measured), flush=True)
            done.append(measured)
        figures = {"contenders": session.notes, **report.figures(config, dtype.itemsize, done)}
        if requests:
            figures |= serve(args, folders, session, requests, stack)
    return figures


def asked_for(args: argparse.Namespace, config: ModelConfig) -> list[Asked]:
    """The ragged workload; [] when it was not asked for."""
    number = REQUESTS.get(args.shape, 16) if args.requests is None else args.requests
    limit = config.max_position_embeddings
    return ragged_requests(number, config.vocab_size, limit) if number else []


def serve(
    args: argparse.Namespace,
    folders: Folders,
    session: Session,
    requests: Sequence[Asked],
    stack: ExitStack,
) -> dict[str, Any]:
    """The ragged race, the scheduler's own cost and the memories': printed, and as figures."""
    contenders, notes = load_servers(args, folders, session, requests, stack)
    print()
    _tell(notes)
    optional = {CONTINUOUS, LLAMA}
    serving = measure_serving(contenders, requests, args.serving_rounds, OURS, optional)
    print("\n" + report.serving_table(serving), flush=True)
    costs = [measure_step_cost(running) for running in RUNNING]
    print("\n" + report.cost_table(costs), flush=True)
    memory = measure_memory(session.ours, requests, args.serving_rounds, args.rounds)
    print("\n" + report.memory_table(memory), flush=True)
    return report.serving_figures(serving, notes, costs) | report.memory_figures(memory)


def _tell(notes: dict[str, str]) -> None:
    print("\n".join(f"  {name}: {note}" for name, note in notes.items()), flush=True)


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
        "--requests", type=int, metavar="N", help="ragged requests: 64 for tiny, else 16; 0 = none"
    )
    parser.add_argument("--serving-rounds", type=int, default=3, metavar="N", help="of those")
    parser.add_argument(
        "--checkpoint", type=Path, help="folder to read, or to make shape and GGUF in and keep them"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument(
        "--all", action="store_true", help="also plain weights here, plain attention in llama.cpp"
    )
    args = parser.parse_args(argv)
    for name, least in (("rounds", 1), ("serving_rounds", 1), ("requests", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
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
    settings = {
        "shape": args.shape,
        "lengths": sorted(set(args.lengths)),
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "serving_rounds": args.serving_rounds,
        "peer": PEER,
        "ours": OURS,
    }
    figures = {"machine": told, "settings": settings, **figures}
    print("", *verdicts(figures), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
