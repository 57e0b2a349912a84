"""Samples of a step, joined with the records of steps with rounds and selections; each is checked by its score."""

import json
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from ppoctl.cli.app import run
from ppoctl.core.batch.records import Record
from ppoctl.core.errors import RecipeError, StorageError
from ppoctl.run.mlflow_extras import trained_on
from ppoctl.show.report.report_samples import rollouts as report_samples
from ppoctl.show.report.run_reader import read_runs
from ppoctl.show.report.shown_sample import ShownSample, read_samples
from ppoctl.store.compare_ledgers import compare
from ppoctl.store.discard import roll_back
from ppoctl.store.journal import read_lines
from ppoctl.store.ledger import Ledger
from ppoctl.store.outline import Outline, Outlines
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.retention import Retention
from ppoctl.store.stored_samples import SampleRow, StepRecords, steps_with_rollouts
from store.steps_on_disk import (
    AHEAD,
    FIRST,
    RESAMPLED,
    ROUNDS,
    SECOND,
    TWO_AHEAD,
    RunOnDisk,
    a_round,
    advantages,
    after_selection,
    on_disk,
    rewards,
    rollouts,
    score_of,
    selection,
    two_rounds,
    update,
)

MODEL = Path(__file__).parents[2] / "recipes/quickstart/model"
ALL = [(number, row) for number in (1, 2) for row in range(4)]
"""Round and row of each sample of two rounds."""
SELECTED = {(1, 1), (1, 2), (2, 0), (2, 3)}


def made(
    root: Path, records: Mapping[str, Record[Any]] | None = None, outlines: Outline | Outlines = ROUNDS
) -> RunOnDisk:
    """Return a run whose step 1 has these records; without them, two rounds."""
    made_run = on_disk(root, outlines, name="rows", recipe={"model": {"path": str(MODEL)}})
    made_run.commit(1, two_rounds() if records is None else records)
    return made_run


def seed(row: SampleRow | ShownSample) -> int:
    """Return the seed that the response names."""
    return int(row.response.removeprefix("seed "))


def keys(rows: list[SampleRow]) -> list[tuple[int, int]]:
    """Return round and row of samples, from prompt and number, after comparing them with the seed."""
    found = [(row.round, 2 * int(row.prompt_id[1:]) + row.sample) for row in rows]
    assert [100 * number + row for number, row in found] == list(map(seed, rows))
    return found


def require_own_values(rows: list[SampleRow], selected: set[tuple[int, int]]) -> None:
    """Compare score and advantage of each sample with those computed from its seed."""
    for row, key in zip(rows, keys(rows), strict=True):
        assert row.score == score_of(seed(row))
        assert row.advantage == (-score_of(seed(row)) if key in selected else None), key


def test_samples_of_two_rounds_have_their_own_scores_and_advantages(tmp_path: Path) -> None:
    rows = StepRecords.read(RecordedRun(made(tmp_path / "run").paths), 1).rows()
    assert keys(rows) == ALL
    assert [row.row for row in rows] == list(range(8))
    require_own_values(rows, SELECTED)


def test_each_token_has_the_values_of_its_own_sample(tmp_path: Path) -> None:
    shown = read_samples(RecordedRun(made(tmp_path / "run").paths), 1)
    for (number, row), sample in zip(ALL, shown, strict=True):
        source, score = (FIRST, SECOND)[number - 1], score_of(seed(sample))
        mask = source.mask[row, : int(source.lengths[row])].int().tolist()
        assert sample.tokens == source.sequences.unpadded()[row][int(source.prompt_lengths[row]) :].tolist()
        assert sample.answer == f"truth seed {seed(sample)}"
        assert sample.logprobs == [-0.5 * each for each in mask]
        assert sample.values is None
        is_selected = (number, row) in SELECTED
        assert sample.advantages == ([-score * each for each in mask] if is_selected else None)
        assert sample.kl == (pytest.approx([score / 10 * each for each in mask], rel=1e-4) if is_selected else None)
    [one] = read_samples(RecordedRun(made(tmp_path / "other").paths), 1, [7])
    assert one == shown[7]


