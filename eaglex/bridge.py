"""The bridge: one rank drafts, every rank of the target gets the same tokens (docs/bridge.md).

Members find each other through a torch Store; afterwards nothing but the bridge's own transport is used. Every wait has
a deadline. What is wrong with a rank is fatal for the group and raises BridgeError on all of them, naming that rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from eaglex.bridge_transport import choose
from eaglex.config import TRANSPORTS, EngineLimits, SpeculationConfig
from eaglex.engine import (
    DraftEngine,
    DraftResults,
    VerifyTensors,
    _extension,
    _fields,
    _fill,
    _Inputs,
    _speculation,
    _verify_fields,
    current_stream,
    repeated_tree_of,
)
from eaglex.errors import BridgeError, ConfigError, first_line
from eaglex.repeated import RepeatedLanes, RepeatedTree

_log = logging.getLogger(__name__)


class Store(Protocol):
    """What of a torch.distributed.Store is used; a PrefixStore keeps groups apart."""

    def set(self, key: str, value: str) -> None:
        """Set a key for all ranks."""

    def get(self, key: str) -> bytes:
        """The value of a key."""

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        """Block until all keys are set; RuntimeError (torch.distributed.DistStoreError) after `timeout`."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BridgeOptions:
    """How long, in seconds, ranks wait for each other: to begin (weights are loaded meanwhile), and in each cycle.

    `transport` (shm, p2p, mailbox or nccl) takes the place of the probe's choice.
    """

    join_deadline: float = 600.0
    deadline: float = 60.0
    transport: str | None = None

    def __post_init__(self) -> None:
        _check_seconds(self)
        if self.transport is not None and self.transport not in TRANSPORTS:
            raise ConfigError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {self.transport}")


