"""eaglex._C without the Python around it: structs whose fields a test may spoil before C++ sees them."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from eaglex import engine as python
from eaglex.engine import DraftBatch, VerifyTensors
from eaglex.reference_rope import rope_frequencies
from support.rig import Rig


class RawEngine:
    """What DraftEngine would hand to C++ for this rig, not yet handed over."""

    def __init__(self, rig: Rig) -> None:
        from eaglex import _C

        self.binary: Any = _C
        self.rig = rig
        self._inv_freq, factor = rope_frequencies(rig.config.rope, rig.config.rotary_dim)
        self.config = python._config(_C, rig.config, factor)
        self.speculation = python._speculation(_C, rig.speculation)
        self.limits = filled(_C.EngineLimits(), dataclasses.asdict(rig.limits))
        self.weights = python._weights(_C, rig.weights, self._inv_freq)
        self.tensors = filled(_C.EngineTensors(), self.bound())

    def bound(self) -> dict[str, object]:
        """Every tensor that is bound at construction."""
        results = rig_results(self.rig)
        return {"req_to_token": self.rig.table, "draft_k": self.rig.draft_k, "draft_v": self.rig.draft_v} | results

    def build(self) -> Any:
        return self.binary.DraftEngine(
            device="cpu",
            index=0,
            config=self.config,
            speculation=self.speculation,
            limits=self.limits,
            weights=self.weights,
            tensors=self.tensors,
        )

    def batch(self, batch: DraftBatch) -> Any:
        return filled(self.binary.BatchTensors(), fields(batch))

    def verify(self, out: VerifyTensors, **ids: Tensor) -> Any:
        values = fields(out) | {"mask_mode": getattr(self.binary.MaskMode, out.mask_mode.name)} | ids
        return filled(self.binary.VerifyTensors(), values)


def rig_results(rig: Rig) -> dict[str, object]:
    return fields(rig.results)


def fields(owner: Any) -> dict[str, object]:
    return {field.name: getattr(owner, field.name) for field in dataclasses.fields(owner)}


def filled(target: Any, values: dict[str, Any]) -> Any:
    for name, value in values.items():
        setattr(target, name, value)
    return target
