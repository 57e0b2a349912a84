"""Rounds of dynamic sampling that overlap, on fakes: the run is that of rounds one after another, a round that the
step does not need leaves nothing, and what it generated is counted."""

import random
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.components import BigramGenerator, EvenScorer, FailsBesideOthers, fake_components
from fakes.dynamic_sampling import without_critic
from fakes.job import StopError, Stops, Witness, open_run, play, result, stopping_at
from fakes.turns import TURNS
from ppoctl.algorithms.choose import trace_at
from ppoctl.core.errors import NonFiniteError, PreemptedError
from ppoctl.core.step_metrics import of_step
from ppoctl.recipe.schema import Recipe
from ppoctl.run.loop.steps import run
from ppoctl.run.run_commands import _generate_and_score
from ppoctl.show.report.who_waited import newest_steps
from ppoctl.store.finished_samples import FILES
from ppoctl.store.journal import read_lines
from ppoctl.store.parallel_run import THREAD
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import MANIFEST, RunPaths

KEEPS = {"every_steps": 3, "keep_rollouts_every_steps": 1}


def recipe_of(*, overlaps: bool = True, **changes: Any) -> Recipe:
    """Return a recipe whose three steps have two rounds, one and three."""
    recipe = without_critic(checkpoint=KEEPS, **changes)
    assert recipe.rollout.groups is not None
    groups = recipe.rollout.groups.model_copy(update={"overlap_rounds": overlaps})
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"groups": groups})})


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Return a run whose rounds do not overlap."""
    paths = RunPaths(tmp_path_factory.mktemp("rounds") / "run")
    play(paths.root, recipe_of(overlaps=False))
    return paths


class Logging(BigramGenerator):
    """Generator that lists step and number of tokens of each response that the thread generates."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.early: list[tuple[int, int]] = []

    def generate(self, request: Any, params: Any) -> Any:
        sample = super().generate(request, params)
        if threading.current_thread().name == THREAD:
            self.early.append((self.state.step + 1, len(sample.tokens)))
        return sample


def play_with(root: Path, recipe: Recipe, **components: Any) -> Logging:
    """Run to the end with these components, and return the generator."""
    made = fake_components(recipe)
    generators: list[Logging] = []

    def generator(actor_at: Any, *_: Any) -> Logging:
        generators.append(Logging(actor_at))
        return generators[0]

    made = replace(made, **{"generator": generator, **components})
    run(open_run(root, recipe, Witness(), components=made).job)
    return generators[0]


def records(paths: RunPaths) -> dict[str, bytes]:
    """Return all files in the folders of steps except manifests: records, and samples that were left."""
    files = (path for path in sorted(paths.steps.rglob("*")) if path.is_file() and path.name != MANIFEST)
    return {paths.inside(path): path.read_bytes() for path in files}


def metrics_of(paths: RunPaths, step: int) -> dict[str, float]:
    return of_step(line for line in read_lines(paths.journal) if line.get("step") == step)


def test_every_interleaving_gives_the_run_of_rounds_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_by_one: RunPaths
) -> None:
    for seed in range(6):
        turns = random.Random(seed)
        monkeypatch.setattr(TURNS, "pick", lambda turns=turns: turns.choice((0, 0, 1, 2, 5)))
        paths = RunPaths(tmp_path / str(seed))
        play(paths.root, recipe_of())
        assert result(paths.root) == result(one_by_one.root), f"seed {seed}"
        assert records(paths) == records(one_by_one), f"seed {seed}"
        lines, expected = (
            [(line["step"], line["stage"]) for line in read_lines(each.journal) if "stage" in line]
            for each in (paths, one_by_one)
        )
        assert lines == expected
    assert trace_at(recipe_of(), 1).outline == trace_at(recipe_of(overlaps=False), 1).outline


@pytest.mark.parametrize(("turns", "generated"), [(0, 1), (1, 4), (99, 4)])
def test_tokens_of_a_round_that_is_not_needed_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int, generated: int
) -> None:
    """The last round of each step is followed by one that is cancelled after one of its four responses, or at its
    end. The engine reports one token of each request that it aborts."""
    paths = RunPaths(tmp_path / "run")
    monkeypatch.setattr(TURNS, "pick", lambda: turns)
    generator = play_with(paths.root, recipe_of())
    for step, rounds in ((1, 2), (2, 1), (3, 3)):
        tokens = [number for of, number in generator.early if of == step]
        unused = tokens[4 * (rounds - 1) :]
        assert len(unused) == generated
        found = metrics_of(paths, step)
        assert found["groups/rounds"] == rounds
        assert found["groups/cancelled_tokens"] == sum(unused) + (4 - generated)
        assert found["time/cancelled_s"] > 0
        assert not paths.all_parts(step)


