"""config.json as transformers completes it: defaults of the family, older spellings, one form of RoPE.

Without transformers, so that a login node can judge a model in milliseconds. That it says the same as transformers is
held by tests/model/test_config.py, field by field.
"""

import math
from collections.abc import Mapping
from typing import Any

from ppoctl.model.fields import Family

OF_EVERY_MODEL = frozenset(
    [
        "_name_or_path",
        "architectures",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "transformers_version",
    ]
)
"""Fields that transformers writes into any configuration: names, labels, what is returned."""
_NOT_OF_THE_MODEL = frozenset(
    [
        "torch_dtype",
        "num_labels",
        "name_or_path",
        "_commit_hash",
        "attn_implementation",
        "_attn_implementation",
        "experts_implementation",
        "base_model_tp_plan",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "target_lookbehind",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    ]
)
"""Fields that transformers takes out of a configuration: how weights are loaded, and how old files generate text."""
_ORIGINAL_CONTEXT = ("llama3", "yarn", "longrope")
"""Kinds of RoPE whose original context is `max_position_embeddings` where the file does not give it."""


def completed(written: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The configuration with every field that a config.json leaves out. Raises InvalidFieldError naming the first
    field that is no number of its kind."""
    config = {family.renamed.get(name, name): value for name, value in written.items()}
    config = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    config["rope_parameters"] = _rope_parameters(config, family)
    config = {**family.defaults, **config}
    for name in sorted(family.fields_read & config.keys()):
        _require_kind(name, config[name])
    _require_as_many_types_as_layers(config)
    if "use_sliding_window" in family.requires and not config.get("use_sliding_window"):
        config["sliding_window"] = None
    return config


class InvalidFieldError(ValueError):
    """A field of a config.json has no value of its kind; the text says which field, and what it should be."""


def _rope_parameters(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """One table of RoPE's parameters, from `rope_parameters` or transformers 4's `rope_scaling` and `rope_theta`."""
    theta = config.pop("rope_theta", 10_000.0)
    found = config.pop("rope_scaling", None) or config.pop("rope_parameters", None) or {}
    config.pop("rope_parameters", None)
    if not isinstance(found, Mapping):
        raise InvalidFieldError(f"`rope_parameters = {found}` must be a table")
    parameters = {"rope_theta": theta, **found}
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters["rope_type"] in _ORIGINAL_CONTEXT:
        positions = config.get("max_position_embeddings", family.defaults["max_position_embeddings"])
        parameters.setdefault("original_max_position_embeddings", positions)
    for name, value in parameters.items():
        if name not in ("rope_type", "type") and not isinstance(value, Mapping | list | bool) and not _number(value):
            raise InvalidFieldError(f"`rope_parameters.{name} = {value}` must be a number above 0")
    return parameters


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


_OR_NONE = frozenset({"num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank"})
_NUMBERS = frozenset({"rms_norm_eps", "routed_scaling_factor", "query_pre_attn_scalar"})
_NUMBERS_OR_NONE = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
_COUNTS = frozenset({"first_k_dense_replace", "n_shared_experts"})
_SWITCHES = frozenset({"tie_word_embeddings", "norm_topk_prob"})
_LISTS = frozenset({"layer_types", "mlp_only_layers"})
_OF_ANOTHER_KIND = frozenset({"rope_parameters", "hidden_activation"})
"""Fields that are no sizes; whoever reads them judges them."""


def _require_kind(name: str, value: Any) -> None:
    """Raise InvalidFieldError unless the value is of its field's kind: a size, but for the fields in the sets
    above."""
    if name in _OF_ANOTHER_KIND:
        return
    is_right, kind = _whole(value), "a whole number above 0"
    if name in _OR_NONE:
        is_right, kind = value is None or _whole(value), f"{kind}, or null"
    elif name in _NUMBERS:
        is_right, kind = _number(value), "a number, not below 0"
    elif name in _NUMBERS_OR_NONE:
        is_right, kind = value is None or _number(value), "a number, not below 0, or null"
    elif name in _COUNTS:
        is_right, kind = _whole(value) or value == 0, "a whole number, not below 0"
    elif name in _SWITCHES:
        is_right, kind = isinstance(value, bool), "true or false"
    elif name in _LISTS:
        is_right, kind = value is None or isinstance(value, list), "a list"
    if not is_right:
        raise InvalidFieldError(f"`{name} = {value}` must be {kind}")


def _require_as_many_types_as_layers(config: Mapping[str, Any]) -> None:
    types, layers = config.get("layer_types"), config["num_hidden_layers"]
    if isinstance(types, list) and len(types) != layers:
        raise InvalidFieldError(f"`layer_types` has {len(types)} entries, and `num_hidden_layers` is {layers}")
