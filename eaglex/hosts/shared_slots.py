"""The draft's side of a host whose target runs on several ranks: rank 0 drafts and sends, the others receive.

Both do what `DraftSlots` does, call for call, on every rank in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from eaglex.bridge import Bridge
from eaglex.config import EngineLimits, MaskMode, SpeculationConfig
from eaglex.engine import DraftResults, LaneStatus, VerifyTensors, current_stream
from eaglex.errors import DeviceError
from eaglex.hosts.draft_slots import DraftRows, DraftSlots
from eaglex.hosts.team import Team
from eaglex.reference import Draft


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """What both ends of a bridge are made from; `limits` and `speculation` are the same on all ranks."""

    team: Team
    speculation: SpeculationConfig
    limits: EngineLimits
    vocab_size: int
    aux_width: int = 0  # A·Ht with a dedicated drafter
    relay: bool = False  # that drafter is on a GPU, and so is the target: rows and drafts go from one to the other


class SharedSlots:
    """One end of a bridge: results, the same on every rank, and their trees, made where the results are.

    That is the target's device, or host memory for a target on CPUs or over `shm`.
    """

    d2t: Tensor | None = None  # only the rank that decides needs it

    def __init__(self, link: Link, results: DraftResults, device: torch.device) -> None:
        self.device, self._link = device, link
        self._bridge = Bridge(
            link.team.members,
            link.speculation,
            limits=link.limits,
            vocab_size=link.vocab_size,
            results=results,
            deadline=link.team.options.deadline,
            aux_width=link.aux_width,
            transport=link.team.options.transport,
        )
        link.team.attach(self._bridge)
        self._follower = self._bridge.follower()

    def trees(self, slots: Sequence[int], lengths: Sequence[int], bonus_tokens: Sequence[int]) -> VerifyTensors:
        """The verifier's tensors [B, N] for these requests, what the target reads of them on its device."""
        nodes, here = self._link.speculation.num_draft_tokens, self._bridge.device
        out = VerifyTensors.allocate(len(slots), nodes, MaskMode.QLEN_ONLY, here)
        self._follower.tree(
            out,
            req_pool_indices=torch.tensor(slots, device=here),
            seq_lens=torch.tensor(lengths, device=here),
            bonus_tokens=torch.tensor(bonus_tokens, device=here),
            stream=current_stream(here),
        )
        for name in ("draft_tokens", "positions", "mask"):
            setattr(out, name, getattr(out, name).to(self.device))
        return out

    def take_warnings(self) -> list[str]:
        """What is to be told since the last call."""
        return []

    def bridge_counters(self) -> dict[str, int]:
        """Messages and drafts, as `Bridge.counters`."""
        return self._bridge.counters()

    def counters(self) -> dict[str, int]:
        """Requests per outcome: known where the draft runs, zero elsewhere."""
        return {status.name.lower(): 0 for status in LaneStatus}

    def close(self) -> None:
        """Nothing to end here."""


class SendingSlots(SharedSlots):
    """Rank 0: drafts, and tells the others, whatever has become of the draft. It follows its own word like them.

    Where the bridge sends what the engine writes, each cycle ends with the push, as part of its graph.
    """

    def __init__(self, drafting: DraftSlots, link: Link) -> None:
        self._drafting, self.d2t = drafting, drafting.d2t
        results = drafting.engine.results
        here = results_device(link, drafting.device)
        self._results = results if here == drafting.device else DraftResults.allocate(link.speculation, link.limits)
        super().__init__(link, self._results, drafting.device)
        self._pushes_itself = self._results is results
        if self._pushes_itself:
            self._bridge.push_from(drafting.engine)
        drafting.warm_up()

    def run(self, rows: Sequence[DraftRows]) -> None:
        """One cycle, and its drafts to all ranks; "no draft" where it fails."""
        slots, new_lens = lanes_of(rows)
        try:
            self._drafting.run(rows)
            if self._pushes_itself:
                return
            self._collect()
        except DeviceError:
            self._bridge.push(slots, new_lens, draft=False)
            raise
        self._bridge.push(slots, new_lens, draft=True)

    def skip(self, rows: Sequence[DraftRows]) -> None:
        """A cycle without a draft, since it has failed: the others wait for word."""
        slots, new_lens = lanes_of(rows)
        self._bridge.push(slots, new_lens, draft=False)

    def chain(self, slot: int, length: int) -> Draft:
        """As DraftSlots.chain; empty where the other ranks have none either."""
        return self._drafting.chain(slot, length if int(self._results.num_nodes[slot]) else -2)

    def counters(self) -> dict[str, int]:
        """Requests per outcome since the start, as `DraftEngine.counters`."""
        return self._drafting.counters()

    def _collect(self) -> None:
        results = self._drafting.engine.results
        for name in ("draft_tokens", "parents", "num_nodes", "drafted_for"):
            try:
                getattr(self._results, name).copy_(getattr(results, name))
            except RuntimeError as error:  # where a fault of the launch shows
                raise DeviceError(f"{name}: expected the draft's results, got {error}") from error


class ReceivingSlots(SharedSlots):
    """Another rank: what rank 0 says, without a draft."""

    def __init__(self, link: Link, device: torch.device) -> None:
        results = DraftResults.allocate(link.speculation, link.limits, results_device(link, device))
        super().__init__(link, results, device)
        if link.aux_width:
            with link.team.members.step("drafter"):  # rank 0 starts it meanwhile
                pass

    def run(self, rows: Sequence[DraftRows]) -> None:
        """One cycle: rank 0's word on these requests."""
        self._bridge.receive(*lanes_of(rows))

    skip = run


def results_device(link: Link, device: torch.device) -> torch.device:
    """Where a bridge's results are for a target on `device`: in host memory for shm, or where a drafter's go there."""
    by_hosts = link.team.options.transport == "shm" or (link.aux_width > 0 and not link.relay)
    return torch.device("cpu") if by_hosts else device


def lanes_of(rows: Sequence[DraftRows]) -> tuple[list[int], list[int]]:
    """Slots, and the lengths that a draft from these rows is for."""
    return [r.slot for r in rows], [r.length + len(r.next_tokens) for r in rows]
