"""The target's ranks: whole tensors where the target has shards, and the bridge between the rank that drafts and them.

Every call here is made by all ranks, in the same order, like the host's own collectives.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

from eaglex.bridge import Bridge, HostPool, Members
from eaglex.config import EngineLimits, SpeculationConfig
from eaglex.engine import DraftResults
from eaglex.errors import ConfigError
from eaglex.hosts.sglang.options import Options
from eaglex.repeated import RepeatedLanes

DRAFTS: Final = 0  # the rank that drafts
SHARED: Final = ("embed_tokens", "lm_head")


class Ranks:
    """This rank among those of the target. `group` is the host's tensor-parallel group."""

    def __init__(self, group: Any, options: Options, *, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group, self._options = group, options
        self._bridges = 0

    @property
    def drafts(self) -> bool:
        """Whether this rank has the draft."""
        return self.rank == DRAFTS

    def told(self, word: bool) -> bool:
        """What the rank that drafts says, on every rank."""
        return word if self.size == 1 else bool(self._group.broadcast_object(word, src=DRAFTS))

    def shared(self, model: Any, names: tuple[str, ...], vocab_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """The target's tensors of these names on the rank that drafts, and nothing elsewhere; no copy where one rank
        has them whole. Rows that the host pads them by are left out.
        """
        parts = dict(zip(SHARED, model.get_embed_and_head(), strict=True))
        # All gathers in front of all that may fail on one rank alone, such as memory on its device.
        embedding, head = (parts[name].data_ptr() for name in SHARED)
        tied = embedding == head and set(names) == set(SHARED)  # on all ranks or none
        once = SHARED[:1] if tied else tuple(name for name in SHARED if name in names)
        gathered = {name: self._whole(parts[name].detach(), vocab_size) for name in once}
        found: dict[str, Tensor] = {}
        for name, whole in gathered.items():
            if whole is None:
                continue
            if whole.dtype != dtype or whole.shape[0] < vocab_size:
                raise ConfigError(
                    f"target's {name}: expected at least {vocab_size} rows of {dtype} to share with the draft, got "
                    f"{list(whole.shape)} {whole.dtype}."
                )
            found[name] = whole[:vocab_size].to(parts[name].device)
        if tied and found:
            found["lm_head"] = found["embed_tokens"]
        return found

    def _whole(self, part: Tensor, vocab_size: int) -> Tensor | None:
        """Rows of all ranks, which the host splits evenly and in order; None on a rank that does not draft.

        Through host memory, where they stay, a second or two for the largest: the group's NCCL communicator, which the
        host never uses, would begin with this gather and keep a gigabyte of every GPU.
        """
        if self.size == 1 or part.shape[0] >= vocab_size:
            return part if self.drafts else None
        rows = part.cpu().contiguous().view(torch.uint8)  # gloo does not know every type
        whole = rows.new_empty((self.size, *rows.shape)) if self.drafts else None
        pieces = None if whole is None else list(whole)
        torch.distributed.gather(rows, pieces, dst=self._group.ranks[DRAFTS], group=self._group.cpu_group)
        return None if whole is None else whole.flatten(0, 1).view(part.dtype)

    def bridge(
        self, speculation: SpeculationConfig, limits: EngineLimits, results: DraftResults, *, vocab_size: int,
        aux_width: int = 0, pool: HostPool | None = None,
    ) -> Bridge | None:  # fmt: skip
        """From the rank that drafts to all; None where there is but one, and no dedicated drafter, whose rows are
        `aux_width` wide and whose K and V lie in `pool`. Raises BridgeError on every rank alike.
        """
        if self.size == 1 and not aux_width:
            return None
        self._bridges += 1  # each has its own part of the store
        found = HashStore() if self.size == 1 else distributed_c10d._get_default_store()
        store = distributed_c10d.PrefixStore(f"eaglex/{self._bridges}", found)
        members = Members(store, rank=self.rank, num_ranks=self.size, deadline=self._options.join_deadline)
        return Bridge(
            members,
            speculation,
            limits=limits,
            vocab_size=vocab_size,
            results=results,
            deadline=self._options.deadline,
            aux_width=aux_width,
            pool=pool,
            transport=self._options.transport,
        )


class Link:
    """Drafts over a bridge, cycle by cycle: `tell` on the rank that drafts, `hear` on the others.

    A bridge between GPUs takes lengths before a cycle and what it added, on the device; one between hosts, sums.
    """

    def __init__(self, bridge: Bridge, *, max_lanes: int) -> None:
        self.bridge, self._max_lanes = bridge, max_lanes
        self._on_device = bridge.transport != "shm"
        self._known: dict[int, RepeatedLanes] = {}  # by requests

    def tell(self, slots: Tensor, lens: Tensor, num_valid: Tensor | None, *, draft: bool, stream: int) -> None:
        """Send these slots' drafts, made for lens + num_valid, or that there are none. The caller keeps them alive."""
        lanes = self._repeated(slots, lens, num_valid)
        if lanes is not None:
            return self.bridge.push_lanes(lanes, draft=draft, stream=stream)
        for some_slots, some_lens, some_valid in self._lanes(slots, lens, num_valid):
            self.bridge.push(some_slots, some_lens, num_valid=some_valid, draft=draft, stream=stream)

    def hear(self, slots: Tensor, lens: Tensor, num_valid: Tensor | None, *, stream: int) -> None:
        """Take in what `tell` sent with the same arguments."""
        lanes = self._repeated(slots, lens, num_valid)
        if lanes is not None:
            return self.bridge.receive_lanes(lanes, stream=stream)
        for some_slots, some_lens, some_valid in self._lanes(slots, lens, num_valid):
            self.bridge.receive(some_slots, some_lens, num_valid=some_valid, stream=stream)

    def _repeated(self, slots: Tensor, lens: Tensor, num_valid: Tensor | None) -> Any:
        """The lanes of a verification that is like one before, with a bridge between GPUs; else None."""
        if num_valid is None or not self._on_device:
            return None
        count = num_valid.shape[0]
        found = self._known.get(count)
        if found is None:
            if count > self._max_lanes:
                return None
            found = self._known[count] = self.bridge.repeated_lanes(slots, lens, num_valid)
        return found.at(slots, lens, num_valid)

    def _lanes(
        self, slots: Tensor, lens: Tensor, num_valid: Tensor | None
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        if num_valid is not None and not self._on_device:
            lens, num_valid = lens + num_valid, None
        count, most = slots.shape[0], self._max_lanes
        if count <= most:
            return [(slots, lens, num_valid)]
        cuts = [slice(first, first + most) for first in range(0, count, most)]
        return [(slots[cut], lens[cut], None if num_valid is None else num_valid[cut]) for cut in cuts]
