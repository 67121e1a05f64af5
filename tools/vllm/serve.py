"""vLLM behind a pipe: one line of JSON for each batch of requests, one line back.

    .venv-vllm/bin/python -P tools/vllm/serve.py

Runs inside vLLM's environment and imports nothing of this repository. The first line holds the
options of `LLM`; the answer says the version and the threads. Each line after it has "prompts" and
"max_tokens"; the answer has "token_ids". Speed is measured by whoever holds the other end.
"""

import json
import os
import sys
from typing import Any

OUT = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)  # whatever vLLM prints is no answer


def say(answer: dict[str, Any]) -> None:
    """One line to the other end."""
    print(json.dumps(answer), file=OUT, flush=True)


def main() -> None:
    """Load, then answer until the other end is closed."""
    options = json.loads(sys.stdin.readline())
    import torch
    import vllm

    llm = vllm.LLM(**options)
    say({"vllm": vllm.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        asked = json.loads(line)
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in asked["max_tokens"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        say({"token_ids": [list(output.outputs[0].token_ids) for output in outputs]})


if __name__ == "__main__":
    main()
