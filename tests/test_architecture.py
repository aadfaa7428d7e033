"""The doors between the rooms hold, and each checker finds a violation that is planted for it."""

import os
import subprocess
import sys
import textwrap

import doors
import pytest


def test_the_repository_has_no_violation():
    assert doors.violations(doors.sources()) == []


def test_sources_are_found():
    paths = doors.sources()
    assert {"eaglex/__init__.py", "tests/conftest.py", "tests/test_architecture.py", "tools/doors.py"} <= set(paths)
    assert not any(path.startswith("third_party") for path in paths)


PLANTED_CXX = {
    "core-cuda": ("csrc/core/x.h", "#include <cuda_runtime.h>", "includes cuda_runtime.h"),
    "core-other-room": ("csrc/core/x.h", '#include "draft/loop.h"', "includes draft/loop.h"),
    "core-posix": ("csrc/core/x.cpp", "#include <unistd.h>", "includes unistd.h"),
    "draft-cpu": ("csrc/draft/x.cpp", '  #  include "cpu/backend.h"', "includes cpu/backend.h"),
    "draft-nccl": ("csrc/draft/x.cpp", "#include <nccl.h>", "includes nccl.h"),
    "draft-ifdef": ("csrc/draft/x.cpp", "#ifdef EAGLEX", "conditional compilation"),
    "draft-stream": ("csrc/draft/x.cpp", "void f(cudaStream_t s);", "names the CUDA runtime"),
    "cpu-draft": ("csrc/cpu/x.cpp", '#include "draft/step.h"', "includes draft/step.h"),
    "cuda-nccl": ("csrc/cuda/x.cu", "#include <nccl.h>", "includes nccl.h"),
    "cuda-draft": ("csrc/cuda/x.cu", '#include "draft/step.h"', "includes draft/step.h"),
    "cuda-chooser": ("csrc/cuda/x.cu", "#ifdef EAGLEX_WITH_CUDA", "EAGLEX_WITH_CUDA"),
    "bridge-kernels": ("csrc/bridge/x.cpp", '#include "cuda/gemm.h"', "includes cuda/gemm.h"),
    "bridge-pybind": ("csrc/bridge/x.cpp", "#include <pybind11/pybind11.h>", "only csrc/bindings.cpp"),
    "tests-pybind": ("tests/cpp/test_x.cpp", "#include <pybind11/pybind11.h>", "only csrc/bindings.cpp"),
    "bindings-torch": ("csrc/bindings.cpp", "#include <torch/extension.h>", "torch headers"),
    "bench-torch": ("bench/x.cu", "#include <ATen/ATen.h>", "torch headers"),
    "deep-folder": ("csrc/cuda/tiles/x.cuh", '#include "bridge/local.h"', "includes bridge/local.h"),
}


@pytest.mark.parametrize(("path", "text", "message"), PLANTED_CXX.values(), ids=PLANTED_CXX.keys())
def test_planted_include_is_found(path, text, message):
    found = list(doors.check_cxx(path, f"#pragma once\n{text}\n"))
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("csrc/core/x.h", "<vector>"),
        ("csrc/draft/x.cpp", '"core/error.h"'),
        ("csrc/cpu/x.cpp", "<omp.h>"),
        ("csrc/cuda/x.cu", "<cuda_bf16.h>"),
        ("csrc/cuda/x.cu", "<cutlass/gemm/gemm.h>"),
        ("csrc/cuda/x.cu", "<cooperative_groups.h>"),
        ("csrc/cuda/x.cu", "<cuda/barrier>"),
        ("csrc/cuda/x.cu", "<nvtx3/nvtx3.hpp>"),
        ("csrc/bridge/x.cpp", "<sys/mman.h>"),
        ("csrc/bridge/x.cpp", "<nccl.h>"),
        ("csrc/bindings.cpp", "<pybind11/pybind11.h>"),
        ("csrc/bindings.cpp", '"cuda/backend.h"'),
        ("tests/cpp/test_x.cpp", "<doctest/doctest.h>"),
        ("csrc/core/x.h", "<string>  // holds a cudaStream_t on CUDA"),
    ],
)
def test_allowed_include_passes(path, include):
    assert list(doors.check_cxx(path, f"#include {include}\n")) == []


