"""Records the runs and logits of vLLM that ship with the package (`tutorial_engine/lab/vllm_runs`).

    python -m tools.vllm.record_runs [--check]

With a Python that has vLLM (`make vllm` sets one up). `--check` writes nothing: it makes the runs
again, compares them with those that ship, times aside, and tries what they do not show.
"""

import argparse
import gc
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from safetensors.torch import load_file, save_file

from tutorial_engine.lab.beside_vllm import LOGITS
from tutorial_engine.lab.hit_rate import LONG as DOG_TEXT
from tutorial_engine.lab.hit_rate import STORY
from tutorial_engine.lab.vllm import RUNS, record, recorded_run
from tutorial_engine.model.checkpoint import TINY, load_tokenizer
from tutorial_engine.trace.events import Event, Finished, Trace
from tutorial_engine.trace.history import replay

SETTINGS = {  # read when vLLM is imported; the last one makes its hashes the same in each run
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
}
OPTIONS = {"dtype": "float32", "enforce_eager": True, "async_scheduling": False}
SIZES = {"block_size": 32, "max_model_len": 128}

PARK = "One day Anna and Ben went to the park."
BEGINNING = f"{STORY} {DOG_TEXT} {PARK}"  # more than two blocks of 32
SHORTER = BEGINNING.replace("The little dog was very happy. ", "", 1)  # another block 1
BURST = [f"{BEGINNING} Anna", f"{BEGINNING} Ben had", f"{SHORTER} Anna", f"{BEGINNING} They"]
SMALL_POOL = [
    f"{STORY} One day Anna said",
    "Ben had a blue ball. The little dog was very happy. One day Ben",
    "The little dog was very happy. Ben had a blue ball. One day Anna",
]
USERS = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]  # notebook 03
LONG = " ".join([USERS[0]] * 9)

FORTY = f"{STORY} The little dog was very happy. {PARK}"  # a block of 32, and 8 tokens more
SHORT = [
    "Ben went to the park.",
    "They had a red ball.",
    "The ball was blue.",
    "Anna was happy.",
    "One day Anna saw a dog.",
]


def make(**options: Any) -> Any:
    """A vLLM with the shipped model."""
    return import_module("vllm").LLM(model=str(TINY), **OPTIONS, **SIZES, **options)


def greedy(max_tokens: int, **more: Any) -> Any:
    """vLLM's parameters for it."""
    return import_module("vllm").SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def burst() -> Trace:
    """Requests with one beginning come together, and one more than may run at once."""
    llm = make(num_gpu_blocks_override=17, max_num_seqs=3, max_num_batched_tokens=128)
    with record(llm) as run:
        llm.generate(BURST, greedy(12), use_tqdm=False)
    return run.trace()


def small_pool() -> Trace:
    """Three requests grow beyond a block each, and the pool has one block too few."""
    llm = make(num_gpu_blocks_override=6, max_num_seqs=3, max_num_batched_tokens=64)
    with record(llm) as run:
        llm.generate(SMALL_POOL, greedy(24), use_tqdm=False)
    return run.trace()


def long_prompt() -> Trace:
    """Three users get their tokens; then comes a prompt that needs several steps."""
    llm = make(num_gpu_blocks_override=17, max_num_seqs=4, max_num_batched_tokens=32)
    engine = llm.llm_engine
    with record(llm) as run:
        for name, prompt in zip("ABC", USERS, strict=True):
            engine.add_request(name, prompt, greedy(20))
        for _ in range(5):
            engine.step()
        engine.add_request("L", LONG, greedy(6))
        while engine.has_unfinished_requests():
            engine.step()
    return run.trace()


def came_back() -> Trace:
    """A prompt of more than a block, then five short ones in turn, and the first one again."""
    llm = make(num_gpu_blocks_override=6, max_num_seqs=3, max_num_batched_tokens=64)
    engine = llm.llm_engine
    short = {f"s{number}": prompt for number, prompt in enumerate(SHORT, 1)}
    with record(llm) as run:
        for name, prompt in {"A": FORTY, **short, "again": FORTY}.items():
            engine.add_request(name, prompt, greedy(3))
            while engine.has_unfinished_requests():
                engine.step()
    return run.trace()


