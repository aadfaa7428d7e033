"""DraftEngine: the C++ engine behind torch tensors. Binds once, then one call per cycle and one per verification.

The tensors and their meaning are the contract of docs/design.md; checks are made in C++ (csrc/draft/door.cpp) and raise
ShapeError or ConfigError. Everything lives on one device, the weights' own.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eaglex.config import DraftConfig, EngineLimits, MaskMode, Sampling, SpeculationConfig
from eaglex.errors import ConfigError, DeviceError
from eaglex.reference_rope import rope_frequencies
from eaglex.repeated import RepeatedRun, RepeatedTree

if TYPE_CHECKING:
    from collections.abc import Callable

    from eaglex.packed import Weight
    from eaglex.weights import DraftWeights


class LaneStatus(enum.IntEnum):
    """What became of a request in a cycle; the order of `DraftEngine.counters`."""

    DRAFTED = 0
    PADDED = 1
    HELD = 2
    NO_ROOM = 3
    NOT_FINITE = 4
    BAD_INDEX = 5
    STOPPED = 6  # drafted, but fewer steps than K: SpeculationConfig.stop_below


@dataclasses.dataclass(kw_only=True)
class DraftBatch:
    """One cycle's input: B requests with `rows` rows in all.

    The rows of request b are row_start[b]..row_start[b + 1]; the first num_valid[b] of them count and sit at positions
    seq_lens[b] + j. A padded lane has request slot 0.
    """

    aux_hidden_states: Tensor  # [rows, A·Ht] float32, float16 or bfloat16
    input_ids: Tensor  # [rows] int32 or int64: for each row the token after it
    row_start: Tensor  # [B + 1] int32
    num_valid: Tensor  # [B] int32
    draft_from: Tensor  # [B] bool: False for a prompt chunk that is not the last
    req_pool_indices: Tensor  # [B] int32 or int64
    seq_lens: Tensor  # [B] int32 or int64: length before these rows
    # [rows] int32 or int64: the KV slot each row's K and V go to; None takes that of its position in req_to_token. A
    # host that may give a finished request's slot away while its last draft still runs must say it here.
    out_cache_loc: Tensor | None = None
    temperatures: Tensor | None = None  # [B] float32, only with Sampling.REJECTION
    uniforms: Tensor | None = None  # [B, K] float32 in [0, 1), only with Sampling.REJECTION


@dataclasses.dataclass(kw_only=True)
class DraftResults:
    """Drafts by request slot; node i of a tree is entry i - 1, node 0 is the root. Written by the engine alone."""

    draft_tokens: Tensor  # [num_slots, N - 1] int64, target vocabulary
    parents: Tensor  # [num_slots, N - 1] int32, node in 0..N-1
    scores: Tensor  # [num_slots, N - 1] float32, cumulative log-probability
    num_nodes: Tensor  # [num_slots] int32, nodes that count; 0 = no draft
    drafted_for: Tensor  # [num_slots] int64, seq_lens + num_valid; -1 = never
    counters: Tensor  # [len(LaneStatus)] int64
    draft_probs: Tensor | None = None  # [num_slots, K, Vd] float32, only with Sampling.REJECTION

    @classmethod
    def allocate(
        cls,
        speculation: SpeculationConfig,
        limits: EngineLimits,
        device: torch.device | str = "cpu",
        *,
        draft_vocab_size: int | None = None,
    ) -> DraftResults:
        """Empty results for that many slots; only a rank that drafts by sampling needs `draft_vocab_size`."""
        slots, nodes = limits.num_slots, speculation.num_draft_tokens - 1

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        probs = None
        if speculation.sampling is Sampling.REJECTION and draft_vocab_size is not None:
            probs = zeros(slots, speculation.num_steps, draft_vocab_size, dtype=torch.float32)
        return cls(
            draft_tokens=zeros(slots, nodes, dtype=torch.int64),
            parents=zeros(slots, nodes, dtype=torch.int32),
            scores=zeros(slots, nodes, dtype=torch.float32),
            num_nodes=zeros(slots, dtype=torch.int32),
            drafted_for=zeros(slots, dtype=torch.int64) - 1,
            counters=zeros(len(LaneStatus), dtype=torch.int64),
            draft_probs=probs,
        )


@dataclasses.dataclass(kw_only=True)
class VerifyTensors:
    """The verifier's own buffers for B requests of N nodes, filled by `DraftEngine.tree`."""

    draft_tokens: Tensor  # [B, N] int64, root first
    positions: Tensor  # [B, N] int64
    retrieve_index: Tensor  # [B, N] int64: b·N + node
    retrieve_next_token: Tensor  # [B, N] int64: first child, -1 none
    retrieve_next_sibling: Tensor  # [B, N] int64: next child of the same parent, -1 none
    mask: Tensor  # by mask_mode
    mask_mode: MaskMode

    @classmethod
    def allocate(
        cls,
        batch: int,
        num_draft_tokens: int,
        mask_mode: MaskMode,
        device: torch.device | str = "cpu",
        total_length: int = 0,
    ) -> VerifyTensors:
        """Buffers for that batch; MaskMode.FULL needs the sum of its seq_lens, `total_length`."""
        n, most = num_draft_tokens, SpeculationConfig.MAX_DRAFT_TOKENS
        if batch < 0 or not 1 <= n <= most:
            raise ConfigError(f"batch, num_draft_tokens: expected >= 0 and in 1..{most}, got {batch} and {n}")
        ids = [torch.zeros(batch, n, dtype=torch.int64, device=device) for _ in range(5)]
        if mask_mode is MaskMode.FULL:
            mask = torch.zeros(n * (total_length + batch * n), dtype=torch.bool, device=device)
        elif mask_mode is MaskMode.QLEN_ONLY:
            mask = torch.zeros(batch, n, n, dtype=torch.bool, device=device)
        else:
            width = next(w for w in (1, 2, 4, 8) if 8 * w >= n)
            mask = torch.zeros(batch, n, width, dtype=torch.uint8, device=device)
        return cls(
            draft_tokens=ids[0],
            positions=ids[1],
            retrieve_index=ids[2],
            retrieve_next_token=ids[3],
            retrieve_next_sibling=ids[4],
            mask=mask,
            mask_mode=mask_mode,
        )


