"""The Python API: commands as functions, and a run as tables; runs on fakes."""

import subprocess
import sys
from pathlib import Path

import pytest

import ppoctl
from fakes.components import commands_on_fakes, fake_components, fake_recipe
from ppoctl.core.errors import ExpectationError, RecipeError, RunExistsError
from ppoctl.run import new_run, session
from ppoctl.store.resume_plan import ResumePlan
from ppoctl.store.run_paths import RunPaths

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.toml"
LITTLE = {
    "steps": 1,
    "rollout.prompts_per_step": 4,
    "rollout.max_new_tokens": 6,
    "data.eval.heldout.max_rows": 3,
    "ppo.minibatch_seqs": 4,
    "expect": {},
    "tracking": {"kind": "none"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ppoctl.Run:
    """Three steps on fakes. The last step keeps its rollouts, whose tokens are decoded with the quickstart's
    tokenizer."""
    model = {"path": str(QUICKSTART.parent / "quickstart/model"), "dtype": "float32"}
    recipe = fake_recipe(model=model, checkpoint={"keep_rollouts_every_steps": 0})
    paths = RunPaths(tmp_path_factory.mktemp("api") / "fake")
    new_run.create(paths, recipe, {"model": "a" * 64, "data": "b" * 64}, command="train")
    session.attempt_run(
        session.OpenedRun(paths, {1: recipe}, fake_components(recipe), plan=ResumePlan(start=0, items=()))
    )
    return ppoctl.Run(paths.root)


@pytest.fixture
def on_fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory in which every training run uses fakes."""
    commands_on_fakes(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_metrics_table_has_a_row_per_step(run: ppoctl.Run) -> None:
    metrics = run.metrics()
    assert metrics["step"].to_pylist() == [0, 1, 2, 3]
    means = metrics["reward/score_mean"].to_pylist()
    assert means[0] is None
    samples = run.samples(3)
    assert means[3] == pytest.approx(sum(samples["score"].to_pylist()) / 8)
    assert [value is not None for value in metrics["eval/held/pass_at_1"].to_pylist()] == [True, False, True, True]


def test_samples_table_has_all_data_of_each_response(run: ppoctl.Run) -> None:
    assert run.steps_with_samples() == [3]
    samples = run.samples()
    assert samples.num_rows == 8
    assert samples["step"].to_pylist() == [3] * 8
    assert samples["row"].to_pylist() == list(range(8))
    for row in samples.to_pylist():
        assert len(row["tokens"]) == len(row["logprobs"]) == len(row["values"]) == len(row["advantages"])
    assert list(samples.to_pandas()["finish"].unique()) != []
    with pytest.raises(RecipeError, match="steps with rollouts: 3"):
        run.samples(1)


def test_ledger_and_evaluations_are_tables(run: ppoctl.Run) -> None:
    assert run.ledger().num_rows == 24
    evaluations = run.evaluations()
    assert sorted(set(evaluations["step"].to_pylist())) == [0, 2, 3]
    assert set(evaluations["mode"].to_pylist()) == {"greedy", "sampled"}
    assert run.recipe["rollout"]["prompts_per_step"] == 4
    assert run.facts["name"] == "fake"
    assert run.journal()[-1]["event"] == "attempt_ended"


def test_run_refuses_a_folder_that_is_not_a_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is not a run directory"):
        ppoctl.Run(tmp_path)


def test_train_from_python_continues_from_rollouts_and_is_continued(on_fakes: Path) -> None:
    generated = ppoctl.rollout(QUICKSTART, {**LITTLE, "name": "mine"})
    assert generated.steps_with_samples() == [1]
    assert "policy/approx_kl" not in generated.metrics().column_names
    trained = ppoctl.train(QUICKSTART, {**LITTLE, "name": "mine"})
    assert "policy/approx_kl" in trained.metrics().column_names
    assert trained.path == on_fakes / "runs/mine"
    assert trained.recipe["steps"] == 1
    assert trained.metrics()["step"].to_pylist()[-1] == 1
    with pytest.raises(RunExistsError):
        ppoctl.train([QUICKSTART], {**LITTLE, "name": "mine"})
    longer = ppoctl.resume(trained, {"steps": 2})
    assert longer.metrics()["step"].to_pylist()[-1] == 2
    resumed = ppoctl.train(str(QUICKSTART), {**LITTLE, "name": "mine", "steps": 2}, or_resume=True)
    assert resumed.ledger() == longer.ledger()


def test_unmet_expectations_raise_an_error_and_the_run_exists(on_fakes: Path) -> None:
    keys = {**LITTLE, "name": "short", "expect": {"reward/score_mean": {"min": 2.0}}}
    with pytest.raises(ExpectationError):
        ppoctl.train(QUICKSTART, keys, runs="elsewhere")
    assert ppoctl.Run(on_fakes / "elsewhere/short").metrics().num_rows


def test_package_import_loads_no_heavy_library() -> None:
    code = (
        "import sys, ppoctl; ppoctl.train, ppoctl.Run, ppoctl.evaluate; "
        "print([name for name in ('torch', 'pyarrow', 'ray', 'mlflow', 'pydantic', 'typer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert {"train", "resume", "rollout", "evaluate", "Run"} <= {*dir(ppoctl)}
    with pytest.raises(AttributeError, match="has no attribute `trian`"):
        ppoctl.trian  # noqa: B018
