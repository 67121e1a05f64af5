"""Speed as a ratio to others': `python -m tools.bench` (or `make bench`).

One process, the same weights, interleaved rounds, medians, checked answers, and beside them the
machine's own limits. The order to read: race, contenders, llama, memory, report, __main__; record
makes the tables, for the screen and for docs/bench/README.md; plots draws.
"""
