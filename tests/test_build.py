"""The build: what CMake decides about CUDA, what the extension links, what a wheel holds, that the stub is current."""

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import stubs

import eaglex

ROOT = Path(__file__).resolve().parent.parent
NVCC_13 = "compute_75 compute_80 compute_86 compute_89 compute_90 compute_100 compute_120"


def cmake_script(tmp_path, text, **environment):
    """Runs CMake code in script mode; returns the exit status and all output on one line."""
    script = tmp_path / "script.cmake"
    script.write_text("cmake_minimum_required(VERSION 3.22)\n" + text)
    command = [shutil.which("cmake"), "-P", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})
    return result.returncode, " ".join((result.stdout + result.stderr).split())


def archs(tmp_path, requested, known=NVCC_13):
    return cmake_script(
        tmp_path,
        f'include("{ROOT}/cmake/cuda_archs.cmake")\n'
        f'eaglex_cuda_archs(result "{requested}" "{known}")\nmessage(STATUS "<${{result}}>")\n',
    )


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ("", "80-real;89-real;90-real;100-real;120"),
        ("90", "90-real"),
        ("9.0;12.0+PTX", "90-real;120"),
        ("8.0 8.9, 10.0", "80-real;89-real;100-real"),
        ("sm_90", "90-real"),
        ("90a", "90a-real"),
        ("native", "native"),
    ],
)
def test_architectures(tmp_path, requested, expected):
    status, output = archs(tmp_path, requested)
    assert status == 0
    assert f"<{expected}>" in output


def test_default_architectures_follow_nvcc(tmp_path):
    assert "<80-real;89-real;90>" in archs(tmp_path, "", "compute_80 compute_89 compute_90")[1]


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ("hopper", "expected items like 90, 9.0, 90a or 12.0+PTX, got 'hopper'"),
        ("9.0;99", "'99' is unknown to this nvcc"),
        ("75", "expected 80 (Ampere) or newer, got '75'"),
    ],
)
def test_bad_architectures_are_named(tmp_path, requested, message):
    status, output = archs(tmp_path, requested)
    assert status != 0
    assert message in output


def cuda_decision(tmp_path, mode, **environment):
    """What cmake/cuda.cmake says for EAGLEX_CUDA=mode where PATH holds nothing and CUDA_HOME an empty folder."""
    hidden = {"PATH": str(tmp_path / "empty"), "CUDA_HOME": str(tmp_path / "empty"), "CUDACXX": "", **environment}
    return cmake_script(tmp_path, f'set(EAGLEX_CUDA {mode})\ninclude("{ROOT}/cmake/cuda.cmake")\n', **hidden)


def fake_nvcc(folder, release):
    compiler = folder / "nvcc"
    compiler.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    compiler.chmod(0o755)
    return str(compiler)


def test_auto_without_nvcc_is_a_cpu_build_that_says_so(tmp_path):
    status, output = cuda_decision(tmp_path, "AUTO")
    assert status == 0
    assert "CPU build (no nvcc in PATH" in output


def test_off_is_a_cpu_build_even_with_nvcc(tmp_path):
    status, output = cuda_decision(tmp_path, "OFF", CUDACXX=fake_nvcc(tmp_path, "13.0"))
    assert status == 0
    assert "CPU build (EAGLEX_CUDA=OFF)" in output


def test_on_without_nvcc_is_an_error(tmp_path):
    status, output = cuda_decision(tmp_path, "ON")
    assert status != 0
    assert "EAGLEX_CUDA=ON, but no nvcc in PATH" in output


def test_on_with_an_old_nvcc_is_an_error(tmp_path):
    status, output = cuda_decision(tmp_path, "ON", CUDACXX=fake_nvcc(tmp_path, "12.4"))
    assert status != 0
    assert "nvcc 12.8 or newer is needed" in output


def test_auto_with_a_broken_nvcc_is_a_cpu_build(tmp_path):
    status, output = cuda_decision(tmp_path, "AUTO", CUDACXX="/nonexistent/nvcc")
    assert status == 0
    assert "CPU build ('/nonexistent/nvcc --version' does not work)" in output


def test_unknown_mode_is_named(tmp_path):
    status, output = cuda_decision(tmp_path, "MAYBE")
    assert status != 0
    assert "expected AUTO, ON or OFF, got 'MAYBE'" in output


def extension_path():
    spec = importlib.util.find_spec("eaglex._C")
    assert spec is not None, "the extension is not built: run `make build`"
    assert spec.origin is not None
    return spec.origin


def test_extension_needs_neither_torch_nor_the_cuda_runtime():
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    dynamic = subprocess.run(["readelf", "-d", extension_path()], capture_output=True, text=True, check=True).stdout
    needed = [line for line in dynamic.splitlines() if "NEEDED" in line]
    assert needed
    assert not [line for line in needed if any(word in line for word in ("torch", "c10", "cudart", "nccl", "libcuda"))]


def test_extension_loads_before_torch():
    code = (
        "import importlib.machinery as m, importlib.util as u, sys\n"
        "spec = u.spec_from_file_location('eaglex._C', sys.argv[1])\n"
        "spec.loader.exec_module(u.module_from_spec(spec))\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, extension_path()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_stub_is_current(capsys):
    pytest.importorskip("pybind11_stubgen")
    assert stubs.main(["--check"]) == 0, capsys.readouterr().out


def test_stub_drift_would_be_found():
    committed = stubs.STUB.read_text()
    assert stubs.difference(committed, committed) == ""
    assert "+def added() -> int: ..." in stubs.difference(committed, committed + "def added() -> int: ...\n")


def test_installed_metadata():
    try:
        installed = importlib.metadata.distribution("eaglex")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("eaglex is on the path but not installed")
    assert installed.version == eaglex.__version__
    plugin = {(e.group, e.name, e.value) for e in installed.entry_points}
    assert ("sglang.srt.plugins", "eaglex", "eaglex.hosts.sglang:register") in plugin


def test_setup_stays_a_thin_driver():
    assert len((ROOT / "setup.py").read_text().splitlines()) <= 60


BACKEND = "from setuptools import build_meta; print(build_meta.build_{kind}({folder!r}))"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_from_a_source_distribution(tmp_path):
    """The sources of an sdist are complete: a wheel builds from them, without network, and imports."""
    off = dict.fromkeys(("EAGLEX_CUDA", "EAGLEX_TESTS", "EAGLEX_EMULATOR"), "OFF")
    environment = {**os.environ, **off, "CMAKE_ARGS": "", "PYTHONPATH": ""}

    def build(kind, source):
        command = [sys.executable, "-c", BACKEND.format(kind=kind, folder=str(tmp_path))]
        result = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=500)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
        return tmp_path / result.stdout.split()[-1]

    with tarfile.open(build("sdist", ROOT)) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    with zipfile.ZipFile(build("wheel", source)) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(tmp_path / "site")
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    assert {f"eaglex/_C{suffix}", "eaglex/_C.pyi", "eaglex/py.typed", "eaglex/reference.py"} <= names
    assert not [name for name in names if name.startswith(("tests", "csrc", "tools"))]

    code = "import eaglex._C, sys; print(eaglex._C.__file__)"
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.strip() == str(tmp_path / "site" / "eaglex" / f"_C{suffix}"), result.stderr
