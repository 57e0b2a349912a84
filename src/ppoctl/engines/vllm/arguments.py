"""Arguments of vLLM's `EngineArgs`, from the settings of an engine and the device that it is on."""

from typing import Any

from ppoctl.engines.vllm.environment import compiles
from ppoctl.engines.vllm.settings import VllmSettings
from ppoctl.machine.device import on_gpu

_PREFILL_TOKENS = 8192
"""Prompt tokens of one engine step on a CPU."""
_MIB = 1 << 20


def engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Arguments by name. Imports vLLM."""
    of_device = _of_a_gpu if on_gpu() else _of_a_cpu
    return {**_of_any_device(settings), **of_device(settings)}


def _of_any_device(settings: VllmSettings) -> dict[str, Any]:
    from vllm.config import WeightTransferConfig

    from ppoctl.engines.vllm import weights

    weights.register()
    table = settings.table
    return {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": table.max_concurrent_seqs,
        "enforce_eager": not compiles(table),
        "async_scheduling": table.async_scheduling,
        "seed": settings.seed,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{weights.__name__}.{weights.WeightReader.__qualname__}",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "weight_transfer_config": WeightTransferConfig(backend=weights.BACKEND),
        "tensor_parallel_size": table.tensor,
        # Each tensor rank is a process of ours with an engine of its own; they all do the same.
        "distributed_executor_backend": "external_launcher" if table.tensor > 1 else None,
    }


def _of_a_gpu(settings: VllmSettings) -> dict[str, Any]:
    table = settings.table
    return {
        "gpu_memory_utilization": table.gpu_memory_frac,
        "enable_sleep_mode": settings.sleeps,
        # Its own kernels read the memory of the other ranks' GPUs: NCCL instead, until that has been seen to work.
        "disable_custom_all_reduce": table.tensor > 1,
    }


def _of_a_cpu(settings: VllmSettings) -> dict[str, Any]:
    """vLLM's default on a CPU is 92 % of all memory. A prompt that is prefilled in chunks draws a number it then
    takes back, which CPU generators cannot: whole prompts only."""
    found: dict[str, Any] = {
        "kv_cache_memory_bytes": settings.table.kv_cache_mib * _MIB,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(_PREFILL_TOKENS, settings.max_model_len),
    }
    if not compiles(settings.table) and _has_latent_attention(settings.model):
        # The CPU kernel turns neighbouring channels of the wrong heads, silently; vLLM's torch code does it right.
        # Compiled, it takes that anyway.
        found["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    return found


def _has_latent_attention(model: str) -> bool:
    """Whether it is of DeepSeek's architecture since V2."""
    from vllm.transformers_utils.config import get_config

    return hasattr(get_config(model, trust_remote_code=False), "kv_lora_rank")
