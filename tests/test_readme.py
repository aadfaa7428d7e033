"""What README.md shows works: its python blocks and its `bash run` blocks are run, its links exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)#]+)")


def runnable(text):
    """(language, code) of each block that is to be run: all of python, and bash where it is marked `bash run`."""
    chosen = (("python", ""), ("bash", "run"))
    return [(language, code) for language, mark, code in BLOCK.findall(text) if (language, mark) in chosen]


def run(language, code):
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-euo", "pipefail", "-c", code]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)


README_BLOCKS = runnable((ROOT / "README.md").read_text())


def test_the_readme_has_an_example():
    assert README_BLOCKS


@pytest.mark.parametrize(("language", "code"), README_BLOCKS, ids=[f"{b[0]}-{i}" for i, b in enumerate(README_BLOCKS)])
def test_block_runs(language, code):
    result = run(language, code)
    assert result.returncode == 0, result.stderr


def test_a_block_that_fails_is_noticed():
    text = "```python\nassert False\n```\n\n```bash run\nfalse | true\n```\n\n```bash\nexit 1\n```\n"
    blocks = runnable(text)
    assert [language for language, _ in blocks] == ["python", "bash"]
    assert all(run(language, code).returncode != 0 for language, code in blocks)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/design.md", "docs/style.md"])
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    assert [link for link in LINK.findall((ROOT / page).read_text()) if not (folder / link).exists()] == []
