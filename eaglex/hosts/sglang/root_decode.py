"""A verification of one token per request that runs the host's decode attention, not the one for prompts.

A root alone, K and V of all before it in the pool: that is a decode step. The host's triton backend verifies with its
kernel for prompts, one program for each request and query head over the whole prefix; its decode kernel splits the
prefix and reads K and V once for all query heads that share them. The forward stays a TARGET_VERIFY in all else
(positions, logits of every row, hidden states, where K and V are written), so nothing of verification changes.

Not for backends that verify one token with a decode kernel of their own accord.
"""

from __future__ import annotations

import copy
from typing import Any, Final

from eaglex.hosts.sglang import compat

DECODES: Final = ("TritonAttnBackend",)  # by class: read in 0.5.17's source
# where a backend turns a batch into what its kernels read; `..._in_graph` does nothing in these
PREPARED: Final = ("init_forward_metadata", "init_forward_metadata_out_graph")


def decode_roots(backend: Any) -> bool:
    """Let this attention backend, which verifies one token per request and no more, decode it. False, with nothing
    changed, where it is of another class.
    """
    if type(backend).__name__ not in DECODES:
        return False
    decode = compat.symbol("ForwardMode").DECODE
    for name in PREPARED:
        setattr(backend, name, _prepared(getattr(backend, name), decode))
    plain, one_token = backend.forward, backend.forward_decode

    def forward(q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *arguments: Any, **options: Any) -> Any:
        chosen = one_token if forward_batch.forward_mode.is_target_verify() else plain
        return chosen(q, k, v, layer, forward_batch, *arguments, **options)

    backend.forward = forward
    return True


def _prepared(plain: Any, decode: Any) -> Any:
    def prepared(forward_batch: Any, *arguments: Any, **options: Any) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            forward_batch = _as_decode(forward_batch, decode)
        return plain(forward_batch, *arguments, **options)

    return prepared


def _as_decode(forward_batch: Any, decode: Any) -> Any:
    """A verification's lengths are those before its tokens; decode's hold the token that it writes."""
    seen = copy.copy(forward_batch)
    seen.forward_mode, seen.spec_info = decode, None
    seen.seq_lens = forward_batch.seq_lens + 1
    if forward_batch.seq_lens_cpu is not None:
        seen.seq_lens_cpu = forward_batch.seq_lens_cpu + 1
    if forward_batch.seq_lens_sum is not None:
        seen.seq_lens_sum = forward_batch.seq_lens_sum + forward_batch.batch_size
    return seen
