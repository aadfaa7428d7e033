"""A causal language model of transformers as a target: its facts, its KV cache, its auxiliary hidden states.

Nothing of the model is changed: hooks on its decoder layers live for one forward call, the tree mask is an argument.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from eaglex.config import DraftConfig
from eaglex.errors import ConfigError, EaglexError, first_line

# Names under which decoders of the Llama, GPT and MPT families keep the list of their layers.
_LAYER_LISTS = ("layers", "h", "blocks")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_HUB_ID = re.compile(r"[\w.-]*\w[\w.-]*(/[\w.-]+)?")  # some old ones have no owner
# Kernels that take an explicit [queries, keys] mask; flash attention does not.
_MASKED_ATTENTION = ("sdpa", "eager")


def transformers() -> Any:
    """The transformers package, imported when first needed. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"transformers: expected the package for a Hugging Face target, got {error}; "
            f"install it with: pip install 'eaglex[hf]'"
        ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What a target's config says, before any weight is read. `window` is the reach of sliding layers, if any."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_positions: int | None
    layer_types: tuple[str, ...]
    window: int | None

    @classmethod
    def of(cls, config: Any, name: str = "target") -> TargetFacts:
        """Read a transformers config. Raises ConfigError for layers whose state cannot be cut back."""
        text = config.get_text_config(decoder=True)
        count = int(text.num_hidden_layers)
        window = getattr(text, "sliding_window", None)
        types = getattr(text, "layer_types", None)
        if types is None:
            types = ["sliding_attention" if window else "full_attention"] * count
        if unknown := sorted(set(types) - set(_LAYER_TYPES)):
            raise ConfigError(
                f"target layer_types: expected only {', '.join(_LAYER_TYPES)}, since a state that cannot be cut back "
                f"cannot verify a draft, got {', '.join(unknown)}"
            )
        return cls(
            name=name,
            hidden_size=int(text.hidden_size),
            num_layers=count,
            vocab_size=int(text.vocab_size),
            max_positions=getattr(text, "max_position_embeddings", None),
            layer_types=tuple(types),
            window=int(window) if window and "sliding_attention" in types else None,
        )

    def check_draft(self, draft: DraftConfig, aux_layer_ids: Sequence[int]) -> None:
        """Raise ConfigError unless a draft of this config can read the outputs of these layers of this target."""
        for field, expected, actual in (
            ("target_hidden_size", self.hidden_size, draft.target_hidden_size),
            ("vocab_size", self.vocab_size, draft.vocab_size),
        ):
            if actual != expected:
                raise ConfigError(
                    f"draft {field}: expected {expected} as in the target {self.name}, got {actual}; "
                    f"is this the EAGLE head of another target?"
                )
        if len(aux_layer_ids) != draft.num_aux:
            raise ConfigError(
                f"aux_layer_ids: expected {draft.num_aux} output ids, since fc reads {draft.num_aux} x "
                f"{draft.target_hidden_size} values, got {list(aux_layer_ids)}"
            )
        if any(not 0 <= i < self.num_layers for i in aux_layer_ids):
            raise ConfigError(
                f"aux_layer_ids: expected output ids in 0..{self.num_layers - 1}, got {list(aux_layer_ids)}"
            )


@contextlib.contextmanager
def _reading(expected: str, path: str | Path) -> Iterator[None]:
    """Whatever transformers raises for an unreadable model, and it raises many things, as one ConfigError."""
    try:
        yield
    except EaglexError:
        raise
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        raise ConfigError(f"target: expected {expected} that transformers loads, got {path}: {reason}") from error


def _check_place(path: str | Path) -> None:
    """Raise ConfigError for a folder that is not there, which transformers takes for a badly spelt Hub id."""
    if not _HUB_ID.fullmatch(str(path)) and not Path(path).is_dir():
        raise ConfigError(f"target: expected a model folder or Hub id, got {path}: no such folder")


def read_facts(path: str | Path) -> TargetFacts:
    """The facts of a folder or Hub id from its config.json. Raises ConfigError where transformers cannot read it."""
    _check_place(path)
    library = transformers()
    with _reading("a model folder or Hub id", path):
        return TargetFacts.of(library.AutoConfig.from_pretrained(path, trust_remote_code=False), str(path))


