"""What a process that SGLang spawns does first: load the plugins. Called by test_sglang_registration.py."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from pathlib import Path
from typing import Any


def hide_installed() -> None:
    """Leave only what a test put on the path: eaglex itself may be installed, and its own entry point would load."""
    found = importlib.metadata.entry_points

    def others(**wanted: Any) -> importlib.metadata.EntryPoints:
        return importlib.metadata.EntryPoints(e for e in found(**wanted) if e.dist is None or e.dist.name != "eaglex")

    importlib.metadata.entry_points = others


def start(package: str, site: str, environment: dict[str, str]) -> Any:
    """Load the host's plugins with `site` first on the path; the host's enum of algorithms."""
    import os

    import torch  # noqa: F401  (before absent packages are replaced)

    os.environ.update(environment)
    sys.path.insert(0, site)
    hide_installed()
    from host_import import open_wheel

    open_wheel(Path(package))
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()
    return SpeculativeAlgorithm


def answers(package: str, site: str, environment: dict[str, str]) -> dict[str, Any]:
    """EAGLEX's answers to every question of the interface, beside EAGLE3's, and what it is made of."""
    enum = start(package, site, environment)
    ours = enum.from_string("eaglex")
    functions = [name for name, value in vars(enum).items() if inspect.isfunction(value) and not name.startswith("_")]
    questions = [name for name in functions if name.startswith(("is_", "supports_"))]
    return {
        "name": ours.name,
        "questions": {name: (getattr(ours, name)(), getattr(enum.EAGLE3, name)()) for name in questions},
        "functions": functions,
        "missing": [name for name in functions if not callable(getattr(ours, name, None))],
        "need_topk": ours.need_topk(),
        "has_draft_kv": ours.has_draft_kv(),
        "supports_overlap": ours.supports_overlap,
        "borrowed": ours.create_future_map.__func__ is enum.create_future_map,
        "worker_imported": "eaglex.hosts.sglang.worker" in sys.modules,
    }


class Arguments:
    """Server arguments that are all None, but for those given."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def launching(package: str, sites: list[tuple[str, str]], environment: dict[str, str]) -> list[list[str]]:
    """For each (site, SGLANG_PLUGINS): what two steps of a launch raise with the plugins loaded, or find.

    The first is the lookup by which a spawned scheduler builds its algorithm; the second is the host's own handling of
    the arguments, which the launcher does before it spawns anything.
    """
    import os

    enum = start(package, sites[0][0], environment | {"SGLANG_PLUGINS": "none"})
    import sglang.srt.plugins as plugins
    from sglang.srt.arg_groups.speculative_hook import handle_speculative_decoding

    from eaglex.hosts.sglang import compat

    compat.installed_version = lambda: None

    def said(step: Any, argument: Any) -> str:
        try:
            return str(step(argument))
        except ValueError as error:
            return f"ValueError: {error}"

    found = []
    for site, wanted in sites:
        sys.path[0] = site
        os.environ["SGLANG_PLUGINS"] = wanted
        plugins._plugins_loaded = False
        plugins.load_plugins()
        arguments = Arguments(speculative_algorithm="eaglex", device="cuda", moe_runner_backend="auto")
        found.append([said(enum.from_string, "EAGLEX"), said(handle_speculative_decoding, arguments)])
    return found


def register_twice(package: str, site: str, environment: dict[str, str]) -> str:
    """What a second registration in one process says."""
    start(package, site, environment)
    import eaglex.hosts.sglang

    try:
        eaglex.hosts.sglang.register()
    except ValueError as error:
        return str(error)
    return "registered twice"
