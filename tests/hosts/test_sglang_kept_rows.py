"""Rows of decodes that wait for one launch: their order, what is copied and what is kept, and when they must go."""

from __future__ import annotations

import pytest
import torch

from eaglex.hosts.sglang.kept_rows import ROWS, KeptRows, rows_that_fit
from eaglex.hosts.sglang.translate import Verified


def kept(rows: int = 3) -> KeptRows:
    return KeptRows(rows=rows, max_batch=4, width=2, dtype=torch.float32, device=torch.device("cpu"))


SLOTS = torch.tensor([5, 9])


def row(number: int, hidden: torch.Tensor, slots: torch.Tensor = SLOTS) -> Verified:
    """The `number`-th decode of two requests at lengths 10 and 20."""
    hidden[:] = torch.tensor([[number, 0.5], [-number, 0.5]])
    return Verified(
        hidden_states=hidden, next_token_ids=torch.tensor([100 + number, 200 + number]),
        accept_lens=torch.ones(2, dtype=torch.int32), req_pool_indices=slots,
        seq_lens=torch.tensor([10 + number, 20 + number]), out_cache_loc=torch.tensor([30 + number, 40 + number]),
    )  # fmt: skip


def test_rows_are_taken_as_one_verification_that_accepted_them_all() -> None:
    made, graph = kept(), torch.zeros(2, 2)
    for number in range(3):
        assert not made.full
        made.add(row(number, graph))  # one memory: the graph's
    assert made.full
    taken = made.take()
    assert taken is not None
    assert taken.hidden_states[:, 0].tolist() == [0, 1, 2, 0, -1, -2], "request by request"
    assert taken.next_token_ids.tolist() == [100, 101, 102, 200, 201, 202]
    assert taken.out_cache_loc.tolist() == [30, 31, 32, 40, 41, 42]
    assert taken.accept_lens.tolist() == [3, 3]
    assert taken.accept_lens.dtype == torch.int32
    assert taken.seq_lens.tolist() == [10, 20], "of the first"
    assert taken.req_pool_indices is SLOTS
    assert len(made) == 0
    assert made.take() is None


def test_fewer_rows_have_the_same_shape_and_say_how_many_count() -> None:
    made, graph = kept(), torch.zeros(2, 2)
    for number in range(2):
        made.add(row(number, graph))
    taken = made.take()
    assert taken is not None
    assert taken.accept_lens.tolist() == [2, 2]
    assert taken.hidden_states.shape == (6, 2)
    assert taken.hidden_states.is_contiguous()
    assert taken.next_token_ids.tolist() == [100, 101, 101, 200, 201, 201]
    assert taken.out_cache_loc.tolist() == [30, 31, 31, 40, 41, 41]


def test_a_batch_goes_on_as_long_as_the_host_keeps_its_tensor() -> None:
    made = kept()
    assert not made.goes_on(SLOTS)
    made.add(row(0, torch.zeros(2, 2)))
    assert made.goes_on(SLOTS)
    assert not made.goes_on(SLOTS.clone()), "made anew: a request has joined or left"
    made.forget()
    assert len(made) == 0
    assert not made.goes_on(SLOTS)


@pytest.mark.parametrize(
    ("num_layers", "max_batch", "max_rows", "rows"),
    [(1, 64, 4096, ROWS), (1, 1024, 4096, 4), (1, 8192, 4096, 1), (2, 64, 4096, 1)],
)
def test_rows_that_fit(num_layers: int, max_batch: int, max_rows: int, rows: int) -> None:
    assert rows_that_fit(num_layers=num_layers, max_batch=max_batch, max_rows=max_rows) == rows