def test_last_round_that_a_step_may_have_is_followed_by_none(tmp_path: Path) -> None:
    """Step 1 has two rounds of at most two."""
    paths = RunPaths(tmp_path / "run")
    recipe = recipe_of(steps=1)
    groups = recipe.rollout.groups
    assert groups is not None
    rollout = recipe.rollout.model_copy(update={"groups": groups.model_copy(update={"max_rounds": 2})})
    generator = play_with(paths.root, recipe.model_copy(update={"rollout": rollout}))
    assert len(generator.early) == 4
    assert metrics_of(paths, 1)["groups/cancelled_tokens"] == 0


class Slow(EvenScorer):
    """Scorer that scores the responses of one early round when `release` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.early: list[tuple[Any, Future[Any]]] = []
        self.in_turn = 0

    def submit(self, request: Any) -> Any:
        if threading.current_thread().name != THREAD:
            self.in_turn += 1
            return super().submit(request)
        self.early.append((request, Future()))
        return self.early[-1][1]

    def release(self) -> None:
        for request, future in [each for each in self.early if not each[1].done()][:4]:
            future.set_result(super().submit(request).result())


@pytest.mark.timeout(60)
def test_scores_of_a_needed_round_survive_those_before_and_others_are_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread submits each response of rounds 2 and 3, and no reward stage submits it again."""
    scorer, recipe = Slow(), recipe_of()
    cancelled_at: dict[str, int] = {}

    def act(number: int, name: str) -> None:
        _, stage, moment = name.split(maxsplit=2)
        if stage.startswith("keep_groups") and moment == "writing":
            cancelled_at[name] = sum(future.cancelled() for _, future in scorer.early)
        if stage.startswith("reward.") and moment == "starts":
            scorer.release()

    monkeypatch.setattr(TURNS, "pick", lambda: 99)
    components = replace(fake_components(recipe), scorer=scorer)
    run(open_run(tmp_path / "run", recipe, Witness(act=act), components=components).job)
    assert list(cancelled_at.items()) == [
        ("1 keep_groups writing", 0),
        ("1 keep_groups.2 writing", 4),
        ("2 keep_groups writing", 8),
        ("3 keep_groups writing", 8),
        ("3 keep_groups.2 writing", 8),
        ("3 keep_groups.3 writing", 12),
    ]
    assert (len(scorer.early), scorer.in_turn) == (4 * (2 + 1 + 3), 4 * 3 + 3 * 8), "and three evaluations"


@pytest.mark.parametrize("overlaps", [True, False])
def test_stop_while_scores_are_computed_keeps_the_finished_responses(
    tmp_path: Path, one_by_one: RunPaths, overlaps: bool
) -> None:
    """Step 2 does not need the responses of its second round, and step 3 does. The resume plan lists no stage of this
    round before it is needed. Needed responses are used, also with rounds one after another; others are removed at
    the latest with the records of the step."""
    for step, needed in ((2, False), (3, True)):
        paths = RunPaths(tmp_path / str(step))
        with pytest.raises(StopError):
            play(paths.root, recipe_of(), stopping_at(f"{step} reward writing"))
        assert not any(thread.name == THREAD for thread in threading.enumerate())
        kept = len(list(paths.parts(step, "rollout.2").glob(FILES)))
        assert kept > 0
        plan = plan_resume(RecordedRun(paths))
        assert [item.name for item in plan.items if item.action == "run"] == [
            f"steps/{step:06d}/{stage}" for stage in ("20-reward", "25-keep_groups", "40-logprobs", "50-advantages")
        ] + [f"steps/{step:06d}/70-actor_update"]
        assert plan.finished == ((step, "rollout.2", kept),)
        recipe = recipe_of(overlaps=overlaps)
        with pytest.raises(StopError):
            play(paths.root, recipe, stopping_at(f"{step} keep_groups renamed"))
        assert plan_resume(RecordedRun(paths)).finished == (((step, "rollout.2", 4 if overlaps else kept),) * needed)
        generator = play(paths.root, recipe).generator
        assert isinstance(generator, BigramGenerator)
        assert result(paths.root) == result(one_by_one.root)
        assert records(paths).keys() - records(one_by_one).keys() == set() or not (needed or overlaps)


