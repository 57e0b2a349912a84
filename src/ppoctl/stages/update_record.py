"""The small record an update commits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ppoctl import metrics
from ppoctl.batch.records import State, Update
from ppoctl.ports import Minibatch, MinibatchResult


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
