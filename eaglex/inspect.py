"""`eaglex inspect`: what a checkpoint is and what a step of it costs, from JSON and headers alone."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

from eaglex.config import DraftConfig
from eaglex.weights import expected_shapes

if TYPE_CHECKING:
    from eaglex.checkpoint import Facts

_ITEMSIZE = {"BF16": 2, "F16": 2, "F32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes of one draft on its GPU. A step reads all weights but `fc` (once per cycle) and the embedding (one row)."""

    parameters: int
    step_bytes: int
    fuse_bytes: int
    weights_bytes: int
    embedding_bytes: int
    kv_bytes_per_token: int

    def floor_us(self, bandwidth_tb_s: float) -> float:
        """Microseconds below which no step at batch 1 can get: its weight bytes over the memory bandwidth."""
        return self.step_bytes / bandwidth_tb_s / 1e6


def cost(config: DraftConfig, dtype: str) -> Cost:
    """Sizes by config; `dtype` in safetensors' spelling. KV in the same type."""
    size = _ITEMSIZE[dtype]
    counts = {}
    for name, shape in expected_shapes(config).items():
        if name != "d2t":
            counts[name] = shape[0] * (shape[1] if len(shape) > 1 else 1)
    fuse = sum(n for name, n in counts.items() if name == "fc" or name.startswith("aux_norms"))
    step = sum(counts.values()) - fuse - counts["embed_tokens"] + config.hidden_size
    return Cost(
        parameters=sum(counts.values()),
        step_bytes=step * size,
        fuse_bytes=fuse * size,
        weights_bytes=(sum(counts.values()) - counts["embed_tokens"]) * size,
        embedding_bytes=counts["embed_tokens"] * size,
        kv_bytes_per_token=2 * config.num_layers * config.kv_size * size,
    )


def report(facts: Facts, bandwidth_tb_s: float | None = None) -> str:
    """The checkpoint's report and its costs, for people."""
    c = cost(facts.config, facts.dtype)
    lines = [
        *facts.lines(),
        f"parameters: {c.parameters / 1e6:,.1f} M (embedding included)",
        f"bytes read per step: {_amount(c.step_bytes)}; fuse, once per cycle: {_amount(c.fuse_bytes)}",
        f"memory on the draft GPU: weights {_amount(c.weights_bytes)}, full embedding copy "
        f"{_amount(c.embedding_bytes)}, "
        f"KV {c.kv_bytes_per_token:,} B per token",
    ]
    if bandwidth_tb_s is not None:
        lines.append(f"step floor: {c.floor_us(bandwidth_tb_s):,.1f} us at {bandwidth_tb_s:g} TB/s, batch 1, no KV")
    return "\n".join(lines)


def as_json(facts: Facts, bandwidth_tb_s: float | None = None) -> dict[str, Any]:
    """The same as one JSON object."""
    c = cost(facts.config, facts.dtype)
    aux = facts.aux
    return {
        "checkpoint": facts.label,
        "dialect": facts.dialect.name.lower(),
        "architectures": list(facts.architectures),
        "dtype": facts.dtype.lower(),
        "config": _plain(dataclasses.asdict(facts.config)),
        "d2t": facts.d2t is not None,
        "aux_layers": {
            "ids": aux.ids and list(aux.ids),
            "convention": aux.convention.value,
            "origin": aux.origin,
            "output_ids": aux.output_ids and list(aux.output_ids),
        },
        "from_target": list(facts.borrowed),
        "missing_without_target": list(facts.absent),
        "notes": list(facts.notes),
        "file_bytes": facts.file_bytes,
        **dataclasses.asdict(c),
        "bandwidth_tb_s": bandwidth_tb_s,
        "step_floor_us": None if bandwidth_tb_s is None else c.floor_us(bandwidth_tb_s),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value.value if isinstance(value, enum.Enum) else value


def _amount(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} B"
