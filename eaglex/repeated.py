"""Calls of one shape, again and again: translated and checked the first time, addresses alone from then on.

A cycle through `DraftEngine.run` and `.tree` reads twenty tensors' shapes, strides, types and devices. A host whose
batches keep their shape for thousands of cycles pays for that once. What is still looked at each time is that a tensor
is dense and has the type and the number of elements of the first one; devices are not, and shapes of one size are not
told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Again = Callable[..., bool]  # of the tensors that move and the stream


class RepeatedRun:
    """`DraftEngine.run` for batches of one shape, whose row_start and draft_from stay the first one's.

    Made by `DraftEngine.repeated_run`. The caller keeps what it gives alive until it has run. `again` is the call as
    one C function, for who counts Python's frames; it takes the same arguments, by place, while this object lives.
    """

    def __init__(self, again: Again, filled: Any, constant: object) -> None:
        self.again, self.filled, self._constant = again, filled, constant

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
        return self.again(aux_hidden_states, input_ids, num_valid, req_pool_indices, seq_lens, out_cache_loc, stream)


class RepeatedAsk:
    """`RelayClient.draft` of verifications of one shape, as RepeatedRun. Made by `RelayClient.repeated`."""

    def __init__(self, ask: Callable[..., bool], filled: Any, constant: object) -> None:
        self._ask, self._filled, self._constant = ask, filled, constant

    def __call__(
        self,
        aux_hidden_states: Tensor,
        input_ids: Tensor,
        num_valid: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        out_cache_loc: Tensor,
        *,
        slots: Sequence[int],
        rewritten: Sequence[bool],
        stream: int,
    ) -> bool | None:
        """As `RelayClient.draft`, no prompts among these; None, with nothing done, where they are of another shape."""
        filled = self._filled
        if not filled.move(aux_hidden_states, input_ids, num_valid, req_pool_indices, seq_lens, out_cache_loc):
            return None
        lanes = {"seq_lens": (), "new_lens": (), "begins": (False,) * len(slots), "rewritten": rewritten}
        return self._ask(filled, slots, stream, **lanes)


class RepeatedLanes:
    """A cycle's requests for a bridge between GPUs, of one count. Made by `Bridge.repeated_lanes`."""

    def __init__(self, filled: Any) -> None:
        self._filled = filled

    def at(self, slots: Tensor, lens: Tensor, num_valid: Tensor) -> Any:
        """The binary's structure over these; None where they are not of the first ones' shape."""
        return self._filled if self._filled.move(slots, lens, num_valid) else None


class RepeatedTree:
    """`tree` into one set of the verifier's tensors.

    Made by `DraftEngine.repeated_tree`. The caller keeps what it gives alive until it has run. Its `again`: as above.
    """

    def __init__(self, again: Again, filled: Any, constant: object) -> None:
        self.again, self.filled, self._constant = again, filled, constant

    def __call__(self, req_pool_indices: Tensor, seq_lens: Tensor, bonus_tokens: Tensor, stream: int) -> bool:
        """As `DraftEngine.tree`; False, with nothing done, where these are not of the first call's shape."""
        return self.again(req_pool_indices, seq_lens, bonus_tokens, stream)
