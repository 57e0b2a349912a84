"""Layouts of the tests of Megatron ranks, and steps under a layout, which are compared with those of one process.

Adapters are read from the tensors of saved states: with beta1 = 0, the first moment of Adam is the clipped gradient.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lora_lab
import megatron_lab as lab
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica
from rank_pool import RankPool
from torch import Tensor

from ppoctl.algorithms.role_table import BySequences, ByTokens
from ppoctl.algorithms.stages.objective import Terms
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron import checkpoint
from ppoctl.engines.megatron.cpu_adaptation import megatron_device
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.trainer import MegatronActor, MegatronCritic, MegatronTrainer

SHARDED = " sharded"
LAYOUTS = {
    "alone": ParallelTable(),
    "DP2": ParallelTable(data=2),
    "DP3": ParallelTable(data=3),
    "TP2": ParallelTable(tensor=2),
    "TP2 sequence": ParallelTable(tensor=2, sequence=True),
    "TP2, experts split": ParallelTable(tensor=2, sequence=True, expert_tensor=2),
    "PP2": ParallelTable(pipeline=2),
    "PP2 uneven": ParallelTable(pipeline=2, first_stage_layers=1),
    "PP2 interleaved": ParallelTable(pipeline=2, stages_per_rank=2),
    "CP2": ParallelTable(context=2),
    "CP3": ParallelTable(context=3),
    "EP2": ParallelTable(data=2, expert=2),
    "EP4": ParallelTable(data=4, expert=4),
    "DP2 TP2": ParallelTable(data=2, tensor=2),
    "DP2 TP2 sequence": ParallelTable(data=2, tensor=2, sequence=True),
    "DP2 PP2": ParallelTable(data=2, pipeline=2),
    "DP2 PP2 interleaved": ParallelTable(data=2, pipeline=2, stages_per_rank=2),
    "TP2 PP2": ParallelTable(tensor=2, pipeline=2, sequence=True),
    "TP2 PP2 interleaved": ParallelTable(tensor=2, pipeline=2, stages_per_rank=2, sequence=True),
    "CP2 DP2": ParallelTable(context=2, data=2),
    "CP2 TP2": ParallelTable(context=2, tensor=2, sequence=True),
    "CP2 TP2 without sequence": ParallelTable(context=2, tensor=2),
    "CP2 TP2, experts split": ParallelTable(context=2, tensor=2, sequence=True, expert_tensor=2),
    "CP2 PP2": ParallelTable(context=2, pipeline=2),
    "CP2 PP2 interleaved": ParallelTable(context=2, pipeline=2, stages_per_rank=2),
    "EP2 DP2": ParallelTable(data=4, expert=2),
    "TP2 EP2": ParallelTable(tensor=2, sequence=True, expert=2),
    "TP2 DP2 EP2": ParallelTable(tensor=2, data=2, sequence=True, expert=2),
    "TP2 DP2 EP2, experts split": ParallelTable(tensor=2, data=2, sequence=True, expert=2, expert_tensor=2),
    "PP2 EP2": ParallelTable(pipeline=2, data=2, expert=2),
    "PP2 EP2 interleaved": ParallelTable(pipeline=2, data=2, expert=2, stages_per_rank=2),
    "CP2 EP2": ParallelTable(context=2, expert=2),
    "CP2 DP2 EP4": ParallelTable(context=2, data=2, expert=4),
}
"""Layouts by name. A name may end with `SHARDED`: with a distributed optimizer."""

GRADIENT_GAP = 1e-5
"""Relative tolerance of the gradient norm."""
CHANGE_GAP = 1e-3
"""Relative tolerance of the change of the weights over three steps."""
LOSS_GAP = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
"""Relative tolerance of the loss."""
TEMPERATURE = 0.8
STEP = replace(lab.STEP, lr=1e-2, grad_clip=0.5, weight_decay=0.1, eps=1e-6)
"""Moves weights by far more than 1e-3, with active gradient clipping. The gradient of a key bias is 0 up to rounding:
`eps` keeps Adam from amplifying it to a full step."""
LOOK = replace(STEP, beta1=0.0)
MOMENT = "optimizer.state.exp_avg."
ROWS = ((0, 1, 2, 3, 4), (2, 0), (1, 4, 2), (3, 0, 2, 1))
"""Rows of four minibatches."""

Steps = dict[str, dict[str, Tensor]]


def parallel_of(kind: str, layout: str) -> ParallelTable:
    """Return a layout for a model. The first stage of a model with an odd number of layers has one layer."""
    found = LAYOUTS[layout.removesuffix(SHARDED)]
    if lab.num_layers(kind) % found.pipeline:
        found = found.model_copy(update={"first_stage_layers": 1})
    return found.model_copy(update={"distributed_optimizer": layout.endswith(SHARDED)})


def settings(folder: Path, role: str, parallel: ParallelTable, dtype: torch.dtype = torch.float32) -> TrainerSettings:
    return TrainerSettings(
        role=role,
        model=str(folder),
        dtype=dtype,
        batching=ByTokens(max_tokens_per_microbatch=20, logits_chunk_tokens=5),
        parallel=parallel,
    )


Model = Callable[[str], Path]


def settings_of(model: Model, kind: str, layout: str, role: str = "actor", **changes: object) -> TrainerSettings:
    """Return settings of a model by kind, under a layout by name."""
    return replace(settings(model(kind), role, parallel_of(kind, layout)), **changes)  # type: ignore[arg-type]


def set_microbatches(rank: MegatronRank, batching: BySequences | ByTokens) -> None:
    """Change how the same processes split rows into microbatches."""
    rank.settings = replace(rank.settings, batching=batching)


def trainer(pool: RankPool, made_from: TrainerSettings) -> MegatronTrainer:
    pool.open(made_from)
    return {"actor": MegatronActor, "critic": MegatronCritic}[made_from.role](made_from, pool)


def started(pool: RankPool, made_from: TrainerSettings) -> MegatronTrainer:
    made = trainer(pool, made_from)
    made.start()
    return made


def actor_of(pool: RankPool, made_from: TrainerSettings) -> MegatronActor:
    """Return an actor that is not started."""
    made = trainer(pool, made_from)
    assert isinstance(made, MegatronActor)
    return made


def started_actor(pool: RankPool, made_from: TrainerSettings) -> MegatronActor:
    made = actor_of(pool, made_from)
    made.start()
    return made


def weights_of(pool: RankPool) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pool.tensors()}


def policy_objective(rollouts: lab.TrainerBatch) -> Terms:
    return lab.policy_objective(rollouts, needs_entropy=True, temperature=TEMPERATURE)


def objective_of(role: str, rollouts: lab.TrainerBatch) -> Terms:
    return policy_objective(rollouts) if role == "actor" else lab.value_objective(rollouts)


def steps_of(pool: RankPool, trained: MegatronTrainer) -> Steps:
    """Return a gradient, the change of the weights, and the reported values: of the first and of all of three steps.
    With adapters these are their matrices, the gradient is that of the third of four steps, and the initial matrices
    are returned too: a critic has no gradient below its head in the first step, and none of A in the second."""
    made_from, rollouts = trained.settings, lab.make_rollouts()
    has_adapters = made_from.trainable.lora is not None

    def weights() -> dict[str, Tensor]:
        return adapters() if has_adapters else weights_of(pool)

    def adapters(prefix: str = "") -> dict[str, Tensor]:
        found = state_of(pool)
        return {each.name: found[prefix + each.parameter] for each in lora_lab.placements_of(trained)}

    rows, steps, early = (
        (ROWS, (STEP, STEP, LOOK, STEP), 3) if has_adapters else ((ROWS[0], *ROWS[2:]), 3 * (STEP,), 1)
    )
    minibatches = [lab.minibatch(rollouts, part, step=step) for part, step in zip(rows, steps, strict=True)]
    objective, initial = objective_of(made_from.role, rollouts), weights()
    results = list(trained.update(rollouts, minibatches[:early], objective))
    gradient = adapters(MOMENT) if has_adapters else pool.gradients()
    results += trained.update(rollouts, minibatches[early:], objective)
    after = weights()
    reported = {
        f"{number} {name}": torch.as_tensor(value)
        for number, result in enumerate(results)
        for name, value in (vars(result) | vars(result.outputs)).items()
        if name not in ("outputs", "merge_error") and value is not None
    }
    change = {name: after[name] - initial[name] for name in initial}
    found = {"gradient": gradient, "change": change, "reported": reported}
    return {**found, "initial": initial} if has_adapters else found


def state_of(pool: RankPool) -> dict[str, Tensor]:
    """Return the tensors that a saved state would have, without files."""
    found: dict[str, Tensor] = {}
    for name, shape, offset, part in (piece for rank in pool.examine(pieces) for piece in rank):
        whole = found.setdefault(name, torch.full(shape, torch.nan))
        whole[tuple(slice(first, first + size) for first, size in zip(offset, part.shape, strict=True))] = part
    return found


def pieces(rank: MegatronRank) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    """Return this rank's pieces of a saved state: name and shape of the whole, place in it, tensor."""
    with megatron_device():
        state = checkpoint._sharded_state(rank._trained(), rank.settings.reshardable, is_loading=False)
        apply_factories(state)
    sharded = [
        each for each in nested_values(state) if isinstance(each, ShardedTensor) and is_main_replica(each.replica_id)
    ]
    return [(each.key, each.global_shape, each.global_offset, each.data.detach().clone()) for each in sharded]


