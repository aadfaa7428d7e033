"""The dedicated drafter: a process of its own that has the draft, and drafts for rank 0 over a bridge.

`python -m eaglex.drafter JOB` is started by rank 0 (eaglex/hosts/dedicated.py) and ends when rank 0 does. JOB is the
JSON of a `Job`. Whatever becomes of this process, rank 0 goes on without drafts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from typing import Any

import torch

from eaglex import checkpoint
from eaglex.aux_layers import AuxConvention
from eaglex.bridge import Invitation
from eaglex.bridge_dedicated import join_as_drafter
from eaglex.config import SpeculationConfig
from eaglex.errors import BridgeError, EaglexError
from eaglex.hosts.draft_slots import DraftSlots


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

    def to_json(self) -> str:
        """One line, for the command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "invitation": Invitation(**fields["invitation"])})


def serve(job: Job) -> None:
    """Draft until rank 0 is gone. Raises EaglexError."""
    loaded = checkpoint.load(
        job.draft,
        target=job.target,
        aux_layer_ids=job.aux_layer_ids,
        convention=AuxConvention(job.convention) if job.convention else None,
        dtype=getattr(torch, job.dtype),
    )
    slots = DraftSlots(
        loaded.config,
        loaded.weights,
        speculation=SpeculationConfig(
            num_steps=job.num_steps, topk=job.topk, num_draft_tokens=job.num_draft_tokens
        ),
        max_batch=job.max_batch,
        max_length=job.max_length,
        max_rows=job.max_rows,
        device=torch.device(job.device),
    )
    slots.warm_up()
    server = join_as_drafter(job.invitation, slots.engine)
    with contextlib.suppress(BridgeError):  # rank 0 has ended
        while True:
            server.serve(1.0)


def main(arguments: list[str]) -> int:
    """The exit code; an error is one line on stderr."""
    try:
        serve(Job.from_json(arguments[0]))
    except EaglexError as error:
        print(f"eaglex drafter: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
