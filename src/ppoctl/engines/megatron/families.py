"""Hugging Face configuration -> what Megatron-Core needs to build the same model: one small table per family.

Every field of a configuration is either read, known to have no effect on what is computed, or required to have the
one value that is supported; any other field is refused by name. Weights are `weights.py`'s business.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig, PretrainedConfig

from ppoctl.batch.balance import TokenCost
from ppoctl.engines.megatron.experts import EXPERT_FIELDS, ExpertShape, read_experts
from ppoctl.errors import EnvironmentProblemError, RecipeError
from ppoctl.recipe.schema import ParallelTable, Recompute


@dataclass(frozen=True)
class Family:
    """How one `model_type` reads."""

    classes: str
    """What the names of its classes in transformers begin with."""
    qkv_bias: bool
    required: Mapping[str, tuple[Any, ...]]
    """Fields of this family that must have one of these values: what else they can say is not supported."""
    ignored: frozenset[str] = frozenset()
    """Fields of this family without effect on the weights or on what is computed, given `required`."""
    qk_norm: bool = False
    has_experts: bool = False


VOCAB_MULTIPLE = 64
"""The embedding's rows are padded to a multiple of it: what tensor parallelism can split evenly."""

FAMILIES: dict[str, Family] = {
    "qwen2": Family(
        classes="Qwen2",
        qkv_bias=True,
        required={"use_sliding_window": (False,), "sliding_window": (None,), "use_mrope": (False,)},
        ignored=frozenset({"max_window_layers"}),
    ),
    "qwen3": Family(
        classes="Qwen3",
        qkv_bias=False,
        qk_norm=True,
        required={"attention_bias": (False,), "use_sliding_window": (False,), "sliding_window": (None,)},
        ignored=frozenset({"max_window_layers"}),
    ),
    "qwen3_moe": Family(
        classes="Qwen3Moe",
        qkv_bias=False,
        qk_norm=True,
        has_experts=True,
        required={"attention_bias": (False,), "use_sliding_window": (False,), "sliding_window": (None,)},
        # The last two are about a load-balancing loss that PPO does not have: see `experts`.
        ignored=frozenset({"max_window_layers", "router_aux_loss_coef", "output_router_logits"}),
    ),
    "llama": Family(
        classes="Llama",
        qkv_bias=False,
        required={"attention_bias": (False,), "mlp_bias": (False,)},
        ignored=frozenset({"pretraining_tp"}),
    ),
}

_READ = frozenset(
    {
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
    }
)
_REQUIRED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "attention_dropout": (0, 0.0)}
_IGNORED = frozenset({"initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id"}) | (
    frozenset(PretrainedConfig().to_dict()) - _READ
)

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    # Megatron-Core's default is the attention, for kernels that keep all scores; the ones here keep none, and the MLP
    # has most of the rest. The norms, another choice, need Transformer Engine.
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}

