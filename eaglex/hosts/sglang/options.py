"""eaglex's own options in a server: one JSON object in the variable `EAGLEX_OPTIONS`, read by every process.

    EAGLEX_OPTIONS='{"pausing": true}' python -m sglang.launch_server --speculative-algorithm EAGLEX ...

SGLang's own `--speculative-*` flags keep their meaning and are not repeated here.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

from eaglex.aux_layers import AuxConvention
from eaglex.bridge_transport import GPU_TRANSPORTS
from eaglex.errors import ConfigError
from eaglex.fields import no_duplicates
from eaglex.hot_vocab import HotVocab
from eaglex.packed import Auto, DraftQuant

VARIABLE = "EAGLEX_OPTIONS"


class Drafter(enum.Enum):
    """HOST: SGLang's own draft model, run early: what eaglex is compared with. ENGINE: eaglex's engine."""

    HOST = "host"
    ENGINE = "engine"


class Placement(enum.Enum):
    """Who drafts: one of the target's GPUs, or a further one."""

    RANK0 = "rank0"
    DEDICATED = "dedicated"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options, each with its default.

    drafter: which draft model runs. placement: where. aux_layer_ids, convention: the target's layers that feed the
    draft, where its config is wrong or silent (docs/checkpoints.md). stop_below: as in SpeculationConfig. max_rows:
    rows of one launch, for which the engine plans memory; longer prompts go in several launches. 0 takes the host's
    chunk size, at most DEFAULT_ROWS. token_table_bytes: as in EngineLimits. pausing: stop drafting where it is slower
    than doing without (docs/sglang.md).
    draft_quant: fewer bits for the draft's matrices, in the words of `eaglex generate --draft-quant`
    (docs/precision.md); without it the host's flag speculative_draft_model_quantization decides. hot_vocab: a smaller
    head, in those of its --hot-vocab.
    With several ranks: seconds that they wait for each other at start (join_deadline) and in each cycle (deadline), and
    the transport that takes the place of the probe's choice (docs/bridge.md). drafter_deadline: seconds after which a
    dedicated drafter's reply is not waited for. drafter_device: cuda:N, the GPU on which it drafts, by default the
    first that no rank of the target has.
    """

    DEFAULT_ROWS: ClassVar[int] = 4096

    drafter: Drafter = Drafter.ENGINE
    placement: Placement = Placement.RANK0
    aux_layer_ids: tuple[int, ...] | None = None
    convention: AuxConvention | None = None
    stop_below: float = 0.0
    max_rows: int = 0
    token_table_bytes: int = 2**30
    pausing: bool = False
    draft_quant: DraftQuant | Auto | None = None
    hot_vocab: HotVocab | None = None
    join_deadline: float = 600.0
    deadline: float = 60.0
    transport: str | None = None
    drafter_deadline: float = 1.0
    drafter_device: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.stop_below < 1:
            _fail("stop_below", "a number in [0, 1)", self.stop_below)
        if self.max_rows < 0:
            _fail("max_rows", "an integer >= 0", self.max_rows)
        for name in ("join_deadline", "deadline", "drafter_deadline"):
            if not 0 < getattr(self, name) < float("inf"):
                _fail(name, "seconds > 0", getattr(self, name))


def read(environment: Mapping[str, str] | None = None) -> Options:
    """The options of this process. ConfigError names a field that is unknown or holds something else."""
    return _parse((os.environ if environment is None else environment).get(VARIABLE, "").strip())


@functools.lru_cache(maxsize=8)
def _parse(text: str) -> Options:
    if not text:
        return Options()
    try:
        values = json.loads(text, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{VARIABLE}: expected a JSON object, got {text!r} ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{VARIABLE}: expected a JSON object, got {text!r}")
    known = [field.name for field in dataclasses.fields(Options)]
    for name in values:
        if name not in known:
            raise ConfigError(f"{VARIABLE}: expected {', '.join(known)}, got {name!r}")
    return Options(**{name: _READERS[name](name, value) for name, value in values.items()})


def shown(chosen: Options) -> str:
    """All options with their values, in one line."""
    values = ((field.name, getattr(chosen, field.name)) for field in dataclasses.fields(chosen))
    return ", ".join(f"{name}={value.value if isinstance(value, enum.Enum) else value}" for name, value in values)


def _member(kind: type[enum.Enum]) -> Any:
    def reader(name: str, value: object) -> Any:
        found = next((member for member in kind if member.value == value), None)
        if found is None:
            _fail(name, " or ".join(repr(member.value) for member in kind), value)
        return found

    return reader


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        _fail(name, "a list of integers", value)
    return tuple(value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _fail(name, "a number", value)
    return float(value)


def _integer(name: str, value: object) -> int:
    if type(value) is not int:
        _fail(name, "an integer", value)
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        _fail(name, "true or false", value)
    return value


def _fail(name: str, expected: str, actual: object) -> NoReturn:
    raise ConfigError(f"{VARIABLE}: {name}: expected {expected}, got {actual!r}")


def _transport(name: str, value: object) -> str:
    if value not in GPU_TRANSPORTS:
        _fail(name, " or ".join(map(repr, GPU_TRANSPORTS)), value)
    return str(value)


def _gpu(name: str, value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"cuda:\d+", value):
        _fail(name, "'cuda:N'", value)
    return value


def _parsed(parse: Callable[[str], Any]) -> Any:
    def reader(name: str, value: object) -> Any:
        if not isinstance(value, str):
            _fail(name, f"a text as of --{name.replace('_', '-')}", value)
        try:
            return parse(value)
        except ConfigError as error:
            raise ConfigError(f"{VARIABLE}: {error}") from error

    return reader


_READERS: dict[str, Any] = {
    "drafter": _member(Drafter),
    "placement": _member(Placement),
    "aux_layer_ids": _ids,
    "convention": _member(AuxConvention),
    "stop_below": _number,
    "max_rows": _integer,
    "token_table_bytes": _integer,
    "pausing": _flag,
    "draft_quant": _parsed(lambda text: Auto.AUTO if text == Auto.AUTO.value else DraftQuant.parse(text)),
    "hot_vocab": _parsed(HotVocab.parse),
    "join_deadline": _number,
    "deadline": _number,
    "transport": _transport,
    "drafter_deadline": _number,
    "drafter_device": _gpu,
}
