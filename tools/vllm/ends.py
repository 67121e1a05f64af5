"""The requests of record_ends.py, ended here again, and what differs.

tests/test_vllm_ends.py asks it of the recording that is stored, and `make vllm` of a new one.
"""

import gzip
import json
from pathlib import Path
from typing import Any

from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.request import CompletionOutput
from tutorial_engine.model.checkpoint import load_tokenizer
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams

Case = dict[str, Any]
TOLERANCE = 2e-3  # of a logprob: fp32, and other kernels


def read(file: Path) -> list[Case]:
    """The requests of a recording, with vLLM's answers."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        cases: list[Case] = json.load(lines)["requests"]
    return cases


def answers(model: CausalLM, cases: list[Case]) -> list[Case]:
    """The same requests here, those with the same ends of text in one engine."""
    found: dict[int, CompletionOutput] = {}
    for ends in {tuple(case["eos_token_ids"]) for case in cases}:
        mine = [i for i, case in enumerate(cases) if tuple(case["eos_token_ids"]) == ends]
        limits = EngineConfig(max_model_len=320)
        engine = LLMEngine(model, load_tokenizer(), limits, eos_token_ids=ends)
        params = [SamplingParams(temperature=0, **cases[i]["params"]) for i in mine]
        outputs = engine.generate([cases[i]["prompt"] for i in mine], params)
        found |= {i: output.outputs[0] for i, output in zip(mine, outputs, strict=True)}
    return [
        {name: getattr(found[i], name) for name in case["answer"]} for i, case in enumerate(cases)
    ]


def difference(ours: Case, theirs: Case) -> str:
    """What differs: text, ids, why it ended, or the text of a token; empty where nothing does."""
    for name in ("text", "token_ids", "finish_reason", "stop_reason"):
        if ours[name] != theirs[name]:
            return f"{name}: {ours[name]!r}, vLLM says {theirs[name]!r}"
    for ours_at, theirs_at in zip(ours["logprobs"] or (), theirs["logprobs"] or (), strict=True):
        told = {str(i): [one.rank, one.decoded_token] for i, one in ours_at.items()}
        wanted = {i: [rank, text] for i, (_, rank, text) in theirs_at.items()}
        if told != wanted:
            return f"tokens at one place: {told}, vLLM says {wanted}"
        for i, (logprob, _, _) in theirs_at.items():
            if abs(ours_at[int(i)].logprob - logprob) > TOLERANCE:
                return f"logprob of {i}: {ours_at[int(i)].logprob}, vLLM says {logprob}"
    return ""
