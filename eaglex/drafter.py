"""The dedicated drafter: a process of its own that has the draft, and drafts for rank 0 over a bridge.

`python -m eaglex.drafter PARENT` is started by rank 0 (eaglex/hosts/dedicated.py), of process id PARENT, reads the
JSON of a `Job` from its stdin, and ends when rank 0 does. Whatever becomes of it, rank 0 goes on without drafts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from typing import Any

import torch

from eaglex import checkpoint
from eaglex.aux_layers import AuxConvention
from eaglex.bridge import HostPool, Invitation
from eaglex.bridge_dedicated import DrafterPool, join_as_drafter
from eaglex.config import DraftConfig, EngineLimits, SpeculationConfig
from eaglex.engine import DraftEngine
from eaglex.errors import BridgeError, EaglexError
from eaglex.hosts.draft_slots import DraftSlots, to_device
from eaglex.packed import DraftQuant
from eaglex.quantize import quantize
from eaglex.weights import DraftWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a drafter needs to know: its checkpoint, the draft's shape, and the way to rank 0."""

    invitation: Invitation
    target: str
    draft: str
    aux_layer_ids: list[int] | None
    convention: str | None
    dtype: str
    device: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    max_batch: int
    max_rows: int
    max_length: int
    revision: str | None = None  # of the draft on the Hub
    target_revision: str | None = None
    draft_quant: str | None = None  # as of --draft-quant
    stop_below: float = 0.0
    num_slots: int = 0  # of a host's pool, on the invitation's terms; 0: max_batch and the padding's

    @staticmethod
    def shape(speculation: SpeculationConfig, limits: EngineLimits) -> dict[str, Any]:
        """The fields that say how far and for how many requests it drafts."""
        return {
            "num_steps": speculation.num_steps,
            "topk": speculation.topk,
            "num_draft_tokens": speculation.num_draft_tokens,
            "stop_below": speculation.stop_below,
            "max_batch": limits.max_batch,
            "max_rows": limits.max_rows,
        }

    @property
    def speculation(self) -> SpeculationConfig:
        """The draft's shape."""
        return SpeculationConfig(
            num_steps=self.num_steps,
            topk=self.topk,
            num_draft_tokens=self.num_draft_tokens,
            stop_below=self.stop_below,
        )

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "invitation": Invitation(**fields["invitation"])})


def serve(job: Job) -> None:
    """Draft until rank 0 is gone. Raises EaglexError."""
    device = torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else a call without a device would make a context on rank 0's GPU
    shared = HostPool(**{name: job.invitation.terms[name] for name in ("num_kv_slots", "table_width")})
    loaded = checkpoint.load(
        job.draft,
        target=job.target,
        aux_layer_ids=job.aux_layer_ids,
        convention=AuxConvention(job.convention) if job.convention else None,
        max_positions=job.max_length if shared.num_kv_slots else None,
        dtype=getattr(torch, job.dtype),
        revision=job.revision,
        target_revision=job.target_revision,
    )
    weights = loaded.weights
    if job.draft_quant is not None:
        weights = quantize(weights, DraftQuant.parse(job.draft_quant))
    if shared.num_kv_slots:
        engine, pool = _in_a_hosts_pool(job, loaded.config, weights, shared)
    else:
        slots = DraftSlots(
            loaded.config,
            weights,
            speculation=job.speculation,
            max_batch=job.max_batch,
            max_length=job.max_length,
            max_rows=job.max_rows,
            device=torch.device(job.device),
        )
        engine, pool = slots.engine, None
    engine.warm_up()
    server = join_as_drafter(job.invitation, engine, pool)
    with contextlib.suppress(BridgeError):  # rank 0 has ended
        while True:
            server.serve(1.0)


def _in_a_hosts_pool(
    job: Job, config: DraftConfig, weights: DraftWeights, shape: HostPool
) -> tuple[DraftEngine, DrafterPool]:
    """An engine whose K and V lie in a host's KV slots, and its pool."""
    device = torch.device(job.device)
    weights = to_device(weights, device)
    pool = DrafterPool.allocate(config, shape, num_slots=job.num_slots, dtype=getattr(torch, job.dtype), device=device)
    limits = EngineLimits(max_batch=job.max_batch, max_rows=job.max_rows, num_slots=job.num_slots)
    return DraftEngine(config, job.speculation, limits=limits, weights=weights, **vars(pool)), pool


def end_with(parent: int, every: float = 0.5) -> None:
    """End this process soon after its parent, also while it loads: until it has joined nothing else tells it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> int:
    """The exit code; an error is one line on stderr."""
    end_with(int(arguments[0]))
    try:
        serve(Job.from_json(sys.stdin.read()))
    except EaglexError as error:
        print(f"eaglex drafter: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
