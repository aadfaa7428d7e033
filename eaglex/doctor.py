"""`eaglex doctor`: verdicts on this machine, each with one fix. Standard library only: it works when little else does.

Everything that can crash or hang (importing torch, the extension, CUDA) happens in a process of its own
(doctor_probe), with a deadline. A machine without a GPU is no failure: the CPU backend runs there.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PYTHONS = ((3, 11), (3, 12))
TORCH = (2, 11)
NVCC = (12, 8)
GXX = (12, 0)
CMAKE = (3, 22)
SGLANG = ((0, 5, 17), (0, 5, 23))
PLUGIN_GROUP = "sglang.srt.plugins"
MIN_CAPABILITY = (8, 0)
PROBE_SECONDS = 120.0
# Read when eaglex runs, then when it is built.
_VARIABLES = tuple(
    f"EAGLEX_{name}"
    for name in (
        *("OPTIONS", "CHAIN", "PDL", "STREAM_REDUCTION"),
        *("CUDA", "CUDA_ARCHS", "CUTLASS_INCLUDE_DIR", "TESTS", "EMULATOR", "BENCH", "WERROR", "OUTPUT_DIR"),
    )
)
_SHM_BYTES = 64 * 2**20  # docker's default; NCCL and SGLang's queues need more on several GPUs


class Verdict(enum.Enum):
    """OK: nothing to do. WARN: works, but slower or not everywhere. FAIL: eaglex or the plugin does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One verdict. `fix` is what to do, "" where there is nothing to do."""

    topic: str
    verdict: Verdict
    text: str
    fix: str = ""


Probe = Mapping[str, Mapping[str, Any]]


def examine() -> list[Finding]:
    """All findings, in the order in which one would fix them."""
    from eaglex import doctor_bridge  # which uses what is defined here

    probe = run_probe()
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("python", lambda: [python(sys.version_info[:2])]),
        ("torch", lambda: [torch(probe)]),
        ("packages", packages),
        ("extension", lambda: [extension(probe)]),
        (
            "compiler",
            lambda: compilers(
                extension_works="info" in probe.get("extension", {}), gpu=bool(probe.get("gpus", {}).get("gpus"))
            ),
        ),
        ("gpus", lambda: gpus(probe, shutil.which("nvidia-smi") is not None)),
        ("libraries", lambda: libraries(probe, installed())),
        ("bridge", lambda: [doctor_bridge.bridge(probe)]),
        ("sglang", lambda: sglang(_version("sglang"), plugin_names(), os.environ.get("SGLANG_PLUGINS"))),
        ("options", sglang_options),
        ("/dev/shm", lambda: [shm(Path("/dev/shm"))]),
        ("environment", environment),
    ]
    findings: list[Finding] = []
    for topic, check in checks:
        try:
            findings += check()
        except Exception as error:
            findings.append(
                Finding(
                    topic,
                    Verdict.FAIL,
                    f"this check broke: {type(error).__name__}: {error}",
                    "report it, with this line",
                )
            )
    return findings


def failures(findings: list[Finding]) -> int:
    """How many findings are failures: the exit code."""
    return sum(f.verdict is Verdict.FAIL for f in findings)


def report(findings: list[Finding]) -> str:
    """Lines for people: verdict, topic, text, and the fix below."""
    width = max(len(f.topic) for f in findings)
    lines = []
    for f in findings:
        lines.append(f"{f.verdict.value:4}  {f.topic:{width}}  {f.text}")
        if f.fix:
            lines.append(f"{'':4}  {'':{width}}  fix: {f.fix}")
    count = failures(findings)
    return "\n".join([*lines, f"{count} failure{'' if count == 1 else 's'}"])


def as_json(findings: list[Finding]) -> str:
    """One JSON object: the findings and the number of failures."""
    return json.dumps(
        {
            "findings": [{**dataclasses.asdict(f), "verdict": f.verdict.value} for f in findings],
            "failures": failures(findings),
        },
        indent=1,
    )


def run_probe(seconds: float = PROBE_SECONDS) -> dict[str, dict[str, Any]]:
    """Stage → facts of doctor_probe. A stage that crashed or hung is missing; "probe" then says how it ended."""
    import eaglex

    # -P: a script's own folder would come first on the path, and eaglex/inspect.py in front of the standard inspect.
    script = Path(__file__).with_name("doctor_probe.py")
    root = str(Path(eaglex.__file__).parent.parent)
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(script)],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, "PYTHONPATH": paths},
        )
        output, ending = (
            done.stdout,
            f"exit code {done.returncode}: {_last_line(done.stderr)}" if done.returncode else "",
        )
    except subprocess.TimeoutExpired as late:
        output = _text(late.stdout)
        ending = f"no answer within {seconds:g} s"
    stages: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        if line.startswith("{"):
            facts = json.loads(line)
            stages[facts.pop("stage")] = facts
    if ending:
        stages["probe"] = {"ending": ending}
    return stages


def python(version: tuple[int, ...]) -> Finding:
    """The interpreter's version."""
    text = f"{version[0]}.{version[1]} ({platform.machine()}, {sys.executable})"
    if version[:2] in PYTHONS:
        return Finding("python", Verdict.OK, text)
    if version[:2] < PYTHONS[0]:
        return Finding("python", Verdict.FAIL, text, "use Python 3.11 or 3.12")
    return Finding("python", Verdict.WARN, f"{text}, newer than what is tested", "use Python 3.12 if something breaks")


