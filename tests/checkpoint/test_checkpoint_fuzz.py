"""Any JSON as a config: valid, or an error of the package that names the file, quickly; never another exception."""

import gc
import json
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from eaglex import dialects
from eaglex.checkpoint import Facts, examine
from eaglex.errors import EaglexError

SECONDS = 0.1
NAMES = sorted(
    {
        "architectures",
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "num_hidden_layers",
        "vocab_size",
        "draft_vocab_size",
        "truncated_vocab_size",
        "target_vocab_size",
        "rms_norm_eps",
        "hidden_act",
        "head_dim",
        "max_position_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "rotary_dim",
        "tie_word_embeddings",
        "target_hidden_size",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "use_aux_norm",
        "norm_output",
        "eagle_config",
        "eagle_aux_hidden_state_layer_ids",
        "transformer_layer_config",
        "speculators_model_type",
        "quantization_config",
        "sliding_window",
        "layer_types",
        "use_sliding_window",
        "num_aux_hidden_states",
        "use_input_layernorm_in_first_layer",
        "type",
        "rope_type",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "attention_factor",
        "truncate",
        "kv_lora_rank",
        "quant_method",
        "quant_algo",
        "quantized_layers",
        "config_groups",
        "weights",
        "strategy",
        "num_bits",
        "group_size",
        "targets",
        "ignore",
        "weight_block_size",
        *dialects.NEUTRAL,
        *dialects.EAGLE_NEUTRAL,
    }
)
WORDS = [
    "llama",
    "LlamaForCausalLMEagle3",
    "Eagle3Speculator",
    "silu",
    "yarn",
    "llama3",
    "linear",
    "mrope",
    "default",
    "longrope",
    "eagle3",
    "compressed-tensors",
    "modelopt",
    "fp8",
    "FP8",
    "re:.*",
    "",
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 256)
    | st.sampled_from([10**400, -1, 2**63, 1e308, 0.5, 8, 32, 128])
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(WORDS)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=6)
    ),
    max_leaves=12,
)
changes = st.dictionaries(st.sampled_from(NAMES), values, max_size=6)
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.fixture
def written(toy):
    """The toy on disk; each example rewrites its config alone."""
    toy.write()
    return toy


@pytest.fixture
def nested(toy):
    """The same as speculators writes it."""
    toy.rename(r"^midlayer\.", "layers.0.")
    toy.nest()
    toy.write()
    return toy


def judge(folder, target, config):
    """The facts or the error; anything else raised, or a slow answer, fails the test."""
    (folder / "config.json").write_text(json.dumps(config))
    gc.disable()  # a collection would walk all that the other tests have imported
    start = time.process_time()
    try:
        found = examine(folder, target=target)
    except EaglexError as error:
        found = error
    finally:
        took = time.process_time() - start
        gc.enable()
    assert took < SECONDS
    if isinstance(found, EaglexError):
        assert any(place in str(found) for place in (str(folder), str(target), ".safetensors"))
        assert len(str(found)) < 2000
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(change=changes)
@example(change={})
@example(change={"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}})
@example(change={"rope_scaling": {"type": "yarn", "factor": 10**400}})
@example(change={"hidden_size": 10**400})
@example(change={"num_attention_heads": 10**400, "num_key_value_heads": 10**400})
@example(change={"partial_rotary_factor": 1e308})
@example(change={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [10**400, 1, 2]}})
def test_changed_config(written, target, change):
    found = judge(written.folder, target, written.config | change)
    if isinstance(found, Facts):
        json.dumps(str(found))


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW)
@given(change=changes, top=changes)
def test_changed_nested_config(nested, target, change, top):
    inner = nested.config["transformer_layer_config"] | change
    judge(nested.folder, target, nested.config | {"transformer_layer_config": inner} | top)


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW)
@given(config=values)
def test_any_json(written, target, config):
    judge(written.folder, target, config)


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW)
@given(change=changes)
def test_changed_target_config(written, target, change):
    sizes = {"hidden_size": 32, "num_hidden_layers": 12, "vocab_size": 128, "max_position_embeddings": 4096}
    (target / "config.json").write_text(json.dumps(sizes | change))
    judge(written.folder, target, written.config)


LONG = {
    "keys": lambda config: config | {f"k{i}": i for i in range(3900)},
    "lists": lambda config: config | {"x": [[]] * 15500},
    "objects": lambda config: config | {"x": [{}] * 15500},
    "architectures": lambda config: config | {"architectures": ["x"] * 12000},
    "architecture": lambda config: config | {"architectures": ["DFlas" * 12000]},
    "model_type": lambda config: config | {"model_type": "mt" * 30000},
    "ids": lambda config: config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(range(8900))}},
    "switches": lambda config: config | {f"norm_before_residua{i}": True for i in range(1900)},
    "rope": lambda config: config | {"rope_scaling": {f"x{i}": 1 for i in range(4600)}},
}


@pytest.mark.parametrize("change", LONG.values(), ids=LONG.keys())
def test_long_config(written, target, change):
    """As long as a config may be, and made to be slow."""
    config = change(written.config)
    assert 45_000 < len(json.dumps(config)) <= 64 * 2**10
    judge(written.folder, target, config)
