"""The durable log of episodes: order of attempts, damaged lines, the fence."""

from dataclasses import replace
from pathlib import Path

import pytest

from ppoctl.core.errors import SupersededError
from ppoctl.core.ports import EpisodeEntry, SampleSetKey
from ppoctl.store.attempt import claim
from ppoctl.store.episode_log import EpisodeLogFiles
from ppoctl.store.run_paths import RunPaths

ONE = SampleSetKey(1, "rollout", "keys")


def entry(number: int, what: str, key: str = "p#0") -> EpisodeEntry:
    return EpisodeEntry(key, number, {"what": what, "text": "\ud800\n"})


def whats(log: EpisodeLogFiles, key: SampleSetKey = ONE) -> dict[str, list[str]]:
    return {name: [event["what"] for event in events] for name, events in log.load(key).items() if events}


def test_events_are_loaded_in_order_and_only_for_their_set(paths: RunPaths) -> None:
    log = EpisodeLogFiles(paths, claim(paths))
    assert whats(log) == {}
    log.append(ONE, [entry(0, "opened"), entry(0, "other", "p#1")])
    log.append(ONE, [])
    log.append(replace(ONE, fingerprint="other keys"), [entry(0, "of another set")])
    log.append(ONE, [entry(1, "turn")])
    assert whats(log) == {"p#0": ["opened", "turn"], "p#1": ["other"]}
    assert log.load(ONE)["p#0"][1]["text"] == "\ud800\n"
    assert whats(log, replace(ONE, fingerprint="other keys")) == {"p#0": ["of another set"]}
    assert whats(log, replace(ONE, stage="rollout.2")) == {}


def test_event_of_a_newer_attempt_replaces_the_rest_of_its_episode(paths: RunPaths) -> None:
    """An older attempt may have recorded events after the newer one had read its file."""
    for number in range(1, 11):  # attempt 10 follows attempt 9, not attempt 1
        log = EpisodeLogFiles(paths, claim(paths))
        if number == 1:
            log.append(ONE, [entry(0, "opened"), entry(1, "turn"), entry(2, "old answer"), entry(3, "old turn")])
        if number == 9:
            log.append(ONE, [entry(2, "answer of 9")])
    log.append(ONE, [entry(3, "turn of 10")])
    assert whats(log) == {"p#0": ["opened", "turn", "answer of 9", "turn of 10"]}


def test_damaged_line_ends_the_known_part_of_its_episode_only(paths: RunPaths) -> None:
    log = EpisodeLogFiles(paths, claim(paths))
    log.append(ONE, [entry(0, "a"), entry(0, "x", "p#1"), entry(1, "b"), entry(2, "c"), entry(1, "y", "p#1")])
    (path,) = paths.parts(1, "rollout").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"b"', b'"B"'))
    assert whats(log) == {"p#0": ["a"], "p#1": ["x", "y"]}
    path.write_bytes(whole[:-1])
    assert whats(log) == {"p#0": ["a", "b", "c"], "p#1": ["x"]}


@pytest.mark.parametrize("wrote_before", [False, True])
def test_superseded_attempt_records_no_event(paths: RunPaths, wrote_before: bool) -> None:
    log = EpisodeLogFiles(paths, claim(paths))
    if wrote_before:
        log.append(ONE, [entry(0, "opened")])
    newer = EpisodeLogFiles(paths, claim(paths))
    with pytest.raises(SupersededError):
        log.append(ONE, [entry(1, "turn")])
    assert whats(newer) == ({"p#0": ["opened"]} if wrote_before else {})


def test_log_is_removed_with_the_folder_of_its_stage(paths: RunPaths) -> None:
    log = EpisodeLogFiles(paths, claim(paths))
    log.append(ONE, [entry(0, "opened")])
    path: Path = paths.parts(1, "rollout") / f"episodes-{log.attempt.number}.jsonl"
    assert path.is_file()
    log.attempt.remove(path.parent)
    assert whats(log) == {}