def torch(probe: Probe) -> Finding:
    """torch's version, and whether it can be imported at all."""
    found, fix = probe.get("torch"), "pip install 'torch>=2.11'"
    if found is None:
        return Finding("torch", Verdict.FAIL, f"importing torch failed: {_ending(probe)}", fix)
    if "error" in found:
        return Finding("torch", Verdict.FAIL, f"cannot be imported: {found['error']}", fix)
    text = f"{found['version']}, CUDA {found['cuda'] or 'none'}"
    if _numbers(found["version"])[:2] < TORCH:
        return Finding("torch", Verdict.FAIL, f"{text}: older than 2.11", fix)
    return Finding("torch", Verdict.OK, text)


def packages() -> list[Finding]:
    """The libraries that reading a checkpoint needs."""
    versions = {name: _version(name) for name in ("safetensors", "huggingface_hub")}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return [
            Finding(
                "packages", Verdict.FAIL, f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}"
            )
        ]
    return [Finding("packages", Verdict.OK, ", ".join(f"{n} {v}" for n, v in versions.items()))]


def extension(probe: Probe) -> Finding:
    """Whether the compiled engine imports, and what it was built with."""
    found, fix = probe.get("extension"), "pip install -e . in a clone (make build), or install a wheel"
    if found is None:
        return Finding("extension", Verdict.FAIL, f"importing eaglex._C failed: {_ending(probe)}", fix)
    if "error" in found:
        return Finding("extension", Verdict.FAIL, f"eaglex._C cannot be imported: {found['error']}", fix)
    info = ", ".join(f"{k} {v}" for k, v in found["info"].items()) or "no build information"
    if probe.get("gpus", {}).get("gpus") and found["info"].get("cuda", True) in (False, None, "", "none"):
        return Finding(
            "extension",
            Verdict.WARN,
            f"{info}: built without CUDA on a machine with a GPU",
            "EAGLEX_CUDA=ON pip install -e . (needs nvcc >= 12.8)",
        )
    return Finding("extension", Verdict.OK, info)


def compilers(*, extension_works: bool, gpu: bool) -> list[Finding]:
    """What building the extension needs. Nothing of it is needed once the extension works."""
    tools = (
        ("g++", GXX, "apt-get install g++", True),
        ("cmake", CMAKE, "pip install cmake", True),
        ("ninja", (0,), "pip install ninja", False),
        ("nvcc", NVCC, "install the CUDA toolkit >= 12.8, or build with EAGLEX_CUDA=OFF", False),
    )
    findings = []
    for name, least, fix, needed in tools:
        version = _tool_version(name)
        wanted = ".".join(map(str, least))
        if version is not None and version >= least:
            findings.append(Finding(name, Verdict.OK, ".".join(map(str, version))))
            continue
        text = "not found" if version is None else f"{'.'.join(map(str, version))}, older than {wanted}"
        if extension_works or (name == "nvcc" and not gpu):
            findings.append(Finding(name, Verdict.OK, f"{text}; not needed here"))
        else:
            findings.append(Finding(name, Verdict.FAIL if needed else Verdict.WARN, text, fix))
    return findings