def load_tokenizer(path: str | Path) -> Any:
    """The target's tokenizer. Raises ConfigError where there is none."""
    _check_place(path)
    library = transformers()
    with _reading("a tokenizer", path):
        return library.AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def load_model(path: str | Path, *, dtype: torch.dtype, device: torch.device, num_ranks: int = 1) -> nn.Module:
    """A causal language model in that type on that device, from safetensors. Raises ConfigError where that fails.

    With several ranks, the calling rank's part of it, by transformers' own plan; the process group exists already.
    """
    library = transformers()
    # Its own loading bar shows whatever the log level is.
    library.utils.logging.disable_progress_bar()
    split = _split_options(path, num_ranks) if num_ranks > 1 else {}
    with _reading("a causal language model", path):
        model, found = library.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **split,
        )
        for name in sorted(found["mismatched_keys"]):
            # transformers 4 gives names, 5 (name, shape in the file, shape by the config)
            name, actual, expected = (name, "another", "that of its config") if isinstance(name, str) else name
            raise ConfigError(f"target: {name}: expected shape {_shape(expected)}, got {_shape(actual)} in {path}")
        if missing := sorted(found["missing_keys"]):
            raise ConfigError(f"target: expected all weights in {path}, got none for {', '.join(missing[:4])}")
        loaded: nn.Module = (model if split else model.to(device)).eval()
        return loaded


def _shape(shape: Sequence[int] | str) -> str:
    return shape if isinstance(shape, str) else str(list(shape))


def check_split(path: str | Path, num_ranks: int) -> None:
    """Raise ConfigError for a target that transformers cannot split over that many ranks, before any weight is read."""
    library = transformers()
    try:
        importlib.import_module("accelerate")
    except ImportError as error:
        raise ConfigError(
            f"accelerate: expected the package for a target on several ranks, got {error}; "
            f"install it with: pip install 'eaglex[hf]'"
        ) from error
    with _reading("a model folder or Hub id", path):
        config = library.AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config(decoder=True)
    if not getattr(config, "base_model_tp_plan", None):
        raise ConfigError(
            f"target: expected a model that transformers has a tensor-parallel plan for, got {path} "
            f"({config.model_type}), which runs in one process only"
        )
    heads = int(config.num_attention_heads)
    for name, count in (
        ("num_attention_heads", heads),
        ("num_key_value_heads", int(getattr(config, "num_key_value_heads", None) or heads)),
        ("intermediate_size", int(config.intermediate_size)),
    ):
        if count % num_ranks:
            raise ConfigError(f"target {name}: expected a multiple of the {num_ranks} ranks, got {count}")


def _split_options(path: str | Path, num_ranks: int) -> dict[str, Any]:
    """What makes from_pretrained split the model; the argument was renamed in transformers 5.18."""
    check_split(path, num_ranks)
    try:
        kind = importlib.import_module("transformers.distributed").DistributedConfig
        return {"distributed_config": kind(tp_plan="auto")}
    except (ImportError, AttributeError, TypeError):
        return {"tp_plan": "auto"}


def decoder_layers(model: Any) -> nn.ModuleList:
    """The list of the model's decoder layers. Raises ConfigError where none is found to hook."""
    count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for name in _LAYER_LISTS:
        found = getattr(decoder, name, None)
        if isinstance(found, nn.ModuleList) and len(found) == count:
            return found
    raise ConfigError(
        f"target: expected a list of {count} decoder layers to hook as {' or '.join(_LAYER_LISTS)} of "
        f"{type(decoder).__name__}, got none"
    )


