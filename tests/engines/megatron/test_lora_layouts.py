"""Adapters do not depend on the layout: initial matrices, outputs, gradients and matrices after four updates equal
those of one process, and a state that is saved under one layout loads under another.

Matrices and gradients are read from saved states: with beta1 = 0, the first moment of Adam is the clipped gradient.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import layout_lab
import lora_lab
import megatron_lab as lab
import pytest
import torch
from layout_lab import CHANGE_GAP, STEP, gap, resumes_under_layout, settings, trainer
from lora_lab import ALL, ATTENTION, LATENT, adapted, matrices_of
from rank_pool import RankPool
from torch import Tensor

from ppoctl.convert.torch_dist import read_metadata
from ppoctl.engines.megatron.settings import TrainerSettings
from ppoctl.model.trainable import Trainable
from ppoctl.recipe.schema import ParallelTable
from tolerance import EXACT

LAYOUTS = {
    "TP2": ParallelTable(tensor=2),
    "TP2 sequence": ParallelTable(tensor=2, sequence=True),
    "PP2": ParallelTable(pipeline=2),
    "PP2 interleaved": ParallelTable(pipeline=2, stages_per_rank=2),
    "CP2": ParallelTable(context=2),
    "DP2": ParallelTable(data=2),
    "DP2 distributed optimizer": ParallelTable(data=2, distributed_optimizer=True),
    "TP2 PP2": ParallelTable(tensor=2, pipeline=2, sequence=True),
    "EP2": ParallelTable(data=2, expert=2),
}
LOOK = replace(STEP, beta1=0.0)
MOMENT = "optimizer.state.exp_avg."
TARGETS: dict[str, Trainable] = {
    "qwen2-deep": ALL,
    "gemma2": adapted("k_proj", "up_proj", "down_proj"),
    "qwen3-moe": adapted(*ATTENTION),
    "deepseek-v3-low-rank": adapted(*LATENT),
}


def lora_steps(pool: RankPool, made: TrainerSettings, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return the initial matrices, the gradient of the third step, the change of the matrices over four steps, and
    the reported values. A critic has no gradient below its head in the first step, and none of A in the second."""
    trained = trainer(pool, made)
    trained.start()
    rollouts, is_actor = lab.make_rollouts(), made.role == "actor"
    objective = layout_lab.policy_objective(rollouts) if is_actor else lab.value_objective(rollouts)
    rows = ((0, 1, 2, 3, 4), (2, 0), (1, 4, 2), (3, 0, 2, 1))
    steps = (STEP, STEP, LOOK, STEP)
    *early, last = (lab.minibatch(rollouts, part, step=step) for part, step in zip(rows, steps, strict=True))
    initial = matrices_of(trained, lora_lab.saved(trained, folder / "initial"))
    results = trained.update(rollouts, early, objective)
    gradient = matrices_of(trained, lora_lab.saved(trained, folder / "third"), MOMENT)
    results += trained.update(rollouts, [last], objective)
    after = matrices_of(trained, lora_lab.saved(trained, folder / "fourth"))
    reported = {
        f"{number} {name}": torch.as_tensor(value)
        for number, result in enumerate(results)
        for name, value in (vars(result) | vars(result.outputs)).items()
        if name not in ("outputs", "merge_error") and value is not None
    }
    change = {name: after[name] - initial[name] for name in initial}
    return {"initial": initial, "gradient": gradient, "change": change, "reported": reported}


