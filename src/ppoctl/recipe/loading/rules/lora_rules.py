"""Rules about adapters (LoRA). They read only config.json."""

import difflib
import json
from collections.abc import Iterator, Sequence

from ppoctl.algorithms.role_model import RoleModel, model_of, trainable_of
from ppoctl.algorithms.roles import CRITIC, POLICY
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.models.convert.adapters import adapters, expert_projections, projection_of, projections
from ppoctl.models.convert.tensors import Placement
from ppoctl.models.lora import Lora
from ppoctl.models.shape import ModelShape
from ppoctl.recipe.schema import Recipe


def check_targets_exist(recipe: Recipe) -> Iterator[Finding]:
    for role, lora, model, shape in _adapted(recipe):
        adaptable = _adaptable(shape)
        unknown = [name for name in lora.targets or () if name not in adaptable and not _is_routed(name, shape)]
        if unknown or lora.targets == ():
            wrong = f"the model has no projection {_listed(unknown)}" if unknown else "no projection is a target"
            meant = [each for name in lora.targets or () for each in _meant(name, shape)]
            key: KeyPath = (role, "train", "lora", "targets")
            hint = _set_targets(key, meant or adaptable)
            yield conflict(f"{wrong}; {_CAN}{_listed(adaptable)}", (key, model.key), hint)


def check_targets_are_not_routed_experts(recipe: Recipe) -> Iterator[Finding]:
    for role, lora, model, shape in _adapted(recipe):
        adaptable, targets = _adaptable(shape), lora.targets or ()
        if refused := [name for name in targets if _is_routed(name, shape)]:
            key: KeyPath = (role, "train", "lora", "targets")
            yield conflict(
                f"routed experts and routers have no adapters, but targets name them: {_listed(refused)}. peft has "
                "no plain adapter for them, and merged experts would be nearly the whole model at each transfer; "
                f"{_CAN}{_listed(adaptable)}",
                (key, model.key),
                _set_targets(key, [name for name in targets if name in adaptable] or adaptable),
            )


def check_rank_fits_targets(recipe: Recipe) -> Iterator[Finding]:
    for role, lora, model, shape in _adapted(recipe):
        targets = (each for each in projections(shape) if lora.is_target(projection_of(each)))
        smallest = min(targets, key=_full_rank, default=None)
        if smallest is not None and lora.rank > _full_rank(smallest):
            key: KeyPath = (role, "train", "lora", "rank")
            outputs, inputs = smallest.shape
            yield conflict(
                f"`{projection_of(smallest)}` has {inputs} inputs and {outputs} outputs, so a rank above "
                f"{_full_rank(smallest)} adds nothing",
                (key, model.key),
                f"--set {dotted(key)}={_full_rank(smallest)}",
            )


def check_freeze_leaves_adapters(recipe: Recipe) -> Iterator[Finding]:
    for role, lora, model, shape in _adapted(recipe):
        has_targets = any(lora.is_target(projection_of(each)) for each in projections(shape))
        if has_targets and not adapters(shape, trainable_of(recipe, role)):
            yield conflict(
                f"no projection of the {role} has an adapter, because the patterns match the weights of all targets",
                ((role, "freeze"), (role, "train", "lora", "targets"), model.key),
                f"--set '{role}.freeze=[]'",
            )


def check_copied_layers_have_no_adapters(recipe: Recipe) -> Iterator[Finding]:
    copied = getattr(recipe.value_head, "layers_copied", 0)
    if copied and trainable_of(recipe, POLICY).lora is not None:
        key: KeyPath = (CRITIC, "layers_copied")
        yield conflict(
            "layers with adapters cannot be copied for a value head",
            (key, (POLICY, "train", "lora", "rank")),
            f"--set {dotted(key)}=0",
        )


_CAN = "the projections that can have adapters are "


def _adapted(recipe: Recipe) -> Iterator[tuple[str, Lora, RoleModel, ModelShape]]:
    """Yield each role with adapters, and its model. A model that is not on this machine is skipped."""
    for role in recipe.trained:
        model, lora = model_of(recipe, role), trainable_of(recipe, role).lora
        if lora is not None and (shape := model.shape) is not None:
            yield role, lora, model, shape


def _adaptable(shape: ModelShape) -> list[str]:
    """Return the names of the projections that can have adapters."""
    return list(dict.fromkeys(map(projection_of, projections(shape))))


_ROUTED = ("experts", "gate_up_proj", "gate", "router")
"""Names of routed experts and routers in transformers, vLLM and Megatron-Core."""


def _is_routed(name: str, shape: ModelShape) -> bool:
    """Return whether a target means only routed experts or routers."""
    if shape.experts is None or name in _adaptable(shape):
        return False
    return name in expert_projections(shape) or not {*_ROUTED}.isdisjoint(name.split("."))


def _meant(name: str, shape: ModelShape) -> list[str]:
    """Return the projections that the target `name` means: itself, those that Megatron fuses under this name, or one
    with a similar name."""
    if _is_routed(name, shape):
        return []
    adaptable = _adaptable(shape)
    fused = {projection_of(each) for each in projections(shape) if each.parameter.split(".")[-2] == name}
    return [each for each in adaptable if each in fused] or difflib.get_close_matches(name, adaptable, 1)


def _full_rank(placement: Placement) -> int:
    return min(placement.shape)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _set_targets(key: KeyPath, names: Sequence[str]) -> str:
    return f"--set '{dotted(key)}={json.dumps(list(dict.fromkeys(names)))}'"
