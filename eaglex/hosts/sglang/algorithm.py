"""The algorithm object that SGLang asks its questions: EAGLE3's answers under the name EAGLEX."""

from __future__ import annotations

import inspect
from typing import Any

from eaglex.hosts.sglang import arguments, compat, options

OWN = ("from_string", "register", "create_worker", "need_topk", "handle_server_args")


def is_question(name: str) -> bool:
    """A predicate of the algorithm's interface, by the host's own naming rule."""
    return name.startswith(("is_", "supports_"))


def algorithm_class() -> type:
    """A `CustomSpecAlgo` that answers as the enum's EAGLE3 does.

    A predicate is passed on to `SpeculativeAlgorithm.EAGLE3`. Any other function of the enum is borrowed with EAGLEX as
    `self`, because some hand the algorithm on (`create_future_map`). Both cover what a newer host adds. Different are:
    the worker; `need_topk`, since what the next cycle drafts from stays with the worker by request slot, so the host
    has no top-k and no hidden states to carry from one cycle to the next; `has_draft_kv` with eaglex's engine, which
    keeps drafted tokens out of the host's slots; and the arguments that are refused.
    """
    enum: Any = compat.symbol("SpeculativeAlgorithm")
    base: Any = compat.symbol("CustomSpecAlgo")

    def answer(name: str) -> Any:
        return lambda self: getattr(enum.EAGLE3, name)()

    def handle_server_args(self: Any, server_args: Any) -> None:
        enum.handle_server_args(self, server_args)
        arguments.complete(server_args)

    members: dict[str, Any] = {
        name: answer(name) if is_question(name) else function
        for name, function in vars(enum).items()
        if inspect.isfunction(function) and not name.startswith("_") and name not in OWN
    }
    members["need_topk"] = lambda self: False
    members["has_draft_kv"] = lambda self: options.read().drafter is options.Drafter.HOST
    members["handle_server_args"] = handle_server_args
    members["__doc__"] = "EAGLEX: EAGLE3 with the draft run right after verification, on its own stream."
    return type("EaglexAlgorithm", (base,), members)


def register(name: str) -> None:
    """Register the algorithm in this process (see `eaglex.hosts.sglang.register`)."""
    enum = compat.symbol("SpeculativeAlgorithm")

    @enum.register(  # type: ignore[untyped-decorator]
        name, supports_overlap=True, validate_server_args=arguments.refuse, spec_class=algorithm_class()
    )
    def worker_class(server_args: Any) -> type:
        if options.read().drafter is options.Drafter.ENGINE:
            from eaglex.hosts.sglang.engine_worker import EaglexEngineWorker

            return EaglexEngineWorker
        from eaglex.hosts.sglang.worker import EaglexWorker

        return EaglexWorker
