"""Generation beside training, on fakes: any interleaving gives the same run, a stop keeps what is finished, and an
error of the generation ends the step."""

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from fakes.components import FEW_ROWS, BigramGenerator, EvenScorer, FailsBesideOthers, fake_components, fake_recipe
from fakes.job import StopError, Stops, Witness, open_run, play, result, stopping_at
from fakes.turns import TURNS
from ppoctl.core.batch import codec
from ppoctl.core.batch.update import step_of
from ppoctl.core.errors import NonFiniteError, PreemptedError, RecipeError
from ppoctl.run.changed_settings import change
from ppoctl.run.loop.steps import run
from ppoctl.show.report.who_waited import newest_steps
from ppoctl.store import record_file
from ppoctl.store.finished_samples import FILES
from ppoctl.store.journal import read_lines
from ppoctl.store.parallel_run import THREAD
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths

PPO = {"epochs": 2, "minibatch_seqs": 2, "rollout_correction": {"kind": "tis"}}
ROLLOUT = {**FEW_ROWS, "ahead": 1, "keep_finished_every_s": 1e-9}


def ahead(**changes: Any) -> Any:
    return fake_recipe(**{"steps": 3, "rollout": ROLLOUT, "ppo": PPO, **changes})


@pytest.mark.parametrize(
    ("changes", "oldest"), [({}, 1), ({"ahead": 2}, 2), ({"max_new_tokens": 5, "tokens_per_step": 2}, 3)]
)
def test_every_interleaving_gives_the_same_run_with_a_bounded_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], oldest: int
) -> None:
    """At each moment of the main thread, the generation gets a random number of turns. A response of three segments
    is at most two steps older than a whole one. Two steps ahead, a generation may end in the next step, but not after
    an evaluation (steps 2 and 4) or a save (step 5)."""
    rollout = {**ROLLOUT, **changes}
    tables = {"rollout": rollout, "steps": 6, "checkpoint": {"every_steps": 5}}
    play(tmp_path / "one by one", ahead(**tables))
    expected = result(tmp_path / "one by one")
    for seed in range(8):
        turns = random.Random(seed)
        monkeypatch.setattr(TURNS, "pick", lambda turns=turns: turns.choice((0, 0, 1, 2, 5)))
        root = tmp_path / str(seed)
        play(root, ahead(**tables))
        assert result(root) == expected, f"seed {seed}"
        for line in map(json.loads, RunPaths(root).ledger.read_text("utf-8").splitlines()):
            stamps = [stamp for stamp, _ in line.get("segments", [[line["stamp"], 0]])]
            assert all(0 <= line["step"] - 1 - step_of(stamp) <= oldest for stamp in stamps)


TWO_AHEAD = {
    "rollout": {**ROLLOUT, "ahead": 2},
    "steps": 5,
    "checkpoint": {"every_steps": 3},
    "eval": {"every_steps": 0},
}


def test_generation_two_steps_ahead_begins_before_the_update_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation advances only while the run waits for it, or it ends at once. Before the save of step 3, it must
    end in both cases."""
    order: dict[int, list[str]] = {}
    for turns in (0, 99):
        monkeypatch.setattr(TURNS, "pick", lambda turns=turns: turns)
        witness = Witness()
        play(tmp_path / str(turns), ahead(**TWO_AHEAD), witness)
        order[turns] = witness.moments
    assert result(tmp_path / "0") == result(tmp_path / "99")
    ends = [name for name in order[0] if name.endswith(("next_rollout renamed", "_update starts", "reward starts"))]
    assert ends[ends.index("2 reward starts") : ends.index("5 reward starts")] == [
        *("2 reward starts", "2 critic_update starts", "2 actor_update starts"),
        *("3 reward starts", "3 critic_update starts", "2 next_rollout renamed", "3 actor_update starts"),
        "3 next_rollout renamed",
        *("4 reward starts", "4 critic_update starts", "4 actor_update starts"),
    ]
    begins = [name for name in order[99] if name.endswith(("next_rollout starts", "reward starts"))]
    assert begins[begins.index("3 next_rollout starts") :][:2] == ["3 next_rollout starts", "3 reward starts"]


def test_stop_after_a_step_does_not_save_it_if_a_generation_needs_its_first_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When step 5 begins, the generation that began in step 4 has not ended, and needs the weights before step 4."""
    root = tmp_path / "run"

    class Gate(Stops):
        def before(self, step: int, stage: str) -> None:
            if (step, stage) == (5, "reward"):
                with TURNS.free_after_an_error():
                    raise PreemptedError("stopped", hint="")

    monkeypatch.setattr(TURNS, "pick", lambda: 0)
    with pytest.raises(PreemptedError):
        run(open_run(root, ahead(**TWO_AHEAD), Witness(), gate=Gate()).job)
    paths = RunPaths(root)
    assert paths.stage(4, "actor_update").is_dir()
    assert not paths.stage(4, "next_rollout").exists()
    assert paths.saved_steps("actor") == [3]
    monkeypatch.undo()
    play(root, ahead(**TWO_AHEAD))
    play(tmp_path / "whole", ahead(**TWO_AHEAD))
    assert result(root) == result(tmp_path / "whole")


