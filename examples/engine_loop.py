"""The loop of a server: requests come while others run, and each text grows step by step.

On vLLM: change `tutorial_engine` to `vllm` in the import line.
"""

from pathlib import Path

from tutorial_engine import EngineArgs, LLMEngine, SamplingParams

MODEL = Path(__file__).parents[1] / "tutorial_engine" / "tiny" / "checkpoint"
COMING = [
    ("anna", "Anna had a red kite. One day", SamplingParams(temperature=0, max_tokens=14)),
    ("ben", "Ben had a blue ball.", SamplingParams(temperature=0, max_tokens=8)),
    ("mia", "Once upon a time", SamplingParams(temperature=0, max_tokens=5)),
]


def main() -> None:
    """Add a request before every second step, step until all are over, print what is new."""
    args = EngineArgs(
        model=str(MODEL), dtype="float32", max_model_len=320, block_size=32, enforce_eager=True
    )
    engine = LLMEngine.from_engine_args(args)
    waiting, shown, step = list(COMING), {name: "" for name, _, _ in COMING}, 0
    while waiting or engine.has_unfinished_requests():
        if waiting and step % 2 == 0:
            engine.add_request(*waiting.pop(0))
        news = []
        # One forward for all. Each output has the whole text so far, so print its end only.
        for output in engine.step():
            name, answer = output.request_id, output.outputs[0]
            end = f" ({answer.finish_reason})" if output.finished else ""
            news.append(f"{name} {answer.text[len(shown[name]) :]!r}{end}")
            shown[name] = answer.text
        print(f"step {step}: " + ", ".join(news))
        step += 1
    print(shown)


if __name__ == "__main__":  # vLLM may start processes of its own, which read this file again
    main()
