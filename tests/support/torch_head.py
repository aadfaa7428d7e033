"""An EAGLE-3 head written a second time, as a torch module: nn.Linear, nn.RMSNorm, LlamaMLP,
scaled_dot_product_attention,
rotation by complex numbers, and no cache: every call runs the whole sequence. It shares no code with eaglex.reference.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from eaglex.config import AuxNorm, DraftConfig, EmbeddingNorm, NextHidden, Residual
from eaglex.weights import DraftWeights
from support.rope import inverse_frequencies


class Attention(nn.Module):
    """Causal grouped-query attention over a whole sequence that starts at position `start`."""

    def __init__(self, config: DraftConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, start: int) -> Tensor:
        def split(y: Tensor) -> Tensor:  # [1, heads, T, D]
            return y.unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)[None]

        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        mixed = functional.scaled_dot_product_attention(
            self.turn(q, start), self.turn(k, start), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(mixed[0].transpose(0, 1).flatten(1))

    def turn(self, x: Tensor, start: int) -> Tensor:
        inv_freq, factor = inverse_frequencies(self.config)
        angle = (torch.arange(start, start + x.shape[2]).float()[:, None] * inv_freq).double()
        dim = 2 * angle.shape[1]
        left, right = x[..., :dim].chunk(2, -1)
        turned = torch.complex(left, right) * torch.polar(torch.full_like(angle, factor), angle)
        return torch.cat([turned.real, turned.imag, x[..., dim:]], -1)


class Layer(nn.Module):
    """One decoder layer; the first one takes the embedding beside the hidden state."""

    def __init__(self, config: DraftConfig, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.first = config, index == 0
        if not self.first or config.embedding_norm is EmbeddingNorm.NORMED:
            self.input_layernorm = nn.RMSNorm(hidden, eps)
        if self.first:
            self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = Attention(config, 2 * hidden if self.first else hidden)
        self.mlp = LlamaMLP(
            LlamaConfig(hidden_size=hidden, num_attention_heads=1, intermediate_size=config.intermediate_size)
        )

    def forward(self, embedding: Tensor, hidden: Tensor, start: int) -> Tensor:
        if self.first:
            if self.config.embedding_norm is EmbeddingNorm.NORMED:
                embedding = self.input_layernorm(embedding)
            normed = self.hidden_norm(hidden)
            x = torch.hstack([embedding, normed])
            stream = normed if self.config.residual is Residual.NORMED else hidden
        else:
            x, stream = self.input_layernorm(hidden), hidden
        stream = stream + self.self_attn(x, start)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class TorchHead(nn.Module):
    """The whole head in float64."""

    def __init__(self, config: DraftConfig, weights: DraftWeights) -> None:
        super().__init__()
        self.config = config
        widths = {
            AuxNorm.NONE: [],
            AuxNorm.WHOLE: [config.num_aux * config.target_hidden_size],
            AuxNorm.EACH: [config.target_hidden_size] * config.num_aux,
        }[config.aux_norm]
        self.aux_norms = nn.ModuleList(nn.RMSNorm(width, config.rms_norm_eps) for width in widths)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(config.num_aux * config.target_hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.to_target = torch.arange(config.draft_vocab_size) + (0 if weights.d2t is None else weights.d2t)
        self.double()
        self.load_state_dict(
            {home(name): tensor.double() for name, tensor in weights.named() if name != "d2t"}, strict=True
        )

    def fused(self, aux: Tensor) -> Tensor:
        """[T, A·Ht] → [T, H]"""
        if self.config.aux_norm is AuxNorm.EACH:
            aux = torch.hstack(
                [norm(part) for norm, part in zip(self.aux_norms, aux.chunk(self.config.num_aux, -1), strict=True)]
            )
        elif self.config.aux_norm is AuxNorm.WHOLE:
            aux = self.aux_norms[0](aux)
        return self.fc(aux)

    @torch.no_grad()
    def forward(self, hidden: Tensor, ids: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """A whole sequence of hidden states and tokens: logits [Vd] and next hidden [H] of its last row."""
        embedding = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(embedding, hidden, start)
        normed = self.norm(hidden)
        fed = normed if self.config.next_hidden is NextHidden.NORMED else hidden
        return self.lm_head(normed)[-1], fed[-1]


def home(name: str) -> str:
    """The canonical name of a tensor → its place in the module."""
    parts = name.split(".")
    if parts[0] == "layers":
        group = {
            "q_proj": "self_attn.",
            "k_proj": "self_attn.",
            "v_proj": "self_attn.",
            "o_proj": "self_attn.",
            "gate_proj": "mlp.",
            "up_proj": "mlp.",
            "down_proj": "mlp.",
        }.get(parts[2], "")
        name = f"layers.{parts[1]}.{group}{parts[2]}"
    return f"{name}.weight"


class Teacher:
    """Log-probabilities after any path of drafted tokens, each path run by itself as one plain causal sequence."""

    def __init__(self, head: TorchHead, aux: Tensor, ids: Tensor, start: int = 0) -> None:
        self.head, self.start = head, start
        self.hidden, self.ids = head.fused(aux.double()).detach(), ids
        self.known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def sequence(self, path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Logits and next hidden state after the rows and then `path` (target ids)."""
        if path not in self.known:
            fed = [self.sequence(path[:i])[1] for i in range(len(path))]
            hidden = torch.cat([self.hidden, torch.stack(fed)]) if fed else self.hidden
            self.known[path] = self.head(
                hidden, torch.cat([self.ids, torch.tensor(path, dtype=torch.int64)]), self.start
            )
        return self.known[path]

    def log_probs(self, path: tuple[int, ...]) -> Tensor:
        return functional.log_softmax(self.sequence(path)[0], -1)
