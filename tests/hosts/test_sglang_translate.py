"""A host's batch as the engine's: rows, lengths and next tokens of prompts, whole, in chunks, in several launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eaglex.engine import DraftBatch
from eaglex.errors import ShapeError
from eaglex.hosts.sglang.translate import Prefilled, Translator, Unfinished, Verified, cut, unfinished_of

CPU = torch.device("cpu")


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    max_batch=st.integers(1, 4),
    max_rows=st.integers(1, 40),
)
def test_pieces_cover_all_rows_in_order(lengths: list[int], max_batch: int, max_rows: int) -> None:
    owner = [place for place, length in enumerate(lengths) for _ in range(length)]
    pieces = list(cut(lengths, max_batch=max_batch, max_rows=max_rows))
    at = 0
    for piece in pieces:
        assert piece.start == at < piece.stop
        assert piece.stop - piece.start <= max_rows
        assert piece.last - piece.first < max_batch
        assert (piece.first, piece.last) == (owner[piece.start], owner[piece.stop - 1])
        at = piece.stop
    assert at == len(owner)
    if len(lengths) <= max_batch and len(owner) <= max_rows:
        assert len(pieces) == 1


def prefilled(lengths: list[int], prefixes: list[int], unfinished: Unfinished | None = None) -> Prefilled:
    """Prompt tokens count up from 100 per request; the token chosen after request b is 900 + b."""
    ids = [100 * (b + 1) + j for b, length in enumerate(lengths) for j in range(length)]
    return Prefilled(
        hidden_states=torch.arange(len(ids), dtype=torch.float32)[:, None],
        input_ids=torch.tensor(ids),
        next_token_ids=torch.tensor([900 + b for b in range(len(lengths))], dtype=torch.int32),
        req_pool_indices=torch.tensor([7 - b for b in range(len(lengths))]),
        seq_lens=torch.tensor([p + n for p, n in zip(prefixes, lengths, strict=True)]),
        out_cache_loc=torch.arange(len(ids)) + 50,
        extend_lens=lengths,
        prefix_lens=prefixes,
        unfinished=unfinished,
    )


def rows_of(batches: list[DraftBatch]) -> dict[int, list[tuple[Any, ...]]]:
    """Per request slot, its rows in order: (position, hidden state, token after it, KV slot)."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for batch in batches:
        for b, slot in enumerate(batch.req_pool_indices.tolist()):
            start, stop = batch.row_start[b : b + 2].tolist()
            assert stop - start == int(batch.num_valid[b])
            assert batch.out_cache_loc is not None
            for j, row in enumerate(range(start, stop)):
                found.setdefault(slot, []).append(
                    (
                        int(batch.seq_lens[b]) + j,
                        int(batch.aux_hidden_states[row, 0]),
                        int(batch.input_ids[row]),
                        int(batch.out_cache_loc[row]),
                    )
                )
    return found


@pytest.mark.parametrize("max_rows", [4, 6, 100])
@pytest.mark.parametrize("unfinished", [None, Unfinished(1, 777)])
def test_rows_of_a_prefill_do_not_depend_on_how_it_is_cut(max_rows: int, unfinished: Unfinished | None) -> None:
    lengths, prefixes = [3, 9, 1], [0, 20, 5]
    translator = Translator(max_batch=2, max_rows=max_rows, num_draft_tokens=2, device=CPU)
    batches = list(translator.after_prefill(prefilled(lengths, prefixes, unfinished)))
    assert all(len(batch.aux_hidden_states) <= max_rows for batch in batches)
    assert rows_of(batches) == {
        7: [(0, 0, 101, 50), (1, 1, 102, 51), (2, 2, 900, 52)],
        6: [(20 + j, 3 + j, 201 + j, 53 + j) for j in range(8)] + [(28, 11, 777 if unfinished else 901, 61)],
        5: [(5, 12, 902, 62)],
    }
    drafted = [
        slot
        for batch in batches
        for slot, wanted in zip(batch.req_pool_indices.tolist(), batch.draft_from.tolist(), strict=True)
        if wanted
    ]
    assert drafted == ([7, 5] if unfinished else [7, 6, 5]), "each is drafted for once, by its last rows"


def test_a_whole_prefill_is_one_launch_on_the_hosts_memory() -> None:
    given_rows = prefilled([3, 2], [0, 0])
    (batch,) = Translator(max_batch=4, max_rows=64, num_draft_tokens=4, device=CPU).after_prefill(given_rows)
    assert batch.aux_hidden_states.data_ptr() == given_rows.hidden_states.data_ptr()
    assert batch.out_cache_loc is not None
    assert batch.out_cache_loc.data_ptr() == given_rows.out_cache_loc.data_ptr()
    assert given_rows.input_ids.tolist() == [100, 101, 102, 200, 201], "the host's own tokens were changed"
    assert given_rows.next_token_ids.tolist() == [900, 901]


def test_running_requests_in_a_prefill_are_prompts_of_one_token() -> None:
    """A mixed batch, which this host never makes under EAGLE3: one row each, behind what they have."""
    translator = Translator(max_batch=4, max_rows=64, num_draft_tokens=4, device=CPU)
    rows = rows_of(list(translator.after_prefill(prefilled([4, 1, 1], [0, 30, 41]))))
    assert rows[6] == [(30, 4, 901, 54)]
    assert rows[5] == [(41, 5, 902, 55)]


def test_a_verified_batch_is_the_hosts_own_tensors() -> None:
    translator = Translator(max_batch=8, max_rows=64, num_draft_tokens=4, device=CPU)
    verified = Verified(
        hidden_states=torch.zeros(12, 5),
        next_token_ids=torch.arange(12, dtype=torch.int32),
        accept_lens=torch.tensor([1, 4, 2], dtype=torch.int32),
        seq_lens=torch.tensor([9, 8, 7]),
        req_pool_indices=torch.tensor([3, 1, 2]),
        out_cache_loc=torch.arange(12),
    )
    batch = translator.after_verify(verified)
    assert batch.aux_hidden_states is verified.hidden_states
    assert batch.input_ids is verified.next_token_ids
    assert batch.num_valid is verified.accept_lens
    assert batch.seq_lens is verified.seq_lens
    assert batch.out_cache_loc is verified.out_cache_loc
    assert batch.req_pool_indices is verified.req_pool_indices
    assert batch.row_start.tolist() == [0, 4, 8, 12]
    assert batch.row_start.dtype is torch.int32
    assert batch.draft_from.tolist() == [True] * 3


def test_rows_that_do_not_fit_the_batch_are_refused() -> None:
    wrong = prefilled([3, 2], [0, 0])
    wrong.extend_lens.append(4)
    with pytest.raises(ShapeError, match="hidden_states: expected 9 rows"):
        list(Translator(max_batch=4, max_rows=64, num_draft_tokens=4, device=CPU).after_prefill(wrong))
    with pytest.raises(ShapeError, match="max_rows: expected at least 16, got 15"):
        Translator(max_batch=4, max_rows=15, num_draft_tokens=4, device=CPU)


def test_which_request_has_more_prompt_to_come() -> None:
    first, second = object(), object()
    batch = SimpleNamespace(reqs=[first, second], chunked_req=second, chunked_req_next_prompt_token=9)
    assert unfinished_of(batch) == Unfinished(1, 9)
    batch.chunked_req = object()  # it is in another batch
    assert unfinished_of(batch) is None
    batch.chunked_req, batch.chunked_req_next_prompt_token = second, None  # its last chunk
    assert unfinished_of(batch) is None
