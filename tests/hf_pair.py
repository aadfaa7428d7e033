"""Tiny random pairs of a Hugging Face target and an EAGLE-3 head, for tests without the network."""

import dataclasses
import json

import safetensors.torch
import tokenizers
import torch
import transformers

from eaglex.config import DraftConfig, RopeConfig, SpeculationConfig
from eaglex.hosts import plain
from eaglex.hosts.hf_target import HookedTarget
from eaglex.hosts.transformers import HostLimits, TransformersHost
from eaglex.weights import DraftWeights, LayerWeights, expected_shapes

AUX = (0, 1, 2)
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 160,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "mistral-sliding": (transformers.MistralConfig, {"sliding_window": 6}),
    "qwen2-mixed": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": (transformers.Qwen3Config, {}),
    "phi3": (transformers.Phi3Config, {}),
}


def target_model(family="llama", *, seed=0, **sizes):
    """A causal language model with random weights, in float32, that depends on its context."""
    kind, extra = FAMILIES[family]
    torch.manual_seed(seed)
    config = kind(**{**SIZES, **extra, **sizes})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()


# With few tokens a random head hits often enough that accepted paths of several nodes occur.
SMALL = {"vocab_size": 12}
SMALL_DRAFT = {"vocab_size": 12, "draft_vocab_size": 9}


PROMPT = [1, 7, 3, 5, 2, 9, 4]
CHAIN = SpeculationConfig(num_steps=3)
TREE = SpeculationConfig(num_steps=3, topk=3, num_draft_tokens=14)
SHAPES = {"chain": CHAIN, "tree": TREE}


def draft_config(**fields):
    """The config of a one-layer head that fits SIZES, with a reduced vocabulary."""
    sizes = {
        "hidden_size": 24,
        "target_hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 12,
        "vocab_size": 40,
        "draft_vocab_size": 32,
        "max_positions": 160,
        "rope": RopeConfig(theta=1e4),
    }
    return DraftConfig(**{**sizes, **fields})


def draft_weights(config, *, seed=1):
    """Random weights; the draft vocabulary is a random subset of the target's. Seed 1 hits the SMALL targets often."""
    g = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=g)
        made[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * (2 / shape[1]) ** 0.5
    ids = torch.randperm(config.vocab_size, generator=g)[: config.draft_vocab_size].sort().values
    fields = [f.name for f in dataclasses.fields(LayerWeights)]
    layers = [LayerWeights(**{f: made.get(f"layers.{i}.{f}") for f in fields}) for i in range(config.num_layers)]
    return DraftWeights(
        embed_tokens=made["embed_tokens"],
        fc=made["fc"],
        aux_norms=[],
        layers=layers,
        norm=made["norm"],
        lm_head=made["lm_head"],
        d2t=ids - torch.arange(len(ids)),
    )


def host(speculation, *, family="llama", model=None, limits=None, config=None, weights=None, aux=AUX):
    """A host around a random pair."""
    config = config or draft_config()
    target = HookedTarget(model or target_model(family), aux)
    return TransformersHost(
        target,
        config,
        weights or draft_weights(config),
        aux_layer_ids=aux,
        speculation=speculation,
        limits=limits or HostLimits(),
    )


def small_host(speculation, family="llama", **arguments):
    """A host around a random pair of few tokens."""
    model, config = target_model(family, **SMALL), draft_config(**SMALL_DRAFT)
    return host(speculation, model=model, config=config, **arguments)


def alone(host, prompt, count, eos=frozenset()):
    """The target's own greedy tokens."""
    return plain.generate(host.target, prompt, count=count, eos=eos)


WORDS = "the a cat dog sees hears old new house tree and or in on under runs sits . ,".split()  # noqa: SIM905


EIGHT = {"vocab_size": 16, "num_attention_heads": 8, "num_key_value_heads": 8}  # heads for eight ranks


def save_pair_of_eight(folder):
    """Eight heads for up to eight ranks, and a draft that hits now and then."""
    config = draft_config(vocab_size=16, draft_vocab_size=12)
    return save_pair(folder, model=target_model(seed=1, **EIGHT), config=config)


def save_pair(folder, *, model=None, config=None, weights=None, aux=AUX, eos=None):
    """A pair in folder/target and folder/draft as `eaglex generate` reads it: target ids 0..39, one word each."""
    model = model or target_model()
    config = config or draft_config()
    weights = weights or draft_weights(config)
    model.generation_config.eos_token_id = eos
    model.config.eos_token_id = eos
    model.save_pretrained(folder / "target")
    vocabulary = {word: i for i, word in enumerate([*WORDS, *(f"w{i}" for i in range(len(WORDS), 40))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="the"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "target")
    draft = folder / "draft"
    draft.mkdir()
    parts = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
    names = {f"layers.0.{leaf}": f"midlayer.{part}.{leaf}" for part, leaves in parts.items() for leaf in leaves}
    stored = {
        f"{names.get(n, n.replace('layers.0', 'midlayer'))}.weight": t.contiguous()
        for n, t in weights.named()
        if n != "d2t"
    }
    stored["d2t"] = weights.d2t
    stored["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
    stored["t2d"][weights.d2t + torch.arange(len(weights.d2t))] = True
    safetensors.torch.save_file(stored, draft / "model.safetensors")
    (draft / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "llama",
                "hidden_size": config.hidden_size,
                "target_hidden_size": config.target_hidden_size,
                "intermediate_size": config.intermediate_size,
                "hidden_act": "silu",
                "num_attention_heads": config.num_heads,
                "num_key_value_heads": config.num_kv_heads,
                "head_dim": config.head_dim,
                "num_hidden_layers": 1,
                "vocab_size": config.vocab_size,
                "draft_vocab_size": config.draft_vocab_size,
                "max_position_embeddings": config.max_positions,
                "rms_norm_eps": config.rms_norm_eps,
                "rope_theta": config.rope.theta,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(aux)},
            }
        )
    )
    return folder