class Members:
    """The ranks of one group before they have a bridge: exchanges of small values through `store`."""

    def __init__(self, store: Store, *, rank: int, num_ranks: int, deadline: float) -> None:
        self.rank, self.num_ranks, self.deadline = rank, num_ranks, deadline
        self._store = store
        self._exchanges = 0

    def gather(self, name: str, value: Any) -> list[Any]:
        """What each rank gave under `name`, a JSON value, by rank.

        Raises BridgeError on every rank where one of them failed instead, or has not come by the deadline.
        """
        return [found["value"] for found in self._exchange(name, {"value": value})]

    def agree(self, name: str, values: dict[str, Any]) -> None:
        """Raise BridgeError on every rank, naming field and rank, unless all ranks have the same values."""
        found = self.gather(name, values)
        for rank, theirs in enumerate(found):
            for field in found[0] | theirs:
                if found[0].get(field) != theirs.get(field):
                    raise BridgeError(
                        f"{field}: expected {found[0].get(field)} as on rank 0, got {theirs.get(field)} on rank {rank}"
                    )

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """What all ranks must get through; where one does not, all raise. Its own error stays its own."""
        try:
            yield
        except Exception as error:  # whatever it is, the others must not wait for this rank
            self._post({"error": str(error) or type(error).__name__})
            raise
        self.gather(name, None)

    def _exchange(self, name: str, value: dict[str, Any]) -> list[dict[str, Any]]:
        self._post(value)
        keys = [self._key(rank) for rank in range(self.num_ranks)]
        self._exchanges += 1
        found: list[dict[str, Any]] = [json.loads(text) for text in self._wait(name, keys)]
        for rank, theirs in enumerate(found):
            if "error" in theirs:
                raise BridgeError(f"{name}: expected success on all ranks, got on rank {rank}: {theirs['error']}")
        return found

    def _wait(self, name: str, keys: list[str]) -> list[bytes]:
        try:
            self._store.wait(keys, datetime.timedelta(seconds=self.deadline))
            return [self._store.get(key) for key in keys]
        except RuntimeError as error:  # of torch.distributed: DistStoreError, DistNetworkError
            try:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            except RuntimeError:
                missing = []
            reason = first_line(error)
            who = f"none from rank {', '.join(map(str, missing))}" if missing else f"an end of the store: {reason}"
            raise BridgeError(f"{name}: expected word from all ranks within {self.deadline:g} s, got {who}") from error

    def _post(self, value: dict[str, Any]) -> None:
        try:
            self._store.set(self._key(self.rank), json.dumps(value))
        except RuntimeError as error:
            raise BridgeError(f"rank {self.rank}: expected to reach the ranks' store, got {error}") from error

    def _key(self, rank: int) -> str:
        # By count alone: a rank that fails does so in place of its next exchange, whatever that is called.
        return f"{self._exchanges}/{rank}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Invitation:
    """The way into a group on this host: where its memory is, which group that must be, and on which terms."""

    address: str
    identity: list[int]
    terms: dict[str, int]
    relay: str = ""  # how the drafter's GPU reaches rank 0's; empty: rows and drafts go through host memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """Seconds that rank 0 waits for a dedicated drafter's reply, and for which one that fell is left alone.

    One that falls again without a good reply in between rests twice as long each time, up to 64 s.
    `device` (cpu, cuda:N) is where it drafts; None leaves that to the host.
    """

    deadline: float = 1.0
    rejoin_after: float = 1.0
    device: str | None = None

    def __post_init__(self) -> None:
        _check_seconds(self, "drafter ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostPool:
    """Of a host in whose KV slots a dedicated drafter has its K and V: their number, and positions per request slot.

    Where there is none, its K and V lie by request slot and position, and the host's table does not travel.
    """

    num_kv_slots: int = 0
    table_width: int = 0


class Bridge:
    """This rank's end. `results` are this rank's own: sent from on rank 0, filled on the others.

    In host memory they travel over `shm`; in device memory over the best of the GPU transports that a probe finds to
    work, or over `transport`. Then calls return when their work is on the stream, which may be one that is being
    captured, and a failure shows in a later call or in `check`. What a call was given is kept alive until it has run,
    or, where a stream was being captured, as long as the bridge.

    Made by all ranks together; `aux_width` A·Ht above 0 makes room for a dedicated drafter, whose K and V lie in the KV
    slots of `pool` where that is given. Raises BridgeError where they do not fit each other.
    """

    def __init__(
        self,
        members: Members,
        speculation: SpeculationConfig,
        *,
        limits: EngineLimits,
        vocab_size: int,
        results: DraftResults,
        deadline: float,
        aux_width: int = 0,
        pool: HostPool | None = None,
        transport: str | None = None,
    ) -> None:
        binary = _extension()
        self.rank, self.num_ranks = members.rank, members.num_ranks
        self.speculation, self.limits, self.vocab_size, self.results = speculation, limits, vocab_size, results
        self.device, self.deadline = results.num_nodes.device, deadline
        self._tensors = _follower_tensors(binary, results)
        self._limits = _fill(binary.EngineLimits(), **_fields(limits))
        self._tensors.check(
            _speculation(binary, speculation), self._limits, device=self.device.type, index=self.device.index or 0
        )
        if transport == "shm" and self.device.type != "cpu":
            raise ConfigError(f"transport: expected results in host memory for shm, got {self.device}")
        terms = {
            "num_ranks": self.num_ranks,
            "max_lanes": limits.max_batch,
            "num_draft_tokens": speculation.num_draft_tokens,
            "num_steps": speculation.num_steps,
            "num_slots": limits.num_slots,
            "vocab_size": vocab_size,
            "aux_width": aux_width,
            "max_rows": limits.max_rows if aux_width else 0,
            **dataclasses.asdict(pool or HostPool()),
        }
        ends = choose(members, binary, terms, device=self.device, wanted=transport, deadline=deadline)
        self._group, self._bridge, self._binary = ends.group, ends.bridge, binary
        self._invitation = Invitation(address=ends.address, identity=ends.identity, terms=terms)
        self._trees = _trees(binary, speculation, self._limits, vocab_size, self._tensors)
        self._inputs = self._trees.inputs

    @property
    def transport(self) -> str:
        """How messages travel: shm, p2p, mailbox or nccl."""
        return str(self._bridge.transport)

    def push(
        self,
        slots: Sequence[int] | Tensor,
        new_lens: Sequence[int] | Tensor,
        *,
        draft: bool,
        num_valid: Tensor | None = None,
        stream: int | None = None,
    ) -> None:
        """Rank 0: send the results of these slots, drafted for these lengths, to all ranks; or that there are none.

        With a GPU transport slots and new_lens [B] may be int64 tensors beside the results, which are read when the
        work runs; `num_valid` [B] int32 is added to new_lens there, which are then lengths before the cycle's rows.
        `stream` is a cudaStream_t as int, by default torch's current one.
        """
        if self.transport == "shm":
            self._bridge.push(self._tensors, slots=_ints(slots), new_lens=_ints(new_lens), draft=draft)
            return
        given = self._lanes(slots, new_lens, num_valid)

        def launch(lanes: Any, to: int) -> None:
            self._bridge.enqueue_push(self._tensors, lanes, draft=draft, stream=to)

        self._inputs.call(launch, self._binary.LaneTensors(), given, self._stream(stream))

    def push_from(self, engine: DraftEngine) -> None:
        """Rank 0: from now on every cycle of this engine ends with the push of its batch, in the cycle's own graph.

        Its results are this bridge's, and it has not run or warmed up yet: ConfigError. Calls of `engine` then raise
        what `push` raises; a cycle that raises anything else has pushed nothing, so that `push` must still say "no
        draft". The engine keeps the bridge alive.
        """
        if engine.results is not self.results:
            raise ConfigError("push_from: expected an engine whose results this bridge sends, got another one's")
        self._bridge.push_from(engine._engine, self._tensors)

    def receive(
        self,
        slots: Sequence[int] | Tensor,
        new_lens: Sequence[int] | Tensor,
        *,
        num_valid: Tensor | None = None,
        stream: int | None = None,
    ) -> bool | None:
        """The other ranks: rank 0's word on these slots into the results, arguments as for `push`.

        Whether it drafted; None with a GPU transport, where that is not known without a wait. A rank that expects other
        slots or lengths than rank 0 has split from it: BridgeError, on all ranks.
        """
        if self.transport == "shm":
            found = self._bridge.receive(self._tensors, slots=_ints(slots), new_lens=_ints(new_lens))
            return bool(found)
        given = self._lanes(slots, new_lens, num_valid)

        def launch(lanes: Any, to: int) -> None:
            self._bridge.enqueue_receive(self._tensors, lanes, stream=to)

        self._inputs.call(launch, self._binary.LaneTensors(), given, self._stream(stream))
        return None

    def check(self) -> None:
        """Raise BridgeError if the group has ended. To be called before tokens of a cycle are given away. No wait."""
        self._bridge.check()

    def _lanes(
        self, slots: Sequence[int] | Tensor, new_lens: Sequence[int] | Tensor, num_valid: Tensor | None
    ) -> dict[str, Tensor]:
        given = {"slots": self._beside(slots), "lens": self._beside(new_lens)}
        if num_valid is not None:
            given["num_valid"] = num_valid
        return given

    def _beside(self, values: Sequence[int] | Tensor) -> Tensor:
        if isinstance(values, Tensor):
            return values
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _stream(self, stream: int | None) -> int:
        return current_stream(self.device) if stream is None else stream

    def invitation(self) -> Invitation:
        """What a dedicated drafter joins with."""
        return self._invitation

    def generation(self) -> int:
        """How many processes have joined as the dedicated drafter so far."""
        return int(self._group.generation)

    def follower(self) -> Follower:
        """The `tree` step over this rank's results, for a rank without a draft."""
        return Follower(self._trees)

    def enter(self) -> None:
        """Mark that a collective of the target begins: `suspects` then knows who is waited for."""
        self._group.enter()

    def end(self, why: str) -> None:
        """End the group because of this rank; the others' next wait raises BridgeError with these words."""
        with contextlib.suppress(BridgeError):
            self._group.end(self.rank, why)

    def verdict(self, patience: float = 1.0) -> str | None:
        """Why the group has ended or now ends, after a collective of the target failed; None if all ranks seem well.

        What has happened to a rank may show a moment after the failure that it caused: looks for `patience` seconds.
        """
        until, behind = time.monotonic() + patience, self._binary.SuspectKind.BEHIND
        try:
            while True:
                self._group.check()
                late = time.monotonic() >= until
                for suspect in self._group.suspects():
                    if late or suspect.kind != behind:
                        self._group.end(suspect.rank, suspect.why)
                if late:
                    return None
                time.sleep(0.05)
        except BridgeError as error:
            return str(error)

    def counters(self) -> dict[str, int]:
        """Messages `pushed` and `received`, and those of them with `drafts`."""
        return {name: int(count) for name, count in self._bridge.counters().items()}

    def repeated_lanes(self, slots: Tensor, lens: Tensor, num_valid: Tensor) -> RepeatedLanes:
        """For `push_lanes` and `receive_lanes` of as many requests, with a transport between GPUs."""
        given = {"slots": slots, "lens": lens, "num_valid": num_valid}
        return RepeatedLanes(_fill(self._binary.LaneTensors(), **given))

    def push_lanes(self, lanes: Any, *, draft: bool, stream: int) -> None:
        """`push` of what `RepeatedLanes.at` gives; the caller keeps it alive until it has run."""
        self._bridge.enqueue_push(self._tensors, lanes, draft=draft, stream=stream)

    def receive_lanes(self, lanes: Any, *, stream: int) -> None:
        """`receive`, as `push_lanes`."""
        self._bridge.enqueue_receive(self._tensors, lanes, stream=stream)