def gpus(probe: Probe, smi: bool) -> list[Finding]:
    """GPUs, whether eaglex has kernels for them, and whether they reach each other's memory."""
    found = probe.get("gpus")
    if found is None:
        if "version" not in probe.get("torch", {}):
            return [Finding("gpus", Verdict.WARN, "unknown: torch cannot be imported", "see torch")]
        return [
            Finding(
                "gpus", Verdict.FAIL, f"asking CUDA failed: {_ending(probe)}", "nvidia-smi; reboot or reload the driver"
            )
        ]
    devices = found["gpus"]
    if not devices:
        if smi and probe["torch"].get("cuda"):
            return [
                Finding(
                    "gpus",
                    Verdict.FAIL,
                    "nvidia-smi is here, but torch sees no GPU",
                    f"a driver for CUDA {probe['torch']['cuda']} or newer; check CUDA_VISIBLE_DEVICES",
                )
            ]
        return [
            Finding(
                "gpus",
                Verdict.WARN,
                "none: the CPU backend runs here",
                "nothing, if this machine has no NVIDIA GPU; else install its driver",
            )
        ]
    names = ", ".join(
        f"{i}: {g['name']} (sm_{g['capability'].replace('.', '')}, {g['memory'] / 2**30:.0f} GiB)"
        for i, g in enumerate(devices)
    )
    old = [g["name"] for g in devices if _numbers(g["capability"]) < MIN_CAPABILITY]
    findings = [
        Finding("gpus", Verdict.FAIL, f"{names}; no kernels for {', '.join(old)}", "use a GPU of sm_80 or newer")
        if old
        else Finding("gpus", Verdict.OK, names)
    ]
    if len(devices) > 1:
        apart = found["without_p2p"]
        findings.append(
            Finding(
                "p2p",
                Verdict.WARN,
                f"{len(apart)} of {len(devices) * (len(devices) - 1)} directions without peer access, "
                f"e.g. {apart[0][0]} to {apart[0][1]}: results go through pinned host memory",
                "nvidia-smi topo -p2p r; IOMMU off or ACS off, or a driver with P2P",
            )
            if apart
            else Finding("p2p", Verdict.OK, "every GPU reaches every other")
        )
    return findings


def installed() -> dict[str, str]:
    """The CUDA libraries that pip installed: distribution → version."""
    names = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime")
    return {name: version for name in names if (version := _version(name)) is not None}


def libraries(probe: Probe, packages: Mapping[str, str]) -> list[Finding]:
    """NCCL and cudart: which are loaded beside which are installed, and whether two of one kind are in a process."""
    found = probe.get("libraries")
    if found is None:
        return [Finding("nccl", Verdict.WARN, f"unknown: {_ending(probe)}", "see above")]
    findings = []
    for topic, prefix, word in (("nccl", "libnccl.so", "nccl"), ("cudart", "libcudart.so", "cuda-runtime")):
        copies = found.get(prefix, {})
        pip = {name: version for name, version in packages.items() if word in name}
        wheels = f"installed {', '.join(f'{n} {v}' for n, v in pip.items()) or 'none by pip'}"
        text = (
            "; ".join(f"loaded {_dotted(prefix, v)} ({path})" for path, v in copies.items())
            or "not loaded (torch without CUDA)"
        )
        loaded = {_dotted(prefix, v) for v in copies.values() if v}
        if len(copies) > 1:
            findings.append(
                Finding(
                    topic,
                    Verdict.FAIL if topic == "nccl" else Verdict.WARN,
                    f"two copies in one process: {text}; {wheels}",
                    f"keep one: pip uninstall the {word} wheel that torch does not need; unset LD_LIBRARY_PATH, "
                    "LD_PRELOAD",
                )
            )
        elif topic == "nccl" and len(pip) > 1:
            findings.append(
                Finding(topic, Verdict.WARN, f"{text}; {wheels}", "keep the wheel of torch's CUDA version alone")
            )
        elif (
            topic == "nccl"
            and loaded
            and pip
            and not any(v.startswith(n) or n.startswith(v) for v in pip.values() for n in loaded)
        ):
            findings.append(
                Finding(
                    topic,
                    Verdict.WARN,
                    f"{text}; {wheels}: not the installed one",
                    "unset LD_LIBRARY_PATH and LD_PRELOAD, or uninstall the wheel",
                )
            )
        else:
            findings.append(Finding(topic, Verdict.OK, f"{text}; {wheels}"))
    return findings


