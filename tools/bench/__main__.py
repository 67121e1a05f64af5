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

from tools.bench import contenders, llama, memory, on_gpu, report
from tools.bench.race import PEER, Asked, Contender, one_prompt, race, ragged_requests
from tools.bench.record import verdicts
from tools.bench.report import LLAMA, OURS
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


Field = tuple[dict[str, Contender], dict[str, str]]  # the contenders, and a note on each


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
    args = session.args
    everyone: dict[str, Contender] = {
        PEER: contenders.Transformers(session.theirs),
        EAGER: contenders.Transformers(session.theirs, attention="eager"),
        STATIC: contenders.Transformers(session.theirs, static_cache=True),
    }
    notes = {
        PEER: "generate, sdpa attention, dynamic cache",
        EAGER: "generate, eager attention, dynamic cache",
        STATIC: "generate, sdpa attention, static cache, not compiled",
    }
    longest = [Asked((0,) * max(args.lengths), args.new_tokens)]
    add_llama(session, longest, (everyone, notes))
    everyone[OURS], notes[OURS] = contenders.Ours(session.ours), "generate.stream, static cache"
    return everyone, notes


def for_one_on_gpu(session: Session) -> Field:
    """Everyone on a GPU, for a single request."""
    everyone: dict[str, Contender] = {
        PEER: contenders.Transformers(session.theirs),
        STATIC: contenders.Transformers(session.theirs, static_cache=True, compiled=True),
    }
    notes = {
        PEER: "generate, sdpa attention, dynamic cache",
        STATIC: "generate, sdpa attention, static cache, compiled by itself in its warm-up",
        LLAMA: on_gpu.NO_LLAMA,
    }
    longest = [Asked((0,) * max(session.args.lengths), session.args.new_tokens)]
    return on_gpu.with_ours((everyone, notes), contenders.OurStream, session.ours, longest)


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
    config = contenders.serving_config(requests)
    everyone[OURS] = contenders.OurServer(session.ours, config)
    notes[OURS] = f"LLMEngine, {config.max_num_seqs} rows of {config.max_model_len}, "
    notes[OURS] += f"{config.max_num_batched_tokens} tokens per step"
    return everyone, notes


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Load all contenders, time every workload, print its lines as they come → the figures."""
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
        everyone, notes = (for_one_request if on_cpu else for_one_on_gpu)(session)
        _tell(notes)
        figures: dict[str, Any] = {"contenders": notes}
        optional = set(everyone) - {PEER, OURS}
        probe = roofline_probe(dtype, device=args.device)
        for length in sorted(set(args.lengths)):
            asked = one_prompt(length, config.vocab_size, args.new_tokens)
            done = race(everyone, asked, args.rounds, optional, probe)
            found = report.one_request(config, dtype.itemsize, done)
            print("\n" + report.one_request_table(found), flush=True)
            for key, values in found.items():
                figures.setdefault(key, []).extend(values)
            if not on_cpu:
                there = {name: one for name, one in everyone.items() if name in done.answers}
                steps = on_gpu.steps(there, asked)
                print("\n".join(on_gpu.told(steps, done.warm_up)), flush=True)
                figures.setdefault("gpu_steps", []).append(steps)
        if not many:
            return figures
        return figures | (serve(session, many) if on_cpu else serve_on_gpu(session, many))


def serve(session: Session, requests: Sequence[Asked]) -> dict[str, Any]:
    """The ragged race, the memories' and the cost of a step: printed, and as figures."""
    everyone, notes = for_many_requests(session, requests)
    print()
    _tell(notes)
    rounds = session.args.serving_rounds
    done = race(everyone, requests, rounds, {CONTINUOUS, LLAMA})
    serving = {**report.many_requests(done, PEER, OURS), "contenders": notes}
    print("\n" + report.many_requests_table(f"{len(requests)} ragged requests", serving))
    ragged = memory.race_layouts(session.ours, requests, rounds)
    num_shared = min(max(len(requests) // 2, 2), memory.SHARING)
    prefix = memory.race_prefix_cache(session.ours, num_shared, rounds)
    part = memory.part_of_shape(session.ours.dtype)
    long = memory.measure_long_context(part, memory.BATCH, memory.CONTEXT, session.args.rounds)
    costs = [memory.measure_step_cost(running) for running in memory.RUNNING]
    account = {
        "ragged": report.many_requests(ragged, memory.ROWS, memory.ROWS),
        "prefix": report.many_requests(prefix, memory.NO_CACHE, memory.NO_CACHE),
        "shared": memory.PREFIX / (memory.PREFIX + memory.OWN),
        "long_context": long._asdict(),
    }
    print("\n" + report.memory_tables(account, costs), flush=True)
    return {"serving": serving, "step_costs": costs, "memory": account}


def serve_on_gpu(session: Session, requests: Sequence[Asked]) -> dict[str, Any]:
    """The ragged race on a GPU: all of it once, which is the first run, and then in rounds."""
    everyone, notes = for_many_requests(session, requests)
    del everyone[OURS]
    on_gpu.with_ours((everyone, notes), contenders.OurServer, session.ours, requests)
    print()
    _tell(notes)
    first = race(everyone, requests, 1, {CONTINUOUS}, warm_up=False)
    left = {name: one for name, one in everyone.items() if name in first.samples}
    done = race(left, requests, session.args.serving_rounds)
    serving = {**report.many_requests(done, PEER, OURS), "contenders": notes}
    serving["failed"] = first.failed
    serving["first_run"] = {name: samples[0] for name, samples in first.samples.items()}
    print("\n" + report.many_requests_table(f"{len(requests)} ragged requests", serving))
    for name, seconds in serving["first_run"].items():
        print(f"{name}, first run: {serving['wanted_tokens'] / seconds:.1f} wanted/s")
    return {"serving": serving}


def _tell(notes: dict[str, str]) -> None:
    print("\n".join(f"  {name}: {note}" for name, note in notes.items()), flush=True)


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
    """Read the command line, measure, print, write JSON if asked; 1 when it could not be run."""
    args = parse(argv)
    try:
        load_model(contenders.TINY, args.device)  # a device that is not here is named
        machine = report.machine(args.dtype, args.device)
        print(f"{args.shape}: " + ", ".join(f"{key} {value}" for key, value in machine.items()))
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
    print("", *verdicts(figures), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
