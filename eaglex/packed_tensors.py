"""Low-bit matrices in a file: the tensors of one matrix become one entry, which reads itself as a PackedWeight."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from eaglex.errors import CheckpointError
from eaglex.packed import GROUP, PackedWeight, Precision
from eaglex.quant_schemes import Layout, Scheme
from eaglex.source import TensorInfo

if TYPE_CHECKING:
    import torch

_LOW_BIT = ("F8_E4M3", "F8_E5M2", "U8", "I8", "F4", "I32")
_SIGN = re.compile(r"(.+)\.(weight_packed|weight_scale|weight_scale_inv|weight_shape)")
# Scales of what eaglex does not quantise: inputs, and the KV pool.
_ACTIVATION = re.compile(r".+\.(input_scale|output_scale|k_scale|v_scale|input_global_scale)")
_SCALE_TYPES = ("F32", "BF16", "F16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedInfo(TensorInfo):
    """One packed matrix: `name` is its weight's, `shape` [out, in], `dtype` the precision in capitals."""

    layout: Layout
    values: TensorInfo
    scales: TensorInfo
    written_shape: TensorInfo | None = None

    @property
    def precision(self) -> Precision:
        """FP8 or INT4."""
        return Precision(self.dtype.lower())

    @property
    def nbytes(self) -> int:
        """Bytes as the engine holds it."""
        rows, width = self.shape
        groups = math.ceil(width / GROUP)
        if self.precision is Precision.FP8:
            return rows * width + 4 * rows * (groups if self.layout is Layout.FP8_BLOCK else 1)
        return rows * width // 2 + rows * groups * (4 if self.scales.dtype == "F32" else 2)

    def pack(self) -> PackedWeight:
        """The matrix itself, on the CPU, with exactly the file's numbers. CheckpointError names a bad tensor."""
        import torch

        rows, width = self.shape
        values, scales = self.values.read(), self.scales.read()
        if not bool(scales.isfinite().all()):
            raise CheckpointError(f"{self.scales}: expected finite scales, got NaN or infinity")
        if self.written_shape is not None and self.written_shape.read().tolist() != [rows, width]:
            raise CheckpointError(
                f"{self.written_shape}: expected {[rows, width]} as of {self.values.name}, "
                f"got {self.written_shape.read().tolist()}"
            )
        if self.layout is Layout.INT4_WORDS:
            values = values.contiguous().view(torch.uint8)
        elif self.layout is Layout.INT4_ROW_PAIRS:
            values = _from_row_pairs(values)
        else:
            if bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any()):
                raise CheckpointError(f"{self.values}: expected finite values, got NaN")
            scales = self._by_row(scales.float())
        return PackedWeight(values=values.contiguous(), scales=scales.contiguous())

    def _by_row(self, scales: torch.Tensor) -> torch.Tensor:
        """[out, 1], or [out, ceil(in / 128)] from blocks."""
        rows = self.shape[0]
        if self.layout is Layout.FP8_BLOCK:
            return scales.repeat_interleave(GROUP, 0)[:rows]
        return scales.reshape(-1, 1).expand(rows, 1)


def _from_row_pairs(values: torch.Tensor) -> torch.Tensor:
    """[out / 2, in] bytes, rows 2j and 2j + 1 in two's complement → [out, in / 2], neighbours plus 8."""
    import torch

    rows = torch.stack([values & 15, values >> 4], 1).flatten(0, 1) ^ 8
    return rows[:, 0::2] | (rows[:, 1::2] << 4)


