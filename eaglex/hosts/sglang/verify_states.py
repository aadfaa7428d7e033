"""Verification at several widths: an attention backend and CUDA graphs of the target for each number of steps.

The host's EAGLE worker keeps such states for its adaptive steps. With 0 steps there is nothing to verify: that state
is the host's plain decode (plain_decode.py). They are made here with the host's own classes, beside the state that the
host itself has captured.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eaglex.hosts.sglang import compat
from eaglex.hosts.sglang.plain_decode import decode_graphs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VerifyState:
    """What the target runs `nodes` nodes per request with, root included; no graphs: kernel by kernel."""

    steps: int
    nodes: int
    attn_backend: Any
    graph_runner: Any


class VerifyStates:
    """States by steps. The one that is active is what the target's runner and the host's published config hold."""

    def __init__(self, model_runner: Any, *, steps: int, nodes: int) -> None:
        self._runner = model_runner
        self.active = VerifyState(steps, nodes, model_runner.attn_backend, model_runner.decode_cuda_graph_runner)
        self._states, self._captured = {steps: self.active}, steps
        self.seconds = 0.0

    def __getitem__(self, steps: int) -> VerifyState:
        return self._states[steps]

    def add(self, steps: int, *, graphs: bool) -> None:
        """Build the state of a chain of so many steps, with graphs for every batch that the host captures.

        Called at start, when the host has captured its own. Memory comes out of what the host's graphs come out of.
        """
        if steps in self._states:
            return
        started, runner, nodes = time.perf_counter(), self._runner, steps + 1
        context = compat.symbol("get_context")()
        context.override("eaglex.build", speculative_num_steps=steps, speculative_num_draft_tokens=nodes)
        workspace = runner.init_new_workspace
        try:
            attn_backend = runner._get_attention_backend(init_new_workspace=True)
            graph_runner = None
            if graphs and nodes == 1:
                graph_runner = decode_graphs(runner, attn_backend)
            elif graphs:
                graph_runner = runner._decode_cuda_graph_runner_cls()(
                    runner,
                    attn_backend=attn_backend,
                    speculative_num_steps=steps,
                    speculative_num_draft_tokens=nodes,
                )
        finally:
            runner.init_new_workspace = workspace
            context.override(
                "eaglex.built",
                speculative_num_steps=self.active.steps,
                speculative_num_draft_tokens=self.active.nodes,
            )
        self._states[steps] = VerifyState(steps, nodes, attn_backend, graph_runner)
        if nodes == 1:
            logger.info(
                "EAGLEX: without drafts the target decodes as without speculation (%s).", type(attn_backend).__name__
            )
        self.seconds += time.perf_counter() - started

    def activate(self, steps: int) -> VerifyState:
        """Make the target verify so many steps from now on. Costs nothing where it does already."""
        if steps != self.active.steps:
            self.active = self._states[steps]
            self._runner.attn_backend = self.active.attn_backend
            self._runner.decode_cuda_graph_runner = self.active.graph_runner
            compat.symbol("get_context")().override(
                "eaglex.steps", speculative_num_steps=steps, speculative_num_draft_tokens=self.active.nodes
            )
        return self.active

    @contextlib.contextmanager
    def as_captured(self) -> Iterator[None]:
        """For a prompt: the state that the host has captured, whose attention backend its prompts' graphs plan on."""
        steps = self.active.steps
        self.activate(self._captured)
        try:
            yield
        finally:
            self.activate(steps)
