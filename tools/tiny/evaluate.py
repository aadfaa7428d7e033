"""Accept length of the stored pair by a plain loop, one request at a time, in fp32.

The target is transformers' own; the head is read from its file and written out here from the EAGLE-3 equations,
so that nothing is shared with the code that trained it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache


@dataclass(frozen=True)
class Measured:
    """Figures over all prompts. acceptance[i]: share of cycles in which draft tokens 0..i were all accepted."""

    accept_length: float
    acceptance: list[float]
    cycles: int
    distinct_4: float  # per output, averaged
    distinct_4_pooled: float  # over all outputs together
    outputs: list[list[int]]


class PlainHead:
    """An EAGLE-3 chain drafter without cache, from a folder in SpecForge's dialect."""

    def __init__(self, folder: Path, embed_tokens: Tensor) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self.weight = {k: v.float() for k, v in stored.items() if v.is_floating_point()}
        self.target_id = stored["d2t"] + torch.arange(len(stored["d2t"]))
        self.embed_tokens = embed_tokens.float()
        self.aux_layer_ids: list[int] = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.config["rms_norm_eps"]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.weight[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weight[f"{name}.weight"])

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [rows, heads, head_dim]."""
        size = x.shape[-1]
        frequency = self.config["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
        angle = torch.outer(positions.float(), frequency)[:, None, :]
        low, high = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), dim=-1)

    def _layer(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """hidden [rows, H]; returns the pre-norm hidden after the layer, and keys and values with these rows added."""
        heads, size, at = self.config["num_attention_heads"], self.config["head_dim"], "midlayer.self_attn"
        embedded = self._norm(self.embed_tokens[tokens], "midlayer.input_layernorm")
        x = torch.cat((embedded, self._norm(hidden, "midlayer.hidden_norm")), dim=-1)
        q, k, v = (self._linear(x, f"{at}.{n}_proj").unflatten(-1, (heads, size)) for n in "qkv")
        q, k = self._rotate(q, positions), self._rotate(k, positions)
        k, v = torch.cat([*past[:1], k]), torch.cat([*past[1:], v])
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
        rows, total = len(q), len(k)
        hidden_keys = torch.arange(total)[None, :] > torch.arange(total - rows, total)[:, None]
        weights = scores.masked_fill(hidden_keys, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(-2)
        hidden = hidden + self._linear(mixed, f"{at}.o_proj")
        y = self._norm(hidden, "midlayer.post_attention_layernorm")
        gated = F.silu(self._linear(y, "midlayer.mlp.gate_proj")) * self._linear(y, "midlayer.mlp.up_proj")
        return hidden + self._linear(gated, "midlayer.mlp.down_proj"), [k, v]

    def extend(self, aux: Tensor, tokens: Tensor, past: list[Tensor], steps: int) -> tuple[list[int], list[Tensor]]:
        """Take in new rows of target state, then draft a greedy chain from the last of them.

        aux [n, 3H] and tokens [n]: aux[j] is the state at position p, tokens[j] the token at p + 1. past: keys and
        values of the rows before. Returns the chain and the keys and values of the target's rows; the chain's own
        are dropped, because they come from drafted hidden states.
        """
        first = len(past[0]) if past else 0
        rows = torch.arange(first, first + len(aux))
        hidden, committed = self._layer(self._linear(aux, "fc"), tokens, rows, past)
        hidden, keys_values, out = hidden[-1:], committed, []
        for step in range(steps):
            logits = self._linear(self._norm(hidden, "norm"), "lm_head")
            out.append(int(self.target_id[logits.argmax()]))
            if step + 1 < steps:
                position = rows[-1:] + 1 + step
                hidden, keys_values = self._layer(hidden, torch.tensor(out[-1:]), position, keys_values)
        return out, committed


@torch.no_grad()
def measure(target: Any, head: PlainHead, prompts: list[list[int]], *, new_tokens: int, steps: int = 5) -> Measured:
    """Speculate greedily on each prompt (token ids with BOS) until new_tokens are made, EOS, or the context's end."""
    reached, accepted_total, cycles = [0] * steps, 0, 0
    outputs = []
    eos, limit = target.config.eos_token_id, target.config.max_position_embeddings

    for prompt in prompts:
        cache = DynamicCache(config=target.config)

        def run(tokens: list[int], cache: DynamicCache = cache) -> tuple[list[int], Tensor]:
            """Target over the next tokens: argmax [n] and auxiliary hidden states [n, 3H] (ids are layer outputs)."""
            result = target(input_ids=torch.tensor([tokens]), past_key_values=cache, output_hidden_states=True)
            aux = torch.cat([result.hidden_states[i + 1][0] for i in head.aux_layer_ids], dim=-1)
            return result.logits[0].argmax(-1).tolist(), aux

        best, aux = run(prompt)
        tokens = [*prompt, best[-1]]
        past: list[Tensor] = []
        while len(tokens) - len(prompt) < new_tokens and tokens[-1] != eos and len(tokens) + steps < limit:
            drafted, past = head.extend(aux, torch.tensor(tokens[-len(aux) :]), past, steps)
            wanted, aux = run([tokens[-1], *drafted])  # wanted[i]: what the target says after drafted[:i]
            accepted = 0
            while accepted < steps and drafted[accepted] == wanted[accepted]:
                accepted += 1
            cycles += 1
            accepted_total += accepted + 1
            for i in range(accepted):
                reached[i] += 1
            tokens += wanted[: accepted + 1]
            aux = aux[: accepted + 1]
            if accepted < steps:
                cache.crop(accepted - steps)  # forget the refused tokens
            made = tokens[len(prompt) :]
            if eos in made:
                tokens = tokens[: len(prompt) + made.index(eos) + 1]
        outputs.append(tokens[len(prompt) :][:new_tokens])
    grams = [[tuple(o[i : i + 4]) for i in range(len(o) - 3)] for o in outputs]
    own = [len(set(g)) / len(g) for g in grams if g]
    pooled = [g for part in grams for g in part]
    return Measured(
        accept_length=accepted_total / max(1, cycles),
        acceptance=[r / max(1, cycles) for r in reached],
        cycles=cycles,
        distinct_4=sum(own) / max(1, len(own)),
        distinct_4_pooled=len(set(pooled)) / max(1, len(pooled)),
        outputs=outputs,
    )


@torch.no_grad()
def bits_per_byte(target: Any, tokenizer: Any, texts: list[str], *, window: int = 1024) -> float:
    """Bits of each text's tokens per UTF-8 byte, in windows that start anew with BOS."""
    nats, size = 0.0, 0
    bos = target.config.bos_token_id
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        size += len(text.encode())
        for at in range(0, len(ids), window):
            part = torch.tensor([[bos, *ids[at : at + window]]])
            logits = target(input_ids=part, use_cache=False).logits[0, :-1].float()
            nats += F.cross_entropy(logits, part[0, 1:], reduction="sum").item()
    return nats / math.log(2) / size
