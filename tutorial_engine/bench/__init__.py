"""Introduced in notebook 02. Speed as a ratio to others': `python -m tutorial_engine.bench`.

Knows how to time engines fairly: one process, the same weights, interleaved rounds, medians,
checked answers, and beside them the machine's own limits. The order to read: roofline, measure,
contenders, llama_cpp, shapes, report, __main__. It knows one request at a time, and no quality.
"""
