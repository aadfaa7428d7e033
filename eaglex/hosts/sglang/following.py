"""A rank without an engine of its own: results by slot that the bridge fills, and the verifier's trees of them."""

from __future__ import annotations

from typing import Any

from eaglex.bridge import Follower
from eaglex.engine import DraftResults
from eaglex.hosts.sglang.draft_side import DraftSide
from eaglex.hosts.sglang.ranks import Link
from eaglex.hosts.sglang.verify_input import Trees


class FollowingSide(DraftSide):
    """What the ranks that hear of drafts and the one with a dedicated drafter have in common."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._follower: Follower | None = None

    @property
    def link(self) -> Link:
        """Made with the memory pools. Raises RuntimeError before."""
        if self._link is None:
            raise RuntimeError("the bridge is made by alloc_memory_pool, which the host has not called yet")
        return self._link

    @property
    def trees(self) -> Trees:
        """The follower, whose trees are the engine's; of roots alone where nothing is drafted any more."""
        found = self._alone or self._follower
        assert found is not None
        return found

    def _follow(self) -> None:
        """This rank's results and its end of the bridge. Raises BridgeError on every rank alike."""
        self._connect(DraftResults.allocate(self.speculation, self.limits, self.device))
        self._follower = self.link.bridge.follower()

    def forget(self) -> None:
        """No slot has a draft any more."""
        if self._link is not None:
            self._link.bridge.results.drafted_for.fill_(-1)
