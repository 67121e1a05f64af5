"""This engine beside vLLM itself: `make vllm`.

environment sets up .venv-vllm; record and serve run inside it and know nothing of this repository;
examples and speed run both engines; __main__ puts all of it on docs/bench/vllm.md.
"""