# What Megatron-Core's RotaryEmbedding has built in; only `factor` can be chosen.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class ModelShape:
    """The numbers that define one model."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    llama3_rope_factor: float | None
    """Scale of Llama 3's long-context RoPE; None: plain RoPE."""
    qkv_bias: bool
    tied_embeddings: bool
    experts: ExpertShape | None

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised, head by head."""
        return FAMILIES[self.family].qk_norm

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding. A multiple of the same number under any layout, so that states fit all of them."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def token_cost(self) -> TokenCost:
        """What a token costs in the layers: of experts those it is routed to, and the choice among all of them."""
        heads = (self.num_heads * 2 + self.num_kv_heads * 2) * self.head_dim
        width = self.num_layers * (heads + 3 * self.ffn_hidden_size)
        if self.experts is not None:
            mixed = self.experts.count + 3 * (self.experts.active_width - self.ffn_hidden_size)
            width += sum(self.experts.layers) * mixed
        parameters = self.hidden_size * width
        return TokenCost.of_decoder(parameters, self.num_layers, self.num_heads, self.head_dim)

    def transformer_config(
        self, dtype: torch.dtype, parallel: ParallelTable, recompute: Recompute = "none"
    ) -> TransformerConfig:
        """Megatron-Core's configuration; `dtype` is that of weights and activations.

        Weights are always loaded, so nothing is initialised. Fusions that need Apex or CUDA extensions are off; those
        of Transformer Engine come with its layer spec. Losses arrive already divided by the global token count,
        hence `calculate_per_token_loss`: neither the schedule nor the gradient buffers may average again.

        Raises RecipeError when `parallel` shares experts that the model does not have.
        """
        if self.experts is None and parallel.expert_ranks > 1:
            written = f"`parallel.expert = {parallel.expert}`, `parallel.expert_tensor = {parallel.expert_tensor}`"
            raise RecipeError(f"{written}: a `{self.family}` model has no experts to share", hint="set both to 1")
        return TransformerConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_heads,
            num_query_groups=self.num_kv_heads,
            kv_channels=self.head_dim,
            normalization="RMSNorm",
            layernorm_epsilon=self.norm_eps,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=self.qkv_bias,
            qk_layernorm=self.qk_norm,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            calculate_per_token_loss=True,
            use_cpu_initialization=not torch.cuda.is_available(),
            perform_initialization=False,
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
            # Interleaved, both neighbours of a rank may be the same one: in a batch of messages it would take the one
            # for the other. Without batches each call sends in one direction, and messages pair by their order.
            overlap_p2p_comm=parallel.stages_per_rank > 1,
            batch_p2p_comm=parallel.stages_per_rank == 1,
            num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
            num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
            sequence_parallel=parallel.sequence,
            variable_seq_lengths=parallel.pipeline > 1,  # packed microbatches differ in length
            moe_token_dispatcher_type="alltoall",  # the default forbids the line above, even without experts
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
            cuda_graph_scope=[],
            **({} if self.experts is None else self.experts.transformer_config(parallel)),
            **_RECOMPUTE[recompute],
        )


def model_folder(path: str) -> Path:
    """The folder with the model's files: `path` itself, or the local snapshot of a hub id (fetched when online).

    Raises EnvironmentProblemError when there is neither.
    """
    if Path(path).is_dir():
        return Path(path)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise EnvironmentProblemError(f"model folder `{path}` does not exist", hint="check `model.path`")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model"]
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise EnvironmentProblemError(
            f"model `{path}` is neither a folder nor available from the hub: {error}", hint=f"hf download {path}"
        ) from error


def read_shape(folder: Path) -> ModelShape:
    """The model that `config.json` in `folder` describes.

    Raises EnvironmentProblemError when there is no such file or it cannot be read, RecipeError naming the field when
    it asks for something this trainer does not compute.
    """
    if not (folder / "config.json").is_file():
        raise EnvironmentProblemError(f"no `config.json` in model folder `{folder}`", hint="check `model.path`")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True).to_dict()
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentProblemError(f"`{folder / 'config.json'}` cannot be read: {error}") from error
    family = FAMILIES.get(config["model_type"])
    if family is None:
        raise RecipeError(
            f"model family `{config['model_type']}` is not supported (config.json of `{folder}`)",
            hint=f"choose a model of {', '.join(sorted(FAMILIES))}",
        )
    _refuse_unsupported(config, family, folder)
    theta, factor = _rope(config["rope_parameters"], folder)
    heads = config["num_attention_heads"]
    return ModelShape(
        family=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"] or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=theta,
        llama3_rope_factor=factor,
        qkv_bias=family.qkv_bias,
        tied_embeddings=config["tie_word_embeddings"],
        experts=read_experts(config) if family.has_experts else None,
    )


def _refuse_unsupported(config: Mapping[str, Any], family: Family, folder: Path) -> None:
    required = {**_REQUIRED, **family.required}
    for field, value in config.items():
        if field in required:
            supported = value in required[field]
        elif field == "layer_types":
            supported = value is None or set(value) <= {"full_attention"}
        else:
            read = _READ | EXPERT_FIELDS if family.has_experts else _READ
            supported = field in read or field in _IGNORED or field in family.ignored
        if not supported:
            raise RecipeError(
                f"`{field} = {value}` is not supported for `{config['model_type']}` (config.json of `{folder}`)",
                hint="choose another model; a copy with this field edited would be another model",
            )


def _rope(parameters: Mapping[str, Any], folder: Path) -> tuple[float, float | None]:
    """Base period, and the factor of Llama 3's scaling where it is on."""
    kind = parameters.get("rope_type", "default")
    rest = {key: value for key, value in parameters.items() if key not in ("rope_type", "type", "rope_theta")}
    factor = rest.pop("factor", None) if kind == "llama3" else None
    fits = rest == _LLAMA3_ROPE and factor is not None if kind == "llama3" else kind == "default" and not rest
    if not fits:
        raise RecipeError(
            f"`rope_parameters = {dict(parameters)}` is not supported (config.json of `{folder}`)",
            hint=f"supported are plain RoPE and llama3 with {_LLAMA3_ROPE} and any factor",
        )
    return float(parameters["rope_theta"]), None if factor is None else float(factor)
