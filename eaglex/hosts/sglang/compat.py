"""All that eaglex knows about SGLang by name: versions, symbols, and where the host compares the algorithm's name.

The only module that imports SGLang. The tables are read by tests/hosts against the wheels of every version in
`READ_VERSIONS`, so that a change of the host fails a test, not a server.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

RUN_VERSIONS: Final = ("0.5.17",)  # the worker has run on a GPU and been compared with EAGLE3, token for token
READ_VERSIONS: Final = ("0.5.17", "0.5.23")  # oldest and newest whose contract the tests read; the newest is refused

# attribute -> module that holds it; every host symbol that eaglex uses
SYMBOLS: Final[dict[str, str]] = {
    "SpeculativeAlgorithm": "sglang.srt.speculative.spec_info",
    "CustomSpecAlgo": "sglang.srt.speculative.spec_registry",
    "BaseSpecWorker": "sglang.srt.speculative.base_spec_worker",
    "EAGLEWorkerV2": "sglang.srt.speculative.eagle_worker_v2",
    "EagleDraftWorker": "sglang.srt.speculative.eagle_worker_v2",
    "EagleDraftInput": "sglang.srt.speculative.eagle_info",
    "EagleVerifyInput": "sglang.srt.speculative.eagle_info",
    "build_eagle_verify_input": "sglang.srt.speculative.eagle_worker_common",
    "run_eagle_verify": "sglang.srt.speculative.eagle_worker_common",
    "eagle_sample": "sglang.srt.speculative.eagle_utils",
    "assign_extend_cache_locs_uniform_func": "sglang.kernels.ops.speculative.cache_locs",
    "sanitize_nan_logits": "sglang.srt.utils.async_probe",
    "GenerationBatchResult": "sglang.srt.managers.utils",
    "default_tree_mask_mode": "sglang.srt.speculative.eagle_utils",
    "check_cuda_graph_backend": "sglang.srt.model_executor.cuda_graph_config",
    "Phase": "sglang.srt.model_executor.cuda_graph_config",
    "Backend": "sglang.srt.model_executor.cuda_graph_config",
    "mambaish_config": "sglang.srt.configs.hybrid_arch",
    "DefaultPoolConfigurator": "sglang.srt.model_executor.pool_configurator",
    "speculative_moe_backend_context": "sglang.srt.layers.moe.utils",
    "speculative_moe_a2a_backend_context": "sglang.srt.layers.moe.utils",
    "CaptureHiddenMode": "sglang.srt.model_executor.forward_batch_info",
    "ForwardBatch": "sglang.srt.model_executor.forward_batch_info",
    "ForwardMode": "sglang.srt.model_executor.forward_batch_info",
    "Scheduler": "sglang.srt.managers.scheduler",
    "SchedulerWeightUpdaterManager": "sglang.srt.managers.scheduler_components.weight_updater",
    "TritonMultiStepDraftBackend": "sglang.srt.layers.attention.triton_backend",
    "get_context": "sglang.srt.runtime_context",
    "adaptive_unsupported_reason": "sglang.srt.speculative.adaptive_spec_params",
    "AdaptiveSpeculativeParams": "sglang.srt.speculative.adaptive_spec_params",
    "get_config": "sglang.srt.utils.hf_transformers.config",
}


@functools.cache
def symbol(name: str) -> Any:
    """A class or function of the host, imported when asked for.

    Raises:
        ImportError: SGLang is not installed, or has no such module.
        AttributeError: the module has no such name.
    """
    return getattr(importlib.import_module(SYMBOLS[name]), name)


def replace(name: str, replacement: Any) -> None:
    """Put another function in the place of one of the host's, for those who look it up in its module."""
    setattr(importlib.import_module(SYMBOLS[name]), name, replacement)


