"""The command line: `python -m tools.bench --help`.

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

from tools.bench import contenders, llama, memory, on_gpu, record, report
from tools.bench.race import (
    LLAMA,
    OURS,
    PEER,
    Asked,
    Contender,
    one_prompt,
    race,
    ragged_requests,
)
from tutorial_engine.lab.roofline import roofline_probe
from tutorial_engine.model.checkpoint import load_model
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EAGER, STATIC, CONTINUOUS = f"{PEER} eager", f"{PEER} static", f"{PEER} continuous"
REQUESTS = {"tiny": 64}  # shape -> ragged requests, unless told; 16 for the large ones


class Session(NamedTuple):
    """What all contenders are made of: options, files, both models; `stack` closes in the end."""

    args: argparse.Namespace
    folders: contenders.Folders
    theirs: Any
    ours: CausalLM
    stack: ExitStack


Field = on_gpu.Field  # the contenders, and a note on each


def add_llama(session: Session, requests: Sequence[Asked], field: Field) -> None:
    """llama.cpp among the contenders; where it cannot run, only a note."""
    args, everyone, notes = session.args, *field
    missing = llama.why_not() if args.device == "cpu" else on_gpu.NO_LLAMA
    if missing:
        notes[LLAMA] = missing
        return
    file = session.folders.converted / f"model-{args.dtype}.gguf"
    try:
        llama.write_gguf(session.folders.weights, file, DTYPES[args.dtype])
        found = llama.LlamaCpp(file, DTYPES[args.dtype], requests)
    except ValueError as error:
        notes[LLAMA] = f"skipped: {error}"
        return
    session.stack.callback(found.close)
    everyone[LLAMA], notes[LLAMA] = found, found.told


def for_one_request(session: Session) -> Field:
    """Everyone for a single request, over the same weights."""
    args, on_cpu = session.args, session.args.device == "cpu"
    compiled = "not compiled" if on_cpu else "compiled by itself in its warm-up"
    everyone: dict[str, Contender] = {PEER: contenders.Transformers(session.theirs)}
    notes = {PEER: "generate, sdpa attention, dynamic cache"}
    if on_cpu:
        everyone[EAGER] = contenders.Transformers(session.theirs, attention="eager")
        notes[EAGER] = "generate, eager attention, dynamic cache"
    everyone[STATIC] = contenders.Transformers(
        session.theirs, static_cache=True, compiled=not on_cpu
    )
    notes[STATIC] = f"generate, sdpa attention, static cache, {compiled}"
    longest = [Asked((0,) * max(args.lengths), args.new_tokens)]
    add_llama(session, longest, (everyone, notes))
    if not on_cpu:
        return on_gpu.with_ours((everyone, notes), contenders.OurStream, session.ours, longest)
    everyone[OURS], notes[OURS] = contenders.Ours(session.ours), "generate.stream, static cache"
    return everyone, notes


def for_many_requests(session: Session, requests: Sequence[Asked]) -> Field:
    """Everyone for the ragged workload, over the same weights."""
    continuous = contenders.ContinuousTransformers(session.theirs, requests)
    session.stack.callback(continuous.close)
    everyone: dict[str, Contender] = {
        PEER: contenders.Transformers(session.theirs),
        CONTINUOUS: continuous,
    }
    notes = {
        PEER: "generate, one batch padded on the left, until the longest is done",
        CONTINUOUS: "continuous batching manager, paged sdpa",
    }
    add_llama(session, requests, (everyone, notes))
    if session.args.device != "cpu":
        return on_gpu.with_ours((everyone, notes), contenders.OurServer, session.ours, requests)
    config = contenders.serving_config(requests)
    everyone[OURS] = contenders.OurServer(session.ours, config)
    notes[OURS] = f"LLMEngine, {config.max_num_seqs} rows of {config.max_model_len}, "
    notes[OURS] += f"{config.max_num_batched_tokens} tokens per step"
    return everyone, notes


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Load all contenders and time every workload → the figures."""
    with ExitStack() as stack:
        folders = stack.enter_context(contenders.checkpoint_folders(args.shape, args.checkpoint))
        config = ModelConfig.from_pretrained(folders.weights)
        limit = config.max_position_embeddings - args.new_tokens
        if bad := [n for n in args.lengths if not 1 <= n <= limit]:
            raise ValueError(
                f"lengths must be from 1 to {limit} tokens (and {args.new_tokens} new ones), "
                f"got {bad}"
            )
        number = REQUESTS.get(args.shape, 16) if args.requests is None else args.requests
        many = number and ragged_requests(number, config.vocab_size, config.max_position_embeddings)
        dtype = DTYPES[args.dtype]
        ours = load_model(folders.weights, args.device, dtype)
        theirs = contenders.load_transformers(folders.weights, dtype, args.device)
        session = Session(args, folders, theirs, ours, stack)
        on_cpu = args.device == "cpu"
        everyone, notes = for_one_request(session)
        figures: dict[str, Any] = {"contenders": notes}
        probe = roofline_probe(dtype, device=args.device)
        for length in sorted(set(args.lengths)):
            _now(f"one request of {length} tokens, {args.rounds} rounds")
            asked = one_prompt(length, config.vocab_size, args.new_tokens)
            done = race(everyone, asked, args.rounds, set(everyone) - {PEER, OURS}, probe)
            found = report.one_request(config, dtype.itemsize, done)
            if not on_cpu:
                there = {name: one for name, one in everyone.items() if name in done.answers}
                found["gpu_steps"] = [on_gpu.steps(there, asked)]
            for key, values in found.items():
                figures.setdefault(key, []).extend(values)
        if many:
            _now(f"{len(many)} ragged requests, {args.serving_rounds} rounds")
            figures["serving"] = serve(session, many)
        if many and on_cpu:
            _now("memories, and steps without a forward")
            figures |= memory.measure(ours, many, args.serving_rounds, args.rounds)
        return figures


