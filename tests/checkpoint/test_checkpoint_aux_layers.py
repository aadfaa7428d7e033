"""The two conventions of auxiliary layer ids: the table, the id that cannot be an output, and the overrides."""

import pytest

from eaglex.aux_layers import AuxConvention, resolve
from eaglex.errors import ConfigError
from eaglex.fields import Fields

KEY = "eagle_aux_hidden_state_layer_ids"
OUTPUT, BEFORE = AuxConvention.OUTPUT, AuxConvention.CAPTURE_BEFORE


def layers(config, *, speculators=False, num_aux=3, n=36, **arguments):
    return resolve(
        Fields(config, "config.json"), speculators=speculators, num_aux=num_aux, num_target_layers=n, **arguments
    )


@pytest.mark.parametrize(
    ("config", "speculators", "convention", "outputs"),
    [
        ({"eagle_config": {KEY: [1, 17, 32]}}, False, OUTPUT, (1, 17, 32)),
        ({"eagle_config": {KEY: [24, 30, 36]}}, False, BEFORE, (23, 29, 35)),  # gpt-oss-120b v3: 36 of 36 layers
        ({KEY: [2, 18, 33]}, True, BEFORE, (1, 17, 32)),
        ({KEY: [2, 18, 33]}, False, BEFORE, (1, 17, 32)),
        ({}, False, BEFORE, (1, 17, 32)),
        ({"eagle_config": {}}, False, BEFORE, (1, 17, 32)),
        ({"eagle_config": {KEY: None}}, True, BEFORE, (1, 17, 32)),
        ({"eagle_config": {KEY: [1, 17, 32]}, KEY: [2, 18, 33]}, False, OUTPUT, (1, 17, 32)),
    ],
)
def test_convention(config, speculators, convention, outputs):
    found = layers(config, speculators=speculators)
    assert (found.convention, found.output_ids) == (convention, outputs)
    assert convention.value in str(found)


def test_default_is_said_aloud():
    found = layers({}, n=8)
    assert found.ids == (2, 4, 5)
    assert found.output_ids == (1, 3, 4)
    assert "default" in str(found)
    assert any("default" in note for note in found.notes)


def test_default_without_target_has_no_numbers():
    found = layers({}, n=None)
    assert found.ids is None
    assert found.output_ids is None
    assert "default" in str(found)


def test_list_that_both_conventions_claim_is_noted():
    assert any("convention=capture_before" in note for note in layers({"eagle_config": {KEY: [2, 18, 33]}}).notes)


def test_last_layer_is_explained():
    (note,) = layers({"eagle_config": {KEY: [2, 5, 8]}}, n=8).notes
    assert "id 8 is the last layer's output before the final norm" in note


def test_arguments_win():
    config = {"eagle_config": {KEY: [1, 17, 32]}}
    assert layers(config, argument=[3, 4, 5]).output_ids == (3, 4, 5)
    assert layers(config, argument=[3, 4, 5], convention=BEFORE).output_ids == (2, 3, 4)
    assert layers(config, convention=BEFORE).output_ids == (0, 16, 31)


@pytest.mark.parametrize(
    ("config", "arguments", "named"),
    [
        ({"eagle_config": {KEY: [1, 17]}}, {}, "expected 3 aux layer ids"),
        ({}, {"argument": [1, 1.5, 3]}, "aux_layer_ids: expected a list of integers"),
        ({"eagle_config": {KEY: [1, 1, 32]}}, {}, "distinct"),
        ({"eagle_config": {KEY: [1, 17, 37]}}, {}, r"in 0\.\.35"),
        ({"eagle_config": {KEY: [1, 17, -1]}}, {}, r"in 0\.\.35"),
        ({KEY: [0, 18, 33]}, {}, r"in 1\.\.36"),
        ({"eagle_config": {KEY: [1, 17, 32]}, KEY: [1, 17, 30]}, {}, "eagle_aux_hidden_state_layer_ids: expected"),
        ({"eagle_config": {KEY: "1,2,3"}}, {}, "list of integers"),
        ({"eagle_config": {KEY: [1, 2, True]}}, {}, "list of integers"),
        ({"eagle_config": [1]}, {}, "eagle_config: expected an object"),
        ({}, {"n": 6}, "distinct"),  # [2, 3, 3]
        ({}, {"n": 2}, "expected ids"),
        ({}, {"num_aux": 5}, "expected 5 ids"),
        ({}, {"convention": OUTPUT}, "convention: expected none"),
        ({"eagle_config": {KEY: [24, 30, 36]}}, {"convention": OUTPUT}, r"in 0\.\.35"),
        ({}, {"argument": [24, 30, 36]}, r"in 0\.\.35 \(convention output\)"),  # never re-read in silence
    ],
)
def test_refusals(config, arguments, named):
    with pytest.raises(ConfigError, match=named):
        layers(config, **arguments)
