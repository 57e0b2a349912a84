"""Settings that the search of `plan --fit` may change, and the recipe with them. Keys that are not listed here keep
their values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

from ppoctl.algorithms.role_model import reward_models
from ppoctl.algorithms.role_table import BySequences, ByTokens, Recompute, TrainedTable
from ppoctl.algorithms.roles import POLICY
from ppoctl.core.key_path import KeyPath
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.trainable_tables import AdaptersTable, TopLayersTable
from ppoctl.recipe.parallel import layouts
from ppoctl.recipe.schema import GeneratorTable, Recipe

TrainedPartTable = TopLayersTable | AdaptersTable | None


@dataclass(frozen=True)
class RoleChoice:
    """Settings of one trained role."""

    layout: ParallelTable
    train: TrainedPartTable
    optimizer_on: Literal["device", "cpu"]
    recompute: Recompute
    batching: BySequences | ByTokens

    def table(self, table: TrainedTable, parallel: ParallelTable | None) -> TrainedTable:
        """Return the table of the role with these settings. `parallel` is its layout as the recipe writes it."""
        return table.model_copy(
            update={
                "parallel": parallel,
                "train": self.train,
                "optimizer": table.optimizer.model_copy(update={"on": self.optimizer_on}),
                "recompute": self.recompute,
                "batching": self.batching,
            }
        )


@dataclass(frozen=True)
class FitCandidate:
    """Settings of a whole recipe."""

    roles: Mapping[str, RoleChoice]
    generator: GeneratorTable
    offload: tuple[str, ...]

    def with_role(self, role: str, choice: RoleChoice) -> "FitCandidate":
        """Return the settings with another choice for a role."""
        return replace(self, roles={**self.roles, role: choice})


def choice_of(recipe: Recipe, role: str) -> RoleChoice:
    """Return the settings of a role as they are in the recipe."""
    table = recipe.trained[role]
    return RoleChoice(layouts(recipe)[role], table.train, table.optimizer.on, table.recompute, table.batching)


def candidate_of(recipe: Recipe) -> FitCandidate:
    """Return the settings as they are in the recipe."""
    roles = {role: choice_of(recipe, role) for role in recipe.trained}
    return FitCandidate(roles, recipe.generator, recipe.cluster.offload)


def settled(recipe: Recipe, candidate: FitCandidate) -> Recipe:
    """Return the recipe with these settings. The rules of recipes are not checked."""
    update: dict[str, Any] = {"generator": candidate.generator}
    policy = candidate.roles[POLICY].layout
    for role, choice in candidate.roles.items():
        table = recipe.trained[role]
        usual = ParallelTable() if role == POLICY else policy
        parallel = None if table.parallel is None and choice.layout == usual else choice.layout
        update[role] = choice.table(table, parallel)
    update["cluster"] = recipe.cluster.model_copy(update={"offload": candidate.offload})
    shards = any(choice.layout.distributed_optimizer for choice in candidate.roles.values())
    if not shards:  # the rules reject "dp" without a distributed optimizer
        update["checkpoint"] = recipe.checkpoint.model_copy(update={"reshardable": "full"})
    return recipe.model_copy(update=update)


def on_shared_gpus(recipe: Recipe, gpus: int) -> Recipe:
    """Return the recipe with roles that share this number of GPUs, each role with data ranks only, and one engine on
    each GPU. A reward model keeps its layout if it has at most as many ranks."""
    cluster = {"placement": "colocated"}
    if recipe.cluster.weights == "broadcast":  # a broadcast requires roles with separate devices
        cluster["weights"] = "shared"
    changed = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update=cluster)})
    for key, table in reward_models(recipe).items():
        if (table.parallel or ParallelTable()).world_size > gpus:
            changed = _with_table(changed, (*key, "parallel"), ParallelTable(data=gpus))
    roles = {
        role: replace(choice_of(recipe, role), layout=split_layout(layouts(recipe)[role], gpus, 1, 1, 1))
        for role in recipe.trained
    }
    engines = recipe.generator.model_copy(update={"engines": gpus, "tensor": 1})
    return settled(changed, FitCandidate(roles, engines, recipe.cluster.offload if gpus else ()))


def split_layout(own: ParallelTable, gpus: int, tensor: int, pipeline: int, context: int) -> ParallelTable:
    """Return the layout on this number of GPUs with these ranks; all other ranks are data ranks. Experts keep as many
    of their ranks as divide the ranks of a pipeline stage."""
    data = gpus // (tensor * pipeline * context)
    return ParallelTable(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        data=data,
        sequence=tensor > 1,
        distributed_optimizer=data * context > 1,
        expert=gcd(own.expert, gpus // pipeline),
    )


def _with_table(value: Any, path: KeyPath, table: ParallelTable) -> Any:
    """Return the table or mapping with another table at this path."""
    if not path:
        return table
    first, *rest = path
    if isinstance(value, Mapping):
        return {**value, first: _with_table(value[first], tuple(rest), table)}
    return value.model_copy(update={first: _with_table(getattr(value, first), tuple(rest), table)})


def changes(recipe: Recipe, changed: Recipe) -> dict[KeyPath, Any]:
    """Return key -> new value, as TOML values, for each key of `changed` that this module can change and that differs
    from the recipe. A layout is one value: its missing keys are 1 or off."""
    before, after = dict(_values(recipe)), dict(_values(changed))
    return {path: value for path, value in after.items() if value != before.get(path)}


def _values(recipe: Recipe) -> Iterator[tuple[KeyPath, Any]]:
    for role, table in recipe.trained.items():
        if table.parallel is not None:
            yield (role, "parallel"), table.parallel.model_dump(exclude_defaults=True)
        yield (role, "recompute"), table.recompute
        for name, value in table.batching.model_dump().items():
            yield (role, "batching", name), value
        yield (role, "optimizer", "on"), table.optimizer.on
        if table.train is not None:
            yield (role, "train"), table.train.model_dump(mode="json", exclude_unset=True)
    for name in ("engines", "tensor", "gpu_memory_frac", "compile"):
        yield ("generator", name), getattr(recipe.generator, name)
    yield ("cluster", "placement"), recipe.cluster.placement
    yield ("cluster", "weights"), recipe.cluster.weights
    yield ("cluster", "offload"), list(recipe.cluster.offload)
    yield ("checkpoint", "reshardable"), recipe.checkpoint.reshardable
    for key, scorer in reward_models(recipe).items():
        if scorer.parallel is not None:
            yield (*key, "parallel"), scorer.parallel.model_dump(exclude_defaults=True)
