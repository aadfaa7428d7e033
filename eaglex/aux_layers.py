"""Which layers of the target feed the draft, and in which of the two conventions their numbers are written.

The same list of numbers means different layers to different engines, and the wrong reading raises no error: the
accept length falls to about 1. eaglex keeps *output* ids: id i is the residual stream behind decoder layer i, in
front of the final norm.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from eaglex.errors import ConfigError
from eaglex.fields import Fields, shown

NESTED = "eagle_config"
KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")


class AuxConvention(enum.Enum):
    """OUTPUT: the output of layer id. CAPTURE_BEFORE: its input, which is hidden_states[id] of Hugging Face."""

    OUTPUT = "output"
    CAPTURE_BEFORE = "capture_before"

    def to_output(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Ids of this convention as output ids."""
        return tuple(i - (self is AuxConvention.CAPTURE_BEFORE) for i in ids)


# Where the ids are written → how they are read. The one table of this decision; docs/checkpoints.md explains each row.
CONVENTIONS = {
    "speculators": AuxConvention.CAPTURE_BEFORE,  # its trainer and vLLM index hidden_states
    "eagle_config": AuxConvention.OUTPUT,  # SpecForge and ModelOpt hook layer outputs; SGLang captures before id + 1
    "top level": AuxConvention.CAPTURE_BEFORE,  # only vLLM reads this place; SGLang ignores it
    "default": AuxConvention.CAPTURE_BEFORE,  # [2, N/2, N-3] of the EAGLE-3 paper's code, as SGLang and vLLM use it
    "argument": AuxConvention.OUTPUT,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuxLayers:
    """The auxiliary layers of one draft, in the order of fc's columns.

    `ids` are the numbers as written. Both lists are None for the default of a target that was not given.
    """

    ids: tuple[int, ...] | None
    convention: AuxConvention
    origin: str
    output_ids: tuple[int, ...] | None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.ids is None:
            return f"aux layer ids: default [2, N/2, N-3] of N layers ({self.convention.value}; no target given)"
        outputs = "" if self.convention is AuxConvention.OUTPUT else f", so output ids {list(self.output_ids or ())}"
        return f"aux layer ids: {list(self.ids)} from {self.origin}, convention {self.convention.value}{outputs}"


def resolve(
    config: Fields,
    *,
    speculators: bool,
    num_aux: int,
    num_target_layers: int | None,
    argument: Sequence[int] | None = None,
    convention: AuxConvention | None = None,
) -> AuxLayers:
    """Find the ids (argument, config, default), decide their convention and check them against the target's layers.

    An id equal to the number of layers cannot be an output id: it is the input of a layer that does not exist, the
    last layer's output in front of the final norm. In a config it proves that the whole list is capture-before
    (gpt-oss-120b v3: [24, 30, 36] of 36). In an argument it is a mistake: whoever passes ids says which kind they are.
    """
    ids, origin, field, notes = (
        _written(config, speculators) if argument is None else (list(argument), "argument", "aux_layer_ids", [])
    )
    source = "the argument" if argument is not None else f"{config.file}"
    if ids is None:
        if convention is not None:
            raise ConfigError(
                f"convention: expected none, since {config.file} holds no aux layer ids to read, got {convention.value}"
            )
        return _default(num_aux, num_target_layers, config.file)
    if any(type(i) is not int for i in ids):
        raise ConfigError(f"{source}: {field}: expected a list of integers, got {shown(ids)}")
    if len(ids) != num_aux:
        raise ConfigError(
            f"{source}: {field}: expected {num_aux} aux layer ids since fc.weight reads {num_aux} hidden states, "
            f"got {shown(ids)}"
        )
    read_as = convention or CONVENTIONS[origin]
    if convention is None and argument is None and num_target_layers in ids and read_as is AuxConvention.OUTPUT:
        read_as = AuxConvention.CAPTURE_BEFORE
        notes.append(
            f"aux layer id {num_target_layers} of a target with {num_target_layers} layers: the ids are read as "
            f"capture_before, and id {num_target_layers} is the last layer's output before the final norm"
        )
    elif (
        convention is None and origin == "eagle_config" and num_target_layers and ids == _default_ids(num_target_layers)
    ):
        notes.append(
            f"aux layer ids {ids} are read as output ids, but they are also the default list in the capture_before "
            f"convention; engines disagree on them. If the accept length is low, pass convention=capture_before"
        )
    outputs = read_as.to_output(ids)
    _check(f"{source}: {field}", ids, outputs, read_as, num_target_layers)
    return AuxLayers(ids=tuple(ids), convention=read_as, origin=field, output_ids=outputs, notes=tuple(notes))


def _written(config: Fields, speculators: bool) -> tuple[list[int] | None, str, str, list[str]]:
    nested = config.child(NESTED)
    inner = _one_of(nested) if nested is not None else None
    outer = _one_of(config)
    if inner and outer:
        (ids, field), (others, other_field) = inner, outer
        if others not in (ids, [i + 1 for i in ids]):
            raise ConfigError(
                f"{config.file}: {other_field}: expected {shown(ids)} or the same layers as capture-before ids "
                f"{shown([i + 1 for i in ids])}, as {field} says, got {shown(others)}"
            )
        notes = (
            [f"aux layer ids {others} stand in {other_field} too, where vLLM reads them as capture_before"]
            if ids == others
            else []
        )
        return ids, "eagle_config", field, notes
    if inner:
        return inner[0], "eagle_config", inner[1], []
    if outer:
        return outer[0], "speculators" if speculators else "top level", outer[1], []
    return None, "default", "default", []


def _one_of(fields: Fields) -> tuple[list[int], str] | None:
    for key in KEYS:
        if (ids := fields.integers(key)) is not None:
            return ids, fields.where(key)
    return None


def _default_ids(num_layers: int) -> list[int]:
    return [2, num_layers // 2, num_layers - 3]


def _default(num_aux: int, num_layers: int | None, file: str) -> AuxLayers:
    read_as = CONVENTIONS["default"]
    if num_aux != 3:
        raise ConfigError(
            f"{file}: {KEYS[0]}: expected {num_aux} ids, since fc.weight reads {num_aux} hidden states of the "
            "target and the default has 3, got none; pass aux_layer_ids, or is this the head of another target?"
        )
    if num_layers is None:
        return AuxLayers(ids=None, convention=read_as, origin="default", output_ids=None)
    ids = _default_ids(num_layers)
    outputs = read_as.to_output(ids)
    _check(f"{file}: {KEYS[0]}: default for {num_layers} layers", ids, outputs, read_as, num_layers)
    note = (
        f"aux layer ids are absent from {file}: the default {ids} ({read_as.value}) is taken; if the accept length is "
        "low, pass aux_layer_ids"
    )
    return AuxLayers(
        ids=tuple(ids), convention=read_as, origin="default [2, N/2, N-3]", output_ids=outputs, notes=(note,)
    )


def _check(
    where: str, ids: list[int], outputs: tuple[int, ...], read_as: AuxConvention, num_layers: int | None
) -> None:
    if len(set(outputs)) != len(outputs):
        raise ConfigError(f"{where}: expected distinct aux layer ids, got {shown(ids)}")
    low = 0 if read_as is AuxConvention.OUTPUT else 1
    high = "" if num_layers is None else str(num_layers - 1 + low)
    if any(o < 0 or (num_layers is not None and o >= num_layers) for o in outputs):
        raise ConfigError(f"{where}: expected ids in {low}..{high} (convention {read_as.value}), got {shown(ids)}")
