"""Configurations: each field's bounds, defaults that follow from other fields, and the same refusals in C++."""

from __future__ import annotations

import dataclasses

import pytest
from support.models import make_config
from support.raw import RawEngine
from support.rig import Rig

from eaglex.config import DraftConfig, EngineLimits, RopeConfig, RopeScaling, Sampling, SpeculationConfig
from eaglex.errors import ConfigError, EaglexError

YARN = {"scaling": RopeScaling.YARN, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"scaling": RopeScaling.LLAMA3, "original_max_position_embeddings": 32}
DRAFT = {
    "hidden_size": (0, ">= 1"),
    "target_hidden_size": (0, ">= 1"),
    "intermediate_size": (-1, ">= 1"),
    "num_heads": (3, "a multiple of num_kv_heads=2"),
    "num_kv_heads": (0, ">= 1"),
    "vocab_size": (0, ">= 1"),
    "draft_vocab_size": (61, "<= vocab_size=60"),
    "max_positions": (0, ">= 1"),
    "num_layers": (0, ">= 1"),
    "num_aux": (0, ">= 1"),
    "head_dim": (7, "even and >= 2"),
    "rotary_dim": (10, "even and in 2..head_dim=8"),
    "rms_norm_eps": (0.0, "in (0, 1)"),
}
# In C++ the check is the same, the words are ranges.
RAW_DRAFT = {name: value for name, (value, _) in DRAFT.items()} | {
    "head_dim": 9,
    "rms_norm_eps": 2.0,
    "rope_factor": -1.0,
}
SPECULATION = {
    "num_steps": [({"num_steps": -1}, "in 0..16"), ({"num_steps": 17}, "in 0..16")],
    "topk": [
        ({"num_steps": 2, "topk": 0}, "in 1..16"),
        ({"num_steps": 2, "topk": 17}, "in 1..16"),
        (
            {"num_steps": 2, "topk": 2, "num_draft_tokens": 4, "sampling": Sampling.REJECTION},
            "1 with rejection sampling",
        ),
    ],
    "num_draft_tokens": [
        ({"num_steps": 3, "num_draft_tokens": 3}, "in 4..4 for num_steps=3, topk=1"),
        ({"num_steps": 3, "num_draft_tokens": 5}, "in 4..4 for num_steps=3, topk=1"),
        ({"num_steps": 3, "topk": 2, "num_draft_tokens": 3}, "in 4..11 for num_steps=3, topk=2"),
        ({"num_steps": 3, "topk": 2, "num_draft_tokens": 12}, "in 4..11 for num_steps=3, topk=2"),
        ({"num_steps": 5, "topk": 8, "num_draft_tokens": 65}, "in 6..64 for num_steps=5, topk=8"),
        ({"num_steps": 0, "num_draft_tokens": 2}, "in 1..1 for num_steps=0, topk=1"),
    ],
}
CASES = [(field, *case) for field, cases in SPECULATION.items() for case in cases]


def says(error: EaglexError, field: str, expected: str, actual: object) -> None:
    assert str(error).endswith(f"{field}: expected {expected}, got {actual}"), str(error)


@pytest.mark.parametrize("field", DRAFT)
def test_draft_config(field) -> None:
    value, expected = DRAFT[field]
    with pytest.raises(ConfigError) as caught:
        make_config(**{field: value})
    says(caught.value, field, expected, value)


@pytest.mark.parametrize("field", RAW_DRAFT)
def test_draft_config_in_cpp(field) -> None:
    raw = RawEngine(Rig(make_config(), SpeculationConfig(num_steps=2)))
    setattr(raw.config, field, RAW_DRAFT[field])
    with pytest.raises(ConfigError, match=rf"^{field}: expected .+, got {RAW_DRAFT[field]:g}$"):
        raw.build()


@pytest.mark.parametrize(("field", "values", "expected"), CASES, ids=str)
def test_speculation_config(field, values, expected) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculationConfig(**values)
    says(caught.value, field, expected, values[field])


@pytest.mark.parametrize(("field", "values", "expected"), CASES, ids=str)
def test_speculation_config_in_cpp(field, values, expected) -> None:
    raw = RawEngine(Rig(make_config(), SpeculationConfig(num_steps=2)))
    defaults = {"topk": 1, "num_draft_tokens": max(0, values["num_steps"]) + 1}
    for name, value in (defaults | values).items():
        setattr(raw.speculation, name, raw.binary.Sampling.REJECTION if name == "sampling" else value)
    with pytest.raises(ConfigError) as caught:
        raw.build()
    says(caught.value, field, expected, values[field])


@pytest.mark.parametrize("value", ["4", 4.0, None])
@pytest.mark.parametrize(
    ("kind", "field"),
    [(DraftConfig, name) for name in DRAFT if name != "rms_norm_eps"]
    + [(SpeculationConfig, name) for name in SPECULATION]
    + [(EngineLimits, field.name) for field in dataclasses.fields(EngineLimits)],
)
def test_what_counts_is_an_integer(kind, field, value) -> None:
    """From a caller's JSON or a division."""
    makers = {
        DraftConfig: make_config,
        SpeculationConfig: lambda **given: SpeculationConfig(**({"num_steps": 3} | given)),
        EngineLimits: lambda **given: EngineLimits(**({"max_batch": 2, "max_rows": 8, "num_slots": 4} | given)),
    }
    with pytest.raises(ConfigError) as caught:
        makers[kind](**{field: value})
    says(caught.value, field, "an integer", repr(value))


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_stop_below(value) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculationConfig(num_steps=2, stop_below=value)
    says(caught.value, "stop_below", "in [0, 1)", value)
    raw = RawEngine(Rig(make_config(), SpeculationConfig(num_steps=2)))
    for score in (0.1, float("nan")):
        raw.speculation.stop_score = score
        with pytest.raises(ConfigError, match=f"^stop_score: expected a log-probability, at most 0, got {score:g}$"):
            raw.build()


