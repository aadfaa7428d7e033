"""Imports SGLang's own modules from an unpacked wheel on a machine that has few of its dependencies.

The package's `__init__` files are skipped, and a package that is not installed is replaced by one whose every attribute
is a permissive class. What runs is the host's code; what it would have called in Triton, msgspec or zmq is not there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BARE = ("sglang", "sglang.srt", "sglang.srt.speculative")


class Anything(type):
    """A metaclass whose classes can be called, indexed, combined and subclassed, with any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return absent(name)

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and not options and callable(arguments[0]):
            return arguments[0]  # used as a decorator
        if cls.__dict__.get("__absent__"):
            return absent(cls.__name__)
        return super().__call__(*arguments, **options)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())

    def __bool__(cls) -> bool:
        return False


class Base:
    """Lets a class of the host derive from an absent one with keyword arguments (`class A(Struct, frozen=True)`)."""

    def __init_subclass__(cls, **options: Any) -> None:
        pass

    def __init__(self, *arguments: Any, **options: Any) -> None:
        vars(self).update(options)


def absent(name: str) -> Any:
    return Anything(name, (Base,), {"__absent__": True})


class AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return absent(name)


def importer() -> str:
    """The module whose import statement is being carried out."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("importlib", "_frozen_importlib")):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: supplies any top-level package, and its submodules, that no other finder has."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if not importer().startswith("sglang"):
            return None  # an optional import of an installed package must keep failing
        here = top in sys.modules and not isinstance(sys.modules[top], AbsentModule)
        if here or top in sys.stdlib_module_names or importlib.machinery.PathFinder.find_spec(top):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def open_wheel(package: Path) -> None:
    """Make `sglang.srt...` importable from the unpacked wheel, for the rest of this process."""
    for name in BARE:
        module = types.ModuleType(name)
        module.__path__ = [str(package.parent / Path(*name.split(".")))]
        sys.modules[name] = module
    sys.meta_path.append(AbsentFinder())