def collect(tensors: Mapping[str, TensorInfo], scheme: Scheme | None) -> tuple[dict[str, TensorInfo], list[str]]:
    """Packed matrices under their weight's name, everything else as it is, and notes for the report.

    Raises CheckpointError for a packed matrix that the scheme does not describe or whose tensors do not fit it.
    Without a scheme nothing is touched: the names and types of packed tensors are then refused like any others.
    """
    if scheme is None:
        return dict(tensors), []
    rest = {name: info for name, info in tensors.items() if not _ACTIVATION.fullmatch(name)}
    modules = {match[1] for name in rest if (match := _SIGN.fullmatch(name))}
    modules |= {n.removesuffix(".weight") for n, i in rest.items() if n.endswith(".weight") and i.dtype in _LOW_BIT}
    dropped = len(tensors) - len(rest)
    notes = [f"{dropped} scales of inputs or KV are not used: eaglex does not quantise activations"] if dropped else []
    for module in sorted(modules):
        own = {name: rest.pop(f"{module}.{name}") for name in _names(module, rest)}
        info = _matrix(module, own, scheme)
        rest[info.name] = info
    packed = [info for info in rest.values() if isinstance(info, PackedInfo)]
    if packed:
        notes.append(f"{scheme.label}: {len(packed)} packed matrices, taken with exactly their numbers")
    else:
        notes.append(f"{scheme.label} of the config is ignored: no tensor is packed")
    return rest, notes


def _names(module: str, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """What stands behind `module.` and belongs to its matrix."""
    start = f"{module}."
    return [name[len(start) :] for name in tensors if name.startswith(start) and "." not in name[len(start) :]]


def _matrix(module: str, own: dict[str, TensorInfo], scheme: Scheme) -> PackedInfo:
    first = next(iter(own.values()))
    layout = scheme.layout(module)
    if layout is None:
        raise CheckpointError(
            f"{first}: expected a plain matrix, since {scheme.place} describes none for {module}, got {sorted(own)}"
        )
    words = layout is Layout.INT4_WORDS
    value_name = "weight_packed" if words else "weight"
    expected = {value_name, scheme.scale_name} | ({"weight_shape"} if words else set())
    if own.keys() != expected:
        wrong = sorted(own.keys() ^ expected)[0]
        raise CheckpointError(
            f"{first.file.name}: {module}.{wrong}: expected {', '.join(sorted(expected))} for {layout.value} "
            f"({scheme.place}), got it {'missing' if wrong in expected else 'beside them'}"
        )
    values, scales = own[value_name], own[scheme.scale_name]
    wanted = {Layout.INT4_WORDS: "I32", Layout.INT4_ROW_PAIRS: "U8"}.get(layout, "F8_E4M3")
    if values.dtype != wanted:
        raise CheckpointError(f"{values}: expected dtype {wanted} for {layout.value}, got {values.dtype}")
    if len(values.shape) != 2:
        raise CheckpointError(f"{values}: expected 2 dimensions, got shape {list(values.shape)}")
    rows, width = values.shape
    rows, width = (rows, 8 * width) if words else (2 * rows, width) if wanted == "U8" else (rows, width)
    groups = math.ceil(width / GROUP)
    shapes: dict[Layout, list[tuple[int, ...]]] = {
        Layout.FP8_TENSOR: [(), (1,)],
        Layout.FP8_ROW: [(rows,), (rows, 1)],
        Layout.FP8_BLOCK: [(math.ceil(rows / GROUP), groups)],
    }
    fits = shapes.get(layout, [(rows, groups)])
    if scales.shape not in fits:
        raise CheckpointError(
            f"{scales}: expected shape {' or '.join(str(list(s)) for s in fits)} for {layout.value} of "
            f"{[rows, width]}, got {list(scales.shape)}"
        )
    if scales.dtype not in _SCALE_TYPES:
        raise CheckpointError(f"{scales}: expected dtype {', '.join(_SCALE_TYPES)}, got {scales.dtype}")
    return PackedInfo(
        file=values.file,
        name=f"{module}.weight",
        dtype="INT4" if wanted in ("I32", "U8") else "FP8",
        shape=(rows, width),
        layout=layout,
        values=values,
        scales=scales,
        written_shape=own.get("weight_shape"),
    )