def test_second_user_of_nccl_is_found():
    one = {"csrc/bridge/nccl.cpp": "#include <nccl.h>\n", "csrc/bridge/local.cpp": "#include <vector>\n"}
    assert list(doors.check_nccl(one)) == []
    assert list(doors.check_nccl({**one, "csrc/bridge/other.cpp": "#include <nccl.h>\n"}))


PLANTED_PYTHON = {
    "pickle": ("eaglex/checkpoint.py", "import pickle", "untrusted"),
    "pickle-late": ("eaglex/checkpoint.py", "def f():\n    from pickle import loads", "untrusted"),
    "torch-load": ("eaglex/checkpoint.py", "import torch\nx = torch.load('f')", "torch.load"),
    "torch-load-import": ("eaglex/checkpoint.py", "from torch import load", "untrusted"),
    "sglang": ("eaglex/engine.py", "import sglang", "compat.py"),
    "sglang-late": ("eaglex/cli.py", "def f():\n    from sglang.srt import x", "compat.py"),
    "sglang-by-name": ("eaglex/cli.py", "import importlib\nimportlib.import_module('sglang.srt')", "compat.py"),
    "sglang-worker": ("eaglex/hosts/sglang/worker.py", "import sglang.srt", "compat.py"),
    "spec-extension": ("eaglex/reference.py", "from eaglex import _C", "torch alone"),
    "spec-relative": ("eaglex/reference.py", "from . import _C", "torch alone"),
    "spec-numpy": ("eaglex/reference.py", "import numpy", "torch alone"),
    "spec-half": ("eaglex/reference_low_bit.py", "from eaglex.packed import PackedWeight", "torch alone"),
    "unlisted": ("eaglex/engine.py", "import requests", "not among the libraries"),
    "transformers": ("eaglex/engine.py", "import transformers", "not among the libraries"),
}


@pytest.mark.parametrize(("path", "text", "message"), PLANTED_PYTHON.values(), ids=PLANTED_PYTHON.keys())
def test_planted_import_is_found(path, text, message):
    found = list(doors.check_python(path, text + "\n"))
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("eaglex/hosts/sglang/compat.py", "import sglang.srt"),
        ("eaglex/hosts/transformers.py", "import transformers"),
        ("eaglex/observe.py", "import prometheus_client"),
        ("eaglex/reference.py", "from eaglex.reference_low_bit import product"),
        ("eaglex/engine.py", "import json, torch, safetensors\nfrom eaglex import _C\nfrom .config import X"),
        ("eaglex/reference.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import eaglex.config"),
    ],
)
def test_allowed_import_passes(path, text):
    assert list(doors.check_python(path, text + "\n")) == []


def test_long_file_is_found():
    assert list(doors.check_length("csrc/core/x.h", "\n" * doors.MAX_LINES)) == []
    assert list(doors.check_length("csrc/core/x.h", "\n" * (doors.MAX_LINES + 1)))


LEAN_IMPORT = """
    import importlib.abc, sys

    class Absent(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            hidden = {"sglang", "transformers", "accelerate", "prometheus_client", "numpy"}
            if name.split(".")[0] in hidden or name == "eaglex._C":
                raise ModuleNotFoundError(f"{name} is hidden by this test", name=name)
            return None

    sys.meta_path.insert(0, Absent())
    import eaglex, eaglex.config, eaglex.reference
    assert "eaglex._C" not in sys.modules and "sglang" not in sys.modules
    assert not sys.modules["torch"].cuda.is_initialized()
    print(eaglex.__version__)
"""


def run_python(code, *arguments):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, cwd=doors.ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_package_imports_without_gpu_host_and_extension():
    result = run_python(LEAN_IMPORT)
    assert result.returncode == 0, result.stderr


def test_lean_import_would_notice():
    result = run_python(LEAN_IMPORT.replace("import eaglex, ", "import eaglex._C, eaglex, "))
    assert result.returncode != 0
    assert "hidden by this test" in result.stderr
