"""`make vllm`: this engine beside vLLM, and docs/bench/vllm.md.

Sets vLLM up, records new runs of it and decides them here again, ends random requests on both,
compares what vLLM's methods take with what is stored, runs each example on both, and races both.
Exits with 1 where something differs or vLLM cannot be installed.
"""

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.bench.record import many
from tools.bench.report import Figures
from tools.vllm import ends, environment, examples, real, speed
from tutorial_engine import as_vllm
from tutorial_engine.engine.llm import LLM
from tutorial_engine.lab.beside_vllm import compare, read_runs
from tutorial_engine.lab.doctor import processor_name
from tutorial_engine.lab.real import NAME, NOT_HERE, VLLM_SAID, where_it_is
from tutorial_engine.model.checkpoint import TINY, load_model
from tutorial_engine.sampling.params import SamplingParams

PAGE = environment.ROOT / "docs" / "bench" / "vllm.md"
SHAPES = ("tiny", "smollm2", "qwen3-0.6b")
HERE = Path(__file__).parent
NUM_ENDS = 100  # requests with random stops


def decide_again(seed: int, count: int) -> tuple[str, list[str]]:
    """Record `count` runs of vLLM and compare → a sentence, and what differs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "runs.json")
        if failed := _record("record.py", TINY, file, seed, count):
            return "vLLM could not be recorded", [failed]
        runs = read_runs(file)
    model, threads = load_model(), torch.get_num_threads()
    torch.set_num_threads(1)  # a model this small gains nothing from more
    found = [(number, compare(run, model)) for number, run in enumerate(runs)]
    torch.set_num_threads(threads)
    wrong = [f"run {number} of seed {seed}: {what}" for number, what in found if what]
    steps = [step for run in runs for step in run["steps"]]
    hits = sum(n > 0 for run in runs for n in run["num_cached_tokens"])
    told = (
        f"{len(runs) - len(wrong)} of {len(runs)} recorded runs (seed {seed}) are equal from the "
        f"first step to the last: {sum(len(run['prompts']) for run in runs)} requests, "
        f"{len(steps)} steps, {sum(len(step['preempted']) for step in steps)} preemptions, "
        f"{hits} requests whose beginning was found"
    )
    return told, wrong


def end_again(seed: int) -> tuple[str, list[str]]:
    """Record random requests that end in every way, and end them here → as above."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ends.json.gz")
        if failed := _record("record_ends.py", TINY, file, seed, NUM_ENDS):
            return "the ends of requests could not be recorded", [failed]
        cases = ends.read(file)
    pairs = zip(ends.answers(load_model(), cases), cases, strict=True)
    found = [(case, ends.difference(ours, case["answer"])) for ours, case in pairs]
    wrong = [f"{case['prompt']!r}, {case['params']}: {what}" for case, what in found if what]
    told = (
        f"{len(cases) - len(wrong)} of {len(cases)} requests with random stops (seed {seed}) end "
        "with the same text, tokens and reasons"
    )
    return told, wrong


def same_signatures(keep: bool) -> tuple[str, list[str]]:
    """What vLLM's methods take, beside what is stored → as above. `keep` stores it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "takes.json")
        if failed := _record("record_signatures.py", file):
            return "what vLLM's methods take could not be recorded", [failed]
        if keep:
            as_vllm.FILE.write_bytes(file.read_bytes())
        theirs, stored = (
            json.loads(path.read_text(encoding="utf-8"))["takes"] for path in (file, as_vllm.FILE)
        )
    wrong = []
    for method, parameters in theirs.items():
        known = stored.get(method, {})
        changed = {n: v for n, v in parameters.items() if n not in known or known[n] != v}
        gone = sorted(known.keys() - parameters.keys())
        if changed or gone:
            wrong.append(f"{method}: new or another default {changed}, gone {gone}")
    number = len(theirs) - len(wrong)
    return f"{number} of {len(theirs)} methods of vLLM take what {as_vllm.FILE.name} says", wrong


def chat_with_a_real_model() -> tuple[str, list[str]]:
    """Eight chats with SmolLM2 on both → a sentence, and what differs."""
    folder = where_it_is()
    if not folder.is_dir():
        return NOT_HERE, []
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "chats.json")
        if failed := _record("real.py", folder, file):
            return "vLLM could not run the real model", [failed]
        theirs = json.loads(file.read_text(encoding="utf-8"))
    chats = [[{"role": "user", "content": text}] for text in real.CHATS]
    params = SamplingParams(temperature=0, max_tokens=real.NUM_TOKENS)
    ours: dict[str, list[Any]] = {"prompt_token_ids": [], "token_ids": [], "text": []}
    for output in LLM(folder).chat(chats, params, use_tqdm=False):
        ours["prompt_token_ids"].append(output.prompt_token_ids)
        ours["token_ids"].append(output.outputs[0].token_ids)
        ours["text"].append(output.outputs[0].text)
    wrong = [
        f"chat {i}, {name}: {mine[i]}, vLLM says {theirs[name][i]}"
        for name, mine in ours.items()
        for i in range(len(chats))
        if mine[i] != theirs[name][i]
    ]
    recorded = json.loads(VLLM_SAID.read_text(encoding="utf-8"))["token_ids"]
    if theirs["after_text"] != recorded:
        wrong.append(f"after {real.TEXT!r} vLLM says {theirs['after_text']}, recorded: {recorded}")
    tokens = sum(map(len, theirs["token_ids"]))
    return (
        f"{len(chats)} chats with {NAME} say the same, text and all {tokens} tokens"
        if not wrong
        else f"chats with {NAME} differ"
    ), wrong


def _record(script: str, *options: object) -> str:
    """Run a script of this folder inside vLLM's environment; its last words where it fails."""
    command = [str(environment.PYTHON), "-P", str(HERE / script), *map(str, options)]
    done = subprocess.run(
        command, env=environment.settings(1), capture_output=True, text=True, check=False
    )
    return done.stderr[-2000:] if done.returncode else ""


