"""A random draft of a given shape, and a target file of which the header alone is ever read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def write_weights(target: Path, draft: Path, shape: dict[str, Any], draft_vocab: int) -> None:
    """`draft` gets a file of bf16 weights; `target` one whose data is a hole, as the host makes dummy weights itself.

    eaglex reads a draft's files, and asks the target's for names and shapes.
    """
    import torch
    from safetensors.torch import save_file

    hidden, inter = shape["hidden_size"], shape["intermediate_size"]
    heads, kv = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))

    def random(*size: int) -> Any:
        return torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02)

    layer = {
        "self_attn.q_proj": random(heads, 2 * hidden), "self_attn.k_proj": random(kv, 2 * hidden),
        "self_attn.v_proj": random(kv, 2 * hidden), "self_attn.o_proj": random(hidden, heads),
        "mlp.gate_proj": random(inter, hidden), "mlp.up_proj": random(inter, hidden),
        "mlp.down_proj": random(hidden, inter), "hidden_norm": random(hidden) + 1,
        "input_layernorm": random(hidden) + 1, "post_attention_layernorm": random(hidden) + 1,
    }  # fmt: skip
    tensors = {f"midlayer.{name}.weight": tensor for name, tensor in layer.items()}
    tensors |= {"fc.weight": random(hidden, 3 * hidden), "norm.weight": random(hidden) + 1}
    tensors |= {"lm_head.weight": random(draft_vocab, hidden), "d2t": torch.zeros(draft_vocab, dtype=torch.int64)}
    save_file(tensors, draft / "model.safetensors")
    header, at = {}, 0
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        end = at + 2 * shape["vocab_size"] * hidden
        header[name] = {"dtype": "BF16", "shape": [shape["vocab_size"], hidden], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (target / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