@dataclasses.dataclass(frozen=True)
class _Trees:
    """The extension's `tree` step over some results, and what keeps its inputs alive."""

    binary: Any
    follower: Any
    inputs: Any


def _trees(binary: Any, speculation: SpeculationConfig, limits: Any, vocab_size: int, tensors: Any) -> _Trees:
    follower = binary.DraftFollower(
        speculation=_speculation(binary, speculation), limits=limits, vocab_size=vocab_size, tensors=tensors
    )
    return _Trees(binary, follower, _Inputs(follower, binary.NEVER))


class Follower:
    """`tree` for a rank that does not draft, as `DraftEngine.tree`; where its results are."""

    def __init__(self, trees: _Trees) -> None:
        self._trees = trees

    @classmethod
    def alone(
        cls, speculation: SpeculationConfig, *, limits: EngineLimits, vocab_size: int, results: DraftResults
    ) -> Follower:
        """Over results that no bridge fills: of a rank that goes on without drafts."""
        binary = _extension()
        of_binary = _fill(binary.EngineLimits(), **_fields(limits))
        return cls(_trees(binary, speculation, of_binary, vocab_size, _follower_tensors(binary, results)))

    def tree(
        self, out: VerifyTensors, *, req_pool_indices: Tensor, seq_lens: Tensor, bonus_tokens: Tensor, stream: int = 0
    ) -> None:
        """Fill the verifier's tensors with these slots' drafts, in this order."""
        ids = {"req_pool_indices": req_pool_indices, "seq_lens": seq_lens, "bonus_tokens": bonus_tokens}
        trees = self._trees
        fields = _verify_fields(trees.binary, out, ids)
        trees.inputs.call(trees.follower.tree, trees.binary.VerifyTensors(), fields, stream)

    def repeated_tree(
        self, out: VerifyTensors, *, req_pool_indices: Tensor, seq_lens: Tensor, bonus_tokens: Tensor
    ) -> RepeatedTree:
        """As `DraftEngine.repeated_tree`."""
        ids = {"req_pool_indices": req_pool_indices, "seq_lens": seq_lens, "bonus_tokens": bonus_tokens}
        trees = self._trees
        return repeated_tree_of(trees.binary, trees.follower, out, ids)


def _follower_tensors(binary: Any, results: DraftResults) -> Any:
    """What the bridge sends and fills of a rank's results."""
    return _fill(
        binary.FollowerTensors(),
        draft_tokens=results.draft_tokens,
        parents=results.parents,
        num_nodes=results.num_nodes,
        drafted_for=results.drafted_for,
    )


def _check_seconds(options: Any, whose: str = "") -> None:
    for field in dataclasses.fields(options):
        if isinstance(field.default, float) and not 0 < getattr(options, field.name) < float("inf"):
            raise ConfigError(f"{whose}{field.name}: expected > 0 and finite, got {getattr(options, field.name)}")


def _ints(values: Sequence[int] | Tensor) -> list[int]:
    return [int(value) for value in values]
