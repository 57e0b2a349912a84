"""The optimizer on the CPU takes the same steps as the optimizer on the device, bit for bit, with the same states."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from layout_lab import settings_of, trainer
from rank_pool import RankPool
from test_host_memory import Cudart, device_bytes
from torch import Tensor

from ppoctl.algorithms.role_table import BySequences
from ppoctl.core.batch.digest import file_digest
from ppoctl.core.errors import NonFiniteError, OutOfMemoryError
from ppoctl.core.ports import OptimizerStep
from ppoctl.engines.megatron.host_optimizer import PIECE, HostAdamW
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.trainer import MegatronTrainer
from ppoctl.models.trainable import Trainable
from tolerance import EXACT, FLOAT32

CPU = torch.device("cpu")
SHAPES = [(1,), (7, 13), (48,), (5, 29), (16, 3)]
"""Fewer and more elements than a piece of 32, and whole pieces."""


def groups_of(parameters: list[Tensor]) -> list[dict[str, object]]:
    """Return two groups whose settings differ."""
    first = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.2}
    second = {"lr": 0.03, "betas": (0.8, 0.99), "eps": 1e-3, "weight_decay": 0.0}
    return [{"params": parameters[:2], **first}, {"params": parameters[2:], **second}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_parameters_have_the_steps_of_torch_adamw(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    expected = [weight.float() for weight in weights]
    mains = [weight.float() if dtype == torch.bfloat16 else weight for weight in weights]
    separate = dict(zip(mains, weights, strict=True)) if dtype == torch.bfloat16 else {}
    torchs = torch.optim.AdamW(groups_of(expected), fused=True)
    host = HostAdamW(groups_of(mains), separate, CPU, piece=32)
    for number in range(4):
        for main, other in zip(mains, expected, strict=True):
            other.grad = torch.randn(other.shape, generator=generator)
            main.grad = other.grad.clone()
        for adam in (torchs, host):
            adam.param_groups[1]["lr"] = 0.03 + 0.01 * number
            adam.step()
    for weight, main, other in zip(weights, mains, expected, strict=True):
        EXACT.check(main, other)
        EXACT.check(weight, other.to(dtype))
        assert weight.dtype == dtype
        for name, value in torchs.state[other].items():
            EXACT.check(host.state[main][name], value)


def test_first_step_moves_by_learning_rate_and_decay() -> None:
    """The moments' corrected ratio is the sign of the gradient: 3 - 0.1 x (1 + 0.2 x 3) = 2.84."""
    weight = torch.tensor([3.0])
    host = HostAdamW(groups_of([weight]), {}, CPU)
    weight.grad = torch.tensor([0.5])
    host.step()
    FLOAT32.check(weight, torch.tensor([2.84]))
    FLOAT32.check(host.state[weight]["exp_avg"], torch.tensor([0.05]))
    FLOAT32.check(host.state[weight]["exp_avg_sq"], torch.tensor([0.0125]))


def test_state_of_torch_adamw_continues_in_the_memory_of_the_host() -> None:
    """Moments, step counts and the settings of the groups are those of the state."""
    expected, main = torch.tensor([3.0, -2.0]), torch.tensor([3.0, -2.0])
    torchs = torch.optim.AdamW([{"params": [expected], "lr": 0.1, "eps": 1e-3}], fused=True)
    host = HostAdamW([{"params": [main], "lr": 0.7, "eps": 1e-8, "betas": (0.5, 0.5), "weight_decay": 1.0}], {}, CPU)
    memory = host.state[main]["exp_avg"].data_ptr()
    expected.grad = torch.tensor([0.5, -4.0])
    torchs.step()
    host.load_state_dict(torchs.state_dict())
    main.copy_(expected)
    for gradient in ([-1.5, 2.0], [0.25, 3.0]):
        expected.grad, main.grad = torch.tensor(gradient), torch.tensor(gradient)
        torchs.step()
        host.step()
        EXACT.check(main, expected)
    EXACT.check(host.state[main]["step"], torch.tensor(3.0))
    assert host.state[main]["exp_avg"].data_ptr() == memory