def installed_version() -> str | None:
    """SGLang's version by its package metadata, without importing it; None when it is not installed."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def refusal(version: str | None) -> str | None:
    """Why this version cannot run the worker, as one sentence; None when it can."""
    if version in RUN_VERSIONS:
        return None
    return (
        f"EAGLEX runs on SGLang {', '.join(RUN_VERSIONS)}, and {version or 'no version'} is installed: "
        f"install sglang=={RUN_VERSIONS[-1]}, or serve with --speculative-algorithm EAGLE3."
    )


class Treatment(Enum):
    """What is done where the host compares the algorithm's name."""

    SAME = "EAGLEX is none of the names compared, and neither is EAGLE3: both take the same way"
    ANSWERED = "the enum's own predicate: eaglex/hosts/sglang/algorithm.py answers it"
    REFUSED = "reached only with an option that eaglex/hosts/sglang/arguments.py refuses"
    ADMITTED = "eaglex/hosts/sglang/engine_arguments.py answers for EAGLEX where its engine drafts, and refuses it else"
    HOST_REFUSES = "the host itself refuses the option for any name but its own, with its own sentence"
    NEWER = "the host's version is refused as a whole"


@dataclass(frozen=True)
class Site:
    """Comparisons in one function of the host: file under sglang/, function, treatment of those that name EAGLE3."""

    path: str
    function: str
    treatment: Treatment = Treatment.SAME


def _sites(path: str, functions: str, treatment: Treatment = Treatment.SAME) -> list[Site]:
    return [Site(path, function, treatment) for function in functions.split()]


_ALGORITHM = "srt/speculative/spec_info.py"
_HOOKS = "srt/arg_groups/"

