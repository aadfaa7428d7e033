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

from eaglex.bridge import Bridge, HostPool, Invitation, LinkOptions, _follower_tensors
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
from eaglex.repeated import RepeatedAsk

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterPool:
    """A drafter's K and V where they lie in the host's KV slots, and its table, which follows the host's.

    req_to_token [num_slots, table_width] int32; draft_k, draft_v per layer [num_kv_slots, num_kv_heads, head_dim]. All
    of them are bound to the drafter's engine.
    """

    req_to_token: Tensor
    draft_k: list[Tensor]
    draft_v: list[Tensor]

    @classmethod
    def allocate(cls, config: DraftConfig, shape: HostPool, *, num_slots: int, dtype: torch.dtype,
                 device: torch.device) -> DrafterPool:  # fmt: skip
        """Empty: zeroed, since a slot that nothing was written to may be read, and NaN in it would void a draft."""
        sizes = (shape.num_kv_slots, config.num_kv_heads, config.head_dim)
        table = torch.full((num_slots, shape.table_width), -1, dtype=torch.int32, device=device)
        k, v = ([torch.zeros(sizes, dtype=dtype, device=device) for _ in range(config.num_layers)] for _ in range(2))
        return cls(req_to_token=table, draft_k=k, draft_v=v)

    @property
    def shape(self) -> HostPool:
        """What it must have in common with the host's."""
        return HostPool(num_kv_slots=self.draft_k[0].shape[0], table_width=self.req_to_token.shape[1])

    def clear(self) -> None:
        """No K and V: rows were missed, so whatever is in a KV slot may be another request's by now.

        The table may stay: of a request that begins, all in front of its rows comes with them.
        """
        for tensor in (*self.draft_k, *self.draft_v):
            tensor.zero_()


class _Client:
    """Rank 0's way to a dedicated drafter: drafts into the bridge's results, or none. No drafter's fault raises."""

    def __init__(self, made: Any, bridge: Bridge, config: DraftConfig, options: LinkOptions, **where: Any) -> None:
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
    """By host memory, which the bridge's results are in.

    `req_to_token` [num_slots, table_width] int32 is the host's table, of a bridge with a HostPool.
    """

    def __init__(
        self, bridge: Bridge, config: DraftConfig, options: LinkOptions, req_to_token: Tensor | None = None
    ) -> None:
        self._table = req_to_token
        super().__init__(bridge._binary.DrafterClient, bridge, config, options, req_to_token=req_to_token)

    def draft(self, batch: DraftBatch, *, begins: Sequence[bool] = (), table_lens: Sequence[int] = ()) -> bool:
        """One cycle, in host memory: whether drafts have come back by the deadline.

        Requests whose earlier rows the drafter has not all seen, since it was not there, are not asked about.

        With a HostPool the batch has out_cache_loc, and `begins` [B] says which rows are a prompt's: from such a cycle
        on a request is asked about for as long as it is in every cycle. Of its row of the host's table the first
        table_lens [B] entries go with it: all in front of a prompt's rows, and again what the host has rewritten.
        ShapeError where one of them is missing.
        """
        filled = _fill(self._binary.BatchTensors(), **_fields(batch))
        lanes = {"begins": [int(flag) for flag in begins], "table_lens": list(table_lens)}
        return bool(self._client.draft(filled, self._results, **lanes))


class DrafterServer:
    """The dedicated drafter's end. Rows come and drafts go through host memory, wherever `engine` is."""

    def __init__(self, group: Any, engine: DraftEngine, pool: DrafterPool | None = None) -> None:
        binary = _extension()
        self._group, self._engine, self._pool = group, engine, pool
        self._server = binary.DrafterServer(group)
        self._on_cpu = engine.device.type == "cpu"
        # the host's memory has the messages: an engine elsewhere gets those rows of its table that changed
        self._table = None if pool is None or self._on_cpu else pool.req_to_token.cpu()
        self._sent = engine.results if self._on_cpu else DraftResults.allocate(engine.speculation, engine.limits)
        self._results = _follower_tensors(binary, self._sent)

    def serve(self, wait: float) -> bool:
        """Answer one request; False if none came within `wait` seconds. Raises BridgeError once rank 0 is gone."""
        batch = self._server.next(wait) if self._on_cpu else self._server.next_memory(wait)
        if not batch:
            return False
        try:
            if self._pool is not None and self._server.anew:
                self._pool.clear()
            if self._on_cpu:
                if self._pool is not None:
                    self._server.write_table(self._pool.req_to_token)
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
            if self._pool is not None and self._table is not None:
                del rows["table"], rows["table_lens"]
                self._server.write_table(self._table)  # where the message is
                slots = rows["req_pool_indices"]
                self._pool.req_to_token[slots] = self._table[slots.cpu()].to(device)
            engine.run(DraftBatch(**rows), current_stream(device))
            for name in ("draft_tokens", "parents", "num_nodes", "drafted_for"):
                getattr(self._sent, name).copy_(getattr(engine.results, name))
        except RuntimeError as error:  # of torch, where a fault of the device shows
            raise DeviceError(f"dedicated drafter: {first_line(error)}") from error


