"""The draft's side of a host whose target runs on several ranks: rank 0 drafts and sends, the others receive.

Both do what `DraftSlots` does, call for call, on every rank in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eaglex.bridge import Bridge, host_results
from eaglex.config import DraftConfig, EngineLimits, MaskMode, SpeculationConfig
from eaglex.engine import DraftResults, LaneStatus, VerifyTensors
from eaglex.errors import DeviceError
from eaglex.hosts.draft_slots import DraftRows, DraftSlots
from eaglex.hosts.team import Team


class SendingSlots(DraftSlots):
    """Rank 0: drafts, and tells the others, whatever has become of the draft."""

    def join(self, team: Team) -> None:
        """Meet the other ranks; called once, before the first cycle."""
        results = self.engine.results
        on_host = results.draft_tokens.device.type == "cpu"
        self._sent = results if on_host else host_results(self.speculation, self.engine.limits)
        self._bridge = _bridge(team, self.speculation, self.engine.limits, self.config, self._sent)

    def run(self, rows: Sequence[DraftRows]) -> None:
        """One cycle, and its drafts to all ranks; "no draft" where it fails."""
        lanes = _lanes(rows)
        try:
            super().run(rows)
            self._collect()
        except DeviceError:
            self._bridge.push(*lanes, draft=False)
            raise
        self._bridge.push(*lanes, draft=True)

    def skip(self, rows: Sequence[DraftRows]) -> None:
        """A cycle without a draft, since it has failed: the others wait for word."""
        self._bridge.push(*_lanes(rows), draft=False)

    def _collect(self) -> None:
        if self._sent is self.engine.results:
            return
        for name in ("draft_tokens", "parents", "num_nodes", "drafted_for"):
            try:
                getattr(self._sent, name).copy_(getattr(self.engine.results, name))
            except RuntimeError as error:  # where a fault of the launch shows
                raise DeviceError(f"{name}: expected the draft's results, got {error}") from error


class ReceivingSlots:
    """Another rank: the results of rank 0 and the `tree` step, without a draft. Trees are made on the CPU."""

    d2t: Tensor | None = None  # only the rank that decides needs it

    def __init__(
        self,
        config: DraftConfig,
        *,
        speculation: SpeculationConfig,
        max_batch: int,
        device: torch.device,
        team: Team,
    ) -> None:
        self.speculation, self.device = speculation, device
        limits = EngineLimits(max_batch=max_batch, max_rows=max_batch, num_slots=max_batch + 1)
        self._results = host_results(speculation, limits)
        self._bridge = _bridge(team, speculation, limits, config, self._results)
        self._follower = self._bridge.follower()

    def run(self, rows: Sequence[DraftRows]) -> None:
        """One cycle: what rank 0 says of these requests."""
        self._bridge.receive(*_lanes(rows))

    skip = run

    def trees(self, slots: Sequence[int], lengths: Sequence[int], bonus_tokens: Sequence[int]) -> VerifyTensors:
        """The verifier's tensors [B, N] for these requests, on the target's device."""
        out = VerifyTensors.allocate(len(slots), self.speculation.num_draft_tokens, MaskMode.QLEN_ONLY)
        self._follower.tree(
            out,
            req_pool_indices=torch.tensor(slots),
            seq_lens=torch.tensor(lengths),
            bonus_tokens=torch.tensor(bonus_tokens),
        )
        for name in ("draft_tokens", "positions", "mask"):  # what the target reads
            setattr(out, name, getattr(out, name).to(self.device))
        return out

    def counters(self) -> dict[str, int]:
        """Requests per outcome: known on rank 0 alone, zero here."""
        return {status.name.lower(): 0 for status in LaneStatus}


def _lanes(rows: Sequence[DraftRows]) -> tuple[list[int], list[int]]:
    """Slots, and the lengths that a draft from these rows is for."""
    return [r.slot for r in rows], [r.length + len(r.next_tokens) for r in rows]


def _bridge(
    team: Team, speculation: SpeculationConfig, limits: EngineLimits, config: DraftConfig, results: DraftResults
) -> Bridge:
    team.bridge = Bridge(
        team.members,
        speculation,
        limits=limits,
        vocab_size=config.vocab_size,
        results=results,
        deadline=team.options.deadline,
    )
    return team.bridge
