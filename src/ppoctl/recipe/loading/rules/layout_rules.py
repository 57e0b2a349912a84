"""Rules about parallel layouts that the model does not support. They read only config.json and start no process."""

import re
from collections.abc import Iterator
from math import gcd

from ppoctl.algorithms.role_model import RoleModel, model_of, own_models, reward_model_of, reward_models
from ppoctl.algorithms.roles import POLICY
from ppoctl.core.errors import quoted
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.shape import ModelShape
from ppoctl.recipe.loading.explain import as_toml
from ppoctl.recipe.parallel import layouts
from ppoctl.recipe.schema import Recipe

_END_KEYS = ("first_stage_layers", "last_stage_layers")


def check_tensor_parallel(recipe: Recipe) -> Iterator[Finding]:
    layouts_written: list[tuple[KeyPath, int, RoleModel]] = [
        ((*role, "parallel", "tensor"), table.tensor, model) for role, table, model in _laid_out(recipe)
    ]
    for key, tensor, model in [
        *layouts_written,
        (("generator", "tensor"), recipe.generator.tensor, model_of(recipe, POLICY)),
    ]:
        dimensions = {} if model.shape is None else _tensor_parallel_dimensions(model.shape)
        for name, count in dimensions.items():
            if count % tensor:
                fits = max(
                    size for size in range(1, tensor + 1) if not any(length % size for length in dimensions.values())
                )
                yield conflict(
                    f"{tensor} tensor ranks do not divide the model's {count} {name}",
                    (key, model.key),
                    _with_key(recipe, key, fits),
                )
                break


def check_pipeline_layers(recipe: Recipe) -> Iterator[Finding]:
    for role, table, model, shape in _with_shapes(recipe):
        layers = shape.num_layers
        message = _pipeline_problem(table, layers)
        if message is None:
            continue
        ends = [key for key in _END_KEYS if getattr(table, key) is not None]
        keys = tuple((*role, "parallel", key) for key in (*ends, "pipeline"))
        fits = max(size for size in range(1, table.pipeline + 1) if layers % size == 0)
        hint = None if ends else _with_key(recipe, (*role, "parallel", "pipeline"), fits)
        yield conflict(message, (*keys, model.key), hint)


def check_offload_needs_colocation(recipe: Recipe) -> Iterator[Finding]:
    if recipe.cluster.offload and recipe.cluster.placement == "apart":
        yield conflict(
            "each process has its own device, so nothing would use the memory that offloading frees",
            (("cluster", "offload"), ("cluster", "placement")),
            "--set cluster.offload=[]",
        )


def check_broadcast_needs_separate_devices(recipe: Recipe) -> Iterator[Finding]:
    if recipe.cluster.weights == "broadcast" and recipe.cluster.placement == "colocated":
        yield conflict(
            "a broadcast allows one process per device, but colocated roles share a device",
            (("cluster", "weights"), ("cluster", "placement")),
            "--set cluster.weights=shared",
        )


def check_engines_on_one_gpu(recipe: Recipe) -> Iterator[Finding]:
    table, several = recipe.generator, ("generator", "engines_per_gpu")
    if table.engines_per_gpu == 1:
        return
    if table.tensor > 1:
        yield conflict(
            "an engine that several GPUs compute shares none of them with another engine",
            (several, ("generator", "tensor")),
            "--set generator.engines_per_gpu=1",
        )
    if recipe.cluster.weights == "broadcast":
        yield conflict(
            "a broadcast allows one process per device, but engines share one",
            (several, ("cluster", "weights")),
            "--set cluster.weights=shared",
        )


def check_fused_kernels(recipe: Recipe) -> Iterator[Finding]:
    for role, table in recipe.trained.items():
        model = model_of(recipe, role)
        if table.kernels == "fused" and model.shape is not None and model.shape.activation != "silu":
            yield conflict(
                f"fused kernels exist for SiLU, but the model has `{model.shape.activation}`",
                ((role, "kernels"), model.key),
                f"--set {role}.kernels=plain",
            )


def check_ray_address(recipe: Recipe) -> Iterator[Finding]:
    address = recipe.cluster.ray_address
    if address is not None and re.fullmatch(r"[^\s/]+:\d+", address) is None:
        yield conflict(
            f"`{address}` is not `host:port`, the address that `ray start --head` prints",
            (("cluster", "ray_address"),),
            "--set cluster.ray_address=HOST:6379",
        )


