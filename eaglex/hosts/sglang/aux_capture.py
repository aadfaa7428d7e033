"""Which layers' outputs the target captures for the draft: decided by eaglex's loader, set on the host's model.

The host's `set_eagle3_layers_to_capture` takes output ids on most models and adds one, because its models capture the
*input* of a layer. Some (DeepSeek, GLM Lite, gpt-oss) guess from the numbers which of the two is meant. So the ids are
set, and what the model then says it captures is read back. A model that captures something else is refused: a wrong
list raises no error in the host, and the accept length falls to about 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eaglex.errors import ConfigError

SETTER = "set_eagle3_layers_to_capture"


def captured(model: Any) -> list[int] | None:
    """What the model says it captures, as inputs of layers, from the one of its modules that keeps the list."""
    found = [list(m.layers_to_capture) for m in model.modules() if getattr(m, "layers_to_capture", None)]
    return found[0] if found and all(one == found[0] for one in found) else None


def set_layers(model: Any, output_ids: Sequence[int]) -> list[int]:
    """Make the model capture these layers' outputs; the argument of the setter that did it.

    Raises:
        ConfigError: the model has no setter, or captures other layers than these, or in another order.
    """
    name = type(model).__name__
    setter = getattr(model, SETTER, None)
    if setter is None:
        raise ConfigError(f"target {name}: expected the method {SETTER}, got none: it cannot feed an EAGLE-3 draft.")
    if list(output_ids) != sorted(output_ids):
        raise ConfigError(
            f"auxiliary layers: expected ascending ids, since the host captures in the order of the layers, got "
            f"{list(output_ids)}."
        )
    wanted = [i + 1 for i in output_ids]  # the input of the next layer
    seen: list[list[int] | None] = []
    for argument in (list(output_ids), wanted):
        setter(argument)
        seen.append(captured(model))
        if seen[-1] == wanted:
            return argument
    raise ConfigError(
        f"target {name}: expected layers_to_capture={wanted} after {SETTER}({list(output_ids)}), got {seen[0]}."
    )


def check_width(num_aux: int, target_hidden: int, *, model_hidden: int) -> None:
    """Raise ConfigError where the target's hidden states do not have the draft's width."""
    if target_hidden != model_hidden:
        raise ConfigError(
            f"draft: expected auxiliary hidden states of {num_aux} x {target_hidden}, and the target's hidden_size is "
            f"{model_hidden}."
        )
