"""`eaglex inspect`: what a checkpoint is and what a step of it costs, from JSON and headers alone."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

from eaglex.config import DraftConfig
from eaglex.packed import DraftQuant, Precision, packed_bytes, rescored
from eaglex.packed_tensors import PackedInfo
from eaglex.weights import expected_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from eaglex.checkpoint import Facts
    from eaglex.source import TensorInfo

_ITEMSIZE = {"BF16": 2, "F16": 2, "F32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes of one draft on its GPU. A step reads all weights but `fc` (once per cycle), the embedding (one row) and
    the rows beside an INT4 head (those that are scored again).
    """

    parameters: int
    step_bytes: int
    fuse_bytes: int
    weights_bytes: int
    embedding_bytes: int
    kv_bytes_per_token: int

    def floor_us(self, bandwidth_tb_s: float) -> float:
        """Microseconds below which no step at batch 1 can get: its weight bytes over the memory bandwidth."""
        return self.step_bytes / bandwidth_tb_s / 1e6


def cost(
    config: DraftConfig, dtype: str, quant: DraftQuant | None = None, *, stored: Mapping[str, TensorInfo] | None = None
) -> Cost:
    """Sizes by config; `dtype` in safetensors' spelling is that of what is not packed, and of K and V.

    `quant` changes parts; `stored` names what the checkpoint has packed already.
    """
    size, quant, stored = _ITEMSIZE[dtype], quant or DraftQuant(), stored or {}
    counts, sizes = {}, {}
    for name, shape in expected_shapes(config).items():
        if name == "d2t":
            continue
        counts[name] = shape[0] * (shape[1] if len(shape) > 1 else 1)
        precision, info = quant.of(name), stored.get(name)
        if precision is None and isinstance(info, PackedInfo):
            sizes[name] = info.nbytes
        elif precision in (None, Precision.NONE):
            sizes[name] = counts[name] * size
        else:
            sizes[name] = packed_bytes(precision, shape)
    four, info = quant.head is Precision.INT4, stored.get("lm_head")
    rows = four and not (isinstance(info, PackedInfo) and info.dtype == Precision.INT4.value.upper())
    kept = counts["lm_head"] * size if rows else 0  # lm_head_rows, of which a chain's step reads a few
    fuse = sum(n for name, n in sizes.items() if name == "fc" or name.startswith("aux_norms"))
    total, embedding = sum(sizes.values()), sizes["embed_tokens"]
    return Cost(
        parameters=sum(counts.values()),
        step_bytes=total - fuse - embedding + (1 + (rescored(1) if rows else 0)) * config.hidden_size * size,
        fuse_bytes=fuse,
        weights_bytes=total - embedding + kept,
        embedding_bytes=embedding,
        kv_bytes_per_token=2 * config.num_layers * config.kv_size * size,
    )


def by_word(facts: Facts) -> dict[str, Cost]:
    """What the draft would cost with each word of `--draft-quant`."""
    return {p.value: cost(facts.config, facts.dtype, DraftQuant.parse(p.value)) for p in Precision}


def report(facts: Facts, bandwidth_tb_s: float | None = None, quant: DraftQuant | None = None) -> str:
    """The checkpoint's report and its costs, for people."""
    c = cost(facts.config, facts.dtype, quant, stored=facts.tensors)
    each = by_word(facts)
    floors = {n: "" if bandwidth_tb_s is None else f" ({each[n].floor_us(bandwidth_tb_s):,.1f} us)" for n in each}
    lines = [
        *facts.lines(),
        f"parameters: {c.parameters / 1e6:,.1f} M (embedding included)",
        f"draft_quant: {quant or DraftQuant()}; --draft-quant would read per step with "
        + ", ".join(f"{name} {_amount(each[name].step_bytes)}{floors[name]}" for name in each),
        f"bytes read per step: {_amount(c.step_bytes)}; fuse, once per cycle: {_amount(c.fuse_bytes)}",
        f"memory on the draft GPU: weights {_amount(c.weights_bytes)}, full embedding copy "
        f"{_amount(c.embedding_bytes)}, "
        f"KV {c.kv_bytes_per_token:,} B per token",
    ]
    if bandwidth_tb_s is not None:
        lines.append(f"step floor: {c.floor_us(bandwidth_tb_s):,.1f} us at {bandwidth_tb_s:g} TB/s, batch 1, no KV")
    return "\n".join(lines)


def as_json(facts: Facts, bandwidth_tb_s: float | None = None, quant: DraftQuant | None = None) -> dict[str, Any]:
    """The same as one JSON object."""
    c = cost(facts.config, facts.dtype, quant, stored=facts.tensors)

    def floor(of: Cost) -> float | None:
        return None if bandwidth_tb_s is None else of.floor_us(bandwidth_tb_s)

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
        "step_floor_us": floor(c),
        "draft_quant": str(quant or DraftQuant()),
        "by_draft_quant": {
            name: {"step_bytes": each.step_bytes, "step_floor_us": floor(each)}
            for name, each in by_word(facts).items()
        },
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