MADE: dict[str, Callable[[], Trace]] = {
    "burst": burst,
    "small_pool": small_pool,
    "long_prompt": long_prompt,
    "came_back": came_back,
}


def logits() -> dict[str, Any]:
    """What vLLM's model gives for each token that it says to the prompts of notebooks 02 to 04."""
    torch, vocabulary = import_module("torch"), load_tokenizer().get_vocab_size()
    llm = make(max_logprobs=vocabulary, logprobs_mode="raw_logits")
    params = greedy(12, ignore_eos=True, logprobs=vocabulary)
    found = {}
    for number, output in enumerate(llm.generate(USERS, params, use_tqdm=False)):
        rows = [
            [one[token].logprob for token in range(vocabulary)]
            for one in output.outputs[0].logprobs
        ]
        found[f"prompt.{number}"] = torch.tensor(output.prompt_token_ids)
        found[f"logits.{number}"] = torch.tensor(rows)
    return found


def without_times(trace: Trace) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """What two recordings of one run have in common."""
    times = ("time", "arrival")

    def values(event: Event) -> tuple[Any, ...]:
        return tuple(getattr(event, name) for name in event.__match_args__ if name not in times)

    return dict(trace.settings), [(type(event), values(event)) for event in trace.events]


def check_odd_cases() -> None:
    """AssertionError if samples, stop strings, aborts or errors are not recorded as they are."""
    # a seeded request whose prompt runs in parts makes vLLM 0.32 fail on a CPU: one step has room
    llm = make(num_gpu_blocks_override=17, max_num_seqs=4, max_num_batched_tokens=128)
    engine, text = llm.llm_engine, BURST[0]
    three = import_module("vllm").SamplingParams(n=3, temperature=1, seed=1, max_tokens=5)
    with record(llm) as run:
        llm.generate([text, text], [three, greedy(40, stop=["kite"])], use_tqdm=False)
    ends = {e.request_id: (e.reason, e.detail) for e in run.events if isinstance(e, Finished)}
    assert ends.pop("r1") == ("stop", "kite"), ends
    assert ends == {name: ("length", None) for name in ("r0", "r0.1", "r0.2")}, ends
    replay(run.events)
    with record(engine) as run:
        for name in ("me", "you"):
            engine.add_request(name, text, greedy(5))
        engine.step()
        engine.abort_request(["me"])
        while engine.has_unfinished_requests():
            engine.step()
    ends = {e.request_id: (e.reason, e.detail) for e in run.events if isinstance(e, Finished)}
    assert ends == {"me": ("abort", None), "you": ("length", None)}, ends
    assert not replay(run.events).unfinished().requests
    known = list(vars(engine))
    try:
        with record(llm):
            raise KeyError
    except KeyError:
        assert list(vars(engine)) == known and "step" not in known, "vLLM is not as it was"


def main() -> None:
    """Makes the runs, and writes or compares them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    is_check = parser.parse_args().check
    os.environ |= SETTINGS
    for name, run in MADE.items():
        trace = run()
        gc.collect()
        replay(trace.events)
        if is_check:
            same = without_times(trace) == without_times(recorded_run(name))
            assert same, f"{name}: vLLM decides otherwise than in the run that ships"
        else:
            trace.save(RUNS / f"{name}.json")
        print(f"{name}: {trace.num_steps} steps, {len(trace.to_json()) / 1000:.1f} KB")
    found = logits()
    if is_check:
        recorded = load_file(LOGITS)
        for name, values in found.items():
            import_module("torch").testing.assert_close(values, recorded[name], rtol=0, atol=1e-4)
        check_odd_cases()
    else:
        save_file(found, LOGITS)


if __name__ == "__main__":
    main()