def test_state_of_a_gpu_is_pinned_as_long_as_the_optimizer_exists(monkeypatch) -> None:
    cuda = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    weight, main, whole = torch.zeros(70, dtype=torch.bfloat16), torch.zeros(70), torch.zeros(5)
    host = HostAdamW(groups_of([main, whole]), {main: weight}, torch.device("cuda"))
    # Each tensor begins at a multiple of 256 bytes. Two pieces of staging have a gradient and a weight each.
    assert sorted(cuda.locked.values()) == sorted([3 * 512 + 2 * 256, 2 * 2 * 4 * 70])
    pinned = next(range(place, place + size) for place, size in cuda.locked.items() if size == 3 * 512 + 2 * 256)
    assert all(tensor.data_ptr() in pinned for tensor in (main, *(host.state[main][m] for m in ("exp_avg",))))
    assert whole.data_ptr() not in pinned, "a float32 weight of the model stays on the device"
    del host
    assert cuda.locked == {}


def test_too_little_host_memory_for_the_optimizer_is_named(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(code=2))
    with pytest.raises(OutOfMemoryError, match="512 bytes for main weights and moments of the optimizer"):
        HostAdamW(groups_of([torch.zeros(5)]), {}, torch.device("cuda"))


def test_pieces_end_at_cache_lines() -> None:
    """torch's kernel treats the elements after the last complete vector separately."""
    assert PIECE % 16 == 0


def steps(first: int, count: int) -> list[OptimizerStep]:
    """Return settings of optimizer steps, all of which change from step to step. Two of three steps are clipped."""
    return [
        OptimizerStep(
            lr=1e-2 / (1 + number),
            weight_decay=0.1 * (number % 4),
            grad_clip=(0.5, 0.0, 1.5)[number % 3],
            beta1=0.9 - 0.02 * number,
            beta2=0.95 + 0.004 * number,
            eps=10.0 ** -(4 + number % 4),
        )
        for number in range(first, first + count)
    ]


def state_of(rank: MegatronRank) -> list[Tensor]:
    """Return weights, main weights, moments and step counts of a rank, in the order of its parameters."""
    parts = rank.optimizer.chained_optimizers
    found = [weight for model in rank.models for weight in model.parameters()]
    for part in parts:
        for group in part.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                found += [parameter, *(state[name] for name in ("exp_avg", "exp_avg_sq", "step"))]
    return [tensor.detach().clone() for tensor in found]


def files_in(folder: Path) -> dict[str, object]:
    """Return the digests of a state's files. `.metadata` is left out: torch's index contains the folder's name."""
    return {path.name: file_digest(path) for path in folder.iterdir() if path.name != ".metadata"}


def update(trained: MegatronTrainer, first: int, count: int) -> list[float]:
    """Take steps; return losses and gradient norms."""
    rollouts = lab.make_rollouts()
    minibatches = [lab.minibatch(rollouts, step=step) for step in steps(first, count)]
    results = trained.update(rollouts, minibatches, lab.policy_objective(rollouts, needs_entropy=True))
    return [number for result in results for number in (result.loss, result.grad_norm)]


