"""Introduced in notebook 01. The model: from token ids to logits, as Qwen3 checkpoints have it.

A batch of tokens laid end to end, rotary positions, layers, attention, the decoder, and the files
that its weights are read from. It knows no cache, no request and no text beyond the tokenizer file:
attention asks "give me all keys and values" and does not know who answers.
"""

from tutorial_engine.model.attention import NaiveAttention, SdpaAttention, causal_mask
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer
from tutorial_engine.model.config import ModelConfig

__all__ = [
    "TINY",
    "Batch",
    "ModelConfig",
    "NaiveAttention",
    "SdpaAttention",
    "causal_mask",
    "load_model",
    "load_tokenizer",
]
