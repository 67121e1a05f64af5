"""Introduced in notebook 02. llama.cpp as a contender, where its Python packages are installed.

Writes our weights as a GGUF file and drives llama.cpp's C interface: a prompt, then token by token.
Knows both formats' names; knows no text. `llama_cpp` and `gguf` are imported inside functions.
"""

import ctypes
import importlib
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutorial_engine.bench.measure import Generated
from tutorial_engine.model.checkpoint import load_model
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

NAME = "llama.cpp"
PACKAGES = ("llama_cpp", "gguf")
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}  # ours -> GGML's
MICRO_BATCH = 512  # tokens that llama.cpp computes at once; its own default


def why_not() -> str:
    """Why there is no llama.cpp here, as a sentence; "" when there is."""
    try:
        for package in PACKAGES:
            importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # the latter two: its shared library
        absent = isinstance(error, ModuleNotFoundError)
        reason = "not installed" if absent else f"cannot be imported ({error})"
        return f"{NAME}: {reason}, skipped (python -m pip install llama-cpp-python gguf)"
    return ""


def write_gguf(folder: Path, file: Path, dtype: torch.dtype) -> None:
    """Our checkpoint as llama.cpp reads it; a finished file is kept. Norms and biases are fp32.

    The file has no tokenizer: the benchmark speaks in ids. ValueError for what GGUF's Qwen3 lacks.
    """
    if file.is_file():
        return
    gguf = importlib.import_module("gguf")
    model = load_model(folder, dtype=dtype, fast=False)
    config = model.config
    if config.attention_bias:
        raise ValueError("llama.cpp's qwen3 has no attention_bias: race a model without")
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
    for name, tensor in gguf_tensors(model):
        kind = TYPES[dtype] if tensor.ndim == 2 else "F32"
        raw = tensor.float() if kind == "F32" else tensor
        data = raw.contiguous().view(torch.uint8).numpy()  # numpy has no bfloat16
        writer.add_tensor(name, data, raw_dtype=getattr(gguf.GGMLQuantizationType, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(file)


def gguf_tensors(model: Qwen3ForCausalLM) -> Iterator[tuple[str, Tensor]]:
    """(GGUF name, weight) of a plain model; what we hold merged is taken apart again."""
    decoder = model.model
    yield "token_embd.weight", decoder.embed_tokens.weight
    for i, layer in enumerate(decoder.layers):
        own: Any = layer
        attention, mlp = own.self_attn, own.mlp
        sizes = (attention.q_size, attention.kv_size, attention.kv_size)
        q, k, v = attention.qkv_proj.weight.split(sizes)
        gate, up = mlp.gate_up_proj.weight.chunk(2)
        weights = {
            "attn_norm": own.input_layernorm.weight,
            "attn_q": q,
            "attn_k": k,
            "attn_v": v,
            "attn_q_norm": attention.q_norm.weight,
            "attn_k_norm": attention.k_norm.weight,
            "attn_output": attention.o_proj.weight,
            "ffn_norm": own.post_attention_layernorm.weight,
            "ffn_gate": gate,
            "ffn_up": up,
            "ffn_down": mlp.down_proj.weight,
        }
        yield from ((f"blk.{i}.{name}.weight", weight) for name, weight in weights.items())
    yield "output_norm.weight", decoder.norm.weight
    if not model.config.tie_word_embeddings:
        yield "output.weight", model.lm_head.weight


@cache
def _silence() -> Any:
    """A log callback that says nothing. One for the process: C calls it when its maker is gone."""
    return importlib.import_module("llama_cpp").llama_log_callback(lambda *_: None)


class LlamaCpp:
    """llama.cpp on the CPU with as many threads as torch has; close() gives its memory back.

    Its cache holds fp32 for fp32 weights, and else fp16, its default. flash=False forbids the flash
    attention that llama.cpp prefers, which rounds more. ValueError when it cannot load the file.
    """

    def __init__(
        self,
        file: Path,
        dtype: torch.dtype,
        max_len: int,
        flash: bool = True,
        num_seqs: int = 1,
    ) -> None:
        self._lib = lib = importlib.import_module("llama_cpp")
        lib.llama_log_set(_silence(), ctypes.c_void_p())
        lib.llama_backend_init()
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(str(file).encode(), model_params)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {file}: delete it, to have it written again")
        params = lib.llama_context_default_params()
        params.n_seq_max, params.n_ctx = num_seqs, max_len * num_seqs
        params.n_batch = max_len if num_seqs == 1 else max(MICRO_BATCH, num_seqs)
        params.n_ubatch = min(params.n_batch, MICRO_BATCH)
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        kind = "F32" if dtype == torch.float32 else "F16"
        params.type_k = params.type_v = getattr(lib, f"GGML_TYPE_{kind}")
        if not flash:
            params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            self.close()
            raise ValueError(f"llama.cpp cannot make a context of {num_seqs} x {max_len} tokens")
        vocab = lib.llama_model_get_vocab(self._model)
        self._vocab_size = lib.llama_vocab_n_tokens(vocab)
        attention = "flash attention" if flash else "plain attention"
        self.told = f"{TYPES[dtype]} weights, {kind} K/V, {attention}, {params.n_threads} threads"

    def generate(self, ids: Sequence[int], new_tokens: int) -> Generated:
        """As Contender.generate."""
        tokens: list[int] = []
        seconds: list[float] = []
        began = time.perf_counter()
        self._forget()
        logits = self._run(ids)
        while True:
            tokens.append(int(logits.argmax()))
            seconds.append(time.perf_counter() - began)
            if len(tokens) == new_tokens:
                return Generated(tuple(tokens), tuple(seconds))
            logits = self._run(tokens[-1:])

    def last_logits(self, ids: Sequence[int]) -> Tensor:
        """As Contender.last_logits."""
        self._forget()
        return self._run(ids).clone()[None]

    def close(self) -> None:
        """Free the context and the model."""
        if self._context:
            self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)
        self._context = self._model = None

    def _forget(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)

    def _run(self, ids: Sequence[int]) -> Tensor:
        """The next tokens → logits [V] of the last, a view that the next call overwrites."""
        array = (ctypes.c_int32 * len(ids))(*ids)
        status = self._lib.llama_decode(
            self._context, self._lib.llama_batch_get_one(array, len(ids))
        )
        if status != 0:
            raise ValueError(f"llama.cpp gave status {status} for {len(ids)} tokens")
        return self._logits(-1)

    def _logits(self, row: int) -> Tensor:
        """Logits [V] of a row of the last batch, a view that the next call overwrites."""
        pointer = self._lib.llama_get_logits_ith(self._context, row)
        kind = ctypes.c_float * self._vocab_size
        numbers = kind.from_address(ctypes.addressof(pointer.contents))
        return torch.frombuffer(numbers, dtype=torch.float32)
