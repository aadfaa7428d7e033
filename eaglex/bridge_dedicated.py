"""A dedicated drafter over a bridge: rank 0's way to it, and its own end. Rows and drafts go through host memory."""

from __future__ import annotations

import ctypes
import logging
import math
from typing import Any

import torch
from torch import Tensor

from eaglex.bridge import Bridge, Invitation, LinkOptions, _follower_tensors
from eaglex.config import DraftConfig
from eaglex.engine import (
    DraftBatch,
    DraftEngine,
    DraftResults,
    _config,
    _extension,
    _fields,
    _fill,
    _speculation,
    current_stream,
)
from eaglex.errors import DeviceError, EaglexError, first_line

_log = logging.getLogger(__name__)


class DrafterClient:
    """Rank 0's way to a dedicated drafter: drafts into the bridge's results, or none. No drafter's fault raises."""

    def __init__(self, bridge: Bridge, config: DraftConfig, options: LinkOptions) -> None:
        binary = self._binary = bridge._binary
        self._results = bridge._tensors
        self._client = binary.DrafterClient(
            bridge._group,
            config=_config(binary, config, 1.0),
            speculation=_speculation(binary, bridge.speculation),
            limits=bridge._limits,
            deadline=options.deadline,
            rejoin_after=options.rejoin_after,
        )

    def draft(self, batch: DraftBatch) -> bool:
        """One cycle, in host memory: whether drafts have come back by the deadline.

        Requests whose earlier rows the drafter has not all seen, since it was not there, are not asked about.
        """
        return bool(self._client.draft(_fill(self._binary.BatchTensors(), **_fields(batch)), self._results))

    def take_warnings(self) -> list[str]:
        """What the user is to be told since the last call, at most one sentence per fall of the drafter."""
        warning = str(self._client.take_warning())
        return [warning] if warning else []

    def counters(self) -> dict[str, int]:
        """Falls of the drafter by kind (late, gone, refused, bad_reply, own_failure) and its `returns`."""
        return {name: int(count) for name, count in self._client.counters().items()}


class DrafterServer:
    """The dedicated drafter's end. Rows come and drafts go through host memory, wherever `engine` is."""

    def __init__(self, group: Any, engine: DraftEngine) -> None:
        binary = _extension()
        self._group, self._engine = group, engine
        self._server = binary.DrafterServer(group)
        self._on_cpu = engine.device.type == "cpu"
        self._sent = engine.results if self._on_cpu else DraftResults.allocate(engine.speculation, engine.limits)
        self._results = _follower_tensors(binary, self._sent)

    def serve(self, wait: float) -> bool:
        """Answer one request; False if none came within `wait` seconds. Raises BridgeError once rank 0 is gone."""
        batch = self._server.next(wait) if self._on_cpu else self._server.next_memory(wait)
        if not batch:
            return False
        try:
            if self._on_cpu:
                self._engine._engine.run(batch, 0)
            else:
                self._run(batch)
        except EaglexError as error:
            _log.error("drafting failed: %s", error)
            self._server.reply(self._results, draft=False)
        else:
            self._server.reply(self._results, draft=True)
        return True

    def _run(self, memory: dict[str, tuple[int, str, list[int]]]) -> None:
        """The engine on its device, and its results back."""
        device, engine = self._engine.device, self._engine
        try:
            rows = {name: _borrowed(*found).to(device) for name, found in memory.items()}
            rows["draft_from"] = rows["draft_from"].bool()
            engine.run(DraftBatch(**rows), current_stream(device))
            for name in ("draft_tokens", "parents", "num_nodes", "drafted_for"):
                getattr(self._sent, name).copy_(getattr(engine.results, name))
        except RuntimeError as error:  # of torch, where a fault of the device shows
            raise DeviceError(f"dedicated drafter: {first_line(error)}") from error


def _borrowed(address: int, dtype: str, shape: list[int]) -> Tensor:
    """A tensor over this memory."""
    kind: torch.dtype = getattr(torch, dtype.split("/")[0])  # bool travels as uint8
    count = math.prod(shape)
    memory = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=kind, count=count).view(shape)


def join_as_drafter(invitation: Invitation, engine: DraftEngine) -> DrafterServer:
    """Join that group with this engine. Raises BridgeError where its sizes are not the group's; rank 0 then knows."""
    binary = _extension()
    own = {
        "num_draft_tokens": engine.speculation.num_draft_tokens,
        "num_steps": engine.speculation.num_steps,
        "num_slots": engine.limits.num_slots,
        "max_lanes": engine.limits.max_batch,
        "max_rows": engine.limits.max_rows,
        "vocab_size": engine.config.vocab_size,
        "aux_width": engine.config.num_aux * engine.config.target_hidden_size,
    }
    terms = _fill(binary.BridgeTerms(), **{**invitation.terms, **own})
    rank = invitation.terms["num_ranks"]
    group = binary.BridgeGroup.join(invitation.address, terms, invitation.identity, rank)
    return DrafterServer(group, engine)
