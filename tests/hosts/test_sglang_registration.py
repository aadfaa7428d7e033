"""`--speculative-algorithm EAGLEX` through the entry point, with the host's own registry and plugin loader."""

from __future__ import annotations

import ast
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import registration_child
from host_source import class_def, methods, module_file, parse

import eaglex
from eaglex.hosts.sglang import NAME, arguments, compat

ROOT = Path(eaglex.__file__).parent.parent
HOST_DRAFT = '{"drafter": "host"}'  # the engine's own arguments: test_sglang_engine_options.py


def install(site: Path, target: str = "eaglex.hosts.sglang:register") -> Path:
    """An installed distribution with eaglex's entry point, as pip leaves it behind."""
    info = site / "eaglex_test-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eaglex-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\neaglex = {target}\n")
    return site


def spawned() -> ProcessPoolExecutor:
    """A process as SGLang starts its schedulers: spawned, with nothing of the parent but the path."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def in_spawned_process(function: Any, package: Path, site: Path) -> Any:
    with spawned() as pool:
        return pool.submit(function, str(package), str(site), {"SGLANG_PLUGINS": "eaglex"}).result(timeout=60)


def test_answers_as_eagle3(host: Path, tmp_path: Path) -> None:
    said = in_spawned_process(registration_child.answers, host, install(tmp_path))
    assert said["name"] == NAME
    assert len(said["questions"]) >= 12
    assert all(ours == theirs for ours, theirs in said["questions"].values()), said["questions"]
    assert said["missing"] == []
    assert said["borrowed"]
    assert said["need_topk"] is False
    assert said["supports_overlap"] is True
    assert said["has_draft_kv"] is False
    assert not said["worker_imported"], "the worker imports most of the host; the launcher needs none of it"


BROKEN = {  # case -> entry point, SGLANG_PLUGINS
    "no such function": ("eaglex.hosts.sglang:no_such_function", "eaglex"),
    "no such module": ("eaglex.hosts.no_such_module:register", "eaglex"),
    "raises when called": ("registration_child:start", "eaglex"),
    "left out": ("eaglex.hosts.sglang:register", "another"),
}


def test_a_plugin_that_failed_stops_the_launch(host: Path, tmp_path: Path) -> None:
    """In the launcher, by the host's own handling of the arguments, and in a scheduler, by the lookup of the name."""
    sites = [(str(install(tmp_path / name, target)), plugins) for name, (target, plugins) in BROKEN.items()]
    sites.append((str(install(tmp_path / "right")), "eaglex"))  # the same process finds a plugin that loads
    with spawned() as pool:
        said = pool.submit(registration_child.launching, str(host), sites, {}).result(timeout=60)
    unknown = f"ValueError: Unknown speculative algorithm name: {NAME}"
    assert said[:-1] == [[unknown, unknown]] * len(BROKEN)
    name, refusal = said[-1]
    assert NAME in name
    assert not name.startswith("ValueError")
    assert refusal == f"ValueError: {compat.refusal(None)}", "the launcher does not ask eaglex about the arguments"


def test_a_failed_scheduler_stops_the_launcher(host: Path) -> None:
    """What the lookup raises in a spawned scheduler reaches the launcher: it is told of any exception by a signal."""
    process = function(parse(module_file(host, "sglang.srt.managers.scheduler")), "run_scheduler_process")
    handlers = [handler for node in ast.walk(process) if isinstance(node, ast.Try) for handler in node.handlers]
    caught = [handler for handler in handlers if handler.type is not None and ast.unparse(handler.type) == "Exception"]
    assert any("send_signal(signal.SIGQUIT)" in ast.unparse(handler) for handler in caught)


def test_the_name_is_taken_once(running_host: Path, tmp_path: Path) -> None:
    said = in_spawned_process(registration_child.register_twice, running_host, install(tmp_path))
    assert "already registered" in said


def line_of(tree: ast.AST, call: str) -> int:
    """The first line that calls a function of this name."""
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == call
    ]
    assert lines, f"no call of {call}"
    return min(lines)


