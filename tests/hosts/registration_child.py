"""What a process that SGLang spawns does first: load the plugins. Called by test_sglang_registration.py."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any


def start(package: str, site: str, environment: dict[str, str]) -> Any:
    """Load the host's plugins with `site` first on the path; the host's enum of algorithms."""
    import os

    import torch  # noqa: F401  (before absent packages are replaced)

    os.environ.update(environment)
    sys.path.insert(0, site)
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


def failing(package: str, sites: list[tuple[str, str]], environment: dict[str, str]) -> list[str]:
    """For each (site, SGLANG_PLUGINS): what `from_string("EAGLEX")` raises with the plugins loaded, or finds."""
    import os

    enum = start(package, sites[0][0], environment | {"SGLANG_PLUGINS": "none"})
    import sglang.srt.plugins as plugins

    said = []
    for site, wanted in sites:
        sys.path[0] = site
        os.environ["SGLANG_PLUGINS"] = wanted
        plugins._plugins_loaded = False
        plugins.load_plugins()
        try:
            said.append(str(enum.from_string("EAGLEX").name))
        except ValueError as error:
            said.append(f"ValueError: {error}")
    return said


def register_twice(package: str, site: str, environment: dict[str, str]) -> str:
    """What a second registration in one process says."""
    start(package, site, environment)
    import eaglex.hosts.sglang

    try:
        eaglex.hosts.sglang.register()
    except ValueError as error:
        return str(error)
    return "registered twice"
