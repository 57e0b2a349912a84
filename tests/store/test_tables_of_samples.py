"""Samples as rows, and rows as tables."""

import json
from pathlib import Path

import numpy as np

from ppoctl.run.mlflow_extras import trained_on
from ppoctl.show.tracking.mlflow_payloads import training_table
from ppoctl.store.arrow_tables import as_table
from ppoctl.store.record_file import PlainRecord
from ppoctl.store.sample_join import JoinedRecords
from ppoctl.store.stored_samples import StepRecords
from store.episodes_on_disk import episodes, run_of_episodes


def test_each_row_has_its_own_prompt() -> None:
    rollouts = {"prompt_tokens": np.array([5, 6, 7, 8, 9, 4]), "prompt_lengths": np.array([2, 1, 3])}
    record, nothing = PlainRecord("rollouts", rollouts), JoinedRecords((None,) * 3)
    joined = JoinedRecords(tuple((record, row) for row in range(3)))
    records = StepRecords(1, (1, 1, 1), joined, nothing, nothing, nothing, nothing)
    assert [records.prompt_tokens(row) for row in range(3)] == [[5, 6], [7], [8, 9, 4]]


def test_table_has_a_column_for_each_field_of_any_row() -> None:
    table = as_table([{"step": 1, "score": 0.5}, {"step": 2, "notes": {"level": 3}}])
    assert table.to_pydict() == {"step": [1, 2], "score": [0.5, None], "notes": [None, '{"level": 3}']}


def test_training_table_of_episodes_has_their_conversations(tmp_path: Path) -> None:
    table = json.loads(training_table(trained_on(run_of_episodes(tmp_path / "run"), 1)) or "")
    assert table["columns"][-3:] == ["conversation", "turns", "end"]
    for row, episode in zip(table["data"], episodes(), strict=True):
        assert [json.loads(row[-3]), *row[-2:]] == list(episode.columns.values())
    single = trained_on(run_of_episodes(tmp_path / "single", has_episodes=False), 1)
    assert list(single[0]) == ["step", "prompt", "response", "reward", "finish", "mean advantage"]
