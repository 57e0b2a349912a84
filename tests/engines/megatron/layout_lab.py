"""Three steps under a layout, compared with three steps under another."""

from dataclasses import replace
from pathlib import Path

import megatron_lab as lab
import torch
from rank_pool import RankPool
from torch import Tensor

from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.settings import TrainerSettings
from ppoctl.engines.megatron.trainer import MegatronActor, MegatronCritic, MegatronTrainer
from ppoctl.recipe.schema import BySequences, ByTokens, ParallelTable
from ppoctl.stages.objective import Terms

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


def settings(folder: Path, role: str, parallel: ParallelTable, dtype: torch.dtype = torch.float32) -> TrainerSettings:
    return TrainerSettings(
        role=role,
        model=str(folder),
        dtype=dtype,
        batching=ByTokens(max_tokens_per_microbatch=20, logits_chunk_tokens=5),
        parallel=parallel,
    )


def set_microbatches(rank: MegatronRank, batching: BySequences | ByTokens) -> None:
    """Change how the same processes split rows into microbatches."""
    rank.settings = replace(rank.settings, batching=batching)


def trainer(pool: RankPool, made_from: TrainerSettings) -> MegatronTrainer:
    pool.open(made_from)
    return {"actor": MegatronActor, "critic": MegatronCritic}[made_from.role](made_from, pool)


def policy_objective(rollouts: lab.TrainerBatch) -> Terms:
    return lab.policy_objective(rollouts, needs_entropy=True, temperature=TEMPERATURE)


def three_steps(pool: RankPool, made_from: TrainerSettings) -> dict[str, dict[str, Tensor]]:
    """Return the first gradient, the change of the weights, and the reported values."""
    trained = trainer(pool, made_from)
    trained.start()
    rollouts = lab.make_rollouts()
    is_actor = made_from.role == "actor"
    objective = policy_objective(rollouts) if is_actor else lab.value_objective(rollouts)
    before = {name: tensor.clone() for name, tensor in pool.tensors()}
    minibatches = [lab.minibatch(rollouts, rows, step=STEP) for rows in ((0, 1, 2, 3, 4), (1, 4, 2), (3, 0, 2, 1))]
    first = trained.update(rollouts, minibatches[:1], objective)
    gradients = pool.gradients()
    rest = trained.update(rollouts, minibatches[1:], objective)
    after = dict(pool.tensors())
    reported = {
        f"{number} {name}": torch.as_tensor(figure)
        for number, result in enumerate([*first, *rest])
        for name, figure in (vars(result) | vars(result.outputs)).items()
        if name != "outputs" and figure is not None
    }
    return {
        "gradient": gradients,
        "change": {name: after[name] - before[name] for name in before},
        "reported": reported,
    }


def assert_agree(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]], *, whole: bool) -> None:
    """Compare three steps of two layouts in gradient, change of weights and reported values. Under a distributed
    optimizer no rank has the `whole` gradient, so only its effect is compared."""
    assert max(float(tensor.abs().max()) for tensor in expected["change"].values()) > 1e-3
    bounds = {"reported": CHANGE_GAP, "change": CHANGE_GAP, **({"gradient": GRADIENT_GAP} if whole else {})}
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
    first = trainer(pool, saved_under)
    first.start()
    first.update(rollouts, minibatches, objective)
    lab.save(first, states)
    saved = {name: tensor.clone() for name, tensor in pool.tensors()}
    [expected] = first.update(rollouts, minibatches, objective)
    after = dict(pool.tensors())

    second = trainer(pool, loaded_under)
    second.load(states)
    loaded = dict(pool.tensors())
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    [found] = second.update(rollouts, minibatches, objective)
    allowed = LOSS_GAP[saved_under.dtype] if loss_gap is None else loss_gap
    assert abs(found.loss - expected.loss) <= allowed * abs(expected.loss)
    changes = [{name: (of[name] - saved[name]).float() for name in saved} for of in (dict(pool.tensors()), after)]
    return gap(*changes)


def gap(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference divided by the norm of the expected tensors, over all tensors together."""
    assert found.keys() == expected.keys()
    off = sum(float((found[name].double() - expected[name]).square().sum()) for name in expected)
    whole = sum(float(expected[name].double().square().sum()) for name in expected)
    return (off / whole) ** 0.5