def test_rows_follow_the_selection_of_the_last_round(tmp_path: Path) -> None:
    """Both selections have as many rows as the advantages."""
    first = selection([(1, 0), (1, 1), (1, 2), (1, 3)], [FIRST], is_full=False)
    last = selection([(2, 1), (1, 3), (2, 2), (1, 0)], [FIRST, SECOND])
    records = a_round(1, FIRST, first) | a_round(2, SECOND, last) | after_selection(1, last, [FIRST, SECOND])
    rows = StepRecords.read(RecordedRun(made(tmp_path / "run", records).paths), 1).rows()
    require_own_values(rows, {(2, 1), (1, 3), (2, 2), (1, 0)})


def test_resampled_rows_of_one_round_keep_their_samples(tmp_path: Path) -> None:
    kept = selection([(1, 3), (1, 3), (1, 1), (1, 3)], [FIRST])
    records = a_round(1, FIRST, kept) | after_selection(1, kept, [FIRST])
    rows = StepRecords.read(RecordedRun(made(tmp_path / "run", records, RESAMPLED).paths), 1).rows()
    require_own_values(rows, {(1, 3), (1, 1)})


def test_round_that_is_not_scored_yet_is_listed(tmp_path: Path) -> None:
    records = {name: record for name, record in two_rounds().items() if name.startswith("rollout")}
    found = made(tmp_path / "run", {**records, "reward": rewards(FIRST)})
    rows = StepRecords.read(RecordedRun(found.paths), 1).rows()
    assert keys(rows) == ALL
    assert [row.score for row in rows] == [score_of(seed(row)) for row in rows[:4]] + [None] * 4
    assert {row.outcome for row in rows[4:]} == {"not scored"}


def test_selection_of_other_samples_is_refused(tmp_path: Path) -> None:
    other = selection([(1, 0)], [rollouts(1, [1, 1])])
    wrong = type(other)(**{**vars(other), "sample_indices": [1]})
    records = a_round(1, FIRST, wrong) | after_selection(1, wrong, [FIRST])
    found = made(tmp_path / "run", records, RESAMPLED)
    with pytest.raises(StorageError, match="row 0 of `rollout` is not sample 1 of prompt `p0`"):
        StepRecords.read(RecordedRun(found.paths), 1)


