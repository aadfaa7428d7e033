"""The two models in plain PyTorch, as they are trained. Parameter names are those of the files that are written.

The files are measured by evaluate.py, which shares no code with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the pair. Every one is a multiple of 8, so the target splits over 8 ranks; head_dim is explicit."""

    vocab_size: int = 2048
    hidden_size: int = 256
    target_intermediate_size: int = 512
    draft_intermediate_size: int = 2048
    num_layers: int = 8
    num_heads: int = 8
    head_dim: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_positions: int = 2048
    draft_vocab_size: int = 1792
    # Layer OUTPUT ids, as SGLang reads them: its default for 8 layers (capture before layers 2, 4, 5).
    aux_layer_ids: tuple[int, int, int] = (1, 3, 4)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Rope(nn.Module):
    """Rotation tables [max_positions, head_dim], halves rotated against each other as Llama's are."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_positions).float(), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, start: int) -> Tensor:
        """x [..., rows, head_dim]; row r has position start + r."""
        rows = x.shape[-2]
        cos, sin = self.cos[start : start + rows], self.sin[start : start + rows]
        low, high = x.float().chunk(2, dim=-1)
        return (x.float() * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape, width_in: int) -> None:
        super().__init__()
        inner = shape.num_heads * shape.head_dim
        self.heads, self.head_dim = shape.num_heads, shape.head_dim
        self.q_proj = nn.Linear(width_in, inner, bias=False)
        self.k_proj = nn.Linear(width_in, inner, bias=False)
        self.v_proj = nn.Linear(width_in, inner, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden_size, bias=False)

    def qkv(self, x: Tensor, rope: Rope, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, rows, width_in] to three of [B, heads, rows, head_dim], q and k rotated."""
        q, k, v = (
            p(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rope(q, start), rope(k, start), v

    def out(self, x: Tensor) -> Tensor:
        return self.o_proj(x.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Cache:
    """Keys and values of all layers for a batch of sequences of equal length."""

    def __init__(self, shape: Shape, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        size = (shape.num_layers, 2, batch, shape.num_heads, length, shape.head_dim)
        self.kv = torch.empty(size, device=device, dtype=dtype)
        self.length = 0


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape.hidden_size, shape.target_intermediate_size)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        """Whole sequences x [B, T, H]."""
        q, k, v = self.self_attn.qkv(self.input_layernorm(x), rope, 0)
        x = x + self.self_attn.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.post_attention_layernorm(x))

    def cached(self, x: Tensor, rope: Rope, start: int, keys: Tensor, values: Tensor) -> Tensor:
        """The same with a cache: a whole prompt (start 0) or a single row at position start."""
        q, k, v = self.self_attn.qkv(self.input_layernorm(x), rope, start)
        end = start + q.shape[2]
        keys[:, :, start:end], values[:, :, start:end] = k, v
        mixed = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], is_causal=start == 0)
        x = x + self.self_attn.out(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Target(nn.Module):
    """A Llama; state_dict() has the names of transformers' LlamaForCausalLM."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.rope = Rope(shape)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / (2 * shape.num_layers) ** 0.5 if out else 0.02)

    def compiled_layers(self) -> list[Callable[[Tensor, Rope], Tensor]]:
        """The layers compiled, one compilation for all; for loops that keep one shape."""
        return [torch.compile(layer, dynamic=False) for layer in self.model.layers]

    def forward(
        self, tokens: Tensor, *, cache: Cache | None = None, layers: Sequence[Callable[[Tensor, Rope], Tensor]] = ()
    ) -> tuple[Tensor, Tensor]:
        """tokens [B, T] to (final normed hidden [B, T, H], auxiliary hidden [B, T, 3H]).

        layers: compiled_layers(), or nothing.
        """
        x = self.model.embed_tokens(tokens)
        aux = []
        for index, layer in enumerate(self.model.layers):
            if cache:
                x = layer.cached(x, self.rope, cache.length, *cache.kv[index])
            else:
                x = (layers[index] if layers else layer)(x, self.rope)
            if index in self.shape.aux_layer_ids:
                aux.append(x)
        if cache:
            cache.length += tokens.shape[1]
        return self.model.norm(x), torch.cat(aux, dim=-1)

    def loss(self, tokens: Tensor, *, layers: Sequence[Callable[[Tensor, Rope], Tensor]] = ()) -> Tensor:
        """Mean next-token cross-entropy in nats of tokens [B, T + 1]."""
        hidden, _ = self(tokens[:, :-1], layers=layers)
        return F.cross_entropy(self.lm_head(hidden).float().flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, prompts: Tensor, new_tokens: int) -> Tensor:
        """Greedy continuation of prompts [B, T]; returns [B, T + new_tokens]. Never stops early."""
        weight = self.lm_head.weight
        dtype = torch.bfloat16 if weight.is_cuda else torch.float32
        cache = Cache(self.shape, len(prompts), prompts.shape[1] + new_tokens, weight.device, dtype)
        out, step = [prompts], prompts
        for _ in range(new_tokens):
            hidden, _ = self(step, cache=cache)
            step = self.lm_head(hidden[:, -1:]).argmax(-1)
            out.append(step)
        return torch.cat(out, dim=1)


class MidLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(shape, 2 * hidden)
        self.mlp = MLP(hidden, shape.draft_intermediate_size)


class Head(nn.Module):
    """The EAGLE-3 draft; state_dict() plus d2t and t2d has the names of SpecForge's checkpoints."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.rope = Rope(shape)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        # The residual stream starts as the last auxiliary layer's state, to which the output layer nearly fits.
        with torch.no_grad():
            self.fc.weight[:, -shape.hidden_size :] += torch.eye(shape.hidden_size)

    def unroll(self, aux: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """Training-time test (EAGLE-3, section 3.2): draft logits of `steps` steps from every row at once.

        aux [B, T, 3H], embedded [B, T, H]. Row p, step k: the hidden state is fc(aux[p]) or the row's output of
        step k-1; the token is embedded[p + 1 + k]; the position is p + k. It attends to step 0 of the rows up to
        p and to its own earlier steps, which is what a chain drafted from row p sees. Returns `steps` tensors
        [B, T - steps, Vd]; entry k, row p is the draft of token p + 2 + k.
        """
        layer, rows = self.midlayer, aux.shape[1] - steps
        hidden = self.fc(aux[:, :rows]).float()  # the residual stream stays in fp32 under autocast
        causal = torch.ones(rows, rows, dtype=torch.bool, device=aux.device).tril()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for k in range(steps):
            token = layer.input_layernorm(embedded[:, 1 + k : 1 + k + rows])
            x = torch.cat((token, layer.hidden_norm(hidden)), dim=-1)
            q, key, value = layer.self_attn.qkv(x, self.rope, k)
            keys.append(key)
            values.append(value)
            scores = (q @ keys[0].transpose(-1, -2)).masked_fill(~causal, float("-inf"))
            own = [(q * later).sum(-1, keepdim=True) for later in keys[1:]]
            weights = (torch.cat([scores, *own], dim=-1).float() * self.shape.head_dim**-0.5).softmax(-1)
            weights = weights.to(value.dtype)
            mixed = weights[..., :rows] @ values[0]
            for j, later in enumerate(values[1:]):
                mixed = mixed + weights[..., rows + j : rows + j + 1] * later
            hidden = hidden + layer.self_attn.out(mixed)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden)))
        return logits
