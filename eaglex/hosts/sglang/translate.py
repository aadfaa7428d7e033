"""A batch of the host after verification or prefill, as the engine's DraftBatch.

Sizes: B requests, N nodes per request (root included), T prompt tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaglex.engine import DraftBatch
from eaglex.errors import ShapeError


class Verified(NamedTuple):
    """What verification leaves, all on the device. A tree's accepted path stands at the front of its request's rows.

    hidden_states [B*N, A*Ht]; next_token_ids [B*N] int32, for each row the token after it; accept_lens [B] int32, bonus
    token included; req_pool_indices [B]; seq_lens [B] int64, before verification; out_cache_loc [B*N], the KV slots
    that verification wrote to. In the order in which RepeatedRun takes them.
    """

    hidden_states: Tensor
    next_token_ids: Tensor
    accept_lens: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor


@dataclass(frozen=True)
class Unfinished:
    """The one request of a prefill batch whose prompt has more to come: its place and the prompt's next token."""

    place: int
    next_token: int


@dataclass(slots=True)
class Prefilled:
    """What a prefill leaves. Tensors are on the device, lists on the CPU.

    hidden_states [T, A*Ht]; input_ids [T], the prompts' tokens; next_token_ids [B], the tokens chosen after them;
    req_pool_indices [B]; seq_lens [B] int64, with these tokens; out_cache_loc [T]; extend_lens, prefix_lens: tokens of
    each request now and before.
    """

    hidden_states: Tensor
    input_ids: Tensor
    next_token_ids: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    extend_lens: list[int]
    prefix_lens: list[int]
    unfinished: Unfinished | None


@dataclass(frozen=True)
class Piece:
    """Requests first..last of a prefill whose rows start..stop go in one launch.

    A request too long for one launch has its rows in several pieces, and is drafted for by the last alone.
    """

    first: int
    last: int
    start: int
    stop: int


