"""The example scripts and the launch lines of docs/sglang.md: they run, and name options that the host has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from host_source import class_def, members

from eaglex.hosts.sglang import options

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
RECORD = """
import json, os, sys
def record(name, given):
    with open(os.environ["RECORD"], "a") as file:
        print(json.dumps([name, given, os.environ.get("EAGLEX_OPTIONS")]), file=file)
"""
SGLANG = """
from record import record
class Engine:
    def __init__(self, **given): record("Engine", given)
    def generate(self, prompts, sampling):
        record("generate", sampling)
        facts = {"completion_tokens": 12, "spec_verify_ct": 4}
        return [{"text": " ...", "meta_info": facts} for _ in prompts]
    def shutdown(self): record("shutdown", None)
"""
SERVER = "import sys\nfrom record import record\nrecord('server', sys.argv[1:])\n"


def run(folder: Path, *command: str, **environment: str) -> tuple[str, list[list[object]]]:
    """The command's output among stand-ins for SGLang, and what they were given."""
    package = folder / "sglang"
    package.mkdir()
    (folder / "record.py").write_text(RECORD)
    (package / "__init__.py").write_text(SGLANG)
    (package / "launch_server.py").write_text(SERVER)
    (folder / "python3").symlink_to(sys.executable)
    kept = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(folder), "RECORD": str(folder / "record")}
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, [json.loads(line) for line in (folder / "record").read_text().splitlines()]


@pytest.mark.parametrize("tree", [[], ["--tree"]], ids=["chain", "tree"])
def test_the_offline_example(tmp_path: Path, running_host: Path, tree: list[str]) -> None:
    script = str(EXAMPLES / "sglang_offline.py")
    printed, seen = run(tmp_path, sys.executable, script, "--target", "T", "--draft", "D", *tree, "A", "B")
    assert printed.count("12 tokens, 3.00 each time") == 2
    (name, given, chosen), *rest = seen
    assert [name, *(one[0] for one in rest)] == ["Engine", "generate", "shutdown"]
    assert isinstance(given, dict)
    assert set(given) <= members(class_def(running_host, "sglang.srt.server_args", "ServerArgs"))
    assert (given["model_path"], given["speculative_draft_model_path"]) == ("T", "D")
    assert given["speculative_algorithm"] == "EAGLEX"
    assert (given["speculative_eagle_topk"] > 1) is bool(tree)
    assert options.read({options.VARIABLE: str(chosen or "")}).drafter is options.Drafter.ENGINE


def flags_of(words: list[str]) -> list[str]:
    return [word.partition("=")[0][2:].replace("-", "_") for word in words if word.startswith("--")]


def test_the_server_example(tmp_path: Path, running_host: Path) -> None:
    _, ((_, given, chosen),) = run(tmp_path, "sh", str(EXAMPLES / "sglang_server.sh"), "T", "D", "--tp-size", "1")
    assert isinstance(given, list)
    assert set(flags_of(given)) <= members(class_def(running_host, "sglang.srt.server_args", "ServerArgs"))
    assert given[given.index("--model-path") + 1] == "T"
    assert given[-2:] == ["--tp-size", "1"]
    assert options.read({options.VARIABLE: str(chosen or "")}).drafter is options.Drafter.ENGINE


def test_the_server_example_without_a_draft() -> None:
    script = str(EXAMPLES / "sglang_server.sh")
    ended = subprocess.run(["sh", script, "T"], capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode != 0
    assert "usage: sglang_server.sh TARGET DRAFT" in ended.stderr


def test_the_server_example_leaves_options_that_are_set(tmp_path: Path) -> None:
    own = '{"drafter": "engine", "stop_below": 0.1}'
    _, ((_, _, chosen),) = run(
        tmp_path, "sh", str(EXAMPLES / "sglang_server.sh"), "T", "D", **{options.VARIABLE: own}
    )  # fmt: skip
    assert chosen == own


def test_launch_lines_of_the_docs(running_host: Path) -> None:
    text = (ROOT / "docs" / "sglang.md").read_text()
    lines = [block for block in re.findall(r"```\n(.*?)```", text, re.DOTALL) if "launch_server" in block]
    assert lines
    known = members(class_def(running_host, "sglang.srt.server_args", "ServerArgs"))
    for line in lines:
        assert set(flags_of(line.split())) <= known
        for written in re.findall(r"EAGLEX_OPTIONS='(.*?)'", line):
            options.read({options.VARIABLE: written})
