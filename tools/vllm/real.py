"""Eight chats with a real model on vLLM and a text of notebook 06, as JSON: all their tokens.

    .venv-vllm/bin/python -P tools/vllm/real.py CHECKPOINT OUT.json

Runs inside vLLM's environment and imports nothing of this repository.
"""

import json
import sys

NUM_TOKENS = 60
TEXT, TEXT_TOKENS = "The capital of France is the city of", 20
CHATS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Who was Ada Lovelace?",
    "Explain photosynthesis in one sentence.",
    "Count from one to ten.",
    "What is 2+2?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
)


def main() -> None:
    """Ask all eight at once, and write one file."""
    import vllm

    checkpoint, path = sys.argv[1:]
    llm = vllm.LLM(
        checkpoint, dtype="float32", enforce_eager=True, max_model_len=2048, block_size=32
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    chats = [[{"role": "user", "content": text}] for text in CHATS]
    outputs = llm.chat(chats, params, use_tqdm=False)
    after = vllm.SamplingParams(temperature=0, max_tokens=TEXT_TOKENS)
    (text,) = llm.generate([TEXT], after, use_tqdm=False)
    told = {
        "after_text": list(text.outputs[0].token_ids),
        "prompt_token_ids": [list(output.prompt_token_ids) for output in outputs],
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "text": [output.outputs[0].text for output in outputs],
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(told, file)


if __name__ == "__main__":
    main()
