"""The decoder of the Llama family on flat tokens, with merged projections.

Llama, Qwen2, Qwen3 and Mistral differ in three lines of `SelfAttention`, and in the angles:
`config.FAMILY` is the table of it.
Knows the layers and their order; knows no file, no cache and no sampling. Attention is handed in.
Shapes: T tokens, H query heads, H_kv key/value heads, D head_dim, I MLP size, V vocabulary.
Sources: Llama (Touvron et al. 2023), Qwen3 technical report (2025). Parameter names are those of
transformers, but for q/k/v and gate/up, which are joined.
"""

import torch
from torch import Tensor, nn

from tutorial_engine.model.attention import AttentionBackend, SdpaAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.layers import Linear, RMSNorm, SiluAndMul
from tutorial_engine.model.rope import RopeAngles, RotaryEmbedding, apply_rope


class SelfAttention(nn.Module):
    """Project to heads, turn q and k by position, attend, project back.

    Qwen3 normalises q and k per head first; in others the norms are nn.Identity.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_size, self.kv_size = (n * self.head_dim for n in (self.num_heads, self.num_kv_heads))
        self.qkv_proj = Linear(config.hidden_size, self.q_size + 2 * self.kv_size, config.qkv_bias)
        self.o_proj = Linear(self.q_size, config.hidden_size, config.o_bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, angles: RopeAngles, batch: Batch, attention: AttentionBackend
    ) -> Tensor:
        """hidden [T, hidden] → [T, hidden]."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(hidden).view(-1, heads + 2 * kv_heads, self.head_dim)
        q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), 1)
        q = apply_rope(self.q_norm(q), *angles)
        k = apply_rope(self.k_norm(k), *angles)
        out = attention.attend(self.layer, q, k, v, batch)  # [T, H, D]
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        assert got == list(q.shape), (
            f"{type(attention).__name__}.attend gave {got}, {list(q.shape)} is wanted: [T, H, D]"
        )
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    """SwiGLU: widen twice (gate and up, one matmul), gate, narrow."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.act_fn = SiluAndMul()
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] → [T, hidden]."""
        return self.down_proj(self.act_fn(self.gate_up_proj(hidden)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm, each added to the running sum (the residual)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        angles: RopeAngles,
        batch: Batch,
        attention: AttentionBackend,
    ) -> tuple[Tensor, Tensor]:
        """(what to add, running sum) → the same for the next layer, both [T, hidden]."""
        if residual is None:  # the first layer: the embeddings are the sum so far
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, angles, batch, attention)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Decoder(nn.Module):
    """Embedding, decoder layers, final norm: token ids in, hidden states out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(*size, _weight=torch.empty(size))  # nothing is drawn
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding.of(config)

    def forward(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """Hidden state of every token, [T, hidden]. ValueError for an id that is no row of it."""
        try:
            hidden = self.embed_tokens(batch.input_ids)  # [T, hidden]
        except IndexError:
            vocab_size = self.embed_tokens.num_embeddings
            outside = [i for i in batch.input_ids.tolist() if not 0 <= i < vocab_size]
            raise ValueError(
                f"token id {outside[0]} is outside the vocabulary: ids run from 0 to "
                f"{vocab_size - 1}. Was the text tokenized for another model?"
            ) from None
        angles = self.rotary_emb(batch.positions)
        residual = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, angles, batch, attention)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class CausalLM(nn.Module):
    """The decoder and the head that turns hidden states into logits over the vocabulary.

    Fresh, it has no weights: `checkpoint.load_model` reads them, `draw_weights` makes random ones.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.default_attention: AttentionBackend = SdpaAttention()
        self.tie_weights()

    @torch.no_grad()
    def draw_weights(self, std: float = 0.02) -> "CausalLM":
        """Random weights for training and tests (transformers' initializer_range) → itself."""
        for parameter in self.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=std)
        return self

    def tie_weights(self) -> None:
        """Let the head read the embedding's own matrix, where the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, batch: Batch, attention: AttentionBackend | None = None) -> Tensor:
        """Hidden state of every token of the batch, [T, hidden]; logits cost extra, on demand."""
        return self.model(batch, attention or self.default_attention)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows [n, hidden] → logits [n, V] fp32. Pass only the rows you will look at."""
        logits = self.lm_head(hidden)
        return logits if logits.dtype == torch.float32 else logits.float()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are stored in."""
        return self.model.embed_tokens.weight.dtype

    def num_parameters(self) -> int:
        """Weights of the architecture, a tied head counted once."""
        with torch.device("meta"):  # a model without memory: fast layers hide some of their weights
            return sum(p.numel() for p in CausalLM(self.config).parameters())
