"""Several prompts at once, and what comes back for each.

On vLLM: change `tutorial_engine` to `vllm` in the import line.
"""

from pathlib import Path

from tutorial_engine import LLM, SamplingParams

MODEL = Path(__file__).parents[1] / "tutorial_engine" / "tiny" / "checkpoint"
PROMPTS = ["Once upon a time", "Anna had a red kite. One day", "Ben had a blue ball."]


def main() -> None:
    """Load the model once, ask it once, print every answer."""
    # On a CPU, vLLM takes blocks of 32, 64, ... tokens. eager: do not compile the model first.
    llm = LLM(
        model=str(MODEL), dtype="float32", max_model_len=320, block_size=32, enforce_eager=True
    )
    # Temperature 0 is greedy: always the likeliest token. (vLLM's default is 1.0; so state it.)
    params = SamplingParams(temperature=0, max_tokens=40)

    # All prompts in one call: the engine runs them together. The outputs keep their order.
    for output in llm.generate(PROMPTS, params):
        answer = output.outputs[0]  # there are n of them, and n is 1 here
        print(f"prompt: {output.prompt!r}, {len(output.prompt_token_ids)} tokens")
        print(f"answer: {answer.text!r}, {len(answer.token_ids)} tokens")
        print(f"ended:  {answer.finish_reason}")  # "length": max_tokens; "stop": the text's own end
        print()


if __name__ == "__main__":  # vLLM may start processes of its own, which read this file again
    main()