def check_end_layers(recipe: Recipe) -> Iterator[Finding]:
    for role, table in _written(recipe):
        for key in _END_KEYS:
            if getattr(table, key) is not None and table.pipeline == 1:
                yield conflict(
                    "a single pipeline rank has all layers",
                    ((*role, "parallel", key), (*role, "parallel", "pipeline")),
                )


def check_interleaving_needs_pipeline(recipe: Recipe) -> Iterator[Finding]:
    for role, table in _written(recipe):
        if table.stages_per_rank > 1 and table.pipeline == 1:
            yield conflict(
                "interleaving needs more than one pipeline rank",
                ((*role, "parallel", "stages_per_rank"), (*role, "parallel", "pipeline")),
                f"--set {dotted(role)}.parallel.stages_per_rank=1",
            )


def check_interleaved_layers(recipe: Recipe) -> Iterator[Finding]:
    for role, table, model, shape in _with_shapes(recipe):
        if _pipeline_problem(table, shape.num_layers) is not None:
            continue
        for count in _layers_of_ranks(table, shape.num_layers):
            if count % table.stages_per_rank:
                yield conflict(
                    f"{count} layers of a pipeline rank do not divide into {table.stages_per_rank} stages",
                    ((*role, "parallel", "stages_per_rank"), (*role, "parallel", "pipeline"), model.key),
                )
                break


def check_sequence_parallel(recipe: Recipe) -> Iterator[Finding]:
    for role, table in _written(recipe):
        if table.sequence and table.tensor == 1:
            yield conflict(
                "sequence parallelism splits over the tensor ranks, but there is only one",
                ((*role, "parallel", "sequence"), (*role, "parallel", "tensor")),
                f"--set {dotted(role)}.parallel.sequence=false",
            )


def check_reshardable(recipe: Recipe) -> Iterator[Finding]:
    roles = layouts(recipe)
    if recipe.checkpoint.reshardable == "dp" and not any(table.distributed_optimizer for table in roles.values()):
        yield conflict(
            "no trained role has a distributed optimizer, and other optimizers are always saved for every layout",
            (("checkpoint", "reshardable"),),
            "--set checkpoint.reshardable=full",
        )


def check_model_has_experts(recipe: Recipe) -> Iterator[Finding]:
    for role, table, model, shape in _with_shapes(recipe):
        key = "expert" if table.expert > 1 else "expert_tensor"
        if shape.experts is None and table.expert_ranks > 1:
            yield conflict(
                f"the model has no experts for {getattr(table, key)} ranks to share",
                ((*role, "parallel", key), model.key),
                _with_key(recipe, (*role, "parallel", key), 1),
            )


def check_expert_count(recipe: Recipe) -> Iterator[Finding]:
    for role, table, model, shape in _with_shapes(recipe):
        if shape.experts is None:
            continue
        sizes = (
            ("expert", "expert ranks", shape.experts.count, "experts of a layer"),
            ("expert_tensor", "expert tensor ranks", shape.experts.ffn_hidden_size, "columns of an expert"),
        )
        for key, ranks, count, what in sizes:
            size = getattr(table, key)
            if count % size:
                fits = max(fit for fit in range(1, size + 1) if count % fit == 0)
                yield conflict(
                    f"{size} {ranks} do not divide the model's {count} {what}",
                    ((*role, "parallel", key), model.key),
                    _with_key(recipe, (*role, "parallel", key), fits),
                )


def check_expert_ranks(recipe: Recipe) -> Iterator[Finding]:
    for role, table in _written(recipe):
        if table.stage_ranks % table.expert_ranks:
            keys = ("expert", "expert_tensor", "tensor", "context", "data")
            # The smallest factor of the data ranks that makes the expert ranks divide all ranks.
            missing = table.expert_ranks // gcd(table.expert_ranks, table.stage_ranks)
            yield conflict(
                f"{table.expert} expert ranks of {table.expert_tensor} each do not divide the {table.tensor} tensor "
                f"x {table.context} context x {table.data} data ranks that they consist of",
                tuple((*role, "parallel", key) for key in keys),
                f"--set {dotted(role)}.parallel.data={table.data * missing}",
            )


