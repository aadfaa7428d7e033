"""Holds the doors between the rooms (docs/design.md): `python tools/doors.py` prints violations and file sizes.

Each checker takes a path relative to the repository and the file's text, and yields violations; it touches no disk, so
that the tests can plant one.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 500
CHECKED_FOLDERS = ("csrc", "eaglex", "tests", "bench", "tools")
CXX_SUFFIXES = (".h", ".cpp", ".cu", ".cuh")

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
CONDITIONAL = re.compile(r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif)\b", re.MULTILINE)
STANDARD = re.compile(r"[a-z0-9_]+")  # <vector>, <cstdint>: a standard C++ header has neither a folder nor a suffix
TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")
PYTHON_API = re.compile(r"pybind11/|Python\.h")
BINDINGS = re.compile(r"csrc/bindings(_\w+)?\.(cpp|h)")
NCCL = re.compile(r"nccl")
CUDA = re.compile(r"(cuda|cub|nv|nvtx3|cooperative_groups|cutlass|cute)/|(cuda\w*|cooperative_groups|mma)\.h")
POSIX = re.compile(r"(sys/[a-z]+|unistd|fcntl|dlfcn|errno|poll|pthread|semaphore|signal|time)\.h")


@dataclass(frozen=True)
class Room:
    """What the include lines of a folder under csrc/ may name, beside the standard library."""

    folders: tuple[str, ...]  # other rooms, as the first part of "core/error.h"
    headers: tuple[re.Pattern[str], ...] = ()


ROOMS = {
    "core": Room(("core",)),
    "draft": Room(("core", "draft")),
    "cpu": Room(("core", "cpu"), (re.compile(r"(omp|immintrin|arm_neon)\.h"),)),
    "cuda": Room(("core", "cuda"), (CUDA,)),
    "bridge": Room(("core", "bridge"), (CUDA, POSIX, NCCL)),
}


def check_cxx(path: str, text: str) -> Iterator[str]:
    """Include lines, and the words that a room must not hold, of one C++ or CUDA file."""
    room = Path(path).parts[1] if path.startswith("csrc/") and path.count("/") > 1 else ""
    text = COMMENT.sub("", text)
    for quote, include in INCLUDE.findall(text):
        if TORCH.match(include):
            yield f"{path}: includes {include}; torch headers tie the binary to one torch version"
        elif PYTHON_API.match(include):
            if not BINDINGS.fullmatch(path):
                yield f"{path}: includes {include}; only csrc/bindings.cpp and its parts may"
        elif room in ROOMS:
            allowed = ROOMS[room]
            if quote == '"':  # our own files; <cuda/barrier> in angle brackets is the toolkit's
                passes = include.split("/")[0] in allowed.folders
            else:
                passes = STANDARD.fullmatch(include) or any(header.match(include) for header in allowed.headers)
            if not passes:
                yield f"{path}: includes {include}; csrc/{room} may use {', '.join(allowed.folders)} and its libraries"
    if room == "draft" and CONDITIONAL.search(text):
        yield f"{path}: conditional compilation; csrc/draft is written once for all devices"
    if room in ("core", "draft", "cpu") and re.search(r"\bcuda[A-Z]\w+", text):
        yield f"{path}: names the CUDA runtime; csrc/{room} knows no device"
    if "EAGLEX_WITH_CUDA" in text and room not in ("", "bridge"):
        yield f"{path}: EAGLEX_WITH_CUDA; only bindings.cpp and the bridge choose an implementation"


def check_nccl(texts: dict[str, str]) -> Iterator[str]:
    """NCCL's header is included by one file."""
    users = [path for path, text in texts.items() if any(NCCL.match(name) for _, name in INCLUDE.findall(text))]
    if len(users) > 1:
        yield f"{', '.join(sorted(users))}: include NCCL; one file may"


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
COMMON_MODULES = {"eaglex", "torch", "safetensors", "huggingface_hub"}
# Longest prefix wins; what is not listed may use COMMON_MODULES. The standard library is always allowed.
EXTRA_MODULES = {
    "eaglex/observe.py": {"prometheus_client"},
    "eaglex/hosts/transformers.py": {"transformers", "tokenizers", "accelerate"},
    "eaglex/hosts/hf_target.py": {"transformers", "accelerate"},
    "eaglex/hosts/progress.py": {"tqdm"},
    "eaglex/hosts/sglang/": {"numpy", "transformers"},
    "eaglex/hosts/sglang/compat.py": {"sglang", "packaging"},
    "eaglex/hosts/sglang/metrics.py": {"prometheus_client"},
}
# The spec may not lean on what it judges: torch, and its own other parts.
SPEC = {"eaglex/reference.py", "eaglex/reference_low_bit.py", "eaglex/reference_rope.py"}
SPEC_MODULES = sys.stdlib_module_names | {"torch", "eaglex.reference_low_bit", "eaglex.reference_rope"}


