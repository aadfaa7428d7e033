"""A smaller vocabulary head: rank the target's tokens by frequency, keep the rows of the most frequent ones.

The head is a quarter to two thirds of the bytes of a draft step, and most of its rows are hardly ever right. A token
that is cut is never drafted; the target still emits it, so only acceptance can suffer. Ranked by frequency in text, as
in FR-Spec (arXiv 2502.14856).
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eaglex.errors import ConfigError
from eaglex.fields import read_json
from eaglex.packed import PackedWeight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eaglex.config import DraftConfig
    from eaglex.packed import Weight
    from eaglex.weights import DraftWeights

FORMAT = "eaglex hot vocabulary 1"
DEFAULT_FILE = "hot_vocab.json"
# Of every ten runs of a thousand tokens one is counted apart: coverage is told of text that the ranking has not seen.
RUN, HELD_OUT = 1000, 10
_FILE_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Ranking:
    """How often texts hold each token of a target; `held_out` counts those that the ranking leaves aside."""

    counts: Tensor  # [vocab] int64
    held_out: Tensor  # [vocab] int64
    source: str

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return len(self.counts)

    def best(self, ids: Tensor, count: int) -> Tensor:
        """Positions in `ids` [n] (target ids) of the `count` most frequent, ties by the lowest id, ascending."""
        by_id = ids.argsort(stable=True)
        order = by_id[self.counts[ids[by_id]].argsort(descending=True, stable=True)]
        return order[:count].sort().values

    def coverage(self, ids: Tensor) -> float:
        """Share of text tokens that are among `ids`: of the held-out ones, of all where none are held out."""
        counts = self.held_out if int(self.held_out.sum()) else self.counts
        return int(counts[ids].sum()) / max(1, int(counts.sum()))

    def write(self, path: str | Path) -> None:
        """As JSON: [id, count, held-out count] of every token that occurs, the most frequent first."""
        seen = (self.counts + self.held_out).nonzero().flatten()
        order = seen[self.counts[seen].argsort(descending=True, stable=True)]
        rows = torch.stack([order, self.counts[order], self.held_out[order]], 1).tolist()
        data = {"format": FORMAT, "vocab_size": self.vocab_size, "source": self.source, "tokens": rows}
        try:
            Path(path).write_text(json.dumps(data) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: expected a file that can be written, got {error.strerror}") from error

    @classmethod
    def read(cls, path: str | Path) -> Ranking:
        """What `write` wrote. Raises CheckpointError or ConfigError, naming file and field."""
        fields = read_json(Path(path), max_bytes=_FILE_BYTES)
        if fields.text("format") != FORMAT:
            fields.fail("format", json.dumps(FORMAT))
        size = fields.integer("vocab_size")
        if size is None or size > 2**24:
            fields.fail("vocab_size", f"an integer in 1..{2**24}")
        rows = fields.data.get("tokens")
        whole = isinstance(rows, list) and all(
            isinstance(r, list) and len(r) == 3 and all(type(v) is int and 0 <= v < 2**62 for v in r) for r in rows
        )
        if not whole or not rows:
            fields.fail("tokens", "a list of [id, count, held-out count]")
        table = torch.tensor(rows, dtype=torch.int64)
        ids = table[:, 0]
        if int(ids.max()) >= size:
            fields.fail("tokens", f"ids in 0..{size - 1}", int(ids.max()))
        if int((times := torch.bincount(ids)).max()) > 1:
            fields.fail("tokens", f"id {int(times.argmax())} at most once", int(times.max()))
        counts, held_out = torch.zeros(2, size, dtype=torch.int64)
        counts[ids], held_out[ids] = table[:, 1], table[:, 2]
        return cls(counts=counts, held_out=held_out, source=fields.text("source") or str(path))


class Counting:
    """Counts tokens block by block, in memory that does not grow with the text."""

    def __init__(self, vocab_size: int) -> None:
        self.counts, self.held_out = torch.zeros(2, vocab_size, dtype=torch.int64)
        self.total = 0

    def add(self, tokens: Sequence[int], where: str) -> None:
        """One block of token ids. Raises ConfigError, with `where`, for an id out of range."""
        size = len(self.counts)
        if tokens and not 0 <= min(tokens) <= max(tokens) < size:
            bad = next(token for token in tokens if not 0 <= token < size)
            raise ConfigError(f"{where}: expected token ids in 0..{size - 1}, got {bad}")
        ids = torch.tensor(tokens, dtype=torch.int64)
        aside = (self.total + torch.arange(len(ids))) // RUN % HELD_OUT == HELD_OUT - 1
        self.total += len(ids)
        self.counts += torch.bincount(ids[~aside], minlength=size)
        self.held_out += torch.bincount(ids[aside], minlength=size)

    def ranking(self, source: str) -> Ranking:
        """What was counted. Raises ConfigError where that is nothing."""
        if not int(self.counts.sum()):
            raise ConfigError(f"{source}: expected text, got no token")
        return Ranking(counts=self.counts, held_out=self.held_out, source=source)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HotVocab:
    """`--hot-vocab`: keep `size` tokens (None: all that the ranking has seen) by the ranking in `file` (None: the
    hot_vocab.json beside the draft).
    """

    size: int | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> HotVocab:
        """`N`, `FILE` or `N:FILE`. Raises ConfigError."""
        count, colon, file = text.partition(":")
        if re.fullmatch(r"[-+]?[\d.]+", count):
            if not count.isdecimal() or int(count) < 1 or (colon and not file):
                raise ConfigError(f"hot_vocab: expected N >= 1, FILE or N:FILE, got {text!r}")
            return cls(size=int(count), file=file or None)
        if not text:
            raise ConfigError("hot_vocab: expected N, FILE or N:FILE, got ''")
        return cls(file=text)

    def ranking(self, draft: str | Path) -> Ranking:
        """The ranking that is meant. Raises ConfigError where there is none."""
        path = Path(self.file) if self.file else Path(draft) / DEFAULT_FILE
        if not path.is_file():
            raise ConfigError(
                f"hot_vocab: expected a ranking at {path}, got no such file; make one from text with: eaglex hot-vocab "
                f"--tokenizer TARGET --output {path.name} TEXT..., and name it as --hot-vocab N:FILE"
            )
        return Ranking.read(path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """A draft with a smaller head, and the share of the ranking's text that head could draft before and can now."""

    config: DraftConfig
    weights: DraftWeights
    before: float
    after: float
    note: str