def check_experts_need_sequence_parallel(recipe: Recipe) -> Iterator[Finding]:
    """Check that experts on several tensor ranks use sequence parallelism.

    Without sequence parallelism, each tensor rank would send every token to the experts, and the gradient of a token
    would be counted several times.
    """
    for role, table, model, shape in _with_shapes(recipe):
        if shape.experts is not None and table.tensor > 1 and not table.sequence:
            yield conflict(
                f"the model has experts: without sequence parallelism, {table.tensor} tensor ranks would send "
                f"them the "
                "same tokens",
                ((*role, "parallel", "sequence"), (*role, "parallel", "tensor"), model.key),
                _with_key(recipe, (*role, "parallel", "sequence"), value=True),
            )


def _with_key(recipe: Recipe, key: KeyPath, value: object) -> str:
    """Return the `--set` option that changes one key of a layout.

    If another role has the policy's layout, the option writes a separate table for that role, with all keys that
    differ from their defaults.
    """
    role = key[0]
    if role == POLICY or role not in recipe.trained or recipe.trained[role].parallel is not None:
        return f"--set {'.'.join(key)}={as_toml(value)}"
    usual = ParallelTable()
    table = layouts(recipe)[role].model_copy(update={key[-1]: value}).model_dump()
    unusual = {name: number for name, number in table.items() if number != getattr(usual, name)} or {key[-1]: value}
    pairs = ", ".join(f"{name}={as_toml(number)}" for name, number in unusual.items())
    return f"--set {quoted(f'{role}.parallel={{{pairs}}}')}"


def _written(recipe: Recipe) -> Iterator[tuple[KeyPath, ParallelTable]]:
    """Yield the parallel tables that the recipe writes, each with the key of its role.

    A role with the policy's layout is skipped, because its layout would cause the same problems again.
    """
    for role, trained in recipe.trained.items():
        table = getattr(trained, "parallel", None)
        if table is not None:
            yield (role,), table
    try:
        models = reward_models(recipe)
    except AttributeError:  # the reward table has errors; the other roles are still checked
        models = {}
    yield from ((key, scorer.parallel) for key, scorer in models.items() if scorer.parallel is not None)


def _laid_out(recipe: Recipe) -> Iterator[tuple[KeyPath, ParallelTable, RoleModel]]:
    """Yield the parallel tables that the recipe writes, each with its role and the model of the role.

    If a role with its own model has the policy's layout, the policy's table is yielded for that role too.
    """
    written = dict(_written(recipe))
    for role in recipe.trained if (POLICY,) in written else ():
        if role in own_models(recipe):
            written.setdefault((role,), written[(POLICY,)])
    for key, table in written.items():
        yield key, table, reward_model_of(recipe, key) if key[0] == "reward" else model_of(recipe, key[0])


def _with_shapes(recipe: Recipe) -> Iterator[tuple[KeyPath, ParallelTable, RoleModel, ModelShape]]:
    """Yield the tables of `_laid_out` with the architecture of each model. A model that is not on this machine is
    skipped."""
    for role, table, model in _laid_out(recipe):
        if (shape := model.shape) is not None:
            yield role, table, model, shape


def _tensor_parallel_dimensions(shape: ModelShape) -> dict[str, int]:
    """Return name -> size of each dimension that tensor ranks split. Experts have separate ranks."""
    parts = {"attention heads": shape.num_heads, "key/value heads": shape.num_kv_heads}
    if shape.experts is None:
        parts["columns of an MLP"] = shape.ffn_hidden_size
    return {**parts, "rows of the embedding, padded": shape.padded_vocab_size}


def _ends(table: ParallelTable) -> list[int]:
    return [count for count in (getattr(table, key) for key in _END_KEYS) if count is not None]


def _pipeline_problem(table: ParallelTable, layers: int) -> str | None:
    if table.pipeline == 1:
        return None
    ends = _ends(table)
    rest, ranks = layers - sum(ends), table.pipeline - len(ends)
    if (ranks == 0 and rest == 0) or (ranks > 0 and rest > 0 and rest % ranks == 0):
        return None
    written = f", {sum(ends)} of them set for the first and last rank," if ends else ""
    return f"the model's {layers} layers{written} do not divide over {table.pipeline} pipeline ranks"


def _layers_of_ranks(table: ParallelTable, layers: int) -> list[int]:
    """Return the layers of the first and last rank as written, and of one rank between them, if the layers divide."""
    ends = _ends(table)
    between = table.pipeline - len(ends)
    return [*ends, (layers - sum(ends)) // between] if between else ends