def plugin_names() -> list[str]:
    """Names of the installed SGLang plugins."""
    return sorted({e.name for e in importlib.metadata.entry_points(group=PLUGIN_GROUP)})


def sglang(version: str | None, plugins: list[str], allowed: str | None) -> list[Finding]:
    """SGLang's version, and whether it will load eaglex's plugin."""
    low, high = (".".join(map(str, v)) for v in SGLANG)
    if version is None:
        return [Finding("sglang", Verdict.OK, "not installed; only the plugin needs it")]
    if SGLANG[0] <= _numbers(version)[:3] <= SGLANG[1]:
        findings = [Finding("sglang", Verdict.OK, version)]
    else:
        findings = [
            Finding(
                "sglang", Verdict.FAIL, f"{version}: outside {low} to {high}", f"pip install 'sglang>={low},<={high}'"
            )
        ]
    if "eaglex" not in plugins:
        findings.append(
            Finding(
                "plugin",
                Verdict.FAIL,
                f"no entry point eaglex in {PLUGIN_GROUP}",
                "pip install eaglex again (not PYTHONPATH)",
            )
        )
    elif allowed is not None and "eaglex" not in [name.strip() for name in allowed.split(",")]:
        findings.append(
            Finding(
                "plugin",
                Verdict.FAIL,
                f"SGLANG_PLUGINS={allowed} excludes eaglex",
                "unset SGLANG_PLUGINS, or add eaglex to it",
            )
        )
    else:
        findings.append(Finding("plugin", Verdict.OK, f"entry point eaglex in {PLUGIN_GROUP}"))
    return findings


def sglang_options() -> list[Finding]:
    """eaglex's own options in a server, as this environment sets them."""
    from eaglex.hosts.sglang import options

    try:
        return [Finding("options", Verdict.OK, f"{options.VARIABLE}: {options.shown(options.read())}")]
    except ValueError as error:
        return [Finding("options", Verdict.FAIL, str(error), f"correct or unset {options.VARIABLE}")]


def shm(path: Path) -> Finding:
    """Shared memory: there, writable, and larger than docker's default."""
    if not path.is_dir() or not os.access(path, os.W_OK):
        return Finding(str(path), Verdict.FAIL, "missing or not writable", "mount a tmpfs there")
    stat = os.statvfs(path)
    size, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    text = f"{size / 2**30:.2f} GiB, {free / 2**30:.2f} GiB free"
    if size <= _SHM_BYTES or free < 16 * 2**20:
        return Finding(str(path), Verdict.WARN, text, "docker run --shm-size=8g, or --ipc=host")
    return Finding(str(path), Verdict.OK, text)


def environment() -> list[Finding]:
    """The EAGLEX_* variables that are set, and those of them that look like a slip."""
    found = {k: v for k, v in sorted(os.environ.items()) if k.startswith("EAGLEX_")}
    if not found:
        return [Finding("environment", Verdict.OK, "no EAGLEX_* variable set")]
    findings = [Finding("environment", Verdict.OK, ", ".join(f"{k}={v}" for k, v in found.items()))]
    for name in sorted(found.keys() - set(_VARIABLES)):
        if near := difflib.get_close_matches(name, _VARIABLES, n=1, cutoff=0.85):
            findings.append(Finding("environment", Verdict.WARN, f"nothing reads {name}", f"did you mean {near[0]}?"))
    return findings


def _ending(probe: Probe) -> str:
    return str(probe.get("probe", {}).get("ending", "no answer"))


def _text(output: object) -> str:
    """What a process printed before its deadline; bytes even where text was asked for."""
    return output.decode(errors="replace") if isinstance(output, bytes) else str(output or "")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text)[:3])


def _dotted(prefix: str, version: int | None) -> str:
    """NCCL packs 2.27.3 as 22703, cudart packs 13.0 as 13000."""
    if not version:
        return "version unknown"
    if "nccl" in prefix:
        return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"
    return f"{version // 1000}.{version % 1000 // 10}"


def _tool_version(name: str) -> tuple[int, ...] | None:
    path = shutil.which(name)
    if path is None:
        return None
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release (\d+)\.(\d+)", text) or re.search(r"\b(\d+)\.(\d+)(?:\.\d+)?", text)
    return (int(match[1]), int(match[2])) if match else None
