"""The draft vocabulary: d2t (draft id → difference to the target id) and t2d (which target ids the draft has)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eaglex.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from eaglex.source import TensorInfo

D2T_TYPES = ("I64", "I32")
T2D_TYPES = ("BOOL", "U8", "I64", "I32")


def check_headers(d2t: TensorInfo | None, t2d: TensorInfo | None, vocab_size: int, draft_vocab_size: int) -> None:
    """Raise CheckpointError for a wrong type or shape, before any data is read."""
    for info, types, size in ((d2t, D2T_TYPES, draft_vocab_size), (t2d, T2D_TYPES, vocab_size)):
        if info is None:
            continue
        if info.dtype not in types:
            raise CheckpointError(f"{info}: expected dtype {' or '.join(types)}, got {info.dtype}")
        if info.shape != (size,):
            raise CheckpointError(f"{info}: expected shape {[size]}, got {list(info.shape)}")


def read_d2t(
    d2t: TensorInfo | None, t2d: TensorInfo | None, vocab_size: int, draft_vocab_size: int, where: str
) -> tuple[Tensor | None, list[str]]:
    """d2t [draft_vocab] int64 or None for the identity, checked against t2d [vocab], and notes for the report.

    d2t must hold differences. Absolute ids are told apart by t2d; without it by the fact that a vocabulary with two
    neighbouring ids has two equal differences, while absolute ids are all distinct.
    """
    import torch

    check_headers(d2t, t2d, vocab_size, draft_vocab_size)
    kept = None if t2d is None else t2d.read()
    if kept is not None and t2d is not None:
        if kept.dtype is not torch.bool and not bool(((kept == 0) | (kept == 1)).all()):
            raise CheckpointError(f"{t2d}: expected only 0 and 1, got {int(kept.min())}..{int(kept.max())}")
        if int(kept.sum()) != draft_vocab_size:
            raise CheckpointError(
                f"{t2d}: expected {draft_vocab_size} target ids marked, one for each of d2t's draft ids "
                f"(draft_vocab_size), got {int(kept.sum())}"
            )
    if d2t is None:
        if draft_vocab_size != vocab_size:
            raise CheckpointError(
                f"{where}: d2t: expected [{draft_vocab_size}] I64, since draft_vocab_size={draft_vocab_size} "
                f"!= vocab_size={vocab_size}, got none"
            )
        return None, []
    offsets = d2t.read().long()
    ids = torch.arange(draft_vocab_size)
    absolute = _valid(offsets, vocab_size) and (
        torch.equal(offsets.sort().values, kept.bool().nonzero().flatten())
        if kept is not None
        else draft_vocab_size > 1 and bool((offsets.diff() > 0).all())
    )
    reads_as_offsets = _valid(ids + offsets, vocab_size)
    if absolute and not (kept is not None and reads_as_offsets and _matches(ids + offsets, kept)):
        proof = (
            f"these are the absolute target ids that {t2d.name} marks"
            if t2d is not None
            else "they look like absolute ids: strictly increasing, and no t2d settles it"
        )
        raise CheckpointError(
            f"{d2t}: expected differences (target id = draft id + d2t), but {proof}; got d2t[:4]={offsets[:4].tolist()}"
        )
    targets = ids + offsets
    bad = ((targets < 0) | (targets >= vocab_size)).nonzero().flatten()
    if len(bad):
        first = int(bad[0])
        raise CheckpointError(
            f"{d2t}: d2t[{first}]: expected {first} + d2t[{first}] in 0..{vocab_size - 1}, got {int(offsets[first])}, "
            f"so target id {int(targets[first])}"
        )
    counts = torch.bincount(targets, minlength=vocab_size)
    if int(counts.max()) > 1:
        twice = int(counts.argmax())
        first, second = (targets == twice).nonzero().flatten()[:2].tolist()
        raise CheckpointError(
            f"{d2t}: d2t[{second}]: expected a different target id for each draft id, got {twice} as for {first}"
        )
    if kept is not None and not _matches(targets, kept):
        first = int(targets[~kept.bool()[targets]][0])
        raise CheckpointError(
            f"{t2d}: expected to mark exactly d2t's target ids, got {first} unmarked: t2d contradicts d2t"
        )
    if draft_vocab_size == vocab_size and not bool(offsets.any()):
        return None, ["d2t is the identity"]
    return offsets, [] if kept is not None else ["no t2d to check d2t against"]


def _valid(targets: Tensor, vocab_size: int) -> bool:
    return bool(((targets >= 0) & (targets < vocab_size)).all())


def _matches(targets: Tensor, kept: Tensor) -> bool:
    import torch

    return torch.equal(targets.sort().values, kept.bool().nonzero().flatten())
