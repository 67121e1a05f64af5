"""This engine beside vLLM itself: `make vllm`.

environment sets up .venv-vllm; record, record_ends, record_signatures and serve run inside it and
know nothing of this repository; ends, examples and speed run both engines; __main__ puts all of it
on docs/bench/vllm.md.
"""