def test_list_shows_the_round_of_each_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = made(tmp_path / "run").paths.root
    assert run(["show", str(root), "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["samples"]
    assert [(row.get("round", 1), row["score"]) for row in found] == [(n, score_of(100 * n + r)) for n, r in ALL]
    assert run(["show", str(root), "--list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:5] == ["row", "round", "prompt", "sample", "score"]
    assert [line[1] for line in lines[1:]] == ["1"] * 4 + ["2"] * 4
    assert run(["show", str(root), "--manifest", "--step", "1"]) == 0
    assert list(json.loads(capsys.readouterr().out)["manifests"]) == list(two_rounds())


def test_report_and_mlflow_show_each_sample_with_its_own_score(tmp_path: Path) -> None:
    paths = made(tmp_path / "run").paths
    [step] = report_samples(read_runs([paths.root])[0], 0, 3)
    assert step["total"] == 8
    for item in step["items"]:
        advantage = {value for value in item.get("advantage", ()) if value}
        assert advantage in (set(), {-item["score"]})
    table = trained_on(paths, 1)
    assert [row["reward"] for row in table] == [score_of(100 * n + r) for n, r in ALL]
    assert [row["mean advantage"] for row in table] == [
        -score_of(100 * n + r) if (n, r) in SELECTED else None for n, r in ALL
    ]


def test_ledger_has_the_samples_of_the_list_with_their_rounds(tmp_path: Path) -> None:
    found = made(tmp_path / "run")
    ledger, samples = Ledger(found.paths.ledger, found.attempt), ((FIRST, rewards(FIRST)), (SECOND, rewards(SECOND)))
    ledger.record(1, samples, {"actor": "abc"})
    lines = read_lines(found.paths.ledger)
    assert [line.get("round") for line in lines] == [None] * 4 + [2] * 4
    rows = StepRecords.read(RecordedRun(found.paths), 1).rows()
    assert [(line.get("round", 1), line["prompt"], line["sample"], line["score"]) for line in lines] == [
        (row.round, row.prompt_id, row.sample, row.score) for row in rows
    ]
    other = made(tmp_path / "other")
    Ledger(other.paths.ledger, other.attempt).record(1, samples[:1] * 2, {"actor": "abc"})
    first = compare(found.paths.ledger, other.paths.ledger).first
    assert first is not None
    assert (first.prompt, first.sample, first.what["seed"]) == ("p0", 0, (200, 100))


# --- reads of the step before -------------------------------------------------------------------------------------


def ahead(
    root: Path, steps: int, *, keep_last: int | None = 2, inspected: int = 0, outlines: Outlines = AHEAD
) -> tuple[RunOnDisk, list[int]]:
    """Return a run that trains on the responses of a step before and saves every step, with the steps that retention
    handled."""
    made_run, reach = on_disk(root, outlines, recipe={"model": {"path": str(MODEL)}}), outlines.reaches_back
    retention = Retention(made_run.attempt, outlines, keep_last=keep_last, keep_rollouts_every_steps=inspected)
    handled = []
    for step in range(1, steps + 1):
        source = rollouts(step - reach, [2, 3])
        first = {"rollout": source} if step <= reach else {}
        rest = {
            "advantages": advantages(source),
            "rollout_ahead": rollouts(step, [2, 3]),
            "actor_update": update(step),
        }
        made_run.commit(step, {**first, "reward": rewards(source), **rest})
        made_run.save(step)
        handled += retention.apply()
    return made_run, handled


def folders(made_run: RunOnDisk) -> dict[int, list[str]]:
    paths = made_run.paths
    return {step: sorted(path.name for path in paths.step(step).iterdir()) for step in paths.committed_steps()}


def test_outlines_say_how_far_a_step_reaches_back() -> None:
    assert (AHEAD.reaches_back, AHEAD.at(2).reads_before()) == (1, {"rollout_ahead"})
    assert (Outlines({1: ROUNDS}).reaches_back, ROUNDS.reads_before()) == (0, frozenset())
    assert AHEAD.roles == ("actor",)


def test_outlines_say_which_records_later_steps_read() -> None:
    name = "rollout_ahead"
    assert TWO_AHEAD.reaches_back == 2
    assert [TWO_AHEAD.read_after(step) for step in (1, 5)] == [{(1, name)}, {(4, name), (5, name)}]
    assert AHEAD.read_after(5) == {(5, name)}
    assert [outlines.readers(5, name) for outlines in (AHEAD, TWO_AHEAD)] == [[6], [7]]


def test_retention_keeps_what_two_steps_after_a_kept_state_reads(tmp_path: Path) -> None:
    """Step 6 reads step 4, and can run again from the states of step 5."""
    found, _ = ahead(tmp_path / "run", 6, outlines=TWO_AHEAD)
    assert found.paths.saved_steps("actor") == [5, 6]
    kept = {step: names for step, names in folders(found).items() if step < 6}
    assert kept == {4: ["rollout_ahead"], 5: ["rollout_ahead"]}
    plan, _ = roll_back(RecordedRun(found.paths), 5)
    assert [item.name for item in plan.items] == [
        "states/actor/000005",
        "steps/000004/rollout_ahead",
        "steps/000005/rollout_ahead",
    ]
    rmtree(found.paths.stage(4, "rollout_ahead"))
    assert [item.description for item in plan_resume(RecordedRun(found.paths)).broken] == [
        "`steps/000004/rollout_ahead` (missing)"
    ]


def test_generation_that_no_step_has_read_may_be_open(tmp_path: Path) -> None:
    """The run was killed in step 4 before the generation of step 3 had ended. Step 5 reads it."""
    found, _ = ahead(tmp_path / "run", 2, outlines=TWO_AHEAD)
    for step in (3, 4):
        source = rollouts(step - 2, [2, 3])
        found.commit(
            step, {"reward": rewards(source), "advantages": advantages(source), "actor_update": update(step)}
        )
    rmtree(found.paths.stage(4, "actor_update"))
    plan = plan_resume(RecordedRun(found.paths))
    assert [item.name for item in plan.items if item.action == "run"] == [
        "steps/000003/rollout_ahead",
        "steps/000004/rollout_ahead",
        "steps/000004/70-actor_update",
    ]
    assert plan.broken == ()
    source = rollouts(5, [2, 3])
    found.commit(5, {"reward": rewards(source)})
    broken = [item.name for item in plan_resume(RecordedRun(found.paths)).broken]
    assert broken == ["steps/000003/rollout_ahead", "steps/000004/70-actor_update"]


def test_retention_keeps_what_the_step_after_the_oldest_kept_state_reads(tmp_path: Path) -> None:
    found, handled = ahead(tmp_path / "run", 5)
    assert found.paths.saved_steps("actor") == [4, 5]
    whole = ["20-reward", "50-advantages", "70-actor_update", "rollout_ahead"]
    assert folders(found) == {4: ["rollout_ahead"], 5: whole}
    assert handled == [1, 1, 2, 2, 3, 3, 4]


def test_run_goes_back_to_the_oldest_kept_state(tmp_path: Path) -> None:
    found, _ = ahead(tmp_path / "run", 5)
    plan, moved = roll_back(RecordedRun(found.paths), 4)
    assert moved == ["moved aside states/actor/000005", "moved aside steps/000005"]
    assert [(item.name, item.action) for item in plan.items] == [
        ("states/actor/000004", "restored"),
        ("steps/000004/rollout_ahead", "recalled"),
    ]
    assert (plan.start, plan.broken) == (4, ())


def test_record_that_the_next_step_reads_is_missing_if_it_is_gone(tmp_path: Path) -> None:
    found, _ = ahead(tmp_path / "run", 3)
    rmtree(found.paths.stage(3, "rollout_ahead"))
    assert [item.description for item in plan_resume(RecordedRun(found.paths)).broken] == [
        "`steps/000003/rollout_ahead` (missing)"
    ]


def test_every_step_with_kept_states_keeps_what_the_next_step_reads(tmp_path: Path) -> None:
    found, _ = ahead(tmp_path / "run", 5, keep_last=None)
    assert found.paths.saved_steps("actor") == [1, 2, 3, 4, 5]
    assert {step: names for step, names in folders(found).items() if step < 5} == {
        step: ["rollout_ahead"] for step in (1, 2, 3, 4)
    }


def test_samples_of_the_step_before_have_the_scores_of_this_step(tmp_path: Path) -> None:
    found, _ = ahead(tmp_path / "run", 5, inspected=2)
    assert steps_with_rollouts(RecordedRun(found.paths)) == [
        2,
        3,
        4,
        5,
    ]  # step 3: its responses are records of step 2
    for step in (2, 4, 5):
        rows = StepRecords.read(RecordedRun(found.paths), step).rows()
        assert [(seed(row), row.score, row.advantage) for row in rows] == [
            (number, score_of(number), -score_of(number)) for number in (100 * step - 100, 100 * step - 99)
        ]
    assert [row.outcome for row in StepRecords.read(RecordedRun(found.paths), 3).rows()] == ["not scored"] * 2
    with pytest.raises(RecipeError, match="steps with rollouts: 2-5"):
        StepRecords.read(RecordedRun(found.paths), 1)