@pytest.mark.parametrize(
    ("topk", "steps", "field", "expected"),
    [
        (5, 2, "topk", "<= draft_vocab_size=4"),
        (2, 9, "num_steps", "< max_positions=9"),
        (2, 16, "num_steps", "< max_positions=9"),
    ],
)
def test_speculation_against_the_model(topk, steps, field, expected) -> None:
    """More branches than tokens, more steps than positions: refused when the engine is made."""
    config = make_config(draft_vocab_size=4, max_positions=9)
    with pytest.raises(ConfigError) as caught:
        Rig(config, SpeculationConfig(num_steps=steps, topk=topk, num_draft_tokens=steps + 1))
    says(caught.value, field, expected, {"topk": topk, "num_steps": steps}[field])
    raw = RawEngine(Rig(config, SpeculationConfig(num_steps=2)))
    raw.speculation.num_steps, raw.speculation.topk, raw.speculation.num_draft_tokens = steps, topk, steps + 1
    with pytest.raises(ConfigError, match=f"^{field}: expected in [01]..{4 if field == 'topk' else 8}, got"):
        raw.build()


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({"max_batch": 0, "max_rows": 4, "num_slots": 4}, "max_batch", "in 1..1073741824"),
        ({"max_batch": 4, "max_rows": 3, "num_slots": 4}, "max_rows", "in 4..1073741824"),
        ({"max_batch": 4, "max_rows": 4, "num_slots": 1}, "num_slots", "in 2..1073741824"),
        ({"max_batch": 4, "max_rows": 4, "num_slots": 4, "token_table_bytes": -1}, "token_table_bytes",
         "in 0..1099511627776"),
        ({"max_batch": 2**40, "max_rows": 2**41, "num_slots": 2}, "max_batch", "in 1..1073741824"),
    ],
    ids=str,
)
def test_engine_limits(values, field, expected) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineLimits(**values)
    says(caught.value, field, expected, values[field])
    raw = RawEngine(Rig(make_config(), SpeculationConfig(num_steps=2)))
    if max(values.values()) >= 2**31:
        return  # no int in C++
    for name, value in values.items():
        setattr(raw.limits, name, value)
    with pytest.raises(ConfigError, match=f"^{field}: expected {expected}, got {values[field]}$"):
        raw.build()


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({"theta": 0.5}, "theta", "> 1"),
        ({"theta": 1.0}, "rope.theta", "> 1"),
        ({"factor": 0.9}, "factor", ">= 1"),
        ({"factor": float("inf")}, "rope.factor", "finite"),
        ({"attention_factor": float("nan")}, "rope.attention_factor", "finite"),
        (YARN | {"beta_fast": 0.0}, "rope.beta_fast", ">= beta_slow=1.0 > 0"),
        (YARN | {"beta_slow": -1.0, "beta_fast": -0.5}, "rope.beta_fast", ">= beta_slow=-1.0 > 0"),
        ({"scaling": RopeScaling.LLAMA3}, "original_max_position_embeddings", ">= 1"),
        ({"scaling": RopeScaling.YARN}, "original_max_position_embeddings", ">= 1"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "rope.high_freq_factor", "> low_freq_factor=1.0 > 0"),
        ({"attention_factor": 0.0}, "rope.attention_factor", "> 0"),
    ],
    ids=str,
)
def test_rope_config(values, field, expected) -> None:
    with pytest.raises(ConfigError) as caught:
        RopeConfig(**values)
    says(caught.value, field, expected, values.get(field.removeprefix("rope."), 0))


def test_what_follows_from_other_fields() -> None:
    config = make_config(head_dim=12)
    assert (config.rotary_dim, config.aux_width, config.q_size, config.kv_size) == (12, 48, 48, 24)
    assert SpeculationConfig(num_steps=5).num_draft_tokens == 6
    assert SpeculationConfig(num_steps=0).num_draft_tokens == 1
    assert [SpeculationConfig(num_steps=k, topk=3, num_draft_tokens=k + 1).num_candidates for k in (0, 1, 2, 4)] == [
        0,
        3,
        12,
        30,
    ]


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_config().hidden_size = 3


def test_python_and_cpp_have_the_same_fields() -> None:
    """The structs of one name carry the same fields; the engine's translation is by name."""
    binary = RawEngine(Rig(make_config(), SpeculationConfig(num_steps=2))).binary
    renamed = {"rope": "rope_factor", "stop_below": "stop_score"}
    for cls, changed in ((DraftConfig, renamed), (SpeculationConfig, renamed), (EngineLimits, {})):
        names = {changed.get(field.name, field.name) for field in dataclasses.fields(cls)}
        assert names == {name for name in dir(getattr(binary, cls.__name__)) if not name.startswith("_")}
    for cls, constant in (
        (SpeculationConfig.MAX_STEPS, "MAX_STEPS"),
        (SpeculationConfig.MAX_TOPK, "MAX_TOPK"),
        (SpeculationConfig.MAX_DRAFT_TOKENS, "MAX_DRAFT_TOKENS"),
    ):
        assert cls == getattr(binary, constant)
