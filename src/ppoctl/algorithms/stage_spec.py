"""Stage specs: everything about a stage except its mathematics. Imports neither torch nor numpy.

step function --calls--> StageSpec --build(recipe, parts)--> store.stage_runner.Stage, which runs
                            |-- read_keys      fingerprint            (resume)
                            |-- passes         memory, FLOPs          (plan)
                            |-- record         bytes                  (plan)
                            |-- metrics        [expect], [health]     (loading.rules)
                            `-- defines_rows   how rows are joined    (store, screens)
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar

from ppoctl.algorithms.roles import POLICY, REFERENCE
from ppoctl.algorithms.sizes import sequences_per_step
from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.core import metric_registry
from ppoctl.core.batch.fields import FIELDS, RecordField
from ppoctl.core.key_path import KeyPath
from ppoctl.core.metric_registry import Metric
from ppoctl.core.speed_metrics import load_metrics
from ppoctl.rewards.shaping_tables import RewardShaping

if TYPE_CHECKING:
    from ppoctl.algorithms.stages.generation import SampleGeneration
    from ppoctl.core.batch.prompts import Prompts
    from ppoctl.core.ports import Dialogue, Environments, Models, Scorer
    from ppoctl.store.stage_runner import Stage

Result = TypeVar("Result", covariant=True)
"""Result of a stage, as a step function receives it: a record, or the state after an update."""

SHAPING_KEYS = tuple(f"reward.{key}" for key in RewardShaping.model_fields)
"""Keys of reward shaping. Changing them does not require scoring again."""

UPDATE = "update"
"""Kind of the record of a stage that trains a role."""

OWN_REFERENCE = f"model.{REFERENCE}"
"""Key of the reference's own model. Only the stages that read the reference have it in their fingerprint."""


@dataclass(frozen=True)
class ModelPass:
    """One use of a model by a stage."""

    kind: Literal["generate", "score", "forward", "train"]
    model: str = ""
    """Role whose model is used, or `reference`; empty: the reward models."""
    with_reference: bool = False
    """Whether the same pass also reads the reference: for the KL over the whole vocabulary, or for the log-probs of a
    reference that shares the frozen trunk."""

    @property
    def role(self) -> str:
        """Role whose processes compute: those of the policy also compute the reference. Empty: no role's do."""
        return POLICY if self.model == REFERENCE else self.model


@dataclass(frozen=True)
class ReportedMetric:
    """A metric of a stage, and what a recipe must set so that the stage reports the metric."""

    metric: Metric
    is_on: bool = True
    """Whether the stage reports the metric under the settings of the recipe."""
    needs: str = ""
    """The missing setting, as the end of a sentence that begins with the name of the metric."""
    keys: tuple[KeyPath, ...] = ()
    """Keys that would change this."""
    hint: str | None = None
    """Command or setting for the error."""


def always(*metrics: Metric) -> tuple[ReportedMetric, ...]:
    """Return metrics that every recipe reports."""
    return tuple(map(ReportedMetric, metrics))


@dataclass(frozen=True, kw_only=True)
class ScoringParts:
    """Components that generate and score responses."""

    generation: "SampleGeneration"
    scorer: "Scorer"
    """Scorer of responses. An `OverlappedScorer` starts to score during generation."""
    notify: Callable[[str], None]
    reward_digest: str = ""
    """Digest of the reward models; empty: no reward model."""
    evaluation_sets: "Mapping[str, Prompts]" = field(default_factory=dict)
    """Name -> prompts of an evaluation set."""
    environments: "Environments | None" = None
    """Environments of rollouts; None: their responses have one turn."""
    eval_environments: "Environments | None" = None
    """Environments of evaluations; None: their responses have one turn."""
    dialogue: "Dialogue | None" = None
    """Token ids of conversations; None: no stage has an environment."""


@dataclass(frozen=True, kw_only=True)
class StageParts(ScoringParts):
    """Components of a run from which stages are built."""

    models: "Models"


@dataclass(frozen=True)
class StageSpec(Generic[Result]):
    """One stage of a step function. A subclass is the only place that describes the stage."""

    name: str
    kind: ClassVar[str]
    """Kind of the record that the stage commits, as in `batch.fields`."""
    keys: ClassVar[tuple[str, ...]] = ()
    """Recipe keys that decide the result."""
    excluded_keys: ClassVar[tuple[str, ...]] = (*SHAPING_KEYS, OWN_REFERENCE)
    """Keys below `keys` that do not decide the result. Only the advantages read the keys of reward shaping."""
    defines_rows: ClassVar[bool] = False
    """Whether the record defines its rows. Otherwise its rows are those of the inputs of the stage."""
    may_end_later: ClassVar[bool] = False
    """Whether the record may be committed in the next step, if the stage runs beside others."""
    joins_by_prompt: ClassVar[bool] = False
    """Whether the stage joins inputs with different rows by the ids of their prompts. The rows of its record are
    those of its first input with rows."""

    def read_keys(self) -> tuple[str, ...]:
        """Return the recipe keys that decide the result: `keys`, and those that depend on the role of the stage."""
        return self.keys

    def fingerprint_texts(self, recipe: StepRecipe) -> Iterator[str]:
        """Yield texts that join the fingerprint: values that the stage reads, under some settings, from keys that are
        not in `keys`."""
        yield from ()

    def passes(self, recipe: StepRecipe) -> tuple[ModelPass, ...]:
        """Return the uses of models, in order."""
        return ()

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        """Return the metrics that the stage reports, and those that it would report under other settings."""
        return ()

    def reports(self, recipe: StepRecipe, name: str) -> bool:
        """Return whether the stage reports the metric of this name. MFU is missing on a GPU that
        `plan/throughput.py` does not know."""
        metric = metric_registry.find(name)
        of_passes = metric_registry.pass_metrics(self.name), metric_registry.usage_metrics(self.name)
        measured = (*chain(*of_passes), *load_metrics(self.name))
        registered = name if metric is None else metric.name
        if name == f"time/{self.name}_s" or (self.passes(recipe) and registered in measured):
            return True
        return any(each.is_on and each.metric is metric for each in self.metrics(recipe))

    def reports_from(self, recipe: StepRecipe) -> int:
        """Return the first step at which the stage certainly reports its metrics."""
        return 1

    def present_fields(self, recipe: StepRecipe) -> dict[str, bool]:
        """Return optional field of the record -> whether it is present. A field that is not listed is absent."""
        return {}

    def record(self, recipe: StepRecipe) -> tuple[RecordField, ...]:
        """Return the fields of the record under the settings of the recipe."""
        present = self.present_fields(recipe)
        return tuple(field for field in FIELDS[self.kind] if not field.is_optional or present.get(field.name, False))

    def row_bounds(self, recipe: StepRecipe) -> tuple[int, int]:
        """Return the minimum and the maximum number of rows of a record that defines its rows, in one round."""
        rows = sequences_per_step(recipe)
        return rows, rows

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Result]":
        """Return the stage. The mathematics is imported here."""
        raise NotImplementedError

    def fingerprint(self, recipe: StepRecipe, reward_digest: str = "") -> str:
        """Return the digest of everything that decides the result except the inputs: the RESULTS keys that the stage
        reads and, if the stage scores, the reward models."""
        scores = any(each.kind == "score" for each in self.passes(recipe))
        scored_by = [reward_digest] if reward_digest and scores else []
        parts = (
            recipe.fingerprint(self.read_keys(), without=self.excluded_keys),
            *self.fingerprint_texts(recipe),
            *scored_by,
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
