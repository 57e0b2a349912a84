"""The contents of MLflow's pages, queried from a real database as the pages do."""

import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from tracking_lab import SETTINGS, MessageLog, Mlflow, RunDir, journaled_points, num_missing

from fakes.components import fake_components, fake_recipe
from fakes.nvml import FakeNvml
from ppoctl.core.batch.sealed_json import seal, unseal
from ppoctl.core.machine.system_metrics import SystemMetrics
from ppoctl.data.token_text import TokenText
from ppoctl.run import new_run, session
from ppoctl.run.mlflow_extras import contract_of, gpus_here, trained_on
from ppoctl.show.tracking.forwarder import Forwarder
from ppoctl.show.tracking.inputs import DataInput, inputs
from ppoctl.show.tracking.mirror import MirrorHooks, MirrorIntervals, MlflowMirror, rebuild
from ppoctl.show.tracking.mlflow_payloads import (
    MOST_OF_TRAINING,
    MOST_TABLES,
    table,
    table_name,
    training_table_name,
    with_tables,
)
from ppoctl.show.tracking.mlflow_run import MlflowRun, address_of
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stored_samples import StepRecords

MODEL = Path(__file__).parents[2] / "recipes" / "quickstart" / "model"
DATA = {
    "train": {"path": "/rows/train.jsonl", "dataset": None},
    "eval": {"held": {"path": None, "dataset": {"path": "openai/gsm8k", "name": "main", "split": "test"}}},
}
COUNTS = {"read": 9, "used": 8}
FACTS: dict[str, Any] = {
    "sources": {"data.train": "a" * 64, "data.eval.held": "b" * 64, "model": "c" * 64},
    "rows": {"data.train": COUNTS},
    "command": "train",
}


def known(run: RunDir, facts: Mapping[str, Any]) -> None:
    """Add facts to run.json."""
    body = unseal(run.paths.run_json.read_text())
    run.paths.run_json.write_text(seal({**body, **facts}, indent=1))


# Tables of samples


def test_table_has_compared_columns_first_and_flattened_fields() -> None:
    rows = [
        {"extras": {"lenient": 1.0, "parts": {"a": 2}}, "prompt": "2+2?", "score": math.inf, "set": "s"},
        {"given": None, "ids": [1, 2], "prompt": "3+3?", "score": 0.5, "set": "s"},
    ]
    lines = [json.dumps(rows[0]), "{", json.dumps(rows[1])]
    assert json.loads(table(lines)) == {
        "columns": ["set", "prompt", "score", "given", "extras.lenient", "extras.parts.a", "ids"],
        "data": [["s", "2+2?", None, None, 1.0, 2, None], ["s", "3+3?", 0.5, None, None, None, "[1, 2]"]],
    }


def test_mlflow_loads_the_tables_and_a_repeat_adds_no_row(run: RunDir, mlflow: Mlflow) -> None:
    run.evaluation(1)
    run.evaluation(2, rows=3)
    for _ in range(2):
        rebuild(run.root, SETTINGS)
    info = mlflow.run().info
    for name, rows in (("samples/step-000001.json", [0, 1]), ("samples/step-000002.json", [0, 1, 2])):
        found = mlflow.table(info.experiment_id, name, info.run_id)
        assert list(found["row"]) == rows


def test_table_tag_keeps_other_tables_and_stays_below_the_limit() -> None:
    theirs = {"path": "mine.json", "type": "table"}
    names = [f"samples/step-{step:06d}.json" for step in range(200)]
    assert json.loads(with_tables(json.dumps([theirs]), names[:1])) == [theirs, {"path": names[0], "type": "table"}]
    assert with_tables(with_tables(None, names[:2]), names[:2]) == with_tables(None, names[:2])
    many = with_tables(None, names)
    assert [entry["path"] for entry in json.loads(many)] == names[-MOST_TABLES:]
    assert len(many) < 8000


def test_training_tables_do_not_displace_evaluation_tables() -> None:
    evaluations = [table_name(step) for step in range(0, 200, 10)]
    trained = [training_table_name(step) for step in range(200)]
    found = [entry["path"] for entry in json.loads(with_tables(with_tables(None, evaluations), trained))]
    assert found == [*evaluations, *trained[-MOST_OF_TRAINING:]]


# Data


def test_datasets_have_digest_source_and_row_counts() -> None:
    assert inputs(FACTS, {"data": DATA}) == [
        DataInput(
            "data.train",
            "a" * 36,
            "local",
            '{"uri": "/rows/train.jsonl"}',
            '{"num_rows": 8, "read": 9, "used": 8}',
            "train",
        ),
        DataInput(
            "data.eval.held",
            "b" * 36,
            "hugging_face",
            '{"path": "openai/gsm8k", "config_name": "main", "split": "test"}',
            None,
            "eval",
        ),
    ]
    assert inputs({}, {"data": DATA}) == [], "a login node has no digests"