def check_python(path: str, text: str) -> Iterator[str]:
    """Import lines of one module of the package, at any depth, and unsafe ways to read a checkpoint."""
    tree = ast.parse(text)
    typing_only = _typing_only(tree)
    extra = next((EXTRA_MODULES[p] for p in sorted(EXTRA_MODULES, key=len, reverse=True) if path.startswith(p)), set())
    for node, module in _imports(tree):
        top = module.split(".")[0]
        where = f"{path}:{node.lineno}: imports {module}"
        if top in FORBIDDEN_MODULES:
            yield f"{where}; checkpoints are untrusted input"
        elif top == "sglang" and "sglang" not in extra:
            yield f"{where}; host symbols come through eaglex/hosts/sglang/compat.py"
        elif path in SPEC and not {top, module} & SPEC_MODULES and id(node) not in typing_only:
            yield f"{where}; the spec uses torch alone"
        elif top not in sys.stdlib_module_names | COMMON_MODULES | extra:
            yield f"{where}; not among the libraries that this module may use"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node.value) == "torch":
            yield f"{path}:{node.lineno}: torch.load; checkpoints are untrusted input"


def _imports(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node, ("eaglex." if node.level else "") + (node.module or "")
            if node.module == "torch" and any(alias.name == "load" for alias in node.names):
                yield node, "pickle"  # `from torch import load`
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            match node.args:
                case [ast.Constant(value=str(name)), *_]:
                    yield node, name


def _typing_only(tree: ast.Module) -> set[int]:
    """Identities of the nodes under `if TYPE_CHECKING:`, which do not run."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    return {id(node) for block in blocks for statement in block.body for node in ast.walk(statement)}


def check_length(path: str, text: str) -> Iterator[str]:
    """A file that is too long says that the room is wrong."""
    lines = len(text.splitlines())
    if lines > MAX_LINES:
        yield f"{path}: {lines} lines; the limit is {MAX_LINES}"


def sources(root: Path = ROOT) -> dict[str, str]:
    """Text of every source file under the checked folders, by path relative to `root`."""
    wanted = (*CXX_SUFFIXES, ".py")  # the stub of the extension is generated
    files = (f for folder in CHECKED_FOLDERS for f in sorted((root / folder).rglob("*")) if f.suffix in wanted)
    return {f.relative_to(root).as_posix(): f.read_text() for f in files}


def violations(texts: dict[str, str]) -> list[str]:
    """All violations in the given files."""
    found = list(check_nccl(texts))
    for path, text in texts.items():
        found += check_length(path, text)
        if path.endswith(CXX_SUFFIXES):
            found += check_cxx(path, text)
        elif path.startswith("eaglex/") and path.endswith(".py"):
            found += check_python(path, text)
    return found


def sizes(texts: dict[str, str]) -> str:
    """One line: number of files, median and longest."""
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    longest = max(lines, key=lambda path: lines[path])
    median = statistics.median(lines.values())
    return f"{len(lines)} source files, median {median:g} lines, longest {lines[longest]} ({longest})"


def main() -> int:
    texts = sources()
    found = violations(texts)
    print(*found, sizes(texts), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
