"""Arguments of vLLM's `EngineArgs`, from the settings of an engine and its device."""

from typing import Any

from ppoctl.core.machine.device import on_gpu
from ppoctl.engines.vllm.vllm_environment import compiles
from ppoctl.engines.vllm.vllm_settings import VllmSettings

_PREFILL_TOKENS = 8192
"""Maximum number of prompt tokens per engine step on a CPU."""
_MIB = 1 << 20
_LARGEST_GRAPH = 512
"""Largest number of tokens of a CUDA graph, as in vLLM."""


def engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Return the arguments by name. Imports vLLM."""
    device_arguments = _gpu_arguments if on_gpu() else _cpu_arguments
    return {**_common_arguments(settings), **device_arguments(settings)}


def _common_arguments(settings: VllmSettings) -> dict[str, Any]:
    from vllm.config import WeightTransferConfig

    from ppoctl.engines.vllm import vllm_weights

    vllm_weights.register()
    table = settings.table
    return {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.seqs_per_engine,
        "enforce_eager": not compiles(table),
        "async_scheduling": table.async_scheduling,
        "seed": settings.seed,
        # Prompts and responses are token ids; ppoctl decodes them itself.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        # By default vLLM returns log-probs before temperature and filters. Here they must be those of the
        # sampled distribution.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{vllm_weights.__name__}.{vllm_weights.WeightReader.__qualname__}",
        # Without vLLM's own record of experts, cached tokens would have none (`routed_experts`).
        "enable_prefix_caching": on_gpu() or not settings.returns_experts,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "weight_transfer_config": WeightTransferConfig(backend=vllm_weights.BACKEND),
        "tensor_parallel_size": table.tensor,
        # Each tensor rank is a separate process with its own engine. All ranks receive the same calls.
        "distributed_executor_backend": "external_launcher" if table.tensor > 1 else None,
    }


def _gpu_arguments(settings: VllmSettings) -> dict[str, Any]:
    table = settings.table
    return {
        "gpu_memory_utilization": table.gpu_memory_frac / table.engines_per_gpu,
        "enable_sleep_mode": settings.sleeps,
        "enable_return_routed_experts": settings.returns_experts,
        # vLLM's own all-reduce kernels read memory of other GPUs. NCCL is used until these kernels are verified here.
        "disable_custom_all_reduce": table.tensor > 1,
        "cudagraph_capture_sizes": graph_sizes(settings.seqs_per_engine) if compiles(table) else None,
    }


def graph_sizes(seqs: int) -> list[int]:
    """Return the numbers of tokens of a step for which CUDA graphs are captured: 1, 2, 4, 6, 8, 12, 16, 24, ... up to
    twice the `seqs` sequences that are decoded together, as in vLLM.

    A rollout ends with few sequences, so small sizes are needed too. From 4 on, a graph is at most half larger than
    its batch. vLLM's default has three times as many sizes. It captures each of them twice at each start.
    """
    most = min(2 * seqs, _LARGEST_GRAPH)
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return sorted({size for power in powers for size in (power, 3 * power) if size != 3 and size <= most} | {most})


def _cpu_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Return arguments for a CPU. By default vLLM would use 92 % of all memory. Chunked prefill is off: vLLM takes a
    random number for an unfinished prompt and then rewinds the random-number generator, which a CPU's random-number
    generator does not support."""
    arguments: dict[str, Any] = {
        "kv_cache_memory_bytes": settings.table.kv_cache_mib * _MIB // settings.table.engines_per_gpu,
        "enable_chunked_prefill": False,
        # Without chunked prefill, vLLM requires that the longest sequence fits into one step.
        "max_num_batched_tokens": max(_PREFILL_TOKENS, settings.max_model_len),
    }
    if not compiles(settings.table) and _has_latent_attention(settings.model):
        # vLLM's CPU kernel for RoPE rotates channels of the wrong heads without an error. vLLM's torch code is
        # correct, and a compiled engine uses the torch code anyway.
        arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    return arguments


def _has_latent_attention(model: str) -> bool:
    """Whether the model has DeepSeek's latent attention (V2 and later)."""
    from vllm.transformers_utils.config import get_config

    return hasattr(get_config(model, trust_remote_code=False), "kv_lora_rank")
