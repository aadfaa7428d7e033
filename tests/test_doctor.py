"""`eaglex doctor`: each verdict, the exit code, and that it ends with a report whatever breaks underneath."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from eaglex import cli, doctor, doctor_bridge
from eaglex.doctor import Finding, Verdict

ROOT = Path(__file__).parent.parent
GPU = {"name": "NVIDIA H200", "capability": "9.0", "memory": 150 * 2**30}
TORCH = {"version": "2.11.0+cu130", "cuda": "13.0"}


@pytest.fixture(scope="module")
def probe():
    """What this machine really answers, asked once."""
    return doctor.run_probe()


def verdicts(findings):
    return [f.verdict.value for f in ([findings] if isinstance(findings, Finding) else findings)]


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 11), "ok"), ((3, 12), "ok"), ((3, 10), "fail"), ((3, 14), "warn")]
)
def test_python(version, verdict):
    assert verdicts(doctor.python(version)) == [verdict]


@pytest.mark.parametrize(
    ("probe", "verdict", "named"),
    [
        ({"torch": TORCH}, "ok", "2.11.0+cu130, CUDA 13.0"),
        ({"torch": {"version": "2.13.0+cpu", "cuda": None}}, "ok", "CUDA none"),
        ({"torch": {"version": "2.9.1", "cuda": None}}, "fail", "older than 2.11"),
        ({"torch": {"error": "ImportError: libcudart.so.13"}}, "fail", "libcudart.so.13"),
        ({"probe": {"ending": "no answer within 120 s"}}, "fail", "no answer within 120 s"),
    ],
)
def test_torch(probe, verdict, named):
    found = doctor.torch(probe)
    assert verdicts(found) == [verdict]
    assert named in found.text


@pytest.mark.parametrize(
    ("probe", "verdict"),
    [
        ({"extension": {"info": {"cuda": False}}}, "ok"),
        ({"extension": {"info": {"cuda": False}}, "gpus": {"gpus": [GPU]}}, "warn"),
        ({"extension": {"info": {"cuda": "13.0"}}, "gpus": {"gpus": [GPU]}}, "ok"),
        ({"extension": {"info": {}}, "gpus": {"gpus": [GPU]}}, "ok"),
        ({"extension": {"error": "ImportError: undefined symbol"}}, "fail"),
        ({"probe": {"ending": "exit code -11: no message"}}, "fail"),
    ],
)
def test_extension(probe, verdict):
    assert verdicts(doctor.extension(probe)) == [verdict]


def fake_tools(monkeypatch, **versions):
    monkeypatch.setattr(doctor, "_tool_version", lambda name: versions.get(name.replace("+", "x")))


@pytest.mark.parametrize(
    ("versions", "works", "gpu", "expected"),
    [
        ({"gxx": (12, 2), "cmake": (3, 25), "ninja": (1, 11), "nvcc": (13, 0)}, False, True, ["ok"] * 4),
        ({}, False, True, ["fail", "fail", "warn", "warn"]),
        ({}, False, False, ["fail", "fail", "warn", "ok"]),
        ({}, True, True, ["ok"] * 4),
        ({"gxx": (11, 4), "cmake": (3, 16), "ninja": (1, 8), "nvcc": (12, 4)}, False, True,
         ["fail", "fail", "ok", "warn"]),
    ],
)  # fmt: skip
def test_compilers(monkeypatch, versions, works, gpu, expected):
    fake_tools(monkeypatch, **versions)
    assert verdicts(doctor.compilers(extension_works=works, gpu=gpu)) == expected


def test_compiler_versions_are_read(tmp_path, monkeypatch):
    for name, text in {
        "g++": "g++ (Debian 12.2.0-14+deb12u1) 12.2.0",
        "nvcc": "Cuda compilation tools, release 13.0, V13.0.88",
        "cmake": "cmake version 3.25.1",
        "ninja": "1.11.1",
        "broken": "?",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {name: doctor._tool_version(name) for name in ("g++", "nvcc", "cmake", "ninja", "broken", "absent")}
    assert found == {
        "g++": (12, 2), "nvcc": (13, 0), "cmake": (3, 25), "ninja": (1, 11), "broken": None, "absent": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("probe", "smi", "expected", "named"),
    [
        ({"torch": TORCH, "gpus": {"gpus": [], "without_p2p": []}}, False, ["warn"], "the CPU backend runs here"),
        ({"torch": TORCH, "gpus": {"gpus": [], "without_p2p": []}}, True, ["fail"], "torch sees no GPU"),
        ({"torch": TORCH, "gpus": {"gpus": [GPU], "without_p2p": []}}, True, ["ok"], "sm_90"),
        ({"torch": TORCH, "gpus": {"gpus": [GPU, GPU], "without_p2p": []}}, True, ["ok", "ok"], "every other"),
        ({"torch": TORCH, "gpus": {"gpus": [GPU, GPU], "without_p2p": [[0, 1]]}}, True, ["ok", "warn"], "1 of 2"),
        ({"torch": TORCH, "gpus": {"gpus": [GPU | {"capability": "7.5"}], "without_p2p": []}}, True, ["fail"], "sm_75"),
        ({"torch": {"error": "x"}}, True, ["warn"], "unknown"),
        ({"torch": TORCH, "probe": {"ending": "exit code -6: abort"}}, True, ["fail"], "exit code -6"),
    ],
)
def test_gpus(probe, smi, expected, named):
    found = doctor.gpus(probe, smi)
    assert verdicts(found) == expected
    assert any(named in f.text for f in found)


@pytest.mark.parametrize(
    ("nccl", "packages", "verdict", "named"),
    [
        ({}, {}, "ok", "not loaded"),
        ({"/v/libnccl.so.2": 22907}, {"nvidia-nccl-cu13": "2.29.7"}, "ok", "loaded 2.29.7 (/v/libnccl.so.2)"),
        ({"/v/libnccl.so.2": 22907}, {"nvidia-nccl-cu13": "2.28.3"}, "warn", "not the installed one"),
        ({"/v/libnccl.so.2": 22907, "/usr/lib/libnccl.so.2": 22203}, {}, "fail", "two copies in one process"),
        ({"/v/libnccl.so.2": 22907}, {"nvidia-nccl-cu12": "2.29.7", "nvidia-nccl-cu13": "2.29.7"}, "warn", "cu12"),
        ({"/v/libnccl.so.2": None}, {"nvidia-nccl-cu13": "2.29.7"}, "ok", "version unknown"),
    ],
)
def test_nccl(nccl, packages, verdict, named):
    found = doctor.libraries({"libraries": {"libnccl.so": nccl, "libcudart.so": {}}}, packages)
    assert verdicts(found) == [verdict, "ok"]
    assert named in found[0].text


GPUS = {"gpus": [{}, {}], "without_p2p": []}
BRIDGES = {
    "cpu build": ({"extension": {"info": {"cuda": False}}, "gpus": GPUS}, "ok", "shm"),
    "no gpu": ({"extension": {"info": {"cuda": True}}, "gpus": {"gpus": []}}, "ok", "shm"),
    "all": (
        {"extension": {"info": {"cuda": True}}, "gpus": GPUS, "libraries": {"libnccl.so": {"a": 22809}}},
        "ok", "p2p, mailbox, nccl: ",
    ),
    "apart": (
        {"extension": {"info": {"cuda": True}}, "gpus": {**GPUS, "without_p2p": [[0, 1], [1, 0]]}},
        "ok", "p2p (the driver says not for GPUs 0-1), mailbox: ",
    ),
    "old nccl": (
        {"extension": {"info": {"cuda": True}}, "gpus": GPUS, "libraries": {"libnccl.so": {"a": 21000}}},
        "warn", "libnccl 21000: expected at least 21800",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("probe", "verdict", "named"), BRIDGES.values(), ids=BRIDGES.keys())
def test_bridge(probe, verdict, named):
    found = doctor_bridge.bridge(probe)
    assert (found.topic, found.verdict.value) == ("bridge", verdict)
    assert named in found.text


def test_two_cudarts_are_a_warning():
    copies = {"/a/libcudart.so.13": 13000, "/b/libcudart.so.12": 12080}
    found = doctor.libraries({"libraries": {"libnccl.so": {}, "libcudart.so": copies}}, {})
    assert verdicts(found) == ["ok", "warn"]
    assert "13.0" in found[1].text
    assert "12.8" in found[1].text


@pytest.mark.parametrize(
    ("version", "plugins", "allowed", "expected"),
    [
        (None, [], None, ["ok"]),
        ("0.5.17", ["eaglex"], None, ["ok", "ok"]),
        ("0.5.23", ["eaglex", "other"], "other, eaglex", ["ok", "ok"]),
        ("0.5.23", ["eaglex"], "other", ["ok", "fail"]),
        ("0.5.23", ["eaglex"], "", ["ok", "fail"]),
        ("0.5.20", [], None, ["ok", "fail"]),
        ("0.5.11", ["eaglex"], None, ["fail", "ok"]),
        ("0.5.24", ["eaglex"], None, ["fail", "ok"]),
        ("0.5.17.post1", ["eaglex"], None, ["ok", "ok"]),
    ],
)
def test_sglang(version, plugins, allowed, expected):
    assert verdicts(doctor.sglang(version, plugins, allowed)) == expected


def test_shm(tmp_path):
    assert verdicts(doctor.shm(tmp_path / "absent")) == ["fail"]
    assert doctor.shm(tmp_path).verdict in (Verdict.OK, Verdict.WARN)


def test_small_shm(tmp_path, monkeypatch):
    size = os.statvfs_result((4096, 4096, 16384, 16000, 16000, 1, 1, 1, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: size)
    found = doctor.shm(tmp_path)
    assert found.verdict is Verdict.WARN
    assert "--shm-size" in found.fix


def test_every_warning_and_failure_has_a_fix(probe, monkeypatch):
    monkeypatch.setattr(doctor, "run_probe", lambda: probe)
    for finding in doctor.examine():
        assert finding.verdict is Verdict.OK or finding.fix


def test_this_machine(capsys):
    code = cli.main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    by_topic = {f["topic"]: f["verdict"] for f in found["findings"]}
    assert code == found["failures"] == list(by_topic.values()).count("fail")
    assert by_topic["torch"] == "ok"
    assert by_topic["extension"] in ("ok", "warn")
    assert by_topic["gpus"] in ("ok", "warn")


def test_exit_code_is_the_number_of_failures(capsys, monkeypatch):
    findings = [
        Finding("a", Verdict.FAIL, "x", "y"),
        Finding("b", Verdict.FAIL, "x", "y"),
        Finding("c", Verdict.WARN, "x", "y"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().out.endswith("2 failures\n")


def test_a_broken_check_does_not_hide_the_others(probe, monkeypatch):
    monkeypatch.setattr(doctor, "run_probe", lambda: probe)
    monkeypatch.setattr(doctor, "gpus", lambda *_: 1 / 0)
    found = {f.topic: f for f in doctor.examine()}
    assert "ZeroDivisionError" in found["gpus"].text
    assert found["gpus"].verdict is Verdict.FAIL
    assert found["torch"].verdict is Verdict.OK


def test_a_probe_that_hangs_is_given_up(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor.run_probe(seconds=1.0) == {"probe": {"ending": "no answer within 1 s"}}


def broken_package(folder, extension):
    """A copy of the package whose extension is that Python source."""
    package = folder / "eaglex"
    package.mkdir()
    for source in (ROOT / "eaglex").glob("*.py"):
        (package / source.name).write_text(source.read_text())
    (package / "_C.py").write_text(textwrap.dedent(extension))
    return folder


@pytest.mark.parametrize(
    ("extension", "named"),
    [
        ("raise ImportError('libstdc++.so.6: version not found')", "libstdc++.so.6"),
        ("import os\nos.abort()", "exit code -6"),
    ],
)
def test_it_works_when_the_extension_does_not(tmp_path, extension, named):
    folder = broken_package(tmp_path, extension)
    run = subprocess.run(
        [sys.executable, "-m", "eaglex", "doctor", "--json"], cwd=folder, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip
    found = json.loads(run.stdout)
    broken = next(f for f in found["findings"] if f["topic"] == "extension")
    assert run.returncode == found["failures"] >= 1
    assert broken["verdict"] == "fail"
    assert named in broken["text"]


def test_only_the_standard_library_is_imported():
    code = "import sys, eaglex.doctor, eaglex.cli; print({'torch', 'safetensors', 'numpy'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "set()"


def test_a_misspelt_variable(monkeypatch) -> None:
    """It would change nothing, and nobody would say so."""
    monkeypatch.setenv("EAGLEX_OPTION", "{}")
    monkeypatch.setenv("EAGLEX_STREAM_REDUCTION", "last")
    monkeypatch.setenv("EAGLEX_OF_ANOTHER_PROGRAM", "1")
    listed, slip = doctor.environment()
    assert "EAGLEX_STREAM_REDUCTION=last" in listed.text
    assert (slip.verdict, slip.text) == (doctor.Verdict.WARN, "nothing reads EAGLEX_OPTION")
    assert slip.fix == "did you mean EAGLEX_OPTIONS?"
