"""When an answer ends and why; and how sure the model was of each token.

On vLLM: change `tutorial_engine` to `vllm` in the import line.
"""

from pathlib import Path

from tutorial_engine import LLM, SamplingParams

MODEL = Path(__file__).parents[1] / "tutorial_engine" / "tiny" / "checkpoint"
PROMPT = "Once upon a time"
GREEDY = {"temperature": 0, "max_tokens": 30}
ENDS = {  # what each does to the same greedy text
    "max_tokens=6": SamplingParams(temperature=0, max_tokens=6),
    "stop='.'": SamplingParams(**GREEDY, stop="."),
    "the same, with the stop string": SamplingParams(
        **GREEDY, stop=".", include_stop_str_in_output=True
    ),
    "the same, after 20 tokens": SamplingParams(**GREEDY, stop=".", min_tokens=20),
    "its own end": SamplingParams(temperature=0, max_tokens=300),
    "ignore_eos": SamplingParams(temperature=0, max_tokens=300, ignore_eos=True),
}


def main() -> None:
    """All these parameters in one call; then a table of likely tokens."""
    llm = LLM(
        model=str(MODEL), dtype="float32", max_model_len=320, block_size=32, enforce_eager=True
    )
    # One prompt each, and parameters of its own: they still run together.
    outputs = llm.generate([PROMPT] * len(ENDS), [*ENDS.values()])
    for name, output in zip(ENDS, outputs, strict=True):
        got = output.outputs[0]
        print(f"{name}: {len(got.token_ids)} tokens, {got.finish_reason}, {got.stop_reason!r}")
        print(f"    ...{got.text[-40:]!r}")

    # logprobs=2: the two likeliest tokens of each place, as natural logarithms. They are those
    # before the temperature. Two engines differ in their last digits, so round them.
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    got = llm.generate(PROMPT, params)[0].outputs[0]
    for token_id, known in zip(got.token_ids, got.logprobs, strict=True):
        best = [f"{one.decoded_token!r} {one.logprob:.2f}" for one in known.values()]
        print(f"token {token_id}, rank {known[token_id].rank}: " + ", ".join(best))
    print(f"all {len(got.token_ids)} together: {got.cumulative_logprob:.2f}")


if __name__ == "__main__":  # vLLM may start processes of its own, which read this file again
    main()
