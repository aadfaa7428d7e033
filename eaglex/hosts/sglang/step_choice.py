"""At start: who chooses the number of steps, and the verification states that it may choose among."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from eaglex.errors import ConfigError
from eaglex.hosts.sglang import break_even, compat
from eaglex.hosts.sglang.draft_memory import Ledger
from eaglex.hosts.sglang.kept_rows import KeptRows
from eaglex.hosts.sglang.steps import Adaptive, Always, BreakEven, Choice, Pausing
from eaglex.hosts.sglang.verify_states import VerifyStates

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chosen:
    """A choice of steps; no states where there is nothing to choose; where rows wait while nothing is drafted, if they
    do on this rank. What all of it costs in GPU memory (GB) and seconds.
    """

    choice: Choice
    states: VerifyStates | None = None
    kept: KeptRows | None = None
    gigabytes: float = 0.0
    seconds: float = 0.0


def choose(server_args: Any, draft: Any, model_runner: Any, *, pausing: bool) -> Chosen:
    """All ranks together, once the host has captured its graphs and `draft` the engine's.

    Adaptive steps are the host's rule, which may say 0 steps, so they and pausing exclude each other.
    """
    steps = server_args.speculative_num_steps
    if server_args.speculative_adaptive:
        return _adaptive(server_args, draft, model_runner)
    if not pausing:
        return Chosen(Always(steps))
    if model_runner.decode_cuda_graph_runner is None:
        raise ConfigError("EAGLEX does not support pausing=true with the host's decode graphs off: it times them.")
    states = VerifyStates(model_runner, steps=steps, nodes=server_args.speculative_num_draft_tokens)
    ledger = Ledger(draft.device)
    with ledger.taking("graphs"):
        states.add(0, graphs=True)
        kept = _kept(draft)
    table = break_even.measure(
        states,
        draft,
        steps=steps,
        clock=break_even.clock_of(draft.device),
        limit=draft.limits.max_batch,
        rows=max(draft.rows_kept, 1),
    )
    # rank 0 times the draft; what the others have timed differs, and every rank must decide alike
    table = BreakEven(tuple(map(tuple, model_runner.tp_group.broadcast_object(table.minimum, src=0))))
    logger.info("EAGLEX: drafting pays from so many tokens per verification, by batch: %s.", table)
    return Chosen(Pausing(steps, table), states, kept, ledger.used["graphs"] / 1e9, states.seconds)


def _kept(draft: Any) -> KeptRows | None:
    if draft.rows_kept < 2:
        return None
    return KeptRows(
        rows=draft.rows_kept,
        max_batch=draft.limits.max_batch,
        width=draft.config.aux_width,
        dtype=draft.kv_dtype,
        device=draft.device,
    )


def _adaptive(server_args: Any, draft: Any, model_runner: Any) -> Chosen:
    steps = server_args.speculative_num_steps
    parameters = compat.symbol("AdaptiveSpeculativeParams")(
        initial_steps=steps, cfg_path=server_args.speculative_adaptive_config
    )
    states = VerifyStates(model_runner, steps=steps, nodes=server_args.speculative_num_draft_tokens)
    runner = model_runner.decode_cuda_graph_runner
    parameters.set_cuda_graph_bs(None if runner is None else list(runner.capture_bs))
    ledger = Ledger(draft.device)
    with ledger.taking("graphs"):
        for other in parameters.candidate_steps:
            reached = parameters.cuda_graph_bs_for_step(other)
            states.add(other, graphs=runner is not None and bool(reached))
        kept = _kept(draft) if 0 in parameters.candidate_steps else None
    logger.info("EAGLEX: adaptive steps %s; %d are drafted.", parameters.candidate_steps, draft.speculation.num_steps)
    return Chosen(Adaptive(parameters), states, kept, ledger.used["graphs"] / 1e9, states.seconds)
