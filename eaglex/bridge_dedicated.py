"""A dedicated drafter over a bridge: rank 0's way to it, and its own end.

Between GPUs that reach each other rows and drafts go from device to device (Relay...), else through host memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import math
from collections.abc import Sequence
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


class _Client:
    """Rank 0's way to a dedicated drafter: drafts into the bridge's results, or none. No drafter's fault raises."""

    def __init__(self, made: Any, bridge: Bridge, config: DraftConfig, options: LinkOptions, **where: int) -> None:
        binary = self._binary = bridge._binary
        self._bridge, self._results = bridge, bridge._tensors
        self._client = made(
            bridge._group,
            config=_config(binary, config, 1.0),
            speculation=_speculation(binary, bridge.speculation),
            limits=bridge._limits,
            deadline=options.deadline,
            rejoin_after=options.rejoin_after,
            **where,
        )

    def invitation(self) -> Invitation:
        """What the drafter joins with."""
        return self._bridge.invitation()

    def joined(self) -> bool:
        """Whether a drafter has joined. No wait."""
        return self._bridge.generation() > 0

    def take_warnings(self) -> list[str]:
        """What the user is to be told since the last call, at most one sentence per fall of the drafter."""
        warning = str(self._client.take_warning())
        return [warning] if warning else []

    def counters(self) -> dict[str, int]:
        """Falls of the drafter by kind (late, gone, refused, bad_reply, own_failure) and its `returns`."""
        return {name: int(count) for name, count in self._client.counters().items()}


class DrafterClient(_Client):
    """By host memory, which the bridge's results are in."""

    def __init__(self, bridge: Bridge, config: DraftConfig, options: LinkOptions) -> None:
        super().__init__(bridge._binary.DrafterClient, bridge, config, options)

    def draft(self, batch: DraftBatch) -> bool:
        """One cycle, in host memory: whether drafts have come back by the deadline.

        Requests whose earlier rows the drafter has not all seen, since it was not there, are not asked about.
        """
        return bool(self._client.draft(_fill(self._binary.BatchTensors(), **_fields(batch)), self._results))


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


class RelayClient(_Client):
    """Where the drafter is on another GPU: rows out of this one's memory, and drafts into it, as the results are."""

    def __init__(self, bridge: Bridge, config: DraftConfig, options: LinkOptions) -> None:
        super().__init__(bridge._binary.RelayClient, bridge, config, options, device=bridge.device.index or 0)

    def invitation(self) -> Invitation:
        """With the way to this GPU."""
        return dataclasses.replace(super().invitation(), relay=str(self._client.offer()))

    def joined(self) -> bool:
        """Whether a drafter has joined and can be reached, or was refused, or has left again. No wait."""
        return bool(self._client.joined())

    def draft(
        self, batch: DraftBatch, *, slots: Sequence[int], seq_lens: Sequence[int], new_lens: Sequence[int]
    ) -> bool:
        """One cycle on the current stream: rows out, and at the deadline at the latest drafts, or none, in the results.

        The batch is on the device; slots and lengths are what the host knows of it: before these rows, and with them.
        False where nobody was asked and nothing was enqueued. Requests whose earlier rows the drafter has not all seen
        are not asked about. What became of a request shows in the next call.
        """
        stream = current_stream(self._bridge.device)
        fields = _fields(batch)
        filled = _fill(self._binary.BatchTensors(), **fields)
        lanes = {"slots": list(slots), "seq_lens": list(seq_lens), "new_lens": list(new_lens)}
        try:
            return bool(self._client.draft(filled, self._results, **lanes, stream=stream))
        finally:
            self._bridge._inputs.keep(tuple(fields.values()), stream)


class RelayServer:
    """The dedicated drafter's end where rank 0's GPU writes into this one's memory."""

    def __init__(self, group: Any, engine: DraftEngine, offer: str) -> None:
        binary = _extension()
        self._engine, self._group = engine, group
        self._results = _follower_tensors(binary, engine.results)
        self._server = binary.RelayServer(group, device=engine.device.index or 0, offer=offer)

    def serve(self, wait: float) -> bool:
        """As DrafterServer: the rows arrive on the device while the cycle is being enqueued behind them."""
        engine = self._engine
        stream = current_stream(engine.device)
        batch = self._server.next(wait, results=self._results, stream=stream)
        if batch is None:
            return False
        drafted = True
        try:
            engine._engine.run(batch, stream)
        except EaglexError as error:
            _log.error("drafting failed: %s", error)
            drafted = False
        self._server.reply(self._results, draft=drafted, stream=stream)
        try:
            if engine.device.type == "cuda":
                torch.cuda.current_stream(engine.device).synchronize()
        except RuntimeError as error:  # of torch, where a fault of the device shows
            raise DeviceError(f"dedicated drafter: {first_line(error)}") from error
        self._server.done(draft=drafted)
        return True


def _borrowed(address: int, dtype: str, shape: list[int]) -> Tensor:
    """A tensor over this memory."""
    kind: torch.dtype = getattr(torch, dtype.split("/")[0])  # bool travels as uint8
    count = math.prod(shape)
    memory = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=kind, count=count).view(shape)


def join_as_drafter(invitation: Invitation, engine: DraftEngine) -> DrafterServer | RelayServer:
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
    return RelayServer(group, engine, invitation.relay) if invitation.relay else DrafterServer(group, engine)