def attention_kernels(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """To be entered around a target's forward on a GPU: every kernel of PyTorch's attention but cuDNN's.

    cuDNN plans anew for each length of the cache, which took 80 to 150 ms per forward in bfloat16 on an H200 with
    torch 2.11, where the forward itself takes 8.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    kernels: contextlib.AbstractContextManager[None] = sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )
    return kernels


class HookedTarget:
    """A target that returns, besides logits, the outputs of its auxiliary layers. One request per call.

    `model` is a causal language model of transformers in evaluation mode; `aux_layer_ids` are the ids of layers whose
    output (the residual stream, for the last layer before the final norm) is captured, in the order of the draft's fc.
    Raises ConfigError.
    """

    def __init__(self, model: Any, aux_layer_ids: Sequence[int], name: str = "target") -> None:
        self.model, self.facts = model, TargetFacts.of(model.config, name)
        implementation = getattr(model.config, "_attn_implementation", "eager")
        if implementation not in _MASKED_ATTENTION:
            raise ConfigError(
                f"target attn_implementation: expected {' or '.join(_MASKED_ATTENTION)}, which take a tree mask, "
                f"got {implementation}"
            )
        layers = decoder_layers(model)
        if bad := [i for i in aux_layer_ids if not 0 <= i < len(layers)]:
            raise ConfigError(f"aux_layer_ids: expected output ids in 0..{len(layers) - 1}, got {bad}")
        self._aux_layers = [layers[i] for i in aux_layer_ids]
        arguments = inspect.signature(model.forward).parameters
        # transformers renamed the argument in 5.2x; the old name warns there.
        self.cache_argument = "cache" if "cache" in arguments else "past_key_values"
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in arguments else {}
        # Entered around each forward; with several ranks it says who is waited for.
        self.around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @property
    def device(self) -> torch.device:
        """Where token ids go in and logits come out."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights and so of the hidden states."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text, by the model's generation config."""
        for config in (getattr(self.model, "generation_config", None), self.model.config):
            ids = getattr(config, "eos_token_id", None)
            if ids is not None:
                return frozenset(ids if isinstance(ids, (list, tuple)) else [ids])
        return frozenset()

    def new_cache(self) -> Any:
        """An empty KV cache that keeps every position: a sliding one forgets rows that a refused draft gives back."""
        return transformers().DynamicCache()

    def extend(self, cache: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Plain causal forward of tokens [T] behind the cache: logits [V] of the last, aux_hidden_states [T, A·Ht]."""
        logits, aux = self._forward(cache, tokens, **self._last_logits)
        return logits[-1], aux

    def verify(self, cache: Any, tokens: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """One forward of a tree: tokens, positions [N], mask [N, N] → logits [N, V], aux_hidden_states [N, A·Ht]."""
        past = int(cache.get_seq_length())
        seen = torch.cat([mask.new_ones(len(tokens), past), mask], 1)
        masks = {"full_attention": self._additive(seen)}
        if self.facts.window is not None:
            keys = torch.cat([torch.arange(past, device=positions.device), positions])
            near = positions[:, None] - keys[None, :] < self.facts.window
            masks["sliding_attention"] = self._additive(seen & near)
        kinds = set(self.facts.layer_types)
        chosen: Any = masks if len(kinds) > 1 else masks[kinds.pop()]
        return self._forward(cache, tokens, position_ids=positions[None], attention_mask=chosen)

    @staticmethod
    def keep(cache: Any, length: int, nodes: Sequence[int]) -> None:
        """Cut the cache back to its first `length` rows and, behind them, these nodes of the last `verify`."""
        end = length + len(nodes)
        moved = list(nodes) != list(range(len(nodes)))
        for layer in cache.layers:
            for name in ("keys", "values"):
                rows = getattr(layer, name)  # [1, kv_heads, positions, head_dim]
                if moved:
                    rows[:, :, length:end] = rows[:, :, [length + node for node in nodes]]
                setattr(layer, name, rows[:, :, :end])

    def _additive(self, seen: Tensor) -> Tensor:
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return bias.masked_fill(~seen, torch.finfo(self.dtype).min)[None, None]

    def _forward(self, cache: Any, tokens: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        with self.around(), self._captured() as outputs, attention_kernels(self.device):
            result = self.model(input_ids=tokens[None], use_cache=True, **{self.cache_argument: cache}, **arguments)
        return result.logits[0], torch.cat([outputs[i][0].to(self.device) for i in range(len(self._aux_layers))], -1)

    @contextlib.contextmanager
    def _captured(self) -> Iterator[dict[int, Tensor]]:
        outputs: dict[int, Tensor] = {}

        def hook_for(index: int) -> Any:
            def hook(_module: nn.Module, _inputs: object, output: Any) -> None:
                outputs[index] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [layer.register_forward_hook(hook_for(i)) for i, layer in enumerate(self._aux_layers)]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()
