"""Every step of a cycle is an NVTX range of its own name, for a profiler that listens."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support.own_process import ROOT, own_process
from support.rig import Ask
from support.streamed import StreamedRig, make_streamed_config

from eaglex.config import MaskMode, SpeculationConfig
from eaglex.engine import VerifyTensors

pytestmark = pytest.mark.gpu

STEPS = 3
STEP = ["qkv", "attention", "o_proj", "gate_up", "down", "head", "select"]


@pytest.fixture(autouse=True)
def _listener(tmp_path, monkeypatch):
    """The tool is read when a process opens its first range, so it is named before the test's own one begins."""
    if "NVTX_INJECTION64_PATH" in os.environ:
        return
    compiler, nvcc = shutil.which("cc"), shutil.which("nvcc")
    if compiler is None or nvcc is None:
        pytest.skip("needs a C compiler and the CUDA toolkit's headers")
    headers, library = Path(nvcc).resolve().parent.parent / "include", tmp_path / "listener.so"
    source = ROOT / "tests" / "support" / "nvtx_listener.c"
    subprocess.run([compiler, "-shared", "-fPIC", f"-I{headers}", "-o", library, source], check=True)
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(library))
    monkeypatch.setenv("EAGLEX_RANGES", str(tmp_path / "ranges"))


def heard() -> list[str]:
    """What was opened in the domain "eaglex" since the last call, and closed again; torch's libraries have others."""
    path = Path(os.environ["EAGLEX_RANGES"])
    lines = path.read_text().splitlines() if path.exists() else []
    path.write_text("")
    names = [line.removeprefix("eaglex/") for line in lines if line.startswith("eaglex/")]
    opened = [name for name in names if name]
    assert len(opened) == len(names) - len(opened)
    return opened


@own_process
def test_every_step_says_its_name() -> None:
    rig = StreamedRig(make_streamed_config(), SpeculationConfig(num_steps=STEPS))
    rig.join(0, 1)
    rig.engine.enqueue(rig.batch([Ask(0, 5)]))
    extend = heard()
    assert extend[:3] == ["admit", "fuse", "qkv"]
    assert extend[-(STEPS - 1) * len(STEP):] == (STEPS - 1) * STEP
    assert set(extend) == {"admit", "fuse", *STEP}
    rig.engine.warm_up()
    assert set(heard()) == {"admit", "fuse", *STEP}, "as graphs are captured"
    rig.engine.run(rig.batch([Ask(0, STEPS)]))  # STEPS + 1 rows a request are what a graph holds
    assert heard() == ["cycle"], "a graph is one launch"
    out = VerifyTensors.allocate(1, STEPS + 1, MaskMode.QLEN_ONLY, "cuda")
    ids = {name: torch.tensor([value], device="cuda")
           for name, value in (("req_pool_indices", 1), ("seq_lens", 5), ("bonus_tokens", 7))}
    rig.engine.tree(out, **ids)
    assert heard() == ["tree"]