def test_resume_after_the_scores_generates_no_round_that_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_by_one: RunPaths
) -> None:
    """Step 2 was killed after the commit of its scores, when one response of the second round was finished."""
    paths, recipe = RunPaths(tmp_path / "run"), recipe_of()
    once = iter([1])
    monkeypatch.setattr(TURNS, "pick", lambda: next(once, 0) if paths.stage(2, "rollout").exists() else 0)
    with pytest.raises(StopError):
        play(paths.root, recipe, stopping_at("2 keep_groups starts"))
    assert paths.all_parts(2)
    generator = play_with(paths.root, recipe)
    assert [step for step, _ in generator.early if step == 2] == []
    assert not paths.all_parts(2)
    assert metrics_of(paths, 2)["groups/cancelled_tokens"] == 0, "those of an earlier attempt are not known"
    assert result(paths.root) == result(one_by_one.root)


def test_error_of_the_next_round_ends_the_step_before_groups_are_kept_and_not_a_resume(
    tmp_path: Path, one_by_one: RunPaths
) -> None:
    """No response of the second round of step 2 can be generated, and the step does not need it."""
    recipe, root = recipe_of(), tmp_path / "run"
    components = fake_components(recipe)

    object.__setattr__(components, "generator", lambda actor_at, *_: FailsBesideOthers(actor_at))
    with pytest.raises(NonFiniteError, match="a log-prob is not finite"):
        run(open_run(root, recipe, Witness(), components=components).job)
    paths = RunPaths(root)
    assert paths.stage(2, "reward").is_dir()
    assert not paths.stage(2, "keep_groups").exists()
    play(root, recipe)
    assert result(root) == result(one_by_one.root)


@pytest.mark.parametrize("stage", ["keep_groups", "rollout.2"])
def test_stop_while_the_step_waits_for_the_next_round_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_by_one: RunPaths, stage: str
) -> None:
    """The gate closes at its first look while step 2 waits for the end of a cancelled round, or step 3 for a needed
    one."""
    step, witness, root = (2 if stage == "keep_groups" else 3), Witness(), tmp_path / "run"
    witness.waits_to_its_end = stage == "keep_groups"

    class Gate(Stops):
        def between(self) -> None:
            if self.at is not None and self.at[1].startswith("rollout."):
                TURNS.give(1)
            if self.at == (step, stage):
                with TURNS.free_after_an_error():
                    raise PreemptedError("stopped", hint="")
            super().between()

    monkeypatch.setattr(TURNS, "pick", lambda: 0)
    with pytest.raises(PreemptedError):
        run(open_run(root, recipe_of(), witness, gate=Gate()).job)
    paths = RunPaths(root)
    assert not any(thread.name == THREAD for thread in threading.enumerate())
    assert not paths.stage(step, stage).exists()
    assert paths.parts(step, "rollout.2").is_dir()
    monkeypatch.undo()
    play(root, recipe_of())
    assert result(root) == result(one_by_one.root)


def test_command_that_only_generates_begins_no_further_round(tmp_path: Path) -> None:
    job = open_run(tmp_path / "run", recipe_of(), Witness()).job
    _generate_and_score(job)
    paths = RunPaths(tmp_path / "run")
    assert paths.stage(1, "reward").is_dir()
    assert not paths.all_parts(1)
    assert not any(thread.name == THREAD for thread in threading.enumerate())


def test_generator_works_while_scores_are_computed(tmp_path: Path) -> None:
    """The engines work in each round, and in the one that is cancelled."""
    play(tmp_path / "run", recipe_of())
    recorded = RecordedRun(RunPaths(tmp_path / "run"))
    steps = newest_steps(recorded.lines, recorded.outlines, at_most=3)
    assert len(steps) == 3
    for step in steps:
        clocked = [line["clocked"] for line in recorded.lines if line.get("step") == step.step and "stage" in line]
        worked_s = sum(each.get("time/generation_s", 0.0) + each.get("time/cancelled_s", 0.0) for each in clocked)
        assert step.worked_s("generator") == pytest.approx(worked_s, abs=1e-3)
