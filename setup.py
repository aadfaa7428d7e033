"""Drives CMake. Every decision about the build is in CMakeLists.txt; the rest of the metadata is in pyproject.toml.

Environment: EAGLEX_CUDA (AUTO, ON, OFF), EAGLEX_CUDA_ARCHS ("90", "9.0;12.0+PTX"), EAGLEX_TESTS, EAGLEX_EMULATOR and
EAGLEX_WERROR (ON, OFF), CMAKE_ARGS (passed on), MAX_JOBS (parallel compilers).
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
OPTIONS = {
    "EAGLEX_CUDA": "AUTO",
    "EAGLEX_CUDA_ARCHS": "",
    "EAGLEX_TESTS": "OFF",
    "EAGLEX_EMULATOR": "OFF",
    "EAGLEX_WERROR": "OFF",
}


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11

        build = ROOT / "build" / str(sys.implementation.cache_tag)  # kept between runs; one per Python version
        module = build / "module"
        # Every path is given each time: an isolated build lives in a temporary folder, and the cache outlives it.
        options = {
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "EAGLEX_OUTPUT_DIR": str(module),
            **{name: os.environ.get(name, default) for name, default in OPTIONS.items()},
        }
        generator = []
        if ninja := shutil.which("ninja"):
            generator = ["-G", "Ninja"]
            options["CMAKE_MAKE_PROGRAM"] = ninja
        definitions = [f"-D{name}={value}" for name, value in options.items()]
        definitions += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        subprocess.run(["cmake", "-S", str(ROOT), "-B", str(build), *generator, *definitions], check=True)
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run(["cmake", "--build", str(build), "--parallel", jobs], check=True)

        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(module / target.name, target)


setup(ext_modules=[Extension("eaglex._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
