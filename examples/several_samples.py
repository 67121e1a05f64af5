"""Several continuations of one prompt, drawn at random.

On vLLM: change `tutorial_engine` to `vllm` in the import line.

Each engine has its own random numbers, so the drawn texts differ from engine to engine; here they
are printed only with `--texts`. What is printed always is what holds in both.
"""

import sys
from pathlib import Path

from tutorial_engine import LLM, SamplingParams

MODEL = Path(__file__).parents[1] / "tutorial_engine" / "tiny" / "checkpoint"
PROMPT = "Once upon a time"


def main() -> None:
    """Draw three, draw them again, and draw where there is nothing to choose."""
    llm = LLM(
        model=str(MODEL), dtype="float32", max_model_len=320, block_size=32, enforce_eager=True
    )
    warm = SamplingParams(n=3, temperature=1.0, top_p=0.95, seed=1, max_tokens=24, ignore_eos=True)
    first, again = llm.generate([PROMPT, PROMPT], warm)  # a seed belongs to its request
    for one in first.outputs:
        print(f"sample {one.index}: {len(one.token_ids)} tokens, {one.finish_reason}")
        if "--texts" in sys.argv:
            print(f"    {one.text!r}")
    texts = [one.text for one in first.outputs]
    print("different texts:", len(set(texts)))
    print("the same again with the same seed:", texts == [one.text for one in again.outputs])

    # top_k=1 leaves one token to draw from: any temperature and seed give the greedy text.
    narrow = SamplingParams(n=2, temperature=1.0, top_k=1, max_tokens=24)
    greedy = SamplingParams(temperature=0, max_tokens=24)
    drawn, sure = llm.generate([PROMPT, PROMPT], [narrow, greedy])
    for one in [*drawn.outputs, *sure.outputs]:
        print(repr(one.text))


if __name__ == "__main__":  # vLLM may start processes of its own, which read this file again
    main()