class DraftEngine:
    """Drafts for up to limits.max_batch requests per cycle with an EAGLE-3 head.

    `req_to_token` [num_slots, max_context] int32 maps a request's positions to KV slots (< 0: no K and V there, not
    attended to); `draft_k`, `draft_v` hold per layer [num_kv_slots, num_kv_heads, head_dim] in float32, float16 or
    bfloat16. The engine is the only writer of the latter; all three are borrowed, and so are the weights. Raises
    ConfigError, ShapeError, DeviceError, before memory is taken. For one thread at a time.

    Where the engine keeps matrices in an order of its own (`prepared_bytes`), it lets go of those that it does not read
    again: their memory is free once the caller has dropped them too. Until it is made the device holds all of fc, the
    layers and lm_head twice: that much must be free (docs/kernels.md, Memory).

    `stream` of the calls below is a cudaStream_t as int, 0 the legacy default stream. What a call was given is kept
    alive until it has run, or, where the host captures the stream, as long as the engine. CUDA refuses the legacy
    default stream (DeviceError) while any thread of the process captures in global mode: hosts that capture while
    eaglex drafts give it a stream of its own.
    """

    def __init__(
        self,
        config: DraftConfig,
        speculation: SpeculationConfig,
        *,
        limits: EngineLimits,
        weights: DraftWeights,
        req_to_token: Tensor,
        draft_k: list[Tensor],
        draft_v: list[Tensor],
    ) -> None:
        binary = _extension()
        speculation.check(config)
        weights.check(config)
        self.config, self.speculation, self.limits = config, speculation, limits
        self.device = weights.fc.device
        inv_freq, rope_factor = rope_frequencies(config.rope, config.rotary_dim)
        inv_freq = inv_freq.to(self.device)
        tensors = _fill(binary.EngineTensors(), req_to_token=req_to_token, draft_k=draft_k, draft_v=draft_v)
        inputs = {
            "device": self.device.type,
            "index": self.device.index or 0,
            "config": _config(binary, config, rope_factor),
            "speculation": _speculation(binary, speculation),
            "limits": _fill(binary.EngineLimits(), **dataclasses.asdict(limits)),
            "weights": _weights(binary, weights, inv_freq),
            "tensors": tensors,
        }
        binary.DraftEngine.check_inputs(**inputs)
        self.results = DraftResults.allocate(speculation, limits, self.device, draft_vocab_size=config.draft_vocab_size)
        _fill(tensors, **_fields(self.results))
        self._engine = binary.DraftEngine(**inputs)
        self._binary = binary
        # The tensors themselves, not the caller's lists and dataclasses, which the caller may change.
        results = _fields(self.results).values()
        # embed_tokens always: it may be the same memory as lm_head. lm_head_rows are read where they lie.
        matrices = [
            weight
            for name, weight in weights.named()
            if name in ("embed_tokens", "lm_head_rows")
            or self._engine.reads_original((weight if isinstance(weight, Tensor) else weight.values).data_ptr())
        ]
        # Attributes go in the order in which they were set. The last reference to the C++ engine, whose end waits for
        # the device, goes with _inputs, and only then what a running cycle reads and writes.
        self._inputs = _Inputs(self._engine, binary.NEVER)
        self._bound = (*matrices, inv_freq, req_to_token, *draft_k, *draft_v, *results)

    def warm_up(self) -> None:
        """To be called by a host at its start, as the model is loaded: capture the graphs of all batch sizes.

        Without it the first `run` does this, which then takes as long as some hundred cycles and allocates. Memory and
        seconds are the same either way, and a capture of another stream is not disturbed. A second call does nothing.
        Raises DeviceError.
        """
        self._engine.warm_up()

    def enqueue(self, batch: DraftBatch, stream: int = 0) -> None:
        """One cycle as raw launches on `stream`, capturable by a host."""
        self._inputs.call(self._engine.enqueue, self._binary.BatchTensors(), _fields(batch), stream)

    def run(self, batch: DraftBatch, stream: int = 0) -> None:
        """One cycle as one launch: extend by the batch's rows, draft K steps, write the results by request slot."""
        self._inputs.call(self._engine.run, self._binary.BatchTensors(), _fields(batch), stream)

    def tree(
        self, out: VerifyTensors, *, req_pool_indices: Tensor, seq_lens: Tensor, bonus_tokens: Tensor, stream: int = 0
    ) -> None:
        """Fill the verifier's tensors with these slots' drafts, in this order.

        A slot whose draft was not made for exactly seq_lens[b] gets none: its nodes are pads that nothing reaches.
        """
        ids = {"req_pool_indices": req_pool_indices, "seq_lens": seq_lens, "bonus_tokens": bonus_tokens}
        fields = _verify_fields(self._binary, out, ids)
        self._inputs.call(self._engine.tree, self._binary.VerifyTensors(), fields, stream)

    def repeated_run(self, batch: DraftBatch) -> RepeatedRun:
        """`run` for batches of this one's shape, at a tenth of the CPU time; out_cache_loc is given, rejection not.

        Keeps the engine alive.
        """
        filled = _fill(self._binary.BatchTensors(), **_fields(batch))
        if batch.out_cache_loc is None or batch.temperatures is not None:
            raise ConfigError("repeated_run: expected out_cache_loc and no temperatures")
        return RepeatedRun(self._engine.repeated_run(filled), filled, (batch.row_start, batch.draft_from))

    def repeated_tree(
        self, out: VerifyTensors, *, req_pool_indices: Tensor, seq_lens: Tensor, bonus_tokens: Tensor
    ) -> RepeatedTree:
        """`tree` into these tensors, as `repeated_run`."""
        ids = {"req_pool_indices": req_pool_indices, "seq_lens": seq_lens, "bonus_tokens": bonus_tokens}
        return repeated_tree_of(self._binary, self._engine, out, ids)

    def embeddings_changed(self) -> None:
        """To be called where the host has written other numbers into the weights' embed_tokens, which lies where it
        was: what was computed from the embeddings beforehand is computed again. Waits for the device.
        """
        self._engine.embeddings_changed()

    def counters(self) -> dict[str, int]:
        """Requests per outcome since the start, by LaneStatus name in lower case. Waits for the device."""
        return {
            status.name.lower(): int(count)
            for status, count in zip(LaneStatus, self.results.counters.tolist(), strict=True)
        }

    @property
    def backend_name(self) -> str:
        """The backend that runs: "cpu", "cuda", or "cuda, plain chain" for a draft that does not stream."""
        return str(self._engine.backend_name)

    @property
    def workspace_bytes(self) -> int:
        """Device memory that was planned beside weights, KV pool and results; graphs come on top (docs/kernels.md)."""
        return int(self._engine.workspace_bytes)

    @property
    def prepared_bytes(self) -> int:
        """Device memory of the weights in the engine's own order: 0 where it reads them as they came."""
        return int(self._engine.prepared_bytes)