def assert_close(found: Steps, expected: Steps, bounds: dict[str, float]) -> None:
    """Compare what has a bound."""
    for what, bound in bounds.items():
        found_gap = gap(found[what], expected[what])
        assert found_gap < bound, f"{what}: {found_gap}"


def resumes_under_layout(
    pool: RankPool,
    saved_under: TrainerSettings,
    loaded_under: TrainerSettings,
    states: Path,
    loss_gap: float | None = None,
) -> float:
    """Save after one step under a layout and load under another: weights must be bit-equal, and the next step must
    have an equal loss, up to this relative gap. Return the gap between its change of the weights and that of an
    uninterrupted run."""
    rollouts = lab.make_rollouts()
    objective = lab.policy_objective(rollouts, temperature=TEMPERATURE)
    minibatches = [lab.minibatch(rollouts, step=STEP)]
    first = started(pool, saved_under)
    first.update(rollouts, minibatches, objective)
    lab.save(first, states)
    saved = weights_of(pool)
    [expected] = first.update(rollouts, minibatches, objective)
    after = dict(pool.tensors())

    second = trainer(pool, loaded_under)
    second.load(states)
    lab.assert_same(dict(pool.tensors()), saved)
    [found] = second.update(rollouts, minibatches, objective)
    allowed = LOSS_GAP[saved_under.dtype] if loss_gap is None else loss_gap
    assert abs(found.loss - expected.loss) <= allowed * abs(expected.loss)
    return gap_of_changes(saved, dict(pool.tensors()), after)


def gap_of_changes(before: dict[str, Tensor], found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the gap between two changes of the same weights."""
    return gap(*({name: (after[name] - before[name]).float() for name in before} for after in (found, expected)))


def gap(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference divided by the norm of the expected tensors, over all tensors together."""
    assert found.keys() == expected.keys()
    off = sum(float((found[name].double() - expected[name]).square().sum()) for name in expected)
    whole = sum(float(expected[name].double().square().sum()) for name in expected)
    return (off / whole) ** 0.5
