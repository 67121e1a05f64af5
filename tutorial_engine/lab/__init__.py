"""Introduced in notebook 01. Instruments around the engine: they measure, compare and prove.

`doctor` (notebook 01) looks at this machine; `ledger` and `hf` (02) compare every way through the
engine with every other and with transformers; `roofline`, `one_forward` and `sizing` count what a
forward and a model need, and measure what this machine gives; `workload` (03) lets requests come
over time, and `static_batch` says when they were answered once; `layouts`, `dial` and `block_size`
(04) compare orders of memory and block sizes, `hit_rate`, `when_full`, `pool_log` and `shift`
answer what users ask.
The engine knows none of them.
Nothing is handed out here: the doctor has to run, and to say so, where torch is not installed.
"""
