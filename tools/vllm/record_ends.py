"""How vLLM ends random requests, and the text that it gives for them, as JSON.

    .venv-vllm/bin/python -P tools/vllm/record_ends.py CHECKPOINT OUT.json.gz SEED REQUESTS

Runs inside vLLM's environment and imports nothing of this repository. All requests are greedy. Half
of them run on a copy of the checkpoint whose generation_config.json names more than one end. Their
stop strings are cut from what the model would say. tests/test_vllm_ends.py reads the file.
"""

import gc
import gzip
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import vllm
from vllm import LLM, SamplingParams

NAMES = ["Anna", "Ben", "The little dog", "The big cat", "Mum"]
DEEDS = ["went to the park.", "had a red ball.", "saw a kite.", "was very happy.", "said"]
SIGNS = ["€", "é", "🪁", "日本", "👩\u200d👧", "ü€", "Ω"]  # of several bytes, a token for each
LONGEST = 90  # tokens
OTHER_ENDS = 2  # so many ids beside the tokenizer's own end of text


def prompt(draw: random.Random) -> str:
    """Sentences like those of the training, or signs that come again and again."""
    if draw.random() < 0.25:
        signs = " ".join(draw.choices(SIGNS, k=draw.randrange(1, 3)))
        return (signs + draw.choice([" ", "", "\n"])) * draw.randrange(3, 8) + draw.choice(
            ["", "One"]
        )
    sentences = [f"{draw.choice(NAMES)} {draw.choice(DEEDS)}" for _ in range(draw.randrange(1, 4))]
    return draw.choice([" ", "\n"]).join(sentences)


def stop_strings(draw: random.Random, text: str) -> list[str]:
    """Pieces of this text, some that end together or begin alike, and some that never come."""
    found = []
    for _ in range(draw.randrange(1, 4)):
        end = draw.randrange(1, len(text) + 1)
        piece = text[max(0, end - draw.randrange(1, 9)) : end]
        found.append(piece)
        if draw.random() < 0.4:  # ends in the same place
            found.append(text[max(0, end - draw.randrange(1, 12)) : end])
        if draw.random() < 0.2:  # begins in the same place, or nearly
            found.append(piece[:-1] or piece)
        if draw.random() < 0.2:
            found.append(piece + draw.choice(["!", "\n", "xyz"]))
    if draw.random() < 0.2:
        found.append("\n")
    draw.shuffle(found)
    return [piece for piece in found if piece and "\ufffd" not in piece]


def parameters(draw: random.Random, text: str, token_ids: list[int]) -> dict[str, Any]:
    """One mixture of all that ends a request."""
    most = draw.choice([1, 5, 20, 40, LONGEST, LONGEST])
    asked: dict[str, Any] = {"max_tokens": most}
    if draw.random() < 0.6 and (stop := stop_strings(draw, text)):
        asked["stop"] = stop if len(stop) > 1 or draw.random() < 0.5 else stop[0]
    if draw.random() < 0.4:
        asked["stop_token_ids"] = draw.choices(token_ids, k=draw.randrange(1, 3))
        if draw.random() < 0.2:
            asked["stop_token_ids"].append(0)  # the end of text
    if draw.random() < 0.5:
        asked["min_tokens"] = min(most, draw.choice([1, 2, 4, 8, 16, 30]))
    if draw.random() < 0.5:
        asked["include_stop_str_in_output"] = True
    if draw.random() < 0.4:
        asked["ignore_eos"] = True
    if draw.random() < 0.4:
        asked["logprobs"] = draw.choice([0, 1, 3, 5])
    return asked


def answer(output: Any) -> dict[str, Any]:
    """What is compared: text, ids, why it ended, and each token's own text."""
    of_it = output.outputs[0]
    told = {
        name: getattr(of_it, name) for name in ("text", "finish_reason", "stop_reason", "logprobs")
    }
    if of_it.logprobs is not None:
        told["logprobs"] = [
            {
                token_id: [round(one.logprob, 4), one.rank, one.decoded_token]
                for token_id, one in at.items()
            }
            for at in of_it.logprobs
        ]
    return {"token_ids": list(of_it.token_ids)} | told


def record(folder: Path, draw: random.Random, count: int, ends: list[int]) -> list[dict[str, Any]]:
    """Ask for what the model would say, then for as much of it as random parameters allow."""
    llm = LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=320,
        max_logprobs=10,
        disable_log_stats=True,
    )
    prompts: list[Any] = [prompt(draw) for _ in range(count)]
    free = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
    said = [output.outputs[0] for output in llm.generate(prompts, free, use_tqdm=False)]
    asked = [parameters(draw, one.text or " ", list(one.token_ids)) for one in said]
    params = [SamplingParams(temperature=0, **one) for one in asked]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        {"prompt": p, "params": one, "eos_token_ids": ends, "answer": answer(output)}
        for p, one, output in zip(prompts, asked, outputs, strict=True)
    ]


def main() -> None:
    """Record both halves and write them."""
    source, out, seed, count = sys.argv[1:]
    draw = random.Random(int(seed))
    first = record(Path(source), draw, int(count) // 2, [0])
    gc.collect()
    often = [i for one in first for i in one["answer"]["token_ids"] if i]
    ends = [0, *sorted(set(draw.choices(often, k=OTHER_ENDS)))]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(source, Path(folder, "model")))
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ends[::-1]}))
        second = record(copy, draw, int(count) - len(first), ends)
    told = {"vllm": vllm.__version__, "seed": int(seed), "requests": first + second}
    with gzip.GzipFile(out, "wb", mtime=0) as file:
        file.write(json.dumps(told, separators=(",", ":")).encode())


if __name__ == "__main__":
    main()