class Translator:
    """Makes DraftBatches for one engine.

    A verified batch costs no tensor operation: what does not change from cycle to cycle is made here once. A prefill
    costs one copy to the device and three small operations, enqueued on the current stream.
    """

    def __init__(self, *, max_batch: int, max_rows: int, num_draft_tokens: int, device: torch.device) -> None:
        if max_rows < max_batch * num_draft_tokens:
            raise ShapeError(f"max_rows: expected at least {max_batch * num_draft_tokens}, got {max_rows}")
        self.max_batch, self.max_rows, self.num_draft_tokens = max_batch, max_rows, num_draft_tokens
        self.device = device
        # by B, since a slice costs as much CPU time as handing the tensor over; the first by rows per request too
        self._row_starts: dict[int, list[Tensor]] = {}
        self._draft_from = {
            drafting: self._slices(torch.full((max_batch,), drafting, dtype=torch.bool, device=device), 0)
            for drafting in (True, False)
        }
        self.row_starts(num_draft_tokens)

    def _slices(self, tensor: Tensor, more: int) -> list[Tensor]:
        """The first B + more elements, for every B."""
        return [tensor[: requests + more] for requests in range(self.max_batch + 1)]

    def row_starts(self, nodes: int) -> list[Tensor]:
        """row_start [B + 1] by B, where each request has so many rows."""
        if nodes not in self._row_starts:
            starts = torch.arange(self.max_batch + 1, dtype=torch.int32, device=self.device) * nodes
            self._row_starts[nodes] = self._slices(starts, 1)
        return self._row_starts[nodes]

    def after_verify(self, verified: Verified, *, drafting: bool = True) -> DraftBatch:
        """All requests, each drafted from its last accepted row; without `drafting` their K and V are kept alone."""
        requests = verified.accept_lens.shape[0]
        return DraftBatch(
            aux_hidden_states=verified.hidden_states,
            input_ids=verified.next_token_ids,
            row_start=self.row_starts(verified.hidden_states.shape[0] // requests)[requests],
            num_valid=verified.accept_lens,
            draft_from=self._draft_from[drafting][requests],
            req_pool_indices=verified.req_pool_indices,
            seq_lens=verified.seq_lens,
            out_cache_loc=verified.out_cache_loc,
        )

    def after_prefill(self, prefilled: Prefilled, *, drafting: bool = True) -> Iterator[DraftBatch]:
        """The prompts in launches of at most max_rows rows, in order: a launch reads what those before it wrote."""
        lengths = prefilled.extend_lens
        total = sum(lengths)
        if total != prefilled.hidden_states.shape[0]:
            raise ShapeError(
                f"hidden_states: expected {total} rows for extend_lens={lengths}, got "
                f"{list(prefilled.hidden_states.shape)}; does the target capture the auxiliary layers of this draft?"
            )
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        pieces = list(cut(lengths, max_batch=self.max_batch, max_rows=self.max_rows))
        numbers = [end - 1 for end in ends[1:]]
        for piece in pieces:
            numbers += self._numbers(piece, ends, prefilled.prefix_lens)
        on_device = self._to_device(numbers)
        input_ids = self._next_tokens(prefilled, on_device[: len(lengths)])
        at = len(lengths)
        for piece in pieces:
            count = piece.last - piece.first + 1
            row_start = on_device[at : at + count + 1]
            num_valid = on_device[at + count + 1 : at + 2 * count + 1]
            seq_lens = on_device[at + 2 * count + 1 : at + 3 * count + 1]
            at += 3 * count + 1
            draft_from = self._draft_from[False][count]
            if drafting:
                draft_from = self._whole(piece, ends, prefilled.unfinished)
            yield DraftBatch(
                aux_hidden_states=prefilled.hidden_states[piece.start : piece.stop],
                input_ids=input_ids[piece.start : piece.stop],
                row_start=row_start,
                num_valid=num_valid,
                draft_from=draft_from,
                req_pool_indices=prefilled.req_pool_indices[piece.first : piece.last + 1],
                seq_lens=seq_lens,
                out_cache_loc=prefilled.out_cache_loc[piece.start : piece.stop],
            )

    def _numbers(self, piece: Piece, ends: list[int], prefix_lens: list[int]) -> list[int]:
        """row_start, num_valid and seq_lens of a piece, flat."""
        places = range(piece.first, piece.last + 1)
        bounds = [(max(ends[i], piece.start), min(ends[i + 1], piece.stop)) for i in places]
        row_start = [bounds[0][0] - piece.start, *(stop - piece.start for _, stop in bounds)]
        seq_lens = [prefix_lens[i] + start - ends[i] for i, (start, _) in zip(places, bounds, strict=True)]
        return [*row_start, *(stop - start for start, stop in bounds), *seq_lens]

    def _whole(self, piece: Piece, ends: list[int], unfinished: Unfinished | None) -> Tensor:
        """draft_from: the requests whose prompt ends in this piece."""
        places = range(piece.first, piece.last + 1)
        held = [ends[i + 1] > piece.stop or (unfinished is not None and unfinished.place == i) for i in places]
        if not any(held):
            return self._draft_from[True][len(held)]
        return torch.tensor([not one for one in held]).to(self.device, non_blocking=True)

    def _next_tokens(self, prefilled: Prefilled, last_rows: Tensor) -> Tensor:
        """For each row the token after it: the prompt shifted by one, and at each prompt's end the token chosen next.

        Where the prompt has more to come, that is the prompt's own next token.
        """
        following = torch.roll(prefilled.input_ids, -1)
        tails = prefilled.next_token_ids.to(following.dtype)
        if prefilled.unfinished is not None:
            tails = tails.clone()
            tails[prefilled.unfinished.place] = prefilled.unfinished.next_token
        return following.index_copy_(0, last_rows.to(torch.int64), tails)

    def _to_device(self, numbers: list[int]) -> Tensor:
        made = torch.tensor(numbers, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        return made.to(self.device, non_blocking=True)


def cut(lengths: list[int], *, max_batch: int, max_rows: int) -> Iterator[Piece]:
    """Cut the rows of requests of these lengths, in order, into pieces of at most max_rows rows, max_batch requests."""
    first = last = start = row = 0
    for place, length in enumerate(lengths):
        end = row + length
        while row < end:
            if row - start == max_rows or place - first == max_batch:
                yield Piece(first, last, start, row)
                start = row
            if row == start:
                first = place
            row, last = min(end, start + max_rows), place
    if row > start:
        yield Piece(first, last, start, row)


def unfinished_of(batch: Any) -> Unfinished | None:
    """The request of a host's prefill batch that has more prompt to come; there is one at most."""
    token = batch.chunked_req_next_prompt_token
    if token is None:
        return None
    places = (i for i, request in enumerate(batch.reqs) if request is batch.chunked_req)
    place = next(places, None)
    return None if place is None else Unfinished(place, int(token))
