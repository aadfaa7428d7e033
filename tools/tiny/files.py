"""The pair's files: a Hugging Face target folder and a SpecForge EAGLE-3 draft folder, weights in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .corpus import BOS, EOS, PAD
from .model import Head, Shape, Target

# bf16 keeps the pair small; d2t and t2d keep SpecForge's types.
STORED = torch.bfloat16


def _common(shape: Shape) -> dict[str, object]:
    return {
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "bfloat16",
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _write_weights(path: Path, state: dict[str, Tensor]) -> None:
    tensors = {name: (t.to(STORED) if t.is_floating_point() else t).cpu().contiguous() for name, t in state.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def write_target(folder: Path, target: Target, tokenizer_json: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shape = target.shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": shape.num_layers,
        "intermediate_size": shape.target_intermediate_size,
        **_common(shape),
    }
    _write_json(folder / "config.json", config)
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    _write_json(folder / "generation_config.json", {**ids, "do_sample": False})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "model_max_length": shape.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    (folder / "tokenizer.json").write_bytes(tokenizer_json.read_bytes())
    _write_weights(folder / "model.safetensors", target.state_dict())


def write_draft(folder: Path, head: Head, ids: Tensor) -> None:
    """ids [Vd] int64: the target id of each draft id. embed_tokens is absent: the host shares the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = head.shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "intermediate_size": shape.draft_intermediate_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(shape.aux_layer_ids),
            "use_aux_hidden_state": True,
        },
        **_common(shape),
    }
    _write_json(folder / "config.json", config)
    ids = ids.cpu()
    in_draft = torch.zeros(shape.vocab_size, dtype=torch.bool)
    in_draft[ids] = True
    state = {**head.state_dict(), "d2t": ids - torch.arange(len(ids)), "t2d": in_draft}
    _write_weights(folder / "model.safetensors", state)


def read_target(folder: Path, shape: Shape, device: torch.device) -> Target:
    target = Target(shape)
    target.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return target.to(device)


def read_draft(folder: Path, shape: Shape, device: torch.device) -> tuple[Head, Tensor]:
    state = load_file(folder / "model.safetensors")
    ids = state.pop("d2t") + torch.arange(shape.draft_vocab_size)
    del state["t2d"]
    head = Head(shape)
    head.load_state_dict({k: v.float() for k, v in state.items()})
    return head.to(device), ids.to(device)