def serve(session: Session, requests: Sequence[Asked]) -> dict[str, Any]:
    """The ragged race, as figures. On a GPU all run it once before, which is the first run."""
    everyone, notes = for_many_requests(session, requests)
    optional, first = {CONTINUOUS, LLAMA}, None
    if session.args.device != "cpu":
        first = race(everyone, requests, 1, optional, warm_up=False)
        everyone = {name: one for name, one in everyone.items() if name in first.samples}
    done = race(everyone, requests, session.args.serving_rounds, optional, warm_up=first is None)
    serving = {**report.many_requests(done, OURS), "contenders": notes}
    if first:
        serving["failed"] |= first.failed
        serving["first_run"] = {name: samples[0] for name, samples in first.samples.items()}
    return serving


def _now(what: str) -> None:
    """What runs at the moment: the tables come in the end."""
    print(f"{what} ...", file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; what cannot work exits with a word."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench", description="our speed beside others', in one run"
    )
    parser.add_argument(
        "--shape", choices=[*contenders.TRAINED, *contenders.SHAPES], default="tiny"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: then the GPU's contenders")
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
    args = parser.parse_args(argv)
    least = {"rounds": 1, "serving_rounds": 1, "requests": 0, "new_tokens": 2}
    for name, bound in least.items():
        value = getattr(args, name)
        if value is not None and value < bound:
            parser.error(f"--{name.replace('_', '-')} must be at least {bound}, got {value}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, measure, print the tables, write JSON if asked; 1 if it cannot run."""
    args = parse(argv)
    try:
        load_model(contenders.TINY, args.device)  # a device that is not here is named
        machine = report.machine(args.dtype, args.device)
        figures = run(args)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    settings = {
        "shape": args.shape,
        "device": args.device,
        "lengths": sorted(set(args.lengths)),
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "serving_rounds": args.serving_rounds,
        "peer": PEER,
        "ours": OURS,
    }
    figures = {"machine": machine, "settings": settings, **figures}
    print(*record.section(figures, str(args.json or "")), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