# A comparison that does not name EAGLE3 cannot tell EAGLEX from EAGLE3, so SAME is right for it wherever it stands; one
# that does must have another treatment. tests/hosts/test_sglang_names.py holds both, and that nothing is missing.
NAME_COMPARISONS: Final[tuple[Site, ...]] = (
    *_sites(_ALGORITHM, "SpeculativeAlgorithm.is_eagle SpeculativeAlgorithm.is_eagle3", Treatment.ANSWERED),
    *_sites(_ALGORITHM, "SpeculativeAlgorithm.supports_mixed_chunk", Treatment.ANSWERED),
    *_sites(
        _ALGORITHM,
        "SpeculativeAlgorithm.is_dflash SpeculativeAlgorithm.is_dspark SpeculativeAlgorithm.is_frozen_kv_mtp "
        "SpeculativeAlgorithm.is_ngram SpeculativeAlgorithm.is_none SpeculativeAlgorithm.is_some "
        "SpeculativeAlgorithm.is_speculative SpeculativeAlgorithm.is_standalone SpeculativeAlgorithm.is_uno",
    ),
    # EAGLE3 with a Gemma 4 assistant draft is refused by the host; EAGLEX refuses the same draft.
    *_sites(_HOOKS + "speculative_hook.py", "_resolve_speculative_algorithm_alias", Treatment.REFUSED),
    # --speculative-draft-window-size: the host warns that it has no effect, though the model would honour it.
    *_sites(_HOOKS + "speculative_hook.py", "handle_speculative_decoding", Treatment.REFUSED),
    # --speculative-use-rejection-sampling.
    *_sites(_HOOKS + "speculative_hook.py", "_handle_eagle_family", Treatment.HOST_REFUSES),
    *_sites(_HOOKS + "speculative_hook.py", "_auto_choose_speculative_params"),
    # --speculative-adaptive: the host would turn it off with a warning.
    *_sites("srt/speculative/adaptive_spec_params.py", "adaptive_unsupported_reason", Treatment.ADMITTED),
    # --enable-attn-tp-input-scattered: hidden states would reach the draft scattered over the ranks.
    *_sites("srt/layers/communicator.py", "AttnTpContext.init_context", Treatment.REFUSED),
    *_sites("srt/layers/layer_boundary/adapters/attention.py", "AttnTpContext.init_context", Treatment.REFUSED),
    *_sites(_HOOKS + "kv_cache_hook.py", "handle_unified_memory_pool", Treatment.REFUSED),
    *_sites(_HOOKS + "validation_hook.py", "check_watermark_server_args", Treatment.NEWER),
    *_sites(_HOOKS + "validation_hook.py", "handle_aux_hidden_state_capture", Treatment.NEWER),
    *_sites("srt/kernel_plugins/amd/binding.py", "<module>", Treatment.NEWER),
    *_sites("srt/lora/utils.py", "warn_if_adapter_targets_embeddings", Treatment.NEWER),
    *_sites("benchmark/dspark_sps_profiler.py", "fetch_server_context"),
    *_sites(_HOOKS + "attention_hook.py", "handle_linear_attn_backend"),
    *_sites(_HOOKS + "cp_tp_group_sharing_hook.py", "resolve_cp_tp_group_sharing"),
    *_sites(_HOOKS + "deepseek_v4_hook.py", "apply_deepseek_v4_defaults validate_deepseek_v41_features"),
    *_sites(_HOOKS + "hicache_hook.py", "resolve_hicache_dcp_compatibility"),
    *_sites(_HOOKS + "hisparse_hook.py", "validate_hisparse"),
    *_sites(_HOOKS + "kimi_k3_hook.py", "apply_kimi_k3_spec_backend_defaults"),
    *_sites(_HOOKS + "kv_cache_hook.py", "handle_kv4_compatibility"),
    *_sites(_HOOKS + "kv_shard_hook.py", "handle_kv_cache_sharding"),
    *_sites(_HOOKS + "layernorm_sp_hook.py", "validate_layernorm_sp"),
    *_sites(_HOOKS + "lora_hook.py", "check_lora_speculative_compatibility"),
    *_sites(_HOOKS + "model_override_base.py", "_forces_eagle_topk_one"),
    *_sites(_HOOKS + "model_overrides/gigachat35.py", "_gigachat35_overrides"),
    *_sites(_HOOKS + "model_overrides/iquest_q1.py", "_iquest_q1_overrides"),
    *_sites(_HOOKS + "model_overrides/kimi_k3.py", "_kimi_k3_overrides"),
    *_sites(_HOOKS + "model_overrides/mimo_v2.py", "_mimo_v2_overrides"),
    *_sites(_HOOKS + "model_overrides/minimax_m3.py", "_minimax_m3_overrides"),
    *_sites(_HOOKS + "model_overrides/nemotron_h.py", "_nemotron_h_overrides"),
    *_sites(
        _HOOKS + "overrides.py",
        "_deepseek_spec_moe_resolution _kimi_k3_overrides _mimo_v2_overrides _step3p_overrides",
    ),
    *_sites(_HOOKS + "validation_hook.py", "check_pipeline_parallel_compat"),
    *_sites("srt/configs/model_config.py", "ModelConfig._config_draft_model"),
    *_sites("srt/disaggregation/mooncake/conn.py", "MooncakeKVManager._validate_peer_state_layout"),
    *_sites("srt/disaggregation/utils.py", "get_dsv41_spec_layout"),
    *_sites("srt/layers/attention/attention_registry.py", "create_flashinfer_backend"),
    *_sites(
        "srt/managers/tokenizer_control_mixin.py",
        "TokenizerControlMixin.add_external_corpus TokenizerControlMixin.list_external_corpora "
        "TokenizerControlMixin.remove_external_corpus",
    ),
    *_sites(
        "srt/mem_cache/kv_cache_configurator.py",
        "KVCacheConfigurator._build_hybrid_req_pool KVCacheConfigurator._build_mtp_kv_shard_pool",
    ),
    *_sites("srt/mem_cache/page_interleave.py", "compute_page_shard_scratch_bytes"),
    *_sites(
        "srt/server_args.py",
        "ServerArgs._handle_linear_attn_backend ServerArgs._validate_mamba_extra_buffer "
        "ServerArgs.check_lora_server_args",
    ),
    *_sites("srt/speculative/spec_utils.py", "spec_need_hidden_states"),
)
