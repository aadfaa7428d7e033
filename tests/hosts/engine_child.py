"""The host's own classes around the worker with eaglex's engine, from a wheel. Called by test_sglang_engine_real.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any


def start(package: str) -> None:
    import torch  # noqa: F401  (before absent packages are replaced)
    from host_import import open_wheel

    import eaglex.checkpoint  # noqa: F401

    open_wheel(Path(package))


def worker_class(package: str) -> dict[str, Any]:
    """What the algorithm builds, derived from the host's real base class."""
    import os

    start(package)
    os.environ["EAGLEX_OPTIONS"] = '{"drafter": "engine"}'
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    import eaglex.hosts.sglang

    eaglex.hosts.sglang.register()
    algorithm = SpeculativeAlgorithm.from_string("EAGLEX")
    made = algorithm.create_worker(SimpleNamespace(disable_overlap_schedule=False))
    return {
        "name": made.__name__,
        "derived": issubclass(made, BaseSpecWorker),
        "abstract": sorted(getattr(made, "__abstractmethods__", ())),
        "has_draft_kv": algorithm.has_draft_kv(),
    }


def verify_input(package: str) -> dict[str, Any]:
    """The host's real verifier input, made by the draft side over a stand-in of the engine."""
    import sys

    import torch
    from host_import import AbsentModule

    start(package)
    for name in ("sglang.kernels.ops.attention.utils", "sglang.srt.model_executor.forward_batch_info"):
        sys.modules[name] = AbsentModule(name)  # of no use here, and they import most of what is not installed
    from eaglex.config import SpeculationConfig
    from eaglex.hosts.sglang import compat
    from eaglex.hosts.sglang.engine_draft import EngineDraft
    from eaglex.hosts.sglang.verify_input import VerifyPool
    from eaglex.repeated import RepeatedTree

    given: list[Any] = []
    draft = EngineDraft.__new__(EngineDraft)
    draft.speculation, draft.topk = SpeculationConfig(num_steps=3, topk=2, num_draft_tokens=6), 2
    draft.device = torch.device("cpu")
    draft.speculative_num_steps, draft.speculative_num_draft_tokens, draft._buffers = 3, 6, VerifyPool(draft.device)
    draft._stream_now = lambda: 0
    draft._verify_input = compat.symbol("EagleVerifyInput")
    draft._alone = None
    draft._engine = SimpleNamespace(  # type: ignore[assignment]
        tree=lambda tensors, **kw: given.append(tensors),
        repeated_tree=lambda tensors, **kw: RepeatedTree(lambda *_: False, None, None),
    )
    found: dict[str, Any] = {}
    for mode, cells in (("FULL_MASK", 4 * 6 * 106), ("QLEN_ONLY", 4 * 6 * 6)):  # tree_mask_numel for 4 requests
        place = SimpleNamespace(
            buffer=torch.zeros(cells, dtype=torch.bool), mode=SimpleNamespace(name=mode), fits=lambda bs: bs <= 4
        )
        backend = SimpleNamespace(verify_mask=place, max_context_len=100)
        draft._runner = SimpleNamespace(attn_backend=backend)
        batch = SimpleNamespace(
            seq_lens=torch.tensor([5, 9]), seq_lens_sum=None, req_pool_indices=torch.tensor([1, 2]),
            spec_info=SimpleNamespace(bonus_tokens=torch.tensor([3, 4], dtype=torch.int32)),
        )  # fmt: skip
        made = draft.draft(batch)
        found[mode] = (
            made.is_verify_input(), made.max_tree_depth, made.tree_topk, made.num_tokens_per_req,
            tuple(made.draft_token.shape), tuple(made.retrieve_index.shape), tuple(given[-1].mask.shape),
            given[-1].mask_mode.value, made.custom_mask is place.buffer,
        )  # fmt: skip
    return found
