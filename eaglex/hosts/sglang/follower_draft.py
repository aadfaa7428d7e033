"""A rank that does not draft: it hears of the drafts of the one that does, and makes the same trees of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from eaglex.hosts.sglang.following import FollowingSide
from eaglex.hosts.sglang.options import Placement
from eaglex.hosts.sglang.translate import Prefilled, Verified

logger = logging.getLogger(__name__)


class FollowerDraft(FollowingSide):
    """No weights, no K and V, no engine: results by slot, and the bridge that fills them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._share()

    def _share(self) -> None:
        """This rank's part of what the draft shares with the target, for the rank that drafts."""
        if self.options.placement is Placement.DEDICATED:
            return  # the drafter reads the target's files
        config = self.target_worker.model_config
        self.ranks.shared(self.target_worker.model_runner.model, self.facts.borrowed, config.vocab_size, config.dtype)

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        """Results for as many slots as the host has, and this end of the bridge."""
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        self._follow()

    def _follow(self) -> None:
        super()._follow()
        logger.info("EAGLEX: rank %d hears of drafts by %s.", self.ranks.rank, self.link.bridge.transport)

    def _renew(self) -> None:
        """As the rank that drafts does it: its embedding is gathered; or its engine is made again, and the bridge."""
        if not self.facts.borrowed or self.options.placement is Placement.DEDICATED:
            return
        if self._renewed_in_place:
            self._share()
            return
        self._buffers.forget()
        self._link = self._follower = None
        self._share()
        if self._agreed(None) and not self._connected_again(self._follow):
            self._follower = None

    @property
    def rows_kept(self) -> int:
        """None: the rank that drafts writes K and V."""
        return 0

    def draft_verified(self, verified: Verified, drafting: bool, stream: int) -> None:
        """Take in what the rank that drafts says of these requests."""
        if drafting and self._link is not None:
            slots, lens, accepted = verified.req_pool_indices, verified.seq_lens, verified.accept_lens
            self._link.hear(slots, lens, accepted, stream=stream)

    def draft_prefilled(self, prefilled: Prefilled, drafting: bool, stream: int) -> None:
        """As `draft_verified`."""
        if drafting and self._link is not None:
            self._link.hear(prefilled.req_pool_indices, prefilled.seq_lens, None, stream=stream)

    def trial(self, requests: int, nodes: int, *, drafting: bool) -> Callable[[], None]:
        """Nothing to time here: the table is the drafting rank's."""
        return lambda: None