def check_states(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for one, other in zip(found, expected, strict=True):
        for tensor, same in zip(one, other, strict=True):
            EXACT.check(tensor, same)


def ten_steps(pool: RankPool, made: TrainerSettings, folder: Path, rest: Callable[[], None]) -> list[object]:
    """Take ten steps, with a saved state after the third; return results, the state's files, and the final state."""
    trained = trainer(pool, made)
    trained.start()
    rest()
    results = update(trained, 0, 3)
    rest()
    folder.mkdir()
    saving = trained.save(folder, in_background=True)
    results += update(trained, 3, 4)
    saving.finish()
    rest()
    results += update(trained, 7, 3)
    return [results, files_in(folder), pool.examine(state_of)]


def last_steps(pool: RankPool, made: TrainerSettings, folder: Path) -> list[list[Tensor]]:
    """Load the state after the third step, and take the others."""
    trained = trainer(pool, made)
    trained.load(folder)
    update(trained, 3, 7)
    return pool.examine(state_of)


TOP = Trainable(top_layers=1)
LAYOUTS = {
    "alone": ("qwen2-tied", "alone", Trainable()),
    "DP2 distributed optimizer": ("qwen2-tied", "DP2 sharded", Trainable()),
    # The first pipeline rank has no parameter that trains.
    "PP2, top layer": ("qwen2-deep", "PP2", TOP),
    "PP2 DP2 distributed optimizer, top layer": ("qwen2-deep", "DP2 PP2 sharded", TOP),
    "EP2": ("qwen3-moe", "EP2", Trainable()),
    "EP2 DP2 distributed optimizer": ("qwen3-moe", "EP2 DP2 sharded", Trainable()),
}
CASES = {f"{layout} {dtype}": (*of, dtype) for layout, of in LAYOUTS.items() for dtype in ("float32", "bfloat16")}
QUICK = ("DP2 distributed optimizer bfloat16",)
IN_CI = ("alone float32", "PP2, top layer bfloat16")
MARKS = {**dict.fromkeys(QUICK, ()), **dict.fromkeys(IN_CI, pytest.mark.ci(*QUICK))}


def made_of(model: Callable[[str], Path], case: tuple[str, str, Trainable, str]) -> TrainerSettings:
    kind, layout, trainable, dtype = case
    how = {"reshardable": "dp" if "PP2" in layout else "full", "batching": BySequences(microbatch_seqs=5)}
    return settings_of(model, kind, layout, trainable=trainable, dtype=getattr(torch, dtype), **how)


@pytest.mark.filterwarnings("ignore:`torch.distributed.* is deprecated")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=MARKS.get(name, pytest.mark.slow)) for name, case in CASES.items()],
)
def test_ten_steps_and_states_are_those_of_the_device(pool, model, tmp_path, case) -> None:
    """Also if the role is offloaded between its calls, and if a state is loaded by the other kind of optimizer."""
    on_device = made_of(model, case)
    on_cpu = replace(on_device, optimizer_on="cpu")
    results, files, state = ten_steps(pool, on_device, tmp_path / "device", lambda: None)
    found, written, reached = ten_steps(pool, on_cpu, tmp_path / "cpu", functools.partial(pool.call, "offload"))
    assert found == results
    assert written == files
    check_states(reached, state)
    check_states(last_steps(pool, on_cpu, tmp_path / "device"), state)
    check_states(last_steps(pool, on_device, tmp_path / "cpu"), state)


def only_rank(made: TrainerSettings) -> tuple[MegatronTrainer, MegatronRank]:
    """Return a started actor of this process."""
    actor = lab.started(made)
    return actor, lab.rank_of(actor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_device_has_no_optimizer_state(model, dtype) -> None:
    made = settings_of(model, "qwen2", "alone", dtype=dtype, optimizer_on="cpu")
    actor, rank = only_rank(made)
    weights = sum(weight.nbytes for weight in rank.models[0].parameters())
    gradients = sum(4 * weight.numel() for weight in rank.models[0].parameters())
    for _ in range(2):
        assert device_bytes(rank) == weights + gradients
        rank.offload()
        assert device_bytes(rank) == 0
        update(actor, 0, 1)


def test_main_weights_are_readable_after_a_refused_step(model, tmp_path) -> None:
    made = settings_of(model, "qwen2", "alone", dtype=torch.bfloat16, optimizer_on="cpu")
    actor, rank = only_rank(made)
    update(actor, 0, 2)
    before, rollouts = state_of(rank), lab.make_rollouts()
    broken = torch.full(rollouts.tokens.shape, math.nan)
    with pytest.raises(NonFiniteError):
        actor.update(rollouts, [lab.minibatch(rollouts)], lab.policy_objective(rollouts, weights=broken))
    check_states([state_of(rank)], [before])
    lab.save(actor, tmp_path)
    resumed = lab.unstarted(actor.settings)
    resumed.load(tmp_path)
    check_states([state_of(lab.rank_of(resumed))], [before])