def cut(config: DraftConfig, weights: DraftWeights, ranking: Ranking, size: int | None = None) -> Cut:
    """Keep the `size` most frequent tokens of the head, full or reduced already (None: all that ever occurred).

    Draft ids stay in ascending order of what they were. Raises ConfigError where the ranking is another target's or
    `size` exceeds the head.
    """
    if ranking.vocab_size != config.vocab_size:
        raise ConfigError(
            f"hot_vocab: expected a ranking of vocab_size={config.vocab_size}, got {ranking.vocab_size} of "
            f"{ranking.source}: made with another tokenizer?"
        )
    had = config.draft_vocab_size
    targets = torch.arange(had) if weights.d2t is None else torch.arange(had) + weights.d2t.cpu()
    count = int((ranking.counts[targets] > 0).sum()) if size is None else size
    if not 1 <= count <= had:
        raise ConfigError(f"hot_vocab: expected 1..{had} tokens, the draft vocabulary, got {count}")
    kept = ranking.best(targets, count)
    unseen = int((ranking.counts[targets[kept]] == 0).sum())
    before, after = ranking.coverage(targets), ranking.coverage(targets[kept])
    held = "held-out" if int(ranking.held_out.sum()) else "its own"
    note = (
        f"hot vocabulary: {count:,} of {had:,} head rows by {ranking.source}; they cover {after:.2%} of {held} text, "
        f"all rows {before:.2%}: a loss of {100 * (before - after):.2f} points"
    )
    if unseen:
        note += f"; {unseen:,} of them never occur there"
    wide = weights.lm_head_rows
    made = dataclasses.replace(
        weights,
        lm_head=_rows(weights.lm_head, kept),
        lm_head_rows=None if wide is None else wide[kept.to(wide.device)],
        d2t=(targets[kept] - torch.arange(count)).to(weights.fc.device),
    )
    return Cut(
        config=dataclasses.replace(config, draft_vocab_size=count), weights=made, before=before, after=after, note=note
    )


def _rows(weight: Weight, kept: Tensor) -> Weight:
    """Rows of a head, packed or not; FP8 is indexed as bytes, which torch knows everywhere."""
    index = kept.to(weight.device)
    if isinstance(weight, Tensor):
        return weight[index]
    values = weight.values.view(torch.uint8)[index].view(weight.values.dtype)
    return PackedWeight(values=values, scales=weight.scales[index])
