"""Introduced in notebook 01. The model of the Llama family: from token ids to logits.

A batch of tokens laid end to end, rotary positions, layers, attention, the decoder, and the files
that its weights are read from. It knows no cache, no request and no text beyond the tokenizer file:
attention asks "give me all keys and values" and does not know who answers.
"""

from tutorial_engine.model.attention import (
    NaiveAttention,
    NoCache,
    SdpaAttention,
    causal_mask,
    naive_attention,
)
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer
from tutorial_engine.model.config import ModelConfig, RopeScaling
from tutorial_engine.model.decoder import CausalLM, DecoderLayer, SelfAttention
from tutorial_engine.model.fast import use_fast_layers
from tutorial_engine.model.layers import RMSNorm
from tutorial_engine.model.rope import (
    RotaryEmbedding,
    apply_rope,
    inverse_frequencies,
    scaled_frequencies,
)

__all__ = [
    "TINY",
    "Batch",
    "CausalLM",
    "DecoderLayer",
    "ModelConfig",
    "NaiveAttention",
    "NoCache",
    "RMSNorm",
    "RopeScaling",
    "RotaryEmbedding",
    "SdpaAttention",
    "SelfAttention",
    "apply_rope",
    "causal_mask",
    "inverse_frequencies",
    "load_model",
    "load_tokenizer",
    "naive_attention",
    "scaled_frequencies",
    "use_fast_layers",
]
