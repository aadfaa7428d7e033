"""Calls of one shape, again and again: translated and checked the first time, addresses alone from then on.

A cycle through `DraftEngine.run` and `.tree` reads twenty tensors' shapes, strides, types and devices. A host whose
batches keep their shape for thousands of cycles pays for that once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Launch = Callable[[Any, int], None]  # the binary's structure, the stream


class _Kinds:
    """How many elements, of which type, and dense: what must stay as it was."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._kinds: list[tuple[int, torch.dtype]] = [(tensor.numel(), tensor.dtype) for tensor in tensors]
        self.dense = all(tensor.is_contiguous() for tensor in tensors)

    def fit(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether these are of those kinds; devices are not looked at, and shapes of one size are not told apart."""
        for tensor, (count, dtype) in zip(tensors, self._kinds, strict=True):
            if tensor.numel() != count or tensor.dtype is not dtype or not tensor.is_contiguous():
                return False
        return self.dense


class RepeatedRun:
    """`DraftEngine.run` for batches of one shape, whose row_start and draft_from stay the first one's.

    Made by `DraftEngine.repeated_run`. The caller keeps what it gives alive until it has run.
    """

    def __init__(self, launch: Launch, filled: Any, given: tuple[Tensor, ...], constant: tuple[Tensor, ...]) -> None:
        self._launch, self._filled, self._constant, self._kinds = launch, filled, constant, _Kinds(given)

    def __call__(
        self,
        aux_hidden_states: Tensor,
        input_ids: Tensor,
        num_valid: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        out_cache_loc: Tensor,
        stream: int,
    ) -> bool:
        """One cycle, as `DraftEngine.run`; False, with nothing done, where these are not of the first batch's shape."""
        if not self._kinds.fit((aux_hidden_states, input_ids, num_valid, req_pool_indices, seq_lens, out_cache_loc)):
            return False
        self._filled.point(
            aux_hidden_states.data_ptr(),
            input_ids.data_ptr(),
            num_valid.data_ptr(),
            req_pool_indices.data_ptr(),
            seq_lens.data_ptr(),
            out_cache_loc.data_ptr(),
        )
        self._launch(self._filled, stream)
        return True


class RepeatedTree:
    """`tree` into one set of the verifier's tensors.

    Made by `DraftEngine.repeated_tree`. The caller keeps what it gives alive until it has run.
    """

    def __init__(self, launch: Launch, filled: Any, given: tuple[Tensor, ...], constant: object) -> None:
        self._launch, self._filled, self._constant, self._kinds = launch, filled, constant, _Kinds(given)

    def __call__(self, req_pool_indices: Tensor, seq_lens: Tensor, bonus_tokens: Tensor, stream: int) -> bool:
        """As `DraftEngine.tree`; False, with nothing done, where these are not of the first call's shape."""
        if not self._kinds.fit((req_pool_indices, seq_lens, bonus_tokens)):
            return False
        self._filled.point(req_pool_indices.data_ptr(), seq_lens.data_ptr(), bonus_tokens.data_ptr())
        self._launch(self._filled, stream)
        return True
