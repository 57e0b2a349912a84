"""Rules about the part of a model that trains. They read only config.json."""

import difflib
import fnmatch
import re
from collections.abc import Iterator

from ppoctl.algorithms.role_model import RoleModel, model_in, model_of, trainable_of
from ppoctl.algorithms.roles import POLICY, head_of
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath
from ppoctl.models.convert.tensors import parameter_names
from ppoctl.models.head import VALUE_HEAD_PREFIX
from ppoctl.models.shape import ModelShape
from ppoctl.recipe.loading.explain import as_toml
from ppoctl.recipe.schema import Recipe


def check_top_layers(recipe: Recipe) -> Iterator[Finding]:
    for role, model, shape in _partly_trained(recipe):
        top_layers = trainable_of(recipe, role).top_layers
        if top_layers is not None and top_layers > shape.num_layers:
            key: KeyPath = (role, "train", "top_layers")
            yield conflict(
                f"the model has only {shape.num_layers} layers",
                (key, model.key),
                f"--set {'.'.join(key)}={shape.num_layers}",
            )


def check_freeze_patterns(recipe: Recipe) -> Iterator[Finding]:
    for role, model, shape in _partly_trained(recipe):
        names = _names(recipe, role, shape)
        for pattern in trainable_of(recipe, role).freeze:
            if _has_value_head(recipe, role) and pattern.startswith(VALUE_HEAD_PREFIX):
                continue
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                # Layers and experts have the same names, so the nearest names are those of one layer.
                kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
                nearest = difflib.get_close_matches(re.sub(r"\.\d+\.", ".*.", pattern), kinds, cutoff=0.0)
                yield conflict(
                    f"no parameter has a name like `{pattern}`; the nearest names are "
                    + ", ".join(f"`{name}`" for name in nearest),
                    ((role, "freeze"), model.key),
                    f"--set '{role}.freeze={as_toml([nearest[0]])}'",
                )


def check_experts_freeze_together(recipe: Recipe) -> Iterator[Finding]:
    """Check that a pattern freezes all experts of a layer or none: a saved state has all of them in one tensor. A
    state of adapters has no experts."""
    for role, model, shape in _partly_trained(recipe):
        if trainable_of(recipe, role).lora is not None:
            continue
        experts = [name for name in parameter_names(shape, head_of(role)) if _EXPERT in name]
        for pattern in trainable_of(recipe, role).freeze:
            frozen = {name for name in experts if fnmatch.fnmatchcase(name, pattern)}
            alike = {_without_expert(name) for name in frozen}
            if part := [name for name in experts if _without_expert(name) in alike and name not in frozen]:
                general = re.sub(rf"(?<={re.escape(_EXPERT)})[^.]*", "*", pattern)
                yield conflict(
                    f"`{pattern}` freezes some experts of a layer, but not `{part[0]}`, and a saved state has the "
                    "experts of a layer in one tensor",
                    ((role, "freeze"), model.key),
                    f"--set '{role}.freeze={as_toml([general])}'",
                )


def check_something_trains(recipe: Recipe) -> Iterator[Finding]:
    for role, model, shape in _partly_trained(recipe):
        described = model_in(recipe, role, shape)
        if described.trainable.lora is None and not any(map(described.trains, _names(recipe, role, shape))):
            yield conflict(
                f"no parameter of the {role} trains", ((role, "freeze"), model.key), f"--set '{role}.freeze=[]'"
            )


_EXPERT = ".local_experts."
"""Before the number of an expert in a name."""


def _partly_trained(recipe: Recipe) -> Iterator[tuple[str, RoleModel, ModelShape]]:
    """Yield each role of which a part trains, with its model. A model that is not on this machine is skipped."""
    for role in recipe.trained:
        model = model_of(recipe, role)
        if not trainable_of(recipe, role).is_all and (shape := model.shape) is not None:
            yield role, model, shape


def _without_expert(name: str) -> str:
    return re.sub(rf"(?<={re.escape(_EXPERT)})\d+", "*", name)


def _has_value_head(recipe: Recipe, role: str) -> bool:
    return role == POLICY and recipe.value_head is not None


def _names(recipe: Recipe, role: str, shape: ModelShape) -> list[str]:
    """Return the names of the role's parameters, of a value head on the policy's model only the last layer."""
    of_value_head = [f"{VALUE_HEAD_PREFIX}output_layer.weight"] if _has_value_head(recipe, role) else []
    return [*parameter_names(shape, head_of(role)), *of_value_head]
