"""The best actors of a run: weights without optimizer, each with the value of the metric that ranks the actor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from ppoctl.core.errors import CorruptArtifactError
from ppoctl.store import artifact
from ppoctl.store import manifest as manifests
from ppoctl.store.attempt import Attempt

if TYPE_CHECKING:
    from ppoctl.core.batch.records import State


@dataclass(frozen=True)
class BestStates:
    """Saved actors that reached the best values of a metric in a run, one folder per step.

    `offer` decides from the folders on disk alone, so a run that repeats steps keeps the same actors.
    """

    attempt: Attempt
    metric: str
    lower_is_better: bool
    keep: int
    versions: Mapping[str, str]

    def offer(self, state: "State", value: float, save_weights: Callable[[Path], None]) -> None:
        """Keep the actor's weights unless `keep` better actors exist. Afterwards, delete all but the best `keep`.

        If two actors have equal values, the later is better. An actor that was kept for another metric is worse than
        every actor that was kept for this metric.
        """
        folder = self.attempt.paths.best / f"{state.step:06d}"
        existing = manifests.read(folder)
        if existing is not None and existing.identity != state.lineage:
            self.attempt.remove(folder)  # the folder is from a dropped run of this step
            existing = None
        others = sorted((self._rank(other), other) for other in self.attempt.paths.best_states() if other != folder)
        if sum(rank > (self._signed(value), state.step) for rank, _ in others) >= self.keep:
            return
        if existing is None:
            extra = {"updates": state.updates, "metric": self.metric, "value": value}
            manifest = manifests.of_state("best", state, extra, self.attempt.number, self.versions)
            artifact.commit(folder, save_weights, manifest, self.attempt, lambda _: None)
        # After the commit: a kill in between leaves one actor too many, never one too few.
        for _, other in others[: max(len(others) + 1 - self.keep, 0)]:
            self.attempt.remove(other)

    def _rank(self, folder: Path) -> tuple[float, int]:
        """Return the rank of a kept actor; a greater rank is better."""
        try:
            manifest = manifests.read(folder)
        except CorruptArtifactError:
            manifest = None
        if manifest is None or manifest.extra["metric"] != self.metric:
            return -inf, int(folder.name)
        return self._signed(manifest.extra["value"]), int(folder.name)

    def _signed(self, value: float) -> float:
        return -value if self.lower_is_better else value
