"""A run over several steps: when it saves and evaluates, what the ledger contains, and how health rules end it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fakes.components import BigramGenerator, fake_components, fake_recipe
from fakes.job import Witness, open_run, play
from ppoctl.core.batch.records import Carry, State
from ppoctl.core.errors import ExpectationError, FinishedShortError, HealthStopError
from ppoctl.core.ports import Sample, SampleRequest, SamplingParams
from ppoctl.recipe.cadence import saves
from ppoctl.recipe.schema import Expectation
from ppoctl.run.loop import steps
from ppoctl.run.loop.steps import RunContext
from ppoctl.show.report.expectations import check_expectations, require_met
from ppoctl.store import manifest as manifests
from ppoctl.store.journal import read_lines
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.states import saved_state


def test_last_step_is_saved_for_any_save_interval() -> None:
    recipe = fake_recipe(steps=5, checkpoint={"every_steps": 2})
    assert [step for step in range(1, 6) if saves(recipe, step)] == [2, 4, 5]


def test_ledger_records_updates_that_used_each_sample(tmp_path: Path) -> None:
    ppo = {"epochs": 1, "minibatch_seqs": 4, "critic_only_steps": 1}
    play(tmp_path / "run", fake_recipe(steps=2, ppo=ppo, checkpoint={"every_steps": 1}))
    paths = RunPaths(tmp_path / "run")
    lines = [json.loads(line) for line in paths.ledger.read_text().splitlines()]
    # Training samples only: eight of each step, none of an evaluation.
    assert [line["step"] for line in lines] == [1] * 8 + [2] * 8
    lineages = {}
    for step, role in ((1, "critic"), (2, "critic"), (2, "actor")):
        saved = saved_state(paths, role, step)
        lineages[step, role] = saved[0].lineage[:16]
    assert {line["step"]: line["used_by"] for line in lines} == {
        1: {"critic": lineages[1, "critic"]},
        2: {"critic": lineages[2, "critic"], "actor": lineages[2, "actor"]},
    }


def test_run_with_missing_steps_raises_finished_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: a resume that considers its run one step further than it is."""
    play(tmp_path / "run", fake_recipe(steps=2, checkpoint={"every_steps": 1}))
    began = steps.start_point

    def further(job: RunContext) -> tuple[int, dict[str, State], Carry]:
        step, *rest = began(job)
        return step + 1, *rest

    monkeypatch.setattr(steps, "start_point", further)
    with pytest.raises(FinishedShortError, match="newest saved step 2, but `steps` is 3"):
        play(tmp_path / "run", fake_recipe(steps=3, checkpoint={"every_steps": 1}))


def test_evaluation_reads_actor_updated_in_same_step(tmp_path: Path) -> None:
    play(tmp_path / "run", fake_recipe(steps=1))
    paths = RunPaths(tmp_path / "run")
    saved = saved_state(paths, "actor", 1)
    evaluated = manifests.read(paths.stage(1, "eval"))
    assert evaluated is not None
    assert evaluated.inputs == (saved[0].identity,)


def test_evaluation_does_not_change_training(tmp_path: Path) -> None:
    for name, table in (("with", {"every_steps": 1}), ("without", {"at_start": False})):
        play(tmp_path / name, fake_recipe(steps=3, eval=table))
    ledgers = [RunPaths(tmp_path / name).ledger.read_bytes() for name in ("with", "without")]
    assert ledgers[0] == ledgers[1]


def test_last_step_is_evaluated_unless_at_end_is_false(tmp_path: Path) -> None:
    def evaluated(**keys: object) -> list[int]:
        folder = tmp_path / "-".join([*keys, "run"])
        play(folder, fake_recipe(steps=3, eval={"every_steps": 2, **keys}))
        return [line["step"] for line in read_lines(RunPaths(folder).journal) if line.get("stage") == "eval"]

    assert evaluated() == [0, 2, 3]
    assert evaluated(at_end=False) == [0, 2]
    # The resumed run does not evaluate step 3: `at_end=False` skipped it, and it is not the last step any more.
    play(tmp_path / "at_end-run", fake_recipe(steps=5, eval={"every_steps": 2}))
    lines = read_lines(RunPaths(tmp_path / "at_end-run").journal)
    assert [line["step"] for line in lines if line.get("stage") == "eval"] == [0, 2, 4, 5]


LINES = [
    {"stage": "eval", "seconds": 1.0, "step": 1, "figures": {"eval/held/pass_at_1": 0.25, "kl/coef": 0.5}},
    {"event": "attempt_started"},
    {"stage": "eval", "seconds": 1.0, "step": 4, "figures": {"eval/held/pass_at_1": 0.75}},
    {"stage": "eval", "seconds": 1.0, "step": 2, "figures": {"eval/held/pass_at_1": 0.5}},
]


@pytest.mark.parametrize(
    ("wanted", "met"),
    [
        ({"min": 0.75}, True),
        ({"min": 0.76}, False),
        ({"max": 0.75}, True),
        ({"max": 0.74}, False),
        ({"rise_min": 0.5}, True),
        ({"rise_min": 0.51}, False),
        ({"at_step": 2, "max": 0.5}, True),
        ({"at_step": 2, "min": 0.51}, False),
        ({"at_step": 3, "min": 0.0}, False),
        ({"min": 0.7, "max": 0.72}, False),
    ],
)
def test_expectation_is_checked_at_its_step_or_last_step(wanted: dict[str, float], met: bool) -> None:
    (verdict,) = check_expectations({"eval/held/pass_at_1": Expectation.model_validate(wanted)}, LINES)
    assert verdict.met is met


def test_missing_metric_is_unmet_and_named() -> None:
    verdicts = check_expectations({"reward/score_mean": Expectation(max=1.0)}, LINES)
    with pytest.raises(ExpectationError, match=r"`reward/score_mean` is absent \(expected at most 1\)"):
        require_met(verdicts)
    require_met(check_expectations({"kl/coef": Expectation(max=1.0)}, LINES))


class DriftingGenerator(BigramGenerator):
    """After each transfer of weights the sampler is a little more confident in its tokens than the trainer."""

    def generate(self, request: SampleRequest, params: SamplingParams) -> Sample:
        sample = super().generate(request, params)
        return replace(sample, logprobs=tuple(logprob + 0.04 * self.syncs for logprob in sample.logprobs))


def test_health_rule_stops_run_if_generator_drifts(tmp_path: Path) -> None:
    recipe = fake_recipe(steps=20, eval={"every_steps": 0})
    drifting = replace(fake_components(recipe), generator=lambda models, notify, logs: DriftingGenerator(models))
    wiring = open_run(tmp_path / "run", recipe, Witness(), components=drifting)
    with pytest.raises(HealthStopError, match=r"step 8: mismatch/gap_mean_abs is 0\.32, above 0\.3 \(`h") as raised:
        steps.run(wiring.job)
    assert raised.value.exit_code == 5
    assert "ppoctl resume" in str(raised.value.hint)
