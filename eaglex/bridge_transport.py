"""Which way a bridge's messages travel: the first whose ends carry real messages, compared on every rank.

Between GPUs: `p2p` (CUDA IPC), `mailbox` (pinned host memory), `nccl`; between hosts: `shm`. What a driver says of peer
access is not asked: on some machines it says yes and copies garbage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from eaglex.config import TRANSPORTS
from eaglex.engine import current_stream
from eaglex.errors import BridgeError, ConfigError, EaglexError, first_line

if TYPE_CHECKING:
    from eaglex.bridge import Members

GPU_TRANSPORTS = TRANSPORTS[1:]  # best first
PROBE_SECONDS = 30.0  # NCCL takes seconds to begin
PROBE_ROUNDS = 20  # more than an inbox holds

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ends:
    """This rank's end once all ranks have theirs: the binary's group and bridge, and the way into the group."""

    group: Any
    bridge: Any
    address: str
    identity: list[int]


class _UnfitError(Exception):
    """A transport that some rank cannot use."""


def choose(
    members: Members, binary: Any, terms: dict[str, int], *, device: torch.device, wanted: str | None, deadline: float
) -> Ends:
    """Ends of the transport `wanted`, by default of the best that works; called by all ranks together.

    Raises BridgeError, on all ranks with the same words, where there is none.
    """
    if wanted is not None and wanted not in TRANSPORTS:
        raise ConfigError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {wanted}")
    candidates = [wanted] if wanted else ["shm"] if device.type == "cpu" else list(GPU_TRANSPORTS)
    refused = []
    for name in candidates:
        try:
            return _Attempt(members, binary, terms, device, name).run(deadline)
        except _UnfitError as error:
            refused.append(f"{name}: {error}")
    raise BridgeError(f"transport: expected {' or '.join(candidates)} to carry a message, got {'; '.join(refused)}")


@dataclasses.dataclass
class _Attempt:
    members: Members
    binary: Any
    terms: dict[str, int]
    device: torch.device
    name: str

    def run(self, deadline: float) -> Ends:
        """A group of its own, since a probe that fails ends it."""
        members, name = self.members, self.name
        group, address, identity = self._group()
        seconds = deadline if name == "shm" else PROBE_SECONDS
        index = self.device.index or 0
        bridge, offer = self._together(
            lambda: _opened(self.binary.Bridge.open(group, transport=name, device=index, deadline=seconds))
        )
        if name == "shm":
            return Ends(group=group, bridge=bridge, address=address, identity=identity)
        offers = members.gather("offer", offer)
        self._together(lambda: bridge.connect(offers))
        self._together(lambda: self._probe(group, bridge))
        bridge.set_deadline(deadline)
        return Ends(group=group, bridge=bridge, address=address, identity=identity)

    def _group(self) -> tuple[Any, str, list[int]]:
        members, binary = self.members, self.binary
        bound = binary.BridgeTerms()
        for field, value in self.terms.items():
            setattr(bound, field, value)
        with members.step("bridge"):
            if members.rank == 0:
                identity = [secrets.randbits(64), secrets.randbits(64)]
                group = binary.BridgeGroup.create(bound, identity)
                found = members.gather("address", {"address": group.address, "identity": identity, "terms": self.terms})
            else:
                found = members.gather("address", None)
                group = binary.BridgeGroup.join(found[0]["address"], bound, found[0]["identity"], members.rank)
        return group, found[0]["address"], found[0]["identity"]

    def _together(self, step: Callable[[], T]) -> T:
        """What `step` returns, once it has worked on all ranks."""
        done: list[T] = []
        complaint = None
        try:
            done.append(step())
        except (EaglexError, RuntimeError) as error:  # RuntimeError: of torch, where a device has failed
            complaint = first_line(error)
        for rank, theirs in enumerate(self.members.gather(f"transport {self.name}", complaint)):
            if theirs is not None:
                raise _UnfitError(f"rank {rank}: {theirs}")
        return done[0]

    def _probe(self, group: Any, bridge: Any) -> None:
        """Real messages through the very kernels, compared word by word."""
        try:
            self._exchange(bridge)
        except (EaglexError, RuntimeError) as error:
            with contextlib.suppress(BridgeError):  # the others need not wait for their deadline
                group.end(self.members.rank, first_line(error))
            raise

    def _exchange(self, bridge: Any) -> None:
        count = min(self.terms["max_lanes"], self.terms["num_slots"] - 1)
        slots = torch.arange(1, count + 1, device=self.device)
        results = Results.allocate(self.terms, self.device)
        bound = results.bind(self.binary)
        for number in range(PROBE_ROUNDS):
            expected = Results.pattern(self.terms, number, self.device)
            lens = expected.drafted_for[slots]  # borrowed: alive until the work has run
            lanes = self.binary.LaneTensors()
            lanes.slots, lanes.lens = slots, lens
            if self.members.rank == 0:
                results.copy_(expected)
                bridge.enqueue_push(bound, lanes, draft=True, stream=current_stream(self.device))
            else:
                bridge.enqueue_receive(bound, lanes, stream=current_stream(self.device))
            differing = int(results.differing(expected, slots))  # waits, so that nothing here is freed too early
            bridge.check()
            if differing:
                raise BridgeError(f"message {number + 1}: expected what rank 0 sent, got {differing} other values")


@dataclasses.dataclass
class Results:
    """What travels of results by slot, in device or host memory."""

    draft_tokens: Tensor
    parents: Tensor
    num_nodes: Tensor
    drafted_for: Tensor

    @classmethod
    def allocate(cls, terms: dict[str, int], device: torch.device) -> Results:
        slots, nodes = terms["num_slots"], terms["num_draft_tokens"] - 1
        return cls(
            torch.zeros(slots, nodes, dtype=torch.int64, device=device),
            torch.zeros(slots, nodes, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.full((slots,), -1, dtype=torch.int64, device=device),
        )

    @classmethod
    def pattern(cls, terms: dict[str, int], number: int | Tensor, device: torch.device) -> Results:
        """Drafts of message `number`, other ones in each; every tree is a chain of K nodes and leaves at its end."""
        made = cls.allocate(terms, device)
        slots, nodes = made.draft_tokens.shape
        at = torch.arange(slots * nodes, device=device).view(slots, nodes)
        made.draft_tokens.copy_((at * 7919 + number * 104729) % terms["vocab_size"])
        deepest = max(0, terms["num_steps"] - 1)
        made.parents.copy_(torch.arange(nodes, device=device).clamp(max=deepest).expand(slots, nodes))
        made.num_nodes.copy_(torch.arange(slots, device=device).add(number) % (nodes + 1) if nodes else made.num_nodes)
        made.drafted_for.copy_(torch.arange(slots, device=device) + 100 + number)
        return made

    def bind(self, binary: Any) -> Any:
        """The binary's form."""
        bound = binary.FollowerTensors()
        for field in dataclasses.fields(self):
            setattr(bound, field.name, getattr(self, field.name))
        return bound

    def copy_(self, other: Results) -> None:
        """Take the other's values."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))

    def differing(self, expected: Results, slots: Tensor) -> Tensor:
        """How many values of these slots count and differ, on the device."""
        count = expected.num_nodes[slots]
        wrong = (self.num_nodes[slots] != count).sum() + (self.drafted_for[slots] != expected.drafted_for[slots]).sum()
        if expected.parents.shape[1]:
            counts = torch.arange(expected.parents.shape[1], device=slots.device) < count[:, None]
            for name in ("draft_tokens", "parents"):
                wrong = wrong + ((getattr(self, name)[slots] != getattr(expected, name)[slots]) & counts).sum()
        return wrong


def _opened(bridge: Any) -> tuple[Any, str]:
    return bridge, str(bridge.offer())
