"""`adapter_config.json` of a peft adapter. Imports no torch.

ppoctl computes peft's plain LoRA only. The fields below are read or cannot change the adapter; a folder is refused if
another field, also one of a later peft, is set: DoRA, rsLoRA, biases, ranks by pattern, chosen layers and the rest.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.core.errors import EnvironmentProblemError, quoted
from ppoctl.models.folder import read_json_object
from ppoctl.models.head import Head
from ppoctl.models.lora import Lora

CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"
HEADS = ("score", "classifier")
"""Modules that peft trains whole for the task type SEQ_CLS. Models of ppoctl's families have only `score`."""
READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "target_modules",
        "target_parameters",
        "modules_to_save",
        "base_model_name_or_path",
        "init_lora_weights",
    }
)
IGNORED = {
    "task_type": "the tensors determine the head",
    "auto_mapping": "names the class of the base",
    "peft_version": "other fields determine what is computed",
    "revision": "of the base, whose weights the run has",
    "inference_mode": "says whether peft trains the adapter after it has read it",
    "lora_dropout": "a property of the training that is over",
    "corda_config": "initial values, see `init_lora_weights`",
    "eva_config": "initial values",
    "loftq_config": "initial values",
    "lora_ga_config": "initial values",
    "megatron_config": "for models of Megatron in peft",
    "megatron_core": "for models of Megatron in peft",
    "qalora_group_size": "no effect without `use_qalora`",
    "runtime_config": "not a property of the adapter",
    "ensure_weight_tying": "for tied layers, which are not projections",
}
"""Fields that cannot change the adapter, and why."""
_INITIAL_VALUES = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the weights of the base as they are."""


@dataclass(frozen=True)
class PeftConfig:
    """The fields of the file that ppoctl reads."""

    rank: int
    alpha: float
    target_modules: str | tuple[str, ...]
    """A regular expression for the whole name of a module, or names, of which a module's name or its end must be
    one."""
    target_parameters: tuple[str, ...]
    """Names of weights, of which the name of a weight or its end must be one, in addition to the modules."""
    modules_to_save: tuple[str, ...]
    base_model: str | None
    """Folder or hub id of the model that the adapter was trained on; None: the file does not name it."""

    def is_target(self, module: str) -> bool:
        """Return whether the projection of this name, such as `model.layers.3.self_attn.q_proj`, has an adapter."""
        if any(f".{module}.weight".endswith(f".{target}") for target in self.target_parameters):
            return True
        if isinstance(self.target_modules, tuple):
            return any(f".{module}".endswith(f".{target}") for target in self.target_modules)
        return self.target_modules.lower() == ALL_LINEAR or bool(re.fullmatch(self.target_modules, module))


@dataclass(frozen=True)
class PeftTargets:
    """Names in the file of an adapter. Together, the two lists select all projections that have an adapter."""

    modules: Sequence[str]
    """Names, or ends of names, of projections."""
    parameters: Sequence[str]
    """Names of weights of projections."""


def read_peft_config(folder: Path) -> PeftConfig:
    """Return the configuration of the adapter in a folder. Raises EnvironmentProblemError if there is none, or if the
    adapter is not a plain LoRA; the error names the field."""
    file, written = folder / CONFIG, read_json_object(folder / CONFIG)
    if not written:
        raise EnvironmentProblemError(f"`{folder}` is not a peft adapter: it has no {CONFIG}", hint=_listed(folder))
    if written.get("peft_type") != "LORA":
        raise _not_plain("peft_type", written.get("peft_type"), file)
    if (initial := written.get("init_lora_weights", True)) not in _INITIAL_VALUES:
        raise EnvironmentProblemError(
            f"`init_lora_weights` in `{file}` is `{_shown(initial)}`, which changes the weights of the base too",
            hint="let peft convert the adapter: save it with `path_initial_model_for_weight_conversion`",
        )
    for name in sorted(written.keys() - READ - IGNORED.keys()):
        if written[name] not in (None, False, "none", [], {}):
            raise _not_plain(name, written[name], file)
    parameters = written.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(str(each).endswith(".weight") for each in parameters):
        raise _not_plain("target_parameters", parameters, file)  # such as fused experts, which have no `.weight`
    try:
        return _config(written)
    except (KeyError, TypeError, ValueError, re.error) as error:
        raise EnvironmentProblemError(
            f"`{file}` is not the configuration of an adapter: {type(error).__name__} {error}", hint=_listed(folder)
        ) from error


def _config(written: Mapping[str, Any]) -> PeftConfig:
    rank, alpha, targets, base = (
        written.get(name) for name in ("r", "lora_alpha", "target_modules", "base_model_name_or_path")
    )
    parameters = tuple(written.get("target_parameters") or ())
    if parameters and targets is None:
        targets = []
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not alpha > 0:
        raise ValueError(f"`r` is `{_shown(rank)}` and `lora_alpha` is `{_shown(alpha)}`, not above 0")
    if isinstance(targets, str):
        re.compile(targets)
    elif not isinstance(targets, list) or not (targets or parameters):
        raise ValueError(f"`target_modules` is `{_shown(targets)}`, not a list or a pattern of modules")
    named = targets if isinstance(targets, str) else tuple(str(target) for target in targets)
    saved = tuple(written.get("modules_to_save") or ())
    return PeftConfig(rank, alpha, named, parameters, saved, base and str(base))


def write_peft_config(folder: Path, lora: Lora, head: Head, targets: PeftTargets, base: str) -> None:
    """Write the file of an adapter. `base`: folder or hub id of the base. Raises OSError."""
    written = {
        "base_model_name_or_path": base,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": ["score"] if head == "value" else None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": list(targets.modules),
        "target_parameters": list(targets.parameters) or None,
        "task_type": "SEQ_CLS" if head == "value" else "CAUSAL_LM",
    }
    (folder / CONFIG).write_text(json.dumps(written, indent=2) + "\n", "utf-8")


def _not_plain(name: str, value: Any, file: Path) -> EnvironmentProblemError:
    return EnvironmentProblemError(
        f"`{name}` in `{file}` is `{_shown(value)}`: ppoctl reads plain LoRA adapters, without this setting",
        hint="merge the adapter into its base with peft (merge_and_unload, save_pretrained), and name that model",
    )


def _shown(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


def _listed(folder: Path) -> str:
    return f"ls -la {quoted(folder)}"