class _Inputs:
    """What calls were given, kept alive until they have run: their memory may come from another stream's pool, which
    would hand it out again at once.
    """

    def __init__(self, engine: Any, never: int) -> None:
        self._engine, self._never = engine, never
        self._running: collections.deque[tuple[int, object]] = collections.deque()  # by number, oldest first
        self._captured: list[object] = []

    def call(self, launch: Callable[[Any, int], None], target: Any, fields: dict[str, Any], stream: int) -> None:
        """`launch` with `target`, filled with these fields, which are kept."""
        filled = _fill(target, **fields)
        try:
            launch(filled, stream)
        except BaseException:  # half a cycle may be under way, so they are kept all the same
            with contextlib.suppress(DeviceError):  # the launch's own error says more
                self.keep(tuple(fields.values()), stream)
            raise
        self.keep(tuple(fields.values()), stream)

    def keep(self, tensors: object, stream: int) -> None:
        """After a call on `stream`; lets go of what calls before it have done with. About 2 µs.

        Where the device cannot say how far it is (DeviceError) they are kept for good.
        """
        number = self._never
        try:
            if self._running:
                reached = self._engine.reached()
                while self._running and self._running[0][0] <= reached:
                    self._running.popleft()
            number = self._engine.mark(stream)
        finally:
            if number == self._never:
                self._captured.append(tensors)
            elif number > 0:
                self._running.append((number, tensors))


