"""Specs of PF-PPO: 55-resample, and 56-whitening with the advantages that it whitens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ppoctl import metric_registry as metrics
from ppoctl.algorithm.advantages import AdvantagesSpec
from ppoctl.algorithm.stage_spec import ReportedMetric, StageParts, StageSpec
from ppoctl.recipe.schema import NoResampling, Recipe

if TYPE_CHECKING:
    from ppoctl.batch.records import Advantages, Selection
    from ppoctl.store.stage_runner import Stage


@dataclass(frozen=True)
class ResampleSpec(StageSpec["Selection"]):
    """55-resample: rows that are sampled again by their shaped scores."""

    kind: ClassVar[str] = "selection"
    keys: ClassVar[tuple[str, ...]] = ("seed", "ppo.resample")
    defines_rows: ClassVar[bool] = True

    def metrics(self, recipe: Recipe) -> tuple[ReportedMetric, ...]:
        is_on = not isinstance(recipe.ppo.resample, NoResampling)
        needs, key = "requires `ppo.resample`, but rows are not sampled again", ("ppo", "resample", "kind")
        return (ReportedMetric(metrics.RESAMPLE_EFFECTIVE_SEQS, is_on, needs, (key,), "--set ppo.resample.kind=pow"),)

    def build(self, recipe: Recipe, parts: StageParts) -> "Stage[Selection]":
        from ppoctl.stages.resample import ResampleStage

        table = recipe.ppo.resample
        assert not isinstance(table, NoResampling), "only step functions of PF-PPO sample rows again"
        return ResampleStage(table.weigh(), recipe.seed, self.fingerprint(recipe), self.name)


@dataclass(frozen=True)
class WhiteningSpec(StageSpec["Advantages"]):
    """56-whitening: the advantages of selected rows, whitened."""

    kind: ClassVar[str] = "advantages"

    def present_fields(self, recipe: Recipe) -> dict[str, bool]:
        return {"returns": recipe.ppo.advantages.trains_critic, "shaped": True, "kl_coef": True}

    def build(self, recipe: Recipe, parts: StageParts) -> "Stage[Advantages]":
        from ppoctl.stages.resample import WhiteningStage

        return WhiteningStage(self.fingerprint(recipe), self.name)


RESAMPLE = ResampleSpec("resample")
WHITENING = WhiteningSpec("whitening")
RAW_ADVANTAGES = AdvantagesSpec("advantages", whitens=False)
"""The advantages that `WHITENING` whitens."""