Steps = Callable[[str, str], dict[str, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def one(pool: RankPool, model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """Steps of a single process."""
    known: dict[tuple[str, str], dict[str, dict[str, Tensor]]] = {}

    def found(kind: str, role: str) -> dict[str, dict[str, Tensor]]:
        if (kind, role) not in known:
            made = replace(settings(model(kind), role, ParallelTable()), trainable=TARGETS[kind])
            known[kind, role] = lora_steps(pool, made, tmp_path_factory.mktemp("one"))
        return known[kind, role]

    return found


def check_agree(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    lab.check_all(EXACT, found["initial"], expected["initial"])
    assert min(float(change.abs().max()) for change in expected["change"].values()) > 1e-3
    assert min(float(gradient.abs().max()) for gradient in expected["gradient"].values()) > 0
    # The gradient is that of the third step: AdamW has amplified differences of gradients near 0 in two steps.
    for what in ("gradient", "change", "reported"):
        found_gap = gap(found[what], expected[what])
        assert found_gap < CHANGE_GAP, f"{what}: {found_gap}"


CASES = [
    *(("qwen2-deep", role, name) for role in ("actor", "critic") for name in LAYOUTS if name != "EP2"),
    *(("gemma2", "actor", name) for name in ("TP2", "TP2 sequence", "PP2")),
    *(("qwen3-moe", "actor", name) for name in ("EP2", "TP2 sequence")),
    *(("deepseek-v3-low-rank", "actor", name) for name in ("TP2 sequence", "EP2")),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "role", "layout"), CASES, ids=[" ".join(case) for case in CASES])
def test_adapters_have_the_steps_of_one_process(pool, model, one, tmp_path, kind, role, layout):
    made = replace(settings(model(kind), role, LAYOUTS[layout]), trainable=TARGETS[kind])
    check_agree(lora_steps(pool, made, tmp_path), one(kind, role))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("layout", ["one", "TP2 sequence", "PP2", "CP2"])
def test_recomputed_layers_have_the_steps_of_one_process(pool, model, one, tmp_path, layout, recompute):
    parallel = LAYOUTS.get(layout, ParallelTable())
    made = replace(settings(model("qwen2-deep"), "actor", parallel), trainable=ALL, recompute=recompute)
    check_agree(lora_steps(pool, made, tmp_path), one("qwen2-deep", "actor"))


def test_lost_gradient_of_one_tensor_rank_fails_the_comparison(pool, model, one, tmp_path):
    """Shows that the comparison can fail."""
    made = replace(settings(model("qwen2-deep"), "actor", LAYOUTS["TP2"]), trainable=ALL)
    trained = trainer(pool, made)
    trained.start()
    pool.forget_gradient(1, only="gate_proj.lora_B")
    rollouts = lab.make_rollouts()
    objective = layout_lab.policy_objective(rollouts)
    steps = (STEP, STEP, LOOK)
    minibatches = [
        lab.minibatch(rollouts, rows, step=step)
        for rows, step in zip(((0, 1, 2, 3, 4), (2, 0), (1, 4, 2)), steps, strict=True)
    ]
    trained.update(rollouts, minibatches, objective)
    found = matrices_of(trained, lora_lab.saved(trained, tmp_path / "state"), MOMENT)
    assert gap(found, one("qwen2-deep", "actor")["gradient"]) > 1e-2


def test_initial_matrices_are_those_of_peft_and_depend_on_the_seed_alone(model):
    """peft's default is kaiming_uniform_ with a = sqrt(5), that is uniform in +-1 / sqrt(inputs); B is 0."""
    found: list[dict[str, Tensor]] = []
    for random_state, changes in ((1, {"seed": 5}), (2, {"seed": 5}), (3, {"seed": 6}), (4, {"role": "critic"})):
        torch.manual_seed(random_state)
        trained = lora_lab.started(model("qwen2"), adapted(rank=16), **changes)  # type: ignore[arg-type]
        found.append({name: each.detach().clone() for name, each in lora_lab.parameters_of(trained).items()})
    lab.check_all(EXACT, found[1], found[0])
    by_inputs: dict[int, list[Tensor]] = {}
    for name, matrix in found[0].items():
        if name.endswith("lora_B.weight"):
            assert not matrix.any()
            continue
        by_inputs.setdefault(matrix.shape[1], []).append(matrix.flatten())
        assert all(not torch.equal(matrix, other[name]) for other in found[2:])
    for inputs, drawn in by_inputs.items():
        bound, every = inputs**-0.5, torch.cat(drawn)
        assert 0.99 * bound < float(every.abs().max()) <= bound
        assert float(every.std()) == pytest.approx(bound / 3**0.5, rel=0.03)
        assert abs(float(every.mean())) < 0.03 * bound
        assert len(every.unique()) > 0.99 * len(every)
    assert by_inputs.keys() == {48, 80}


RESUMED = [
    ("qwen2-deep", "PP2", "one"),
    ("qwen2-deep", "TP2 sequence", "PP2 interleaved"),
    ("qwen2-deep", "TP2 PP2", "CP2"),
    ("qwen2-deep", "DP2 distributed optimizer", "TP2 distributed optimizer"),
    ("qwen2-deep", "PP2 interleaved", "TP2"),
    ("deepseek-v3-low-rank", "TP2 sequence", "EP2"),
    ("qwen3-moe", "EP2", "TP2 sequence"),
]
RESUMING = {
    **LAYOUTS,
    "one": ParallelTable(),
    "TP2 distributed optimizer": ParallelTable(tensor=2, data=2, distributed_optimizer=True),
}


# In bfloat16, the rows A x are rounded before and after their sum over tensor ranks, and a token may reach another
# expert.
DTYPES = {"float32": (torch.float32, RESUMED), "bfloat16": (torch.bfloat16, RESUMED[:5])}
RESUMED_DTYPES = [(*case, name) for name, (_, cases) in DTYPES.items() for case in cases]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "saved_under", "loaded_under", "name"), RESUMED_DTYPES, ids=[" ".join(case) for case in RESUMED_DTYPES]
)
def test_state_of_adapters_loads_under_other_layout(pool, model, tmp_path, kind, saved_under, loaded_under, name):
    dtype = DTYPES[name][0]
    made: list[Any] = [
        replace(settings(model(kind), "actor", RESUMING[layout], dtype), trainable=TARGETS[kind])
        for layout in (saved_under, loaded_under)
    ]
    loss_gap, change_gap = (1e-5, CHANGE_GAP) if dtype is torch.float32 else (0.01, 0.2)
    assert resumes_under_layout(pool, *made, tmp_path, loss_gap) < change_gap
    keys = read_metadata(tmp_path).state_dict_metadata
    names = {each.parameter for each in lora_lab.placements_of(trainer(pool, made[0]))}
    assert {key for key in keys if not key.startswith("optimizer")} == names
    assert all(any(key.endswith(name) for name in names) for key in keys if "decoder" in key)