def test_mix_is_one_dataset_with_rows_of_all_sources() -> None:
    sources = {"a": {"path": ["/x", "/y"]}, "b": {"function": "mine.py:rows"}, "c": {"dataset": {"path": "hub/id"}}}
    facts = {"sources": {"data.train": "d"}, "rows": {f"data.train.sources.{name}": COUNTS for name in sources}}
    (found,) = inputs(facts, {"data": {"train": {"sources": sources}}})
    assert json.loads(found.source) == {"uri": "/x, /y, mine.py:rows, hub/id"}
    assert json.loads(found.profile or "") == {"num_rows": 24, "read": 27, "used": 24}


def test_mlflow_has_each_dataset_once(run: RunDir, mlflow: Mlflow) -> None:
    run.recipe({"name": "demo", "data": DATA})
    known(run, FACTS)
    assert rebuild(run.root, SETTINGS).inputs == 2
    assert num_missing(rebuild(run.root, SETTINGS)) == 0
    found = {each.dataset.name: each for each in mlflow.run().inputs.dataset_inputs}
    assert sorted(found) == ["data.eval.held", "data.train"]
    assert [(tag.key, tag.value) for tag in found["data.train"].tags] == [("mlflow.data.context", "train")]
    assert found["data.eval.held"].dataset.digest == "b" * 36


# Users and versions


@pytest.mark.parametrize(
    ("facts", "job", "kind"), [({}, None, "LOCAL"), ({}, "7", "JOB"), ({"on": "slurm"}, None, "JOB")]
)
def test_mlflow_run_has_user_and_source(
    run: RunDir, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch, facts: dict[str, str], job: str | None, kind: str
) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    known(run, {**FACTS, **facts})
    rebuild(run.root, SETTINGS)
    found = mlflow.run()
    tags = {name.removeprefix("mlflow."): value for name, value in found.data.tags.items()}
    assert (tags["user"], tags["source.name"], tags["source.type"]) == ("ada", "ppoctl train demo", kind)
    assert found.info.user_id == "ada"


