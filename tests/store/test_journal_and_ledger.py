"""Journal and ledger after a crash: nothing is lost or doubled, and both are correct when a step is repeated."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from shutil import copytree, rmtree

import pytest

from fakes.components import fake_recipe
from fakes.job import Witness, open_run, play, result, stop_at
from ppoctl.core.batch.records import Rewards, Rollouts
from ppoctl.core.batch.scores import REWARD_OUTCOMES
from ppoctl.core.batch.sealed_json import sealed_line
from ppoctl.core.errors import SupersededError
from ppoctl.run.loop.steps import run
from ppoctl.store import manifest as manifests
from ppoctl.store.attempt import claim
from ppoctl.store.journal import NEWEST, Journal, JournalEvent, events, read_lines, read_newest
from ppoctl.store.ledger import Ledger, whole_blocks
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import load_record
from store.conftest import a_manifest, working

REDO = {"checkpoint": {"every_steps": 5}}


def test_torn_last_journal_line_is_removed_before_the_next(paths: RunPaths) -> None:
    journal = Journal(paths, working(paths, 1))
    journal.event("attempt_started")
    with paths.journal.open("ab") as file:
        file.write(b'{"seq": 2, "ev')
    again = Journal(paths, working(paths, 1))
    again.event("attempt_ended")
    assert [(line["seq"], line["event"]) for line in again.lines()] == [(1, "attempt_started"), (2, "attempt_ended")]
    assert paths.journal.read_bytes().count(b"\n") == 2


def test_lost_journal_lines_are_rebuilt_from_manifests(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "2 values starts", **REDO)
    before = read_lines(layout.journal)
    layout.journal.write_bytes(b"".join(layout.journal.read_bytes().splitlines(keepends=True)[:5]))
    play(layout.root, fake_recipe(**REDO))
    assert read_lines(layout.journal)[: len(before)] == before


def test_stage_published_by_a_dying_attempt_gets_its_journal_line(tmp_path: Path) -> None:
    play(tmp_path / "whole", fake_recipe(**REDO))
    # The new attempt has already read the journal when the rename of the old one takes effect.
    wiring = open_run(tmp_path / "run", fake_recipe(**REDO), Witness())
    late = RunPaths(tmp_path / "run").stage(1, "rollout")
    copytree(RunPaths(tmp_path / "whole").stage(1, "rollout"), late)
    run(wiring.job)
    assert result(tmp_path / "run") == result(tmp_path / "whole")


def test_journal_line_is_written_after_the_manifest(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    ahead: list[str] = []

    def look(number: int, name: str) -> None:
        words = name.split()
        if words[-1] in ("writing", "written") and not words[1].startswith("state/"):
            lines = [(line["step"], line["stage"]) for line in read_lines(paths.journal)]
            ahead.extend([name] if (int(words[0]), words[1]) in lines else [])

    play(paths.root, fake_recipe(steps=1), Witness(act=look))
    assert ahead == []


def test_journal_has_the_metrics_of_a_recommitted_stage(
    paths: RunPaths,
) -> None:
    journal = Journal(paths, working(paths, 1))
    old = a_manifest()
    new = replace(old, identity="bb", figures={"value/mean": 2.0})
    assert journal.ensure(old) is not None
    assert journal.ensure(new) is not None
    assert Journal(paths, working(paths, 1)).ensure(new) is None
    assert journal.metrics(1) == {"value/mean": 2.0}


def samples_of(paths: RunPaths, step: int) -> tuple[Rollouts, Rewards]:
    found = []
    for stage in ("rollout", "reward"):
        manifest = manifests.read(paths.stage(step, stage))
        assert manifest is not None
        found.append(load_record(paths, step, stage, manifest))
    rollouts, rewards = found
    assert isinstance(rollouts, Rollouts)
    assert isinstance(rewards, Rewards)
    return rollouts, rewards


@pytest.mark.parametrize("torn_after", [0.1, 0.4, 0.99])
def test_torn_ledger_step_is_removed_and_rewritten(tmp_path: Path, torn_after: float) -> None:
    layout = stop_at(tmp_path / "run", "3 rollout starts", **REDO)
    whole = layout.ledger.read_bytes()
    second = whole.index(b"\n", len(whole) // 2 - 40) + 1
    assert json.loads(whole[second:].split(b"\n")[0])["step"] == 2
    layout.ledger.write_bytes(whole[: second + int(torn_after * (len(whole) - second))])
    Ledger(layout.ledger, claim(layout)).record(2, [samples_of(layout, 2)], {"critic": "x", "actor": "y"})
    lines = [json.loads(line) for line in layout.ledger.read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [1] * 8 + [2] * 8
    assert [line.get("end_of_step", False) for line in lines] == ([False] * 7 + [True]) * 2
    assert layout.ledger.read_bytes()[:second] == whole[:second]


@pytest.mark.parametrize("lost", range(6))
def test_ledger_step_with_a_missing_line_is_dropped(lost: int) -> None:
    lines = [{"step": step, "sample": sample, "of": 2} for step in (1, 2, 3) for sample in (0, 1)]
    for line in lines[1::2]:
        line["end_of_step"] = True
    kept = [line for block in whole_blocks(lines[:lost] + lines[lost + 1 :]) for line in block]
    assert kept == [line for line in lines if line["step"] != lines[lost]["step"]]


def test_replayed_step_leaves_the_ledger_unchanged(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "3 rollout starts", **REDO)
    before = layout.ledger.read_bytes()
    used_by = [json.loads(line)["used_by"] for line in before.splitlines()]
    ledger = Ledger(layout.ledger, claim(layout))
    for step, roles in ((1, used_by[0]), (2, used_by[-1])):
        ledger.record(step, [samples_of(layout, step)], roles)
        assert layout.ledger.read_bytes() == before


def test_changed_step_removes_later_steps_from_the_ledger(
    tmp_path: Path,
) -> None:
    layout = stop_at(tmp_path / "run", "3 rollout starts", **REDO)
    whole, ledger = layout.ledger.read_bytes(), Ledger(layout.ledger, claim(layout))
    used_by = [json.loads(line)["used_by"] for line in whole.splitlines()]
    ledger.record(2, [samples_of(layout, 2)], used_by[-1])
    first = len(b"".join(whole.splitlines(keepends=True)[:8]))
    assert [ledger.end_of(step) for step in (0, 1, 2, 9)] == [0, first, len(whole), len(whole)]
    ledger.record(1, [samples_of(layout, 1)], {"critic": "another"})
    again = layout.ledger.read_bytes()
    assert {json.loads(line)["step"] for line in again.splitlines()} == {1}
    assert [ledger.end_of(step) for step in (1, 2)] == [len(again), len(again)]


def test_ledger_line_has_the_token_digest_and_the_score(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "2 rollout starts", **REDO)
    rollouts, rewards = samples_of(layout, 1)
    lengths = rollouts.lengths.tolist()
    assert min(lengths) < rollouts.tokens.shape[1]
    outcomes, scores = rewards.outcomes.clone(), rewards.scores.clone()
    outcomes[1], scores[1] = REWARD_OUTCOMES.index("error"), 0.0
    rewards = replace(rewards, outcomes=outcomes, scores=scores)
    (tmp_path / "ledger").touch()
    Ledger(tmp_path / "ledger", claim(layout)).record(1, [(rollouts, rewards)], {})
    lines = [json.loads(line) for line in (tmp_path / "ledger").read_bytes().splitlines()]
    ids = [json.dumps(row[:length].tolist()).encode() for row, length in zip(rollouts.tokens, lengths, strict=True)]
    assert [line["tokens"] for line in lines] == [sha256(text).hexdigest()[:24] for text in ids]
    assert [line["score"] for line in lines] == [
        None if row == 1 else float(score) for row, score in enumerate(rewards.scores)
    ]


def test_superseded_attempt_does_not_write_the_ledger(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "2 rollout starts", **REDO)
    ledger = Ledger(layout.ledger, claim(layout))
    claim(layout)
    with pytest.raises(SupersededError):
        ledger.record(2, [samples_of(layout, 1)], {"critic": "x"})


def test_regenerated_steps_replace_ledger_lines_and_journal_metrics(tmp_path: Path) -> None:
    layout = stop_at(tmp_path / "run", "3 rollout starts", **REDO)
    for step in layout.committed_steps():
        rmtree(layout.step(step))
    play(layout.root, fake_recipe(**REDO, seed=9))
    play(tmp_path / "whole", fake_recipe(**REDO, seed=9))
    whole = RunPaths(tmp_path / "whole")
    assert layout.ledger.read_bytes() == whole.ledger.read_bytes()
    again, expected = (Journal(run, claim(run)) for run in (layout, whole))
    assert [again.metrics(step) for step in (1, 2, 3)] == [expected.metrics(step) for step in (1, 2, 3)]


def test_journal_history_has_complete_steps_without_initial_eval(
    paths: RunPaths,
) -> None:
    journal = Journal(paths, working(paths, 1))
    for step, stage, value in ((0, "eval", 1.0), (1, "values", 2.0), (1, "reward", 3.0), (2, "values", 4.0)):
        journal.ensure(a_manifest(step=step, stage=stage, identity=f"{step}{stage}", figures={stage: value}))
    assert journal.history(up_to=1) == [(1, {"values": 2.0, "reward": 3.0})]
    assert [step for step, _ in journal.history(up_to=9)] == [1, 2]


def test_chart_events_are_resumes_and_health_stops() -> None:
    started, stopped = {"event": "attempt_started"}, {"event": "attempt_ended", "status": "stopped"}
    failed = {"event": "attempt_ended", "status": "failed"}
    first, second = {"stage": "values", "step": 1}, {"stage": "reward", "step": 2}
    # A start before any stage resumes nothing, not even the second start.
    found = events([started, failed, started, first, failed, started, second, stopped, started])
    assert found == [JournalEvent(1, "resumed"), JournalEvent(2, "health stop"), JournalEvent(2, "resumed")]
    assert events([{"stage": "eval", "step": 0}, started]) == [JournalEvent(0, "resumed")]


@pytest.mark.parametrize("length", [NEWEST, NEWEST + 40])
def test_read_newest_keeps_events_and_the_last_evaluation(tmp_path: Path, length: int) -> None:
    lines = [{"seq": number, "stage": "values", "step": number} for number in range(length)]
    lines[2] |= {"stage": "eval"}
    lines[5] |= {"stage": "eval"}
    lines[7] = {"seq": 7, "event": "attempt_started"}
    lines[8] = {"seq": 8, "event": "saved", "step": 8, "role": "actor"}
    (tmp_path / "journal.jsonl").write_bytes(b"".join(map(sealed_line, lines)) + b'{"seq": 999')
    kept = [line["seq"] for line in read_newest(tmp_path / "journal.jsonl")]
    older = list(range(length - NEWEST))
    assert kept == [seq for seq in older if seq in (5, 7)] + list(range(length - NEWEST, length))


def test_recent_stage_time_is_the_maximum_of_the_last_five(paths: RunPaths) -> None:
    journal = Journal(paths, working(paths, 1))
    assert (journal.recent_s("values"), journal.longest_s()) == (None, 0.0)
    for step, seconds in enumerate((90.0, 3.0, 1.0, 2.0, 4.0, 1.0), start=1):
        journal.ensure(a_manifest(step=step, identity=f"{step}", seconds=seconds))
    journal.ensure(a_manifest(stage="reward", step=6, identity="r", seconds=7.0))
    assert (journal.recent_s("values"), journal.recent_s("reward"), journal.recent_s("eval")) == (4.0, 7.0, None)
    assert journal.longest_s() == 7.0
