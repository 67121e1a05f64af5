"""Introduced in notebook 02. From logits to a token, and from tokens to "that was the last one".

What a request asks for (`SamplingParams`), who draws its tokens (`Sampler`), and who reads the text
for a reason to stop (`StopChecker`). It knows one row of logits at a time; no model, no cache, no
queue.
"""

from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import (
    SampledToken,
    Sampler,
    filter_logits,
    min_p,
    top_k,
    top_p,
)
from tutorial_engine.sampling.stopping import Finish, StopChecker

__all__ = [
    "Finish",
    "SampledToken",
    "Sampler",
    "SamplingParams",
    "StopChecker",
    "filter_logits",
    "min_p",
    "top_k",
    "top_p",
]
