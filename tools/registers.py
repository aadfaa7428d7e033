"""The tables of registers, shared memory and spills in docs/kernels.md, from what ptxas says of every kernel.

    cmake -S . -B build/registers -G Ninja -DEAGLEX_CUDA=ON "-DEAGLEX_CUDA_ARCHS=80;89;90;100;120" \
      -DEAGLEX_TESTS=OFF -DCMAKE_CUDA_FLAGS=-Xptxas=-v
    python tools/registers.py build/registers              (prints the tables)
    python tools/registers.py build/registers --write      (puts them between the marks in docs/kernels.md)

Compiles every CUDA source there: half an hour of one core, next to nothing where ccache is the compiler's launcher and
has them. Ends with an error where a source does not compile for one of the architectures.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "kernels.md"
MARKS = ("<!-- tools/registers.py -->", "<!-- end of tools/registers.py -->")
CUTLASS = "_ZN7cutlass"  # names that c++filt cannot read
ROOMS = {"eaglex::cuda::": "Plain chain", "eaglex::stream::": "Fast chain", CUTLASS: "CUTLASS, for long prompts",
         "eaglex::bridge::": "Bridge"}
TYPES = {"__nv_bfloat16": "bf16", "BesideKeptX<Int4Weights>": "INT4 beside kept x",
         "Bf16Weights": "bf16", "Fp8Weights": "FP8", "Int4Weights": "INT4"}
ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


@dataclasses.dataclass
class Kernel:
    """One instance for one architecture."""

    mangled: str
    arch: int
    source: str
    spilled: int = 0  # bytes, stores and loads
    registers: int = 0
    shared: int = 0  # bytes, static


def parse(text: str, source: str) -> list[Kernel]:
    """The kernels in what ptxas wrote while it compiled `source`."""
    found: list[Kernel] = []
    for line in text.splitlines():
        if match := ENTRY.search(line):
            found.append(Kernel(match[1], int(match[2]), source))
        elif found and (match := SPILLS.search(line)) and not found[-1].registers:
            found[-1].spilled = int(match[1]) + int(match[2])
        elif found and (match := USED.search(line)) and not found[-1].registers:
            found[-1].registers, found[-1].shared = int(match[1]), int(match[2] or 0)
    return found


def compiled(build: Path) -> list[Kernel]:
    """Every CUDA source of the library, compiled once more for what ptxas says of it. Raises SystemExit."""
    found, failed = [], []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = Path(entry["file"])
        if path.suffix != ".cu" or "csrc" not in path.parts:
            continue
        target = Path(entry["directory"], entry["output"]).relative_to(build.resolve())
        (build / target).unlink(missing_ok=True)
        done = subprocess.run(["cmake", "--build", str(build), "--target", str(target)], capture_output=True, text=True,
                              check=False)
        kernels = parse(done.stdout + done.stderr, path.name)
        print(f"{path.name}: {len(kernels)} kernels" if done.returncode == 0 else f"{path.name}: FAILED",
              file=sys.stderr, flush=True)
        if done.returncode:
            failed.append(f"{path.name}:\n{done.stdout[-2000:]}")
        found += kernels
    if failed:
        raise SystemExit("\n".join(failed))
    if not found:
        raise SystemExit("ptxas said nothing: expected a build folder with CMAKE_CUDA_FLAGS=-Xptxas=-v")
    return found


def demangled(names: list[str]) -> dict[str, str]:
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.splitlines(), strict=True))


def named(kernel: Kernel, plain: str) -> tuple[str, str, int]:
    """Room, name of its row, and its place in that row: products by their tiles of tokens."""
    plain = plain.removeprefix("void ").replace("(anonymous namespace)::", "")
    room = next((title for prefix, title in ROOMS.items() if plain.startswith(prefix)), "Others")
    if plain.startswith(CUTLASS):
        return room, kernel.source, 0
    name = re.sub(r"eaglex::(\w+::)?", "", plain.partition("(")[0]).replace("> >", ">>")
    for old, new in TYPES.items():
        name = name.replace(old, new)
    if match := re.fullmatch(r"stream_gemm<([\w ]+), (\d+), (.*)>", name):
        step = match[3].removesuffix("Step").replace("Step<false>", "").replace("Step<true>", " with norms")
        return room, f"{step}, {match[1]}", int(match[2])
    return room, name, 0


def tables(kernels: list[Kernel]) -> str:
    """Markdown: per room a row for each kernel, a column for each architecture."""
    plain = demangled([kernel.mangled for kernel in kernels])
    rows: dict[tuple[str, str], list[tuple[int, int, Kernel]]] = collections.defaultdict(list)
    for kernel in kernels:
        name = plain[kernel.mangled]
        if "__half" not in name or name.startswith(CUTLASS):  # fp16's are as bf16's
            room, row, place = named(kernel, name)
            rows[room, row].append((kernel.arch, place, kernel))
    archs = sorted({kernel.arch for kernel in kernels})
    lines = []
    for title in (*ROOMS.values(), "Others"):
        here = {row: instances for (room, row), instances in sorted(rows.items()) if room == title}
        if here:
            lines += ["", f"| {title} | static shared | " + " | ".join(f"sm_{arch}" for arch in archs) + " |",
                      "|---" * (2 + len(archs)) + "|"]
        for row, instances in here.items():
            shared = sorted({kernel.shared for _, _, kernel in instances})
            cells = []
            for arch in archs:
                at = [k for which, _, k in sorted(instances, key=lambda each: each[:2]) if which == arch]
                cells.append(", ".join(f"{k.registers} ({k.spilled})" if k.spilled else str(k.registers) for k in at))
            lines.append(f"| {row} | {' or '.join(map(str, shared))} | " + " | ".join(cells) + " |")
    return "\n".join(lines).strip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="a build folder, configured as above")
    parser.add_argument("--write", action="store_true", help="into docs/kernels.md")
    options = parser.parse_args()
    text = tables(compiled(options.build))
    if not options.write:
        print(text)
        return
    before, mark, rest = DOC.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not mark or not end:
        raise SystemExit(f"{DOC}: expected the marks {MARKS[0]} and {MARKS[1]}")
    DOC.write_text(f"{before}{mark}\n\n{text}\n{end}{after}")


if __name__ == "__main__":
    main()