def test_stop_in_an_update_keeps_the_finished_samples_of_the_next_step(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with pytest.raises(StopError):
        play(root, ahead(), stopping_at("2 actor_update starts"))
    assert not any(thread.name == THREAD for thread in threading.enumerate())
    paths = RunPaths(root)
    assert paths.stage(2, "critic_update").is_dir()
    assert not paths.stage(2, "next_rollout").exists()
    kept = len(list(paths.parts(2, "next_rollout").glob(FILES)))
    assert kept > 0
    generator = play(root, ahead()).generator
    assert isinstance(generator, BigramGenerator)
    play(tmp_path / "whole", ahead())
    assert result(root) == result(tmp_path / "whole")


def test_samples_of_a_generation_that_has_ended_survive_the_rest_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation ends at the first moment of step 2, and the next periodic write would come much later."""
    root, rollout = tmp_path / "run", {**ROLLOUT, "keep_finished_every_s": 1e9}
    monkeypatch.setattr(TURNS, "pick", lambda: 99)
    with pytest.raises(StopError):
        play(root, ahead(rollout=rollout), stopping_at("2 actor_update starts"))
    kept = RunPaths(root).parts(2, "next_rollout").glob(FILES)
    assert sum(len(codec.decode(path.read_bytes())[1]["lengths"]) for path in kept) == 4
    generator = play(root, ahead(rollout=rollout)).generator
    assert isinstance(generator, BigramGenerator)
    assert generator.num_generated == 4 + 2 * 8, "the responses of step 4, and two evaluations"
    play(tmp_path / "whole", ahead(rollout=rollout))
    assert result(root) == result(tmp_path / "whole")


def test_error_of_the_generation_ends_the_step_before_its_next_stage(tmp_path: Path) -> None:
    """No response of step 3 can be generated. The generation fails while the main thread scores step 2."""
    recipe, root = ahead(), tmp_path / "run"
    components = fake_components(recipe)

    object.__setattr__(components, "generator", lambda actor_at, *_: FailsBesideOthers(actor_at))
    with pytest.raises(NonFiniteError, match="a log-prob is not finite"):
        run(open_run(root, recipe, Witness(), components=components).job)
    paths = RunPaths(root)
    assert paths.stage(2, "reward").is_dir()
    assert not paths.stage(2, "values").exists()


def test_stop_while_the_step_waits_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate closes at its third look in the wait of step 2. Each look gives the generation one turn."""
    root, looks, many = tmp_path / "run", list[int](), {"rollout": {**ROLLOUT, "prompts_per_step": 9}}

    witness = Witness()
    witness.waits_to_its_end = False

    class Gate(Stops):
        def between(self) -> None:
            if witness.stage != "next_rollout":
                return
            TURNS.give(1)
            looks.append(int(Path(root / "steps/000002/70-actor_update").is_dir()))
            if sum(looks) == 3:
                with TURNS.free_after_an_error():
                    raise PreemptedError("stopped", hint="")

    monkeypatch.setattr(TURNS, "pick", lambda: 0)
    with pytest.raises(PreemptedError):
        run(open_run(root, ahead(**many), witness, gate=Gate()).job)
    paths = RunPaths(root)
    assert sum(looks) == 3
    assert not paths.stage(2, "next_rollout").exists()
    assert list(paths.parts(2, "next_rollout").glob(FILES))
    monkeypatch.undo()
    play(root, ahead(**many))
    play(tmp_path / "whole", ahead(**many))
    assert result(root) == result(tmp_path / "whole")


def test_rollout_metrics_of_a_step_are_of_the_responses_that_it_trains_on(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    play(paths.root, ahead(checkpoint={"keep_rollouts_every_steps": 1}))
    lines = [line for line in read_lines(paths.journal) if "stage" in line]
    tokens = {
        (line["step"], line["stage"]): line["figures"]["rollout/tokens"]
        for line in lines
        if "rollout/tokens" in line["figures"]
    }
    assert list(tokens) == [(1, "rollout"), (2, "reward"), (3, "reward")]
    for step, stage in tokens:
        of, name = (1, "rollout") if step == 1 else (step - 1, "next_rollout")
        record = record_file.read(paths, of, name)
        assert record is not None
        assert tokens[step, stage] == float(record["lengths"].sum())


def test_scoring_of_the_next_responses_begins_while_a_step_trains(tmp_path: Path) -> None:
    """The thread of the generation submits each response of steps 2 to 4, and no reward stage submits it again."""
    recipe = ahead()
    components, submitted = fake_components(recipe), list[tuple[bool, str]]()

    class Logged(EvenScorer):
        def submit(self, request: Any) -> Any:
            submitted.append((threading.current_thread().name == THREAD, request.prompt_id))
            return super().submit(request)

    object.__setattr__(components, "scorer", Logged())
    run(open_run(tmp_path / "run", recipe, Witness(), components=components).job)
    trained = sorted((prompt, in_thread) for in_thread, prompt in submitted if len(prompt) == 2)
    assert trained == [(f"p{number}", number >= 2) for number in range(8) for _ in range(2)]


def test_keys_of_an_environment_cannot_change_between_steps(tmp_path: Path) -> None:
    environment = {"kind": "python", "path": "fakes:Sum", "turns": 3, "tokens": 16}
    reward = {"kind": "exact_match", "max_error_frac": 1.0}
    play(tmp_path / "run", ahead(steps=2, environment=environment, reward=reward))
    recorded = RecordedRun(RunPaths(tmp_path / "run"))
    scored = {**environment, "on_failure": {"score": -1.0}}
    assert change(recorded, ahead(steps=4, environment=scored, reward=reward)) is not None
    with pytest.raises(
        RecipeError, match=r"`environment\.turns` cannot change now: responses of step 3 have already"
    ):
        change(recorded, ahead(steps=4, environment={**environment, "turns": 2}, reward=reward))


def test_who_waited_is_known_of_each_step(tmp_path: Path) -> None:
    play(tmp_path / "run", ahead())
    recorded = RecordedRun(RunPaths(tmp_path / "run"))
    steps = newest_steps(recorded.lines, recorded.outlines, at_most=3)
    assert [(step.step, step.is_parallel, step.resumed_at_s) for step in steps] == [(n, True, ()) for n in (1, 2, 3)]
    for step in steps:
        clocked = [line["clocked"] for line in recorded.lines if line.get("step") == step.step and "stage" in line]
        generated_s = sum(each.get("time/generation_s", 0.0) for each in clocked)
        assert step.worked_s("generator") == pytest.approx(generated_s, abs=1e-4)
        ends = [(span.start_s, span.end_s) for spans in step.spans.values() for span in spans]
        assert all(0 <= start < end <= step.seconds + 1e-5 for start, end in ends)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            1,
            {"temperature": 0.5},
            "`rollout.temperature` cannot change now: responses of step 3 have already been",
        ),
        (1, {"samples_per_prompt": 3}, "`rollout.samples_per_prompt` cannot change now: responses of step 3"),
        (0, {"ahead": 1}, "`rollout.ahead` cannot change now: step 2 has generated no responses for step 3"),
        (0, {"ahead": 2}, "`rollout.ahead` cannot change now: step 1 has generated no responses for step 3"),
        (2, {"temperature": 0.5}, "`rollout.temperature` cannot change now: responses of step 3 have already been"),
        (
            0,
            {"tokens_per_step": 2},
            "`rollout.tokens_per_step` cannot change now: step 2 has generated no responses for step 3",
        ),
    ],
)
def test_keys_of_generated_responses_cannot_change_between_steps(
    tmp_path: Path, before: int, after: dict[str, Any], says: str
) -> None:
    """Step 3 of the longer run would train on responses of the shorter one."""
    rollout = {**ROLLOUT, "ahead": before}
    play(tmp_path / "run", ahead(steps=2, rollout=rollout))
    recorded = RecordedRun(RunPaths(tmp_path / "run"))
    assert change(recorded, ahead(steps=4, rollout=rollout)) is not None
    with pytest.raises(RecipeError, match=says) as refused:
        change(recorded, ahead(steps=4, rollout={**rollout, **after}))
    assert (refused.value.hint or "").startswith(f"ppoctl resume {tmp_path / 'run'}")