# torch's own, which Triton's launcher takes too: a tenth of the time of current_stream(), which makes a Stream
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> int:
    """The stream that torch launches to on `device`, as the engine takes it; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    if _raw_stream is not None and device.index is not None:
        return _raw_stream(device.index)
    return int(torch.cuda.current_stream(device).cuda_stream)


def current_stream_of(device: torch.device) -> Callable[[], int]:
    """`current_stream(device)` as one call of a C function where torch has one."""
    if device.type != "cuda" or _raw_stream is None or device.index is None:
        return functools.partial(current_stream, device)
    return functools.partial(_raw_stream, device.index)


def _extension() -> Any:
    try:
        from eaglex import _C
    except ImportError as error:
        raise DeviceError(
            f"eaglex._C: expected the compiled extension, got {error}; build it with: pip install -e ."
        ) from error
    return _C


def _fill(target: Any, **values: Any) -> Any:
    for name, value in values.items():
        try:
            setattr(target, name, value)
        except TypeError as error:
            raise ConfigError(f"{name}: expected another type, got {type(value).__name__} {value!r}") from error
    return target


def _fields(owner: Any) -> dict[str, Any]:
    kind = type(owner)
    if kind not in _NAMES:
        _NAMES[kind] = tuple(field.name for field in dataclasses.fields(kind))
    return {name: getattr(owner, name) for name in _NAMES[kind]}


_NAMES: dict[type, tuple[str, ...]] = {}  # dataclasses.fields() costs more than the look-ups, several times a cycle


def _verify_fields(binary: Any, out: VerifyTensors, ids: dict[str, Tensor]) -> dict[str, Any]:
    """What fills the binary's VerifyTensors; ids holds req_pool_indices, seq_lens and bonus_tokens."""
    return _fields(out) | ids | {"mask_mode": getattr(binary.MaskMode, out.mask_mode.name)}


def repeated_tree_of(binary: Any, trees: Any, out: VerifyTensors, ids: dict[str, Tensor]) -> RepeatedTree:
    """A `tree` of one shape, for an engine of the binary and a follower alike."""
    filled = _fill(binary.VerifyTensors(), **_verify_fields(binary, out, ids))
    return RepeatedTree(trees.repeated_tree(filled), filled, dataclasses.replace(out))


def _config(binary: Any, config: DraftConfig, rope_factor: float) -> Any:
    values = _fields(config)
    del values["rope"]
    values["rope_factor"] = rope_factor
    for name, value in values.items():
        if isinstance(value, enum.Enum):
            values[name] = getattr(getattr(binary, type(value).__name__), value.name)
    return _fill(binary.DraftConfig(), **values)


def _speculation(binary: Any, speculation: SpeculationConfig) -> Any:
    values = _fields(speculation)
    values["sampling"] = getattr(binary.Sampling, speculation.sampling.name)
    del values["stop_below"]
    values["stop_score"] = speculation.stop_score
    return _fill(binary.SpeculationConfig(), **values)


def _weights(binary: Any, weights: DraftWeights, inv_freq: Tensor) -> Any:
    layers = [
        _fill(binary.LayerWeights(), **{name: _plain(t) for name, t in _fields(layer).items()})
        for layer in weights.layers
    ]
    return _fill(
        binary.DraftWeights(),
        embed_tokens=_plain(weights.embed_tokens),
        fc=_plain(weights.fc),
        aux_norms=[_plain(t) for t in weights.aux_norms],
        layers=layers,
        norm=_plain(weights.norm),
        lm_head=_plain(weights.lm_head),
        lm_head_rows=_plain(weights.lm_head_rows),
        d2t=weights.d2t,
        inv_freq=inv_freq,
    )


def _plain(weight: Weight | None) -> Weight | None:
    return weight.detach() if isinstance(weight, Tensor) else weight
