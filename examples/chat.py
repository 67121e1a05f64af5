"""Talk to a model in the terminal: python examples/chat.py FOLDER (`make chat` brings a real one).

Ctrl-C ends an answer; at the question it ends the program, as Ctrl-D does.
On vLLM: change `tutorial_engine` to `vllm` in the import line, and set
VLLM_ENABLE_V1_MULTIPROCESSING=0.
"""

import sys
import time
from pathlib import Path

from jinja2 import Template

from tutorial_engine import LLM, SamplingParams


def answer(llm: LLM, prompt: list[int], params: SamplingParams) -> str:
    """Run one request, print its text as it comes, and then what it took → the text."""
    engine, text, began = llm.llm_engine, "", time.perf_counter()
    engine.add_request("turn", {"prompt_token_ids": prompt}, params)
    first = output = None
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():  # a part of a long prompt brings no token yet
                first = first or time.perf_counter()
                print(output.outputs[0].text[len(text) :], end="", flush=True)
                text = output.outputs[0].text
    except KeyboardInterrupt:
        engine.abort_request(["turn"])
        while engine.has_unfinished_requests():
            engine.step()
    if output is not None and first is not None:
        tokens, seconds = len(output.outputs[0].token_ids), time.perf_counter() - first
        found = output.num_cached_tokens or 0
        print(f"\n[{len(prompt)} tokens in the prompt, {found} of them found in the cache;", end="")
        print(f" first token after {first - began:.2f} s, {(tokens - 1) / seconds:.0f} tokens/s]")
    return text


def main() -> None:
    """Ask, answer, and keep the conversation: it is the beginning of the next prompt."""
    folder = Path(sys.argv[1])
    # On a CPU, vLLM takes blocks of 32, 64, ... tokens. eager: do not compile the model first.
    llm = LLM(str(folder), dtype="float32", block_size=32, enforce_eager=True)
    template = Template((folder / "chat_template.jinja").read_text(encoding="utf-8"))
    params, messages = SamplingParams(temperature=0, max_tokens=500), []
    print("The conversation is kept. Ctrl-C ends an answer, and here the program.")
    while True:
        try:
            question = input("\nyou: ").strip()
        except (EOFError, KeyboardInterrupt):
            return print()
        if not question:
            continue
        messages.append({"role": "user", "content": question})
        text = template.render(messages=messages, add_generation_prompt=True)
        ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
        print("model: ", end="")
        said = answer(llm, getattr(ids, "ids", ids), params)  # a list of ids, on vLLM
        messages.append({"role": "assistant", "content": said})


if __name__ == "__main__":
    main()
