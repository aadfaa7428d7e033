"""A matrix of few bits as the package holds it, and which matrices of a draft may be stored so."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TYPE_CHECKING

from eaglex.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

GROUP = 128  # as in reference_low_bit, which needs torch; so is `rescored`


class Precision(enum.Enum):
    """How a matrix is stored: 16 or 32 bits as the checkpoint has it, or one of the two of reference_low_bit."""

    NONE = "none"
    FP8 = "fp8"
    INT4 = "int4"


class Part(enum.Enum):
    """The matrices that may be stored in few bits, by what reads them; fc, norms and embedding never are."""

    HEAD = "head"
    MLP = "mlp"
    QKV = "qkv"
    O_PROJ = "o"


_PARTS = {
    "lm_head": Part.HEAD,
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), Part.MLP),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), Part.QKV),
    "o_proj": Part.O_PROJ,
}


class Auto(enum.Enum):
    """`--draft-quant auto`: the precisions are measured out once the draft is there (eaglex.hosts.auto_quant)."""

    AUTO = "auto"

    def __str__(self) -> str:
        return self.value


_WORDS = tuple(p.value for p in Precision)
_PART_WORDS = tuple(p.value for p in Part)


def part_of(name: str) -> Part | None:
    """The part that a canonical name belongs to; None for what stays as it is."""
    return _PARTS.get(name.split(".")[-1])


def rescored(topk: int) -> int:
    """Scores of a row that a rescored head makes exact: an INT4 one beside the rows it was made from."""
    return max(8, 2 * topk)


def packed_bytes(precision: Precision, shape: tuple[int, ...]) -> int:
    """Bytes of a matrix [out, in] in FP8 or INT4 as quantised here, scales included."""
    rows, width = shape
    return rows * (width + 4) if precision is Precision.FP8 else rows * (width // 2 + 2 * math.ceil(width / GROUP))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftQuant:
    """The precision of each part; None leaves it as the checkpoint has it, NONE makes it as wide as `fc`."""

    head: Precision | None = None
    mlp: Precision | None = None
    qkv: Precision | None = None
    o: Precision | None = None

    @classmethod
    def every(cls, precision: Precision) -> DraftQuant:
        """The same for all parts."""
        return cls(**dict.fromkeys(_PART_WORDS, precision))

    @classmethod
    def parse(cls, text: str) -> DraftQuant:
        """`none`, `fp8`, `int4`, or parts as in `head=int4,mlp=fp8`. Raises ConfigError.

        `fp8` has the head in INT4, as its best scores are made exact, and FP8 in the other parts; `int4` INT4 in all
        (docs/precision.md).
        """
        if text == Auto.AUTO.value:
            raise ConfigError(
                f"draft_quant: expected {', '.join(_WORDS)} or part=precision, got auto, which measures and so needs "
                "the weights on their device: eaglex generate --draft-quant auto prints what it chooses"
            )
        if text in _WORDS:
            return _OF_WORD[Precision(text)]
        chosen: dict[str, Precision] = {}
        for item in text.split(","):
            part, equals, word = item.strip().partition("=")
            if not equals or part not in _PART_WORDS or word not in _WORDS or part in chosen:
                raise ConfigError(
                    f"draft_quant: expected {', '.join(_WORDS)}, or {', '.join(_PART_WORDS)} once each as in "
                    f"head=int4,mlp=fp8, got {text!r}"
                )
            chosen[part] = Precision(word)
        return cls(**chosen)

    def of(self, name: str) -> Precision | None:
        """The precision that is asked for the tensor of that canonical name; None: as it is."""
        part = part_of(name)
        return None if part is None else getattr(self, part.value)

    def __str__(self) -> str:
        words = [f"{f.name}={p.value}" for f in dataclasses.fields(self) if (p := getattr(self, f.name)) is not None]
        return Precision.NONE.value if self == DraftQuant.every(Precision.NONE) else ",".join(words) or "as stored"


_OF_WORD = {precision: DraftQuant.every(precision) for precision in Precision}
_OF_WORD[Precision.FP8] = dataclasses.replace(_OF_WORD[Precision.FP8], head=Precision.INT4)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PackedWeight:
    """A matrix [out, in] of few bits: W[o, k] = scales[o, g(k)] · values[o, k] (reference_low_bit).

    FP8: values [out, in] float8_e4m3fn, scales float32. INT4: values [out, in / 2] uint8, the even k in the low half of
    a byte, each number plus 8; scales bfloat16 (as made here), float16 or float32. Scales are [out, 1], one per row, or
    [out, ceil(in / 128)], one per 128 inputs with a shorter last group.
    """

    values: Tensor
    scales: Tensor

    @property
    def precision(self) -> Precision:
        """INT4 where a value is half a byte."""
        return Precision.INT4 if str(self.values.dtype) == "torch.uint8" else Precision.FP8

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, width = self.values.shape
        return rows, 2 * width if self.precision is Precision.INT4 else width

    @property
    def device(self) -> torch.device:
        """Where the values lie."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes that reading it once takes."""
        return self.values.nbytes + self.scales.nbytes

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same on another device."""
        return PackedWeight(values=self.values.to(device), scales=self.scales.to(device))

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ShapeError, naming the tensor, unless this is a packed matrix of that shape."""
        if len(shape) != 2:
            raise ShapeError(f"{name}: expected a tensor of shape {list(shape)}, got a packed matrix")
        rows, width = shape
        dtype = str(self.values.dtype).removeprefix("torch.")
        if dtype not in ("float8_e4m3fn", "uint8"):
            raise ShapeError(f"{name}.values: expected dtype float8_e4m3fn (FP8) or uint8 (INT4), got {dtype}")
        four = dtype == "uint8"
        if four and width % 2:
            raise ShapeError(f"{name}: expected an even width for INT4, got {list(shape)}")
        stored = [rows, width // 2 if four else width]
        if list(self.values.shape) != stored:
            raise ShapeError(f"{name}.values: expected shape {stored} {dtype}, got {list(self.values.shape)}")
        types = ("bfloat16", "float16", "float32") if four else ("float32",)
        scale_type = str(self.scales.dtype).removeprefix("torch.")
        if scale_type not in types:
            raise ShapeError(f"{name}.scales: expected dtype {' or '.join(types)}, got {scale_type}")
        groups = math.ceil(width / GROUP)
        counts = [groups] if four else sorted({1, groups})
        if list(self.scales.shape) not in [[rows, count] for count in counts]:
            expected = " or ".join(str([rows, count]) for count in counts)
            raise ShapeError(f"{name}.scales: expected shape {expected}, got {list(self.scales.shape)}")


if TYPE_CHECKING:
    Weight = torch.Tensor | PackedWeight