def run_examples(keep: bool) -> tuple[str, list[str]]:
    """Every example on both → a sentence, and what differs. `keep` stores what vLLM printed."""
    wrong = []
    for script in examples.scripts():
        theirs, stored = examples.there(script), examples.EXPECTED / f"{script.stem}.txt"
        if keep:
            stored.write_text(theirs, encoding="utf-8")
        is_stored = stored.exists() and stored.read_text(encoding="utf-8") == theirs
        differs = examples.difference(examples.here(script), theirs)
        if differs or not is_stored:
            wrong.append(f"{script.name}: {differs or f'{stored.name} says something else'}")
    number = len(examples.scripts())
    return f"{number - len(wrong)} of {number} scripts of examples/ print the same in both", wrong


def page(vllm: str, command: str, told: Sequence[str], races: Sequence[Figures]) -> str:
    """All of docs/bench/vllm.md."""
    versions = races[0]["told"] if races else {}
    head = (
        f"# Beside vLLM {vllm}\n\nWritten by `{command}`. Machine: {processor_name()}, "
        f"{torch.get_num_threads()} threads, Python {platform.python_version()}, torch "
        f"{torch.__version__} here and {versions.get('torch', '?')} there.\n"
    )
    options = speed.OPTIONS
    how = (
        f"{speed.NUM_REQUESTS} requests at once, {options['dtype']}, greedy, the same options of\n"
        f"`LLM` (blocks of {options['block_size']} tokens, {options['max_num_batched_tokens']} "
        "tokens a step, no prefix cache), in turns; output\ntokens a second: the median of all "
        "rounds, with the least and the most in brackets. vLLM has no\npreloaded libraries "
        "(tcmalloc, libiomp). Compare within one model only.\n"
    )
    return "\n".join([head, *(f"- {one}." for one in told), "", how, *map(table, races)])


def table(race: Figures) -> str:
    """A line for each engine, of one model."""
    title = f"{race['shape']}, {race['num_requests']} requests"
    return "\n".join(many(title, race, ["tokens/s"]))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.vllm", description=__doc__)
    parser.add_argument(
        "--seed", type=int, help="of the recorded runs; without it another each time"
    )
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="to record")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each race; 0 = none")
    parser.add_argument("--keep", action="store_true", help="store what vLLM prints, and takes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Do all of it; 1 where something differs."""
    args = parse(argv)
    seed = random.randrange(10**6) if args.seed is None else args.seed
    try:
        vllm = environment.set_up()
    except environment.CannotSetUpError as error:
        print(error, file=sys.stderr)
        return 1
    told, wrong = [], []
    parts = (
        partial(decide_again, seed, args.runs),
        partial(end_again, seed),
        partial(same_signatures, args.keep),
        partial(run_examples, args.keep),
        chat_with_a_real_model,
    )
    for part in parts:
        sentence, differences = part()
        print(sentence, *differences, sep="\n", flush=True)
        told.append(sentence)
        wrong += differences
    races = []
    for shape in SHAPES if args.rounds else ():
        if shape == "smollm2" and not where_it_is().is_dir():
            continue
        races.append(speed.measure(shape, args.rounds))
        print("\n" + table(races[-1]), flush=True)
    if races:
        command = f"make vllm SEED={seed} RUNS={args.runs}"
        PAGE.write_text(page(vllm, command, told, races), encoding="utf-8")
        print(f"\n{PAGE.relative_to(environment.ROOT)} is written")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
