"""How a step's rows become optimizer steps, and the small record that an update commits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from ppoctl import metrics
from ppoctl.batch.records import State, Update
from ppoctl.batch.seeds import derive_seed
from ppoctl.ports import Minibatch, MinibatchResult, OptimizerStep
from ppoctl.ppo.schedule import learning_rate, minibatch_rows


@dataclass(frozen=True)
class Schedule:
    """Learning rate over optimizer steps (see `ppo.schedule.learning_rate`) and what stays constant."""

    peak: float
    kind: str
    warmup_updates: int
    total_updates: int
    min_frac: float
    constant: OptimizerStep
    """`lr` of it is not read."""

    def at(self, update: int) -> OptimizerStep:
        """Settings of the update-th optimizer step, from 0."""
        lr = learning_rate(
            update,
            peak=self.peak,
            warmup_updates=self.warmup_updates,
            total_updates=self.total_updates,
            kind=self.kind,  # type: ignore[arg-type]
            min_frac=self.min_frac,
        )
        constant = self.constant
        return OptimizerStep(
            lr, constant.weight_decay, constant.grad_clip, constant.beta1, constant.beta2, constant.eps
        )


@dataclass(frozen=True)
class MinibatchPlan:
    """Epochs x minibatches of one role."""

    epochs: int
    minibatch_seqs: int
    seed: int
    schedule: Schedule

    def minibatches(self, state: State, *, step: int, mask: Bool[Tensor, "B R"]) -> list[Minibatch]:
        """All optimizer steps of one PPO step, in order; a new order of rows in every epoch. A minibatch in which no
        token counts (no sample of it has a score) teaches nothing and is left out."""
        planned: list[Minibatch] = []
        for epoch in range(self.epochs):
            seed = derive_seed(self.seed, step, state.role, epoch)
            for rows in minibatch_rows(mask.shape[0], self.minibatch_seqs, seed=seed):
                count = int(mask[rows].sum())
                if count:
                    planned.append(Minibatch(rows, count, self.schedule.at(state.updates + len(planned))))
        return planned


@dataclass(frozen=True)
class Trained:
    """One update as it went: every optimizer step with what it saw."""

    before: State
    after: State
    minibatches: Sequence[Minibatch]
    results: Sequence[MinibatchResult]
    diagnostics: Sequence[Mapping[str, float]]
    """Per optimizer step."""

    def record(self, *, prefix: str, of_the_step: Mapping[str, float]) -> Update:
        """Per-minibatch figures in full; in the summary their means (the last learning rate, the largest extremes).

        Replays compare `per_minibatch`, so everything in it must come from the model and the optimizer.
        """
        per_minibatch = {
            "loss": [result.loss for result in self.results],
            "grad_norm": [result.grad_norm for result in self.results],
            "lr": [minibatch.step.lr for minibatch in self.minibatches],
        }
        for name in self.diagnostics[0] if self.diagnostics else ():
            per_minibatch[name] = [figures[name] for figures in self.diagnostics]
        summary = {
            metrics.named(prefix, name): _summarise(name, column) for name, column in per_minibatch.items() if column
        }
        return Update(
            role=self.after.role,
            step=self.after.step,
            parent=self.before.lineage,
            lineage=self.after.lineage,
            updates=self.after.updates,
            per_minibatch=per_minibatch,
            summary={**summary, **of_the_step},
        )


def _summarise(name: str, column: list[float]) -> float:
    if name == "lr":
        return column[-1]
    if name.endswith("_max"):
        return max(column)
    return sum(column) / len(column)
