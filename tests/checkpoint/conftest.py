"""A small draft checkpoint and its target, written in any dialect and then spoilt in one place."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import save_file

HIDDEN, INTER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, DRAFT_VOCAB, LAYERS, CONTEXT = 32, 48, 4, 2, 8, 128, 40, 12, 4096


class Toy:
    """A draft in SpecForge's dialect; `config` and `tensors` are free to change before `write`."""

    def __init__(self, folder, num_aux=3, target_hidden=HIDDEN, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(torch.bfloat16)

        self.folder = folder
        self.config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INTER,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "num_hidden_layers": 1,
            "vocab_size": VOCAB,
            "draft_vocab_size": DRAFT_VOCAB,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "attention_bias": False,
        }
        ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
        self.tensors = {
            "fc.weight": normal(HIDDEN, num_aux * target_hidden),
            "norm.weight": normal(HIDDEN),
            "lm_head.weight": normal(DRAFT_VOCAB, HIDDEN),
            "embed_tokens.weight": normal(VOCAB, HIDDEN),
            "d2t": ids - torch.arange(DRAFT_VOCAB),
            "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True),
        }
        layer = {
            "input_layernorm": (HIDDEN,),
            "hidden_norm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, 2 * HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTER, HIDDEN),
            "mlp.up_proj": (INTER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTER),
        }
        self.tensors |= {f"midlayer.{name}.weight": normal(*shape) for name, shape in layer.items()}
        self.normal = normal

    def rename(self, pattern, replacement):
        self.tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in self.tensors.items()}

    def nest(self):
        """The config as speculators writes it."""
        flat = copy.deepcopy(self.config)
        top = {key: flat.pop(key) for key in ("draft_vocab_size", "torch_dtype")}
        flat.pop("architectures")
        self.config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "transformer_layer_config": flat,
            "norm_before_residual": True,
            "target_hidden_size": None,
            **top,
        }

    def add_layer(self, index=1):
        """A further decoder layer, reading H instead of 2H, after midlayer has become layers.0."""
        for name, tensor in list(self.tensors.items()):
            if name.startswith("layers.0.") and "hidden_norm" not in name:
                first = "qkv" if re.search(r"[qkv]_proj", name) else ""
                copied = tensor[:, :HIDDEN] if first else tensor
                self.tensors[name.replace("layers.0.", f"layers.{index}.")] = copied.clone()

    def write(self):
        self.folder.mkdir(exist_ok=True, parents=True)
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors.items()}, self.folder / "model.safetensors"
        )
        return self.folder


@pytest.fixture
def toy(tmp_path):
    return Toy(tmp_path / "draft")


@pytest.fixture
def make_toy(tmp_path):
    """A factory, for a test that needs several or other sizes."""
    return lambda name="other", **sizes: Toy(tmp_path / name, **sizes)


@pytest.fixture
def make_target(tmp_path):
    def make(hidden=HIDDEN, tied=False, **config):
        folder = tmp_path / "target"
        folder.mkdir(exist_ok=True)
        sizes = {
            "hidden_size": hidden,
            "num_hidden_layers": LAYERS,
            "vocab_size": VOCAB,
            "max_position_embeddings": CONTEXT,
        }
        (folder / "config.json").write_text(json.dumps(sizes | {"tie_word_embeddings": tied} | config))
        generator = torch.Generator().manual_seed(9)
        tensors = {
            name: torch.randn(VOCAB, hidden, generator=generator).to(torch.bfloat16)
            for name in (["model.embed_tokens.weight"] if tied else ["model.embed_tokens.weight", "lm_head.weight"])
        }
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture
def target(make_target):
    return make_target()
