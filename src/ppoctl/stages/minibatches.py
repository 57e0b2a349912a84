"""How a step's rows become optimizer steps."""

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from ppoctl.batch.records import State
from ppoctl.batch.seeds import derive_seed
from ppoctl.ports import Minibatch, OptimizerStep
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
