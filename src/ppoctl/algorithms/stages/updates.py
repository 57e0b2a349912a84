"""Optimizer steps of one PPO step, and the small record that an update commits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ppoctl.algorithms.formulas.learning_rate import LearningRate
from ppoctl.algorithms.formulas.minibatches import minibatch_rows
from ppoctl.algorithms.stages.objective import Terms
from ppoctl.core import metric_registry
from ppoctl.core.batch.lineage import next_lineage
from ppoctl.core.batch.records import Record, State, Update
from ppoctl.core.batch.seeds import derive_seed
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.ports import Minibatch, MinibatchResult, Models, OptimizerStep


@dataclass(frozen=True)
class OptimizerSchedule:
    """Settings of each optimizer step: a learning rate that depends on the tick (see `LearningRate`), and constant
    settings."""

    rate: LearningRate
    constant: OptimizerStep
    """Settings that are the same for all optimizer steps; `lr` is not read."""
    steps_before: int | None = None
    """Number of PPO steps before the first PPO step that trains the role, if each PPO step is a tick; None: each
    optimizer step is a tick."""

    def at(self, state: State, done: int, waited: int = 0) -> OptimizerStep:
        """Return the settings of the next optimizer step, after `done` optimizer steps in the PPO step that begins at
        `state`. `waited` PPO steps did not train the role, in addition to `steps_before`."""
        tick = state.updates + done if self.steps_before is None else state.step - self.steps_before - waited
        return replace(self.constant, lr=self.rate.at(tick))


@dataclass(frozen=True)
class MinibatchPlan:
    """Epochs and minibatches of one role."""

    epochs: int
    minibatch_seqs: int
    seed: int | None
    """Seed of the run, from which each epoch derives an order of the rows; None: rows stay in order."""
    schedule: OptimizerSchedule
    at_most: int | None = None
    """Maximum number of minibatches of an epoch, if the number of rows varies from step to step. They have equal
    sizes, and more than `minibatch_seqs` rows only if there are too many: no step has more updates than planned.
    None: a minibatch has `minibatch_seqs` rows."""

    def minibatches(
        self, state: State, num_seqs: int, objective: Terms, waited: int = 0, *, first_has_all_rows: bool = False
    ) -> list[Minibatch]:
        """Return all optimizer steps of the PPO step after `state`, in order (`waited`: see `OptimizerSchedule.at`).

        A minibatch without an unmasked token is left out (none of the samples in it has a score). In the others, rows
        without such a token are left out after the divisors are counted: they have no gradient, but would be
        computed. `first_has_all_rows`: metrics of the first minibatch are of all its rows.
        """
        planned: list[Minibatch] = []
        size = self._size(num_seqs)
        for epoch in range(self.epochs):
            seed = None if self.seed is None else derive_seed(self.seed, state.step + 1, state.role, epoch)
            for rows in minibatch_rows(num_seqs, size, seed=seed):
                totals = objective.totals(rows)
                if any(totals):
                    computed = rows if first_has_all_rows and not planned else objective.rows_in_loss(rows)
                    planned.append(Minibatch(computed, totals, self.schedule.at(state, len(planned), waited)))
        return planned

    def _size(self, num_seqs: int) -> int:
        """Return the number of rows of a minibatch."""
        if self.at_most is None:
            return self.minibatch_seqs
        return ceil(num_seqs / min(self.at_most, ceil(num_seqs / self.minibatch_seqs)))


@dataclass(frozen=True)
class UpdateTrace:
    """One update: every optimizer step with its result."""

    before: State
    after: State
    steps: Sequence[tuple[Minibatch, MinibatchResult]]

    def record(
        self, prefix: str, diagnostics: Sequence[Mapping[str, float]], *, of_the_step: Mapping[str, float]
    ) -> Update:
        """Return the record: metrics of each optimizer step, and a summary of them. The summary has means, but the
        last learning rate and the maxima of metrics that end with `_max`. `diagnostics` has one entry per optimizer
        step, empty if the step does not have these metrics; the summary leaves such steps out.

        Replays compare `per_minibatch`, so each of its metrics must be computed by the model or the optimizer.
        """
        per_minibatch: dict[str, list[float | None]] = {
            "loss": [result.loss for _, result in self.steps],
            "grad_norm": [result.grad_norm for _, result in self.steps],
            "lr": [minibatch.step.lr for minibatch, _ in self.steps],
        }
        for name in next((metrics for metrics in diagnostics if metrics), ()):
            per_minibatch[name] = [metrics.get(name) for metrics in diagnostics]
        summary = {
            metric_registry.named(prefix, name): _summarise(name, values)
            for name, column in per_minibatch.items()
            if (values := [value for value in column if value is not None])
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


@dataclass(frozen=True, kw_only=True)
class UpdateStage:
    """Base class of the update stages of all roles."""

    models: Models
    plan: MinibatchPlan
    fingerprint: str

    def train(
        self,
        before: State,
        sequences: Sequences,
        objective: Terms,
        *,
        read: Sequence[Record[Any]],
        waited: int = 0,
        first_has_all_rows: bool = False,
    ) -> UpdateTrace:
        """Run all epochs of one role. The lineage of the new state contains the old state and all records in `read`.
        `waited` is the number of PPO steps that did not train the role (see `OptimizerSchedule.at`);
        `first_has_all_rows`: see `MinibatchPlan.minibatches`."""
        minibatches = self.plan.minibatches(
            before, sequences.num_seqs, objective, waited, first_has_all_rows=first_has_all_rows
        )
        after = State(
            role=before.role,
            step=before.step + 1,
            updates=before.updates + len(minibatches),
            lineage=next_lineage(before, [record.identity for record in read], self.fingerprint),
        )
        with self.models.advancing(before, to=after) as trainer:
            results = trainer.update(sequences, minibatches, objective)
        return UpdateTrace(before, after, list(zip(minibatches, results, strict=True)))


def not_trained(before: State) -> Update:
    """Return the record of an update without optimizer steps: the state after it has the lineage, so the weights, of
    the state before."""
    return Update(
        role=before.role,
        step=before.step + 1,
        parent=before.lineage,
        lineage=before.lineage,
        updates=before.updates,
        per_minibatch={"loss": [], "grad_norm": [], "lr": []},
        summary={},
    )


def _summarise(name: str, column: list[float]) -> float:
    if name == "lr":
        return column[-1]
    if name.endswith("_max"):
        return max(column)
    return sum(column) / len(column)
