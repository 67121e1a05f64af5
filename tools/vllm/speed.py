"""Tokens a second: the same requests in this engine and in vLLM, in turns.

Both are used through `LLM` with the same options. vLLM runs in processes of its own, which wait
while others are timed. The race, its medians and its checks are those of tools/bench.
"""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from tools.bench.contenders import checkpoint_folders
from tools.bench.race import OURS, Answer, Asked, Contender, race
from tools.bench.report import Figures, many_requests
from tools.vllm import environment
from tutorial_engine.engine.llm import LLM
from tutorial_engine.lab.workload import ragged
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.sampling.params import SamplingParams

EAGER, COMPILED = "vLLM eager", "vLLM compiled"
NUM_REQUESTS, PROMPTS, OUTPUTS = 8, (32, 160), (16, 48)  # tokens of each, from and to
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 320,
    "max_num_seqs": NUM_REQUESTS,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "num_gpu_blocks_override": NUM_REQUESTS * 10 + 1,
    "enable_prefix_caching": False,  # every round asks the same again
}
SCRIPT = Path(__file__).with_name("serve.py")


class Ours:
    """This engine, as a script uses it."""

    def __init__(self, folder: Path) -> None:
        self.llm = LLM(folder, **OPTIONS)

    def serve(self, requests: Sequence[Asked]) -> Sequence[Answer]:
        params = [
            SamplingParams(temperature=0, max_tokens=one.new_tokens, ignore_eos=True)
            for one in requests
        ]
        prompts = [list(one.prompt) for one in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [Answer(tuple(output.outputs[0].token_ids)) for output in outputs]


class Vllm:
    """vLLM in a process of its own. RuntimeError, with its last words, where it does not run."""

    def __init__(self, folder: Path, is_eager: bool) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [environment.PYTHON, "-P", SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment.settings(torch.get_num_threads()),
        )
        model = {"model": str(folder), "enforce_eager": is_eager}
        self.told = self._ask(OPTIONS | model)

    def serve(self, requests: Sequence[Asked]) -> Sequence[Answer]:
        answer = self._ask(
            {
                "prompts": [one.prompt for one in requests],
                "max_tokens": [one.new_tokens for one in requests],
            }
        )
        return [Answer(tuple(token_ids)) for token_ids in answer["token_ids"]]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended: the empty answer says so
            print(json.dumps(question), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            raise RuntimeError("vLLM ended: " + self._said.read()[-1500:].strip())
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(shape: str, rounds: int) -> Figures:
    """The race on the shipped weights ("tiny") or on random ones of a shape, as plain figures."""
    with ExitStack() as stack:
        folder = stack.enter_context(checkpoint_folders(shape, None)).weights
        vocab_size = ModelConfig.from_pretrained(folder).vocab_size
        arrivals = ragged(NUM_REQUESTS, vocab_size, prompt_lens=PROMPTS, output_lens=OUTPUTS)
        requests = [Asked(tuple(map(int, a.prompt)), a.params.max_tokens) for a in arrivals]
        everyone: dict[str, Contender] = {OURS: Ours(folder)}
        failed: dict[str, str] = {}
        told: dict[str, Any] = {}
        for name in (EAGER, COMPILED):
            try:
                vllm = Vllm(folder, name == EAGER)
            except RuntimeError as error:
                failed[name] = str(error).splitlines()[-1]
                continue
            stack.callback(vllm.close)
            everyone[name], told = vllm, vllm.told
        done = race(everyone, requests, rounds, optional={EAGER, COMPILED})
        found = many_requests(done, OURS)
        return found | {"shape": shape, "told": told, "failed": found["failed"] | failed}
