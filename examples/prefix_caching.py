"""Prompts that begin alike: what is computed once is found in the cache afterwards.

On vLLM: change `tutorial_engine` to `vllm` in the import line.
"""

from pathlib import Path

from tutorial_engine import LLM, SamplingParams

MODEL = Path(__file__).parents[1] / "tutorial_engine" / "tiny" / "checkpoint"
STORY = (
    "Once upon a time Raba had a big apple. Rade had an old coat. One day Raba and Rade went "
    "to the garden. Rade wanted to play with the big apple, but Raba said no. Then Raba was sad. "
)
PARAMS = SamplingParams(temperature=0, max_tokens=12)


def ask(llm: LLM, prompts: list[str]) -> None:
    """Say how much of each prompt was found, and what it is continued with."""
    for output in llm.generate(prompts, PARAMS, use_tqdm=False):
        tokens = len(output.prompt_token_ids)
        print(f"{output.num_cached_tokens:3} of {tokens} found: {output.outputs[0].text!r}")


def main() -> None:
    """The same beginning again and again, with one way to forget it."""
    llm = LLM(
        model=str(MODEL),
        dtype="float32",
        max_model_len=320,
        block_size=32,  # only whole blocks are found: 32, 64, 96 ... tokens
        enable_prefix_caching=True,
        enforce_eager=True,
    )
    print("nobody was here before:")
    ask(llm, [STORY + "One day"])
    print("the same story, other ends; none of them computes the story again:")
    ask(llm, [STORY + "Then", STORY + "Her friend Ben", STORY + "One day"])
    print("another first word changes all that follows, so nothing is found:")
    ask(llm, ["Well, " + STORY + "One day"])
    print("forgotten:", llm.reset_prefix_cache())
    print("all at once: the first computes the story, and the others wait for nothing:")
    ask(llm, [STORY + "Then", STORY + "Her friend Ben", STORY + "One day"])


if __name__ == "__main__":  # vLLM may start processes of its own, which read this file again
    main()
