"""llama.cpp as a contender, where its Python packages are installed.

Writes the weights as a GGUF file and drives llama.cpp's batch interface as its own server does:
every sequence that decodes gets its token, the room that is left goes to prompts. Knows both
formats' names; knows no text. `llama_cpp` and `gguf` are imported inside functions.
"""

import ctypes
import importlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tools.bench.race import Answer, Asked, longest_request
from tutorial_engine.model.config import ModelConfig

PACKAGES = ("llama_cpp", "gguf")
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}  # ours -> GGML's
MICRO_BATCH = 512  # tokens that llama.cpp computes at once; its own default
# Hugging Face's name of a weight -> GGUF's
LAYER = re.compile(r"model\.layers\.(\d+)\.(?:self_attn\.|mlp\.)?(\w+)\.weight")
PARTS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
PARTS |= {f"{part}_proj": f"attn_{part}" for part in "qkv"} | {"o_proj": "attn_output"}
PARTS |= {f"{part}_norm": f"attn_{part}_norm" for part in "qk"}
PARTS |= {f"{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def why_not() -> str:
    """Why there is no llama.cpp here, as a sentence; "" when there is."""
    try:
        for package in PACKAGES:
            importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # the latter two: its shared library
        return f"skipped: {error} (python -m pip install llama-cpp-python gguf)"
    return ""


def write_gguf(folder: Path, file: Path, dtype: torch.dtype) -> None:
    """A checkpoint as llama.cpp reads it; a finished file is kept. Norms are fp32.

    The file has no tokenizer: the benchmark speaks in ids. ValueError for what GGUF's Qwen3 lacks.
    """
    if file.is_file():
        return
    gguf = importlib.import_module("gguf")
    config = ModelConfig.from_pretrained(folder)
    if not config.qk_norm or config.qkv_bias or config.o_bias:
        raise ValueError("this file is for llama.cpp's qwen3, without biases: race such a model")
    unfinished = file.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, "qwen3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in gguf_tensors(folder, config.tie_word_embeddings):
        kind = TYPES[dtype] if tensor.ndim == 2 else "F32"
        raw = tensor.to(dtype)  # as the others get it, norms too
        raw = raw.float() if kind == "F32" else raw
        data = raw.contiguous().view(torch.uint8).numpy()  # numpy has no bfloat16
        writer.add_tensor(name, data, raw_dtype=getattr(gguf.GGMLQuantizationType, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(file)


def gguf_tensors(folder: Path, tied: bool) -> Iterator[tuple[str, Tensor]]:
    """(GGUF name, weight) of a checkpoint. KeyError for a name that GGUF's Qwen3 lacks."""
    for file in sorted(folder.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            layer = LAYER.fullmatch(name)
            if layer:
                yield f"blk.{layer[1]}.{PARTS[layer[2]]}.weight", weight
            elif not (tied and name == "lm_head.weight"):
                yield WHOLE[name], weight


@cache
def _silence() -> Any:
    """A log callback that says nothing. One for the process: C calls it when its maker is gone."""
    return importlib.import_module("llama_cpp").llama_log_callback(lambda *_: None)


@dataclass
class _Slot:
    """One sequence: what it wants, how much of it is in the cache, and what came."""

    seq_id: int
    asked: Asked
    num_cached: int = 0
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def next_ids(self, room: int) -> Sequence[int]:
        """The next tokens to run: its newest one, or up to `room` of its prompt."""
        if self.tokens:
            return self.tokens[-1:]
        return self.asked.prompt[self.num_cached : self.num_cached + room]


class LlamaCpp:
    """llama.cpp on the CPU with as many threads as torch has, a sequence for each request.

    Its cache holds fp32 for fp32 weights, and else fp16, its default. It prefers flash attention,
    which rounds more. ValueError when it cannot load the file.
    """

    def __init__(self, file: Path, dtype: torch.dtype, requests: Sequence[Asked]) -> None:
        self._lib = lib = importlib.import_module("llama_cpp")
        lib.llama_log_set(_silence(), ctypes.c_void_p())
        lib.llama_backend_init()
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._context = self._batch = None
        self._model = lib.llama_model_load_from_file(str(file).encode(), model_params)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {file}: delete it, to have it written again")
        params = lib.llama_context_default_params()
        params.n_seq_max = len(requests)
        params.n_ctx = longest_request(requests) * len(requests)
        params.n_batch = self._room = max(MICRO_BATCH, len(requests))
        params.n_ubatch = MICRO_BATCH
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        kind = "F32" if dtype == torch.float32 else "F16"
        params.type_k = params.type_v = getattr(lib, f"GGML_TYPE_{kind}")
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            self.close()
            raise ValueError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        self._batch = lib.llama_batch_init(self._room, 0, 1)
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        weights = f"{TYPES[dtype]} weights, {kind} K/V, flash attention"
        self.told = f"{weights}, {params.n_threads} threads"

    def serve(self, requests: Sequence[Asked]) -> Sequence[Answer]:
        began = time.perf_counter()
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)
        slots = [_Slot(i, request) for i, request in enumerate(requests)]
        while left := [slot for slot in slots if len(slot.tokens) < slot.asked.new_tokens]:
            for slot in self._step(left):
                slot.seconds.append(time.perf_counter() - began)
        return [Answer(tuple(slot.tokens), tuple(slot.seconds)) for slot in slots]

    def _step(self, slots: Sequence[_Slot]) -> list[_Slot]:
        """One batch, decodes first → those that got a token, having run all they have."""
        batch: Any = self._batch
        batch.n_tokens = 0
        rows: list[tuple[_Slot, int]] = []  # (slot, row whose logits choose its next token)
        for slot in sorted(slots, key=lambda slot: not slot.tokens):
            for token in slot.next_ids(self._room - batch.n_tokens):
                i = batch.n_tokens
                batch.token[i], batch.pos[i], batch.logits[i] = token, slot.num_cached, 0
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, slot.seq_id
                batch.n_tokens += 1
                slot.num_cached += 1
            if slot.num_cached == len(slot.asked.prompt) + len(slot.tokens):
                batch.logits[batch.n_tokens - 1] = 1
                rows.append((slot, batch.n_tokens - 1))
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise ValueError(f"llama.cpp gave status {status} for {batch.n_tokens} tokens")
        for slot, row in rows:
            slot.tokens.append(int(self._logits(row).argmax()))
        return [slot for slot, _ in rows]

    def _logits(self, row: int) -> Tensor:
        """Logits [V] of a row of the last batch, a view that the next call overwrites."""
        pointer = self._lib.llama_get_logits_ith(self._context, row)
        numbers = (ctypes.c_float * self._vocab_size).from_address(
            ctypes.addressof(pointer.contents)
        )
        return torch.frombuffer(numbers, dtype=torch.float32)

    def close(self) -> None:
        """Free the batch, the context and the model."""
        if self._batch:
            self._lib.llama_batch_free(self._batch)
        if self._context:
            self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)
        self._batch = self._context = self._model = None
