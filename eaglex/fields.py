"""Typed reading of untrusted JSON: every refusal names file, field, the expected and the actual value."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar, cast

from eaglex.errors import CheckpointError, ConfigError

T = TypeVar("T")

_MAX_ACTUAL = 120  # characters of a wrong value that an error repeats


class Fields:
    """One JSON object. A field that is null counts as absent. `place` is its dotted path in the file, "" at the top."""

    def __init__(self, data: Mapping[str, object], file: str, place: str = "") -> None:
        self.data, self.file, self.place = data, file, place

    def integer(self, name: str, low: int = 1) -> int | None:
        """A JSON integer >= low."""
        return self._value(name, f"an integer >= {low}", int, good=lambda v: v >= low)

    def number(self, name: str, low: float = 0.0) -> float | None:
        """A finite JSON number >= low."""
        expected = f"a finite number >= {low:g}"
        value = self._value(name, expected, int, float, good=lambda v: _finite(v) and v >= low)
        return None if value is None else float(value)

    def flag(self, name: str) -> bool | None:
        """true or false."""
        return self._value(name, "true or false", bool)

    def text(self, name: str) -> str | None:
        """A string."""
        return self._value(name, "a string", str)

    def texts(self, name: str) -> list[str]:
        """A list of strings; [] when absent."""
        return self._value(name, "a list of strings", list, good=lambda v: all(type(i) is str for i in v)) or []

    def integers(self, name: str) -> list[int] | None:
        """A list of integers."""
        return self._value(name, "a list of integers", list, good=lambda v: all(type(i) is int for i in v))

    def child(self, name: str) -> Fields | None:
        """A JSON object inside this one."""
        value = self._value(name, "an object", dict)
        return None if value is None else Fields(value, self.file, self.where(name))

    def where(self, name: str) -> str:
        """The dotted path of a field."""
        return f"{self.place}.{name}" if self.place else name

    def fail(self, name: str, expected: str, actual: object = None) -> NoReturn:
        """Refuse this field; `actual` defaults to what the file says."""
        value = self.data.get(name) if actual is None else actual
        raise ConfigError(f"{self.file}: {self.where(name)}: expected {expected}, got {shown(value)}")

    def _value(self, name: str, expected: str, *kinds: type[T], good: Callable[[T], bool] = lambda _: True) -> T | None:
        value = self.data.get(name)
        if value is None:
            return None
        if type(value) not in kinds or not good(cast(T, value)):  # not isinstance: true is no integer here
            self.fail(name, expected, value)
        return cast(T, value)


def agree(places: list[tuple[Fields, str]], read: Callable[[Fields, str], T | None]) -> T | None:
    """The one value that all present spellings of a field give; ConfigError where two contradict each other."""
    found = [(fields, name, value) for fields, name in places if (value := read(fields, name)) is not None]
    if not found:
        return None
    first, first_name, value = found[0]
    for fields, name, other in found[1:]:
        if other != value:
            fields.fail(name, f"{shown(value)} as in {first.where(first_name)}", other)
    return value


def read_json(path: Path, *, max_bytes: int = 2**20) -> Fields:
    """The JSON object in a file; CheckpointError unless it is one, of bounded size and without a key given twice.

    The bound is one on time as well: a megabyte of empty lists takes most of a second to parse.
    """
    try:
        text = path.read_bytes() if path.stat().st_size <= max_bytes else None
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable file, got {error.strerror or error}") from None
    if text is None:
        raise CheckpointError(f"{path}: expected at most {max_bytes} bytes, got {path.stat().st_size}")
    try:
        data = json.loads(text, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected valid JSON, got {shown(error)}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return Fields(data, str(path))


def shown(value: object) -> str:
    """A value as an error repeats it, cut to a bounded length."""
    try:
        text = str(value) if isinstance(value, Exception) else json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # an integer beyond Python's digit limit, or not JSON at all
        text = type(value).__name__ if isinstance(value, int) else repr(value)
    return text if len(text) <= _MAX_ACTUAL else text[:_MAX_ACTUAL] + "..."


def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """For json.loads as its object_pairs_hook: ValueError for a key given twice, of which Python takes the last."""
    data = dict(pairs)
    if len(data) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} twice in one object")
    return data


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