def function(tree: ast.AST, name: str) -> ast.AST:
    return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)


def test_every_process_loads_plugins_before_it_asks_for_the_name(host: Path) -> None:
    """An unknown name stops the launch because each process looks it up, and does so after loading the plugins."""
    hook = parse(module_file(host, "sglang.srt.arg_groups.speculative_hook"))
    line_of(function(hook, "handle_speculative_decoding"), "from_string")
    scheduler = parse(module_file(host, "sglang.srt.managers.scheduler"))
    line_of(methods(class_def(host, "sglang.srt.managers.scheduler", "Scheduler"))["__init__"], "from_string")
    process = function(scheduler, "run_scheduler_process")
    assert isinstance(process, ast.FunctionDef)
    assert line_of(process, "load_plugins") < line_of(process, "configure_scheduler_process")
    for module in ("sglang.srt.entrypoints.engine", "sglang.launch_server", "sglang.cli.serve"):
        line_of(parse(module_file(host, module)), "load_plugins")


def test_importing_the_host_folder_imports_no_host() -> None:
    code = "import sys, eaglex.hosts.sglang; sys.exit('sglang' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def given(**changed: Any) -> SimpleNamespace:
    """Arguments as the host hands them to the check."""
    options = {refused.option: refused.allowed for refused in arguments.REFUSED + arguments.HOST_DRAFT_REFUSED}
    options |= {
        "speculative_draft_attention_backend": None,
        "speculative_draft_model_path": "a/head",
        "speculative_draft_model_revision": None,
        "trust_remote_code": False,
    }
    return SimpleNamespace(**(options | changed))


@pytest.fixture
def on_a_supported_version(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    architectures = ["LlamaForCausalLMEagle3"]
    monkeypatch.setenv("EAGLEX_OPTIONS", HOST_DRAFT)
    monkeypatch.setattr(compat, "installed_version", lambda: compat.RUN_VERSIONS[0])
    monkeypatch.setattr(compat, "symbol", lambda name: lambda path, **_: SimpleNamespace(architectures=architectures))
    return architectures


def test_arguments_that_are_served(on_a_supported_version: list[str]) -> None:
    arguments.refuse(given())
    arguments.refuse(given(speculative_draft_attention_backend="triton"))


REFUSALS = {
    "pp_size": 2, "dcp_size": 2, "device": "cpu", "disaggregation_mode": "decode", "speculative_draft_window_size": 512,
    "speculative_draft_attention_backend": "fa3", "speculative_draft_model_path": None,
}  # fmt: skip
REFUSALS |= {
    refused.option: True for refused in arguments.REFUSED + arguments.HOST_DRAFT_REFUSED if refused.allowed is False
}


@pytest.mark.parametrize(("option", "value"), REFUSALS.items())
@pytest.mark.usefixtures("on_a_supported_version")
def test_arguments_that_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option) as caught:
        arguments.refuse(given(**{option: value}))
    assert repr(value) in str(caught.value)
    assert str(caught.value).endswith(".")


def test_every_refused_option_is_tested() -> None:
    assert {refused.option for refused in arguments.REFUSED + arguments.HOST_DRAFT_REFUSED} <= set(REFUSALS)


def test_a_draft_of_another_kind_is_refused(on_a_supported_version: list[str]) -> None:
    on_a_supported_version[:] = ["Gemma4AssistantForCausalLM"]
    with pytest.raises(ValueError, match="EAGLE-3 head"):
        arguments.refuse(given())


@pytest.mark.parametrize("version", ["0.5.16", "0.5.18", "0.5.23", None])
def test_another_version_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(compat, "installed_version", lambda: version)
    with pytest.raises(ValueError, match=r"0\.5\.17") as caught:
        arguments.refuse(given())
    assert (version or "no version") in str(caught.value)
    assert str(caught.value).count(". ") == 0


def test_the_draft_backend_is_set_where_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLEX_OPTIONS", HOST_DRAFT)
    options = given()
    arguments.complete(options)
    assert options.speculative_draft_attention_backend == arguments.DRAFT_BACKEND