def test_user_without_a_name_is_left_out(run: RunDir, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    rebuild(run.root, SETTINGS)
    assert mlflow.run().info.status == "RUNNING"


# The machine


def test_system_metrics_have_the_names_and_units_of_mlflow(tmp_path: Path) -> None:
    found = SystemMetrics(tmp_path, lambda: {"gpu_0_utilization_percentage": 87.0}).measured()
    assert set(found) == {
        "system/cpu_utilization_percentage",
        "system/system_memory_usage_megabytes",
        "system/system_memory_usage_percentage",
        "system/disk_usage_percentage",
        "system/process_memory_usage_megabytes",
        "system/gpu_0_utilization_percentage",
    }
    memory, own = psutil.virtual_memory(), psutil.Process().memory_info()
    assert found["system/system_memory_usage_megabytes"] < memory.total / 1e6
    assert 0 < found["system/system_memory_usage_percentage"] < 100
    assert found["system/process_memory_usage_megabytes"] > 0.5 * (own.rss - own.shared) / 1e6
    assert found["system/gpu_0_utilization_percentage"] == 87.0


def test_gpu_metrics_have_the_names_and_units_of_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(memory=(80 << 30, 2_000_000_000), busy={0: 87, 1: None}).plant(monkeypatch)
    assert gpus_here() == {
        "gpu_0_utilization_percentage": 87.0,
        "gpu_0_memory_usage_megabytes": 2000.0,
        "gpu_1_memory_usage_megabytes": 2000.0,
    }
    FakeNvml(fault="Driver/library version mismatch").plant(monkeypatch)
    assert gpus_here() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus_here() == {}


def test_system_metrics_do_not_affect_the_journal(run: RunDir, mlflow: Mlflow) -> None:
    """The run was made at 1763700000.5, so that 1763700100 is within its second 99; the journal is sent once."""
    address = address_of(SETTINGS, run.root.parent)
    run.step(1)
    sender = Forwarder(RunPaths(run.root), MlflowRun(RunPaths(run.root), address))
    sender.forward()
    sender.measure({"system/cpu_utilization_percentage": 50.0}, at=1_763_700_100.0)
    run.step(2)
    assert rebuild(run.root, SETTINGS).lines == 3
    assert mlflow.points() == journaled_points(run.root)
    (point,) = mlflow.client.get_metric_history(mlflow.run().info.run_id, "system/cpu_utilization_percentage")
    assert (point.step, point.value, point.timestamp) == (99, 50.0, 1_763_700_100_000)


# Contract and report


def test_expectations_are_tagged_with_values_and_bounds(run: RunDir) -> None:
    run.evaluation(1)  # pass_at_1 is 0.25
    assert contract_of(run.paths) == {}
    run.recipe({"name": "demo", "steps": 1, "expect": {"eval/gsm8k/pass_at_1": {"min": 0.2}}})
    assert contract_of(run.paths) == {
        "ppoctl.contract": "met",
        "ppoctl.contract.eval/gsm8k/pass_at_1": "0.25 (at least 0.2): met",
    }
    run.recipe({"name": "demo", "steps": 1, "expect": {"eval/gsm8k/pass_at_1": {"min": 0.2}, "a/b": {"max": 1.0}}})
    assert contract_of(run.paths) == {
        "ppoctl.contract": "unmet",
        "ppoctl.contract.eval/gsm8k/pass_at_1": "0.25 (at least 0.2): met",
        "ppoctl.contract.a/b": "absent (at most 1): unmet",
    }
    run.recipe({"name": "demo", "steps": 2, "expect": {"a/b": {"max": 1.0}}})
    assert contract_of(run.paths) == {}, "a step is to come"


def test_expectations_are_tagged_only_after_the_last_step(run: RunDir, mlflow: Mlflow) -> None:
    hooks = MirrorHooks(
        contract=lambda: {"ppoctl.contract": "unmet", "ppoctl.contract.a": "0.5 (at least 0.8): unmet"}
    )
    run.event("attempt_started")
    rebuild(run.root, SETTINGS, hooks)
    assert "ppoctl.contract" not in mlflow.run().data.tags
    run.event("attempt_ended", status="unmet", exit_code=5)
    rebuild(run.root, SETTINGS, hooks)
    tags = mlflow.run().data.tags
    assert (tags["ppoctl.contract"], tags["ppoctl.contract.a"]) == ("unmet", "0.5 (at least 0.8): unmet")
    assert num_missing(rebuild(run.root, SETTINGS, hooks)) == 0


def test_report_is_uploaded_when_an_attempt_ends(run: RunDir, mlflow: Mlflow, messages: MessageLog) -> None:
    around = MirrorHooks(notify=messages, files=lambda: {"report.html": "<p>it</p>"})
    run.step(1)
    mirror = MlflowMirror(run.root, SETTINGS, attempt=1, around=around, patience=MirrorIntervals())
    mirror.start()
    assert mirror.close("finished", 60.0)
    assert mlflow.text("report.html") == "<p>it</p>"
    assert messages.lines == []
    assert rebuild(run.root, SETTINGS, around).files == 3


def test_failed_report_costs_only_a_message(run: RunDir, mlflow: Mlflow, messages: MessageLog) -> None:
    def files() -> Mapping[str, str]:
        raise ValueError("no tokenizer\nat all")

    run.step(1)
    run.event("attempt_ended", status="finished", exit_code=0)
    sent = rebuild(run.root, SETTINGS, MirrorHooks(notify=messages, files=files))
    assert messages.lines == ["mlflow: the report could not be created (no tokenizer); the run is not affected"]
    assert (sent.files, mlflow.run().info.status) == (2, "FINISHED")


def test_run_passes_expectations_and_report_to_its_mirror(
    runs_dir: Path, mlflow: Mlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"path": str(MODEL), "dtype": "float32"}
    recipe = fake_recipe(model=model, tracking={"kind": "mlflow"}, expect={"reward/score_mean": {"min": 2.0}})
    paths = RunPaths(runs_dir / "fake")
    new_run.create(paths, recipe, {"model": "a" * 64, "data.train": "b" * 64}, command="train")
    session.attempt_run(
        session.OpenedRun(paths, {1: recipe}, fake_components(recipe), plan_resume(RecordedRun(paths)))
    )
    assert "mlflow:" not in capsys.readouterr().err
    found = mlflow.run("fake")
    assert (found.info.status, found.data.tags["ppoctl.contract"]) == ("FINISHED", "unmet")
    assert [each.dataset.name for each in found.inputs.dataset_inputs] == ["data.train"]
    assert '<meta name="generator" content="ppoctl report' in mlflow.text("report.html", "fake")
    samples = mlflow.table(found.info.experiment_id, "samples/train-000003.json", found.info.run_id)
    assert list(samples.columns)[:6] == ["step", "prompt", "response", "reward", "finish", "mean advantage"]
    kept = StepRecords.read(RecordedRun(paths), 3)
    rows = [kept.row(number * kept.num_seqs // 8) for number in range(8)]
    assert list(samples["response"]) == [row.response for row in rows]
    assert list(samples["reward"]) == pytest.approx([row.score for row in rows])
    assert list(samples["mean advantage"]) == pytest.approx([row.advantage for row in rows])
    text = TokenText(str(MODEL))
    assert list(samples["prompt"]) == [text.text(kept.prompt_tokens(row.row)) for row in rows]
    shutil.rmtree(paths.step(3))
    assert trained_on(paths, 3) == ()
