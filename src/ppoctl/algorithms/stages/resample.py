"""55-resample and 56-whitening: the rows that the updates train on (PF-PPO), and the whitening of their
advantages."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxtyping import Bool, Float, Float64
from torch import Tensor

from ppoctl.algorithms.formulas.masking import whiten
from ppoctl.algorithms.formulas.resampling import effective_rows, or_uniform, sampled_rows
from ppoctl.core import metric_registry
from ppoctl.core.batch.records import Advantages, Rollouts, Selection
from ppoctl.core.batch.seeds import derive_seed

WeighRows = Callable[[Float[Tensor, " B"], Bool[Tensor, " B"]], Float64[Tensor, " B"]]
"""(shaped scores, rows that may be sampled) -> weight of each row."""


@dataclass(frozen=True)
class ResampleStage:
    """Stage that samples as many rows as the step has, with replacement, by their shaped scores."""

    weigh: WeighRows
    seed: int
    """Seed of the run."""
    fingerprint: str
    name: str = "resample"

    def run(self, rollouts: Rollouts, advantages: Advantages) -> Selection:
        """Return the sampled rows. Rows without a token to train on are never sampled."""
        assert advantages.shaped is not None, "rows are sampled by their shaped scores, which were not stored"
        trains = advantages.mask.any(dim=1)
        weights = or_uniform(self.weigh(advantages.shaped, trains), trains)
        rows = sampled_rows(weights, seed=derive_seed(self.seed, rollouts.step, self.name))
        return Selection(
            rounds=rows.new_ones(len(rows)),
            rows=rows,
            prompt_ids=[rollouts.prompt_ids[row] for row in rows.tolist()],
            sample_indices=[rollouts.sample_indices[row] for row in rows.tolist()],
            is_full=True,
            summary={metric_registry.RESAMPLE_EFFECTIVE_SEQS.name: effective_rows(weights)},
        )


@dataclass(frozen=True)
class WhiteningStage:
    """Stage that whitens the advantages of selected rows."""

    fingerprint: str
    name: str = "whitening"

    def run(self, advantages: Advantages) -> Advantages:
        """Return the advantages whitened over all unmasked tokens. The record has no metrics: those of the step are
        in the record of all rows."""
        return replace(advantages, advantages=whiten(advantages.advantages, advantages.mask), summary={})
