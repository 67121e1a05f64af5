"""Speed as a ratio to others': `python -m tools.bench`.

Knows how to time engines fairly: one process, the same weights, interleaved rounds, medians,
checked answers, and beside them the machine's own limits. The order to read: roofline,
one_forward, sizing, measure, contenders, llama_cpp, shapes; of many requests at once serving,
servers, llama_server, scheduler_cost; report, __main__. It knows no quality.
"""