class RelayClient(_Client):
    """Where the drafter is on another GPU: rows out of this one's memory, and drafts into it, as the results are."""

    def __init__(
        self, bridge: Bridge, config: DraftConfig, options: LinkOptions, req_to_token: Tensor | None = None
    ) -> None:
        self._table, device = req_to_token, bridge.device.index or 0
        super().__init__(
            bridge._binary.RelayClient, bridge, config, options,
            rows_deadline=bridge.deadline, device=device, req_to_token=req_to_token,
        )  # fmt: skip

    def invitation(self) -> Invitation:
        """With the way to this GPU."""
        return dataclasses.replace(super().invitation(), relay=str(self._client.offer()))

    def joined(self) -> bool:
        """Whether a drafter has joined and can be reached, or was refused, or has left again. No wait."""
        return bool(self._client.joined())

    def draft(
        self,
        batch: DraftBatch,
        *,
        slots: Sequence[int],
        seq_lens: Sequence[int] = (),
        new_lens: Sequence[int] = (),
        begins: Sequence[bool] = (),
        rewritten: Sequence[bool] = (),
        stream: int | None = None,
    ) -> bool:
        """One cycle on `stream` (a cudaStream_t as int, by default torch's current one): rows out, and at the deadline
        at the latest drafts, or none, in the results.

        The batch is on the device; slots and lengths are what the host knows of it: before these rows, and with them.
        False where nobody was asked and nothing was enqueued. Requests whose earlier rows the drafter has not all seen
        are not asked about. What became of a request shows in the next call.

        With a HostPool no lengths are needed. `begins` [B] is as in DrafterClient.draft; such a request's row of the
        host's table travels up to its length before these rows, and so does that of one that `rewritten` [B] names.
        """
        if stream is None:
            stream = current_stream(self._bridge.device)
        fields = _fields(batch)
        filled = _fill(self._binary.BatchTensors(), **fields)
        lanes = {"seq_lens": seq_lens, "new_lens": new_lens, "begins": begins, "rewritten": rewritten}
        try:
            return self._ask(filled, slots, stream, **lanes)
        finally:
            self._bridge._inputs.keep(tuple(fields.values()), stream)

    def try_out(self, dtype: torch.dtype, *, patience: float) -> bool:
        """One request that is about no slot, in front of all others: whether its reply comes within `patience` seconds.

        It loads what both ends launch, and shows that the one GPU's writes arrive at the other; hidden states are of
        `dtype`. Waits for it. Where there is none the drafter has fallen as by any other request.
        """
        device, terms = self._bridge.device, self._bridge.invitation().terms
        batch = DraftBatch(
            aux_hidden_states=torch.zeros(1, terms["aux_width"], dtype=dtype, device=device),
            input_ids=torch.zeros(1, dtype=torch.int64, device=device),
            row_start=torch.tensor([0, 1], dtype=torch.int32, device=device),
            num_valid=torch.ones(1, dtype=torch.int32, device=device),
            draft_from=torch.ones(1, dtype=torch.bool, device=device),
            req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
            seq_lens=torch.zeros(1, dtype=torch.int64, device=device),
            out_cache_loc=torch.zeros(1, dtype=torch.int64, device=device) if terms["num_kv_slots"] else None,
        )
        filled = _fill(self._binary.BatchTensors(), **_fields(batch))
        return bool(self._client.try_out(filled, self._results, patience=patience, stream=current_stream(device)))

    def repeated(self, batch: DraftBatch) -> RepeatedAsk:
        """`draft` of verifications of this one's shape, at less CPU time; with a HostPool. The caller keeps what it
        gives alive until it has run.
        """
        filled = _fill(self._binary.BatchTensors(), **_fields(batch))
        return RepeatedAsk(self._ask, filled, (batch.row_start, batch.draft_from))

    def _ask(self, filled: Any, slots: Sequence[int], stream: int, **lanes: Sequence[int]) -> bool:
        return bool(self._client.draft(filled, self._results, slots=slots, **lanes, stream=stream))


class RelayServer:
    """The dedicated drafter's end where rank 0's GPU writes into this one's memory."""

    def __init__(self, group: Any, engine: DraftEngine, offer: str, pool: DrafterPool | None = None) -> None:
        binary = _extension()
        self._engine, self._group, self._pool = engine, group, pool
        self._results = _follower_tensors(binary, engine.results)
        table = None if pool is None else pool.req_to_token
        self._server = binary.RelayServer(group, device=engine.device.index or 0, offer=offer, req_to_token=table)

    def serve(self, wait: float) -> bool:
        """As DrafterServer: the rows arrive on the device while the cycle is being enqueued behind them."""
        engine = self._engine
        stream = current_stream(engine.device)
        batch = self._server.next(wait, results=self._results, stream=stream)
        if batch is None:
            return False
        drafted = True
        try:
            if self._pool is not None and self._server.anew:
                self._pool.clear()  # behind the table's rows, in front of the first K and V
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


def join_as_drafter(
    invitation: Invitation, engine: DraftEngine, pool: DrafterPool | None = None
) -> DrafterServer | RelayServer:
    """Join that group with this engine, bound to `pool` where that group's host has one.

    Raises BridgeError where its sizes are not the group's; rank 0 then knows.
    """
    binary = _extension()
    own = {
        "num_draft_tokens": engine.speculation.num_draft_tokens,
        "num_steps": engine.speculation.num_steps,
        "num_slots": engine.limits.num_slots,
        "max_lanes": engine.limits.max_batch,
        "max_rows": engine.limits.max_rows,
        "vocab_size": engine.config.vocab_size,
        "aux_width": engine.config.num_aux * engine.config.target_hidden_size,
        **dataclasses.asdict(HostPool() if pool is None else pool.shape),
    }
    terms = _fill(binary.BridgeTerms(), **{**invitation.terms, **own})
    rank = invitation.terms["num_ranks"]
    group = binary.BridgeGroup.join(invitation.address, terms, invitation.identity, rank)
    if invitation.relay:
        return RelayServer(group, engine, invitation.relay, pool)
    return DrafterServer(group, engine, pool)
