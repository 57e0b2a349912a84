"""config.json as transformers completes it: defaults of the family, older field names, one form of RoPE.

This module does not import transformers, so that a login node can check a model in milliseconds.
tests/model/test_config.py compares the result with transformers, field by field.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ppoctl.models.shape_fields import Family

NOT_OF_THE_MODEL = (
    # Names, labels and output options, which transformers writes into any configuration.
    frozenset({"_name_or_path", "name_or_path", "architectures", "model_type", "dtype", "transformers_version"})
    | {"id2label", "label2id", "num_labels", "problem_type", "output_attentions", "output_hidden_states"}
    | {"return_dict", "chunk_size_feed_forward", "is_encoder_decoder"}
    # How weights are loaded.
    | {"torch_dtype", "_commit_hash", "attn_implementation", "_attn_implementation", "experts_implementation"}
    | {"base_model_tp_plan"}
    # Generation settings of old files, and their output options.
    | {"bad_words_ids", "begin_suppress_tokens", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size"}
    | {"encoder_repetition_penalty"}
    | {"exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"}
    | {"length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "repetition_penalty"}
    | {"num_beam_groups", "num_beams", "diversity_penalty", "num_return_sequences", "remove_invalid_values"}
    | {"temperature", "top_k", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff"}
    | {"assistant_confidence_threshold", "assistant_lookbehind", "num_assistant_tokens"}
    | {"num_assistant_tokens_schedule", "target_lookbehind", "output_scores", "return_dict_in_generate"}
)
"""Fields of a configuration without effect on the model."""
_ORIGINAL_CONTEXT = ("llama3", "yarn", "longrope")
"""Kinds of RoPE whose original context defaults to `max_position_embeddings`."""


def completed(written: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the configuration with the fields that config.json omits. Raises InvalidFieldError that names the first
    field with an invalid value."""
    config = {family.renamed.get(name, name): value for name, value in written.items()}
    config["rope_parameters"] = _rope_parameters(config, family)
    config = {**family.defaults, **config}
    for name in sorted(family.fields_read & config.keys()):
        _require_kind(name, config[name])
    _require_as_many_types_as_layers(config)
    if "use_sliding_window" in family.requires and not config.get("use_sliding_window"):
        config["sliding_window"] = None
    return config


class InvalidFieldError(ValueError):
    """A field of a config.json has an invalid value. The message names the field and the values it may have."""


def _rope_parameters(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the RoPE parameters, from `rope_parameters` or transformers 4's `rope_scaling` and `rope_theta`."""
    if family.rope_thetas:
        return _rope_by_layer_type(config, family.rope_thetas)
    theta = config.pop("rope_theta", 10_000.0)
    written = _table(config.pop("rope_scaling", None) or config.pop("rope_parameters", None))
    config.pop("rope_parameters", None)
    parameters = {"rope_theta": theta, **written}
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters["rope_type"] in _ORIGINAL_CONTEXT:
        positions = config.get("max_position_embeddings", family.defaults["max_position_embeddings"])
        parameters.setdefault("original_max_position_embeddings", positions)
    _require_numbers(parameters)
    return parameters


def _rope_by_layer_type(config: dict[str, Any], thetas: Mapping[str, float]) -> dict[str, Any]:
    """Return the RoPE parameters by type of layer. transformers 4's `rope_scaling` and `rope_theta` are those of
    layers with full attention, and `rope_local_base_freq` that of layers with a sliding window."""
    written = _table(config.pop("rope_parameters", None))
    scalings = {"full_attention": _table(config.pop("rope_scaling", None))}
    bases = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    parameters = dict(written)
    for kind, theta in thetas.items():
        theta = config.pop(bases[kind], theta)
        own = {"rope_theta": theta, "rope_type": "default", **_table(written.get(kind)), **scalings.get(kind, {})}
        _require_numbers(own)
        parameters[kind] = own
    return parameters


def _table(written: Any) -> Mapping[str, Any]:
    if not isinstance(written or {}, Mapping):
        raise InvalidFieldError(f"`rope_parameters = {written}` must be a table")
    return written or {}


def _require_numbers(parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        if name not in ("rope_type", "type") and not isinstance(value, Mapping | list | bool) and not _number(value):
            raise InvalidFieldError(f"`rope_parameters.{name} = {value}` must be a number above 0")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


_Kind = tuple[Callable[[Any], bool], str]
_SIZE: _Kind = (_whole, "a whole number above 0")
_SIZE_OR_NONE: _Kind = (_or_none(_whole), "a whole number above 0, or null")
_NUMBER: _Kind = (_number, "a number, not below 0")
_NUMBER_OR_NONE: _Kind = (_or_none(_number), "a number, not below 0, or null")
_COUNT: _Kind = (lambda value: _whole(value) or value == 0, "a whole number, not below 0")
_SWITCH: _Kind = (lambda value: isinstance(value, bool), "true or false")
_LIST: _Kind = (lambda value: value is None or isinstance(value, list), "a list")
_ANY: _Kind = (lambda _: True, "any value that its reader accepts")

_KINDS: dict[str, _Kind] = {
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank"), _SIZE_OR_NONE),
    **dict.fromkeys(("rms_norm_eps", "routed_scaling_factor", "query_pre_attn_scalar"), _NUMBER),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _NUMBER_OR_NONE),
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts"), _COUNT),
    **dict.fromkeys(("tie_word_embeddings", "norm_topk_prob"), _SWITCH),
    **dict.fromkeys(("layer_types", "mlp_only_layers"), _LIST),
    **dict.fromkeys(("rope_parameters", "hidden_activation"), _ANY),
}
"""Check and description of the values of fields by name; all fields that are not listed are sizes."""


def _require_kind(name: str, value: Any) -> None:
    """Raise InvalidFieldError unless the field may have this value."""
    is_valid, kind = _KINDS.get(name, _SIZE)
    if not is_valid(value):
        raise InvalidFieldError(f"`{name} = {value}` must be {kind}")


def _require_as_many_types_as_layers(config: Mapping[str, Any]) -> None:
    types, layers = config.get("layer_types"), config["num_hidden_layers"]
    if isinstance(types, list) and len(types) != layers:
        raise InvalidFieldError(f"`layer_types` has {len(types)} entries, but `num_hidden_layers` is {layers}")
