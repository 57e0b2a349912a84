"""A critic with its own model: the source that the run records."""

import json
import shutil
from pathlib import Path

import pytest

from fakes.components import fake_recipe
from ppoctl.batch.digest import flushed_digest
from ppoctl.errors import CorruptArtifactError, RecipeError
from ppoctl.preflight.critic_state import require_kept
from ppoctl.recipe.schema import Recipe
from ppoctl.runs import new_run
from ppoctl.store import run_dir
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import MANIFEST, RunPaths
from ppoctl.wire.outlines import as_recorded
from ppoctl.wire.sources import COMPANIONS, companions_of, model_digests


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "base" / name).write_text(json.dumps(name), "utf-8")
    return tmp_path / "base"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Return the critic that a run saved at step 12."""
    run = RunPaths(tmp_path / "runs/first")
    folder = run.state("critic", 12)
    folder.mkdir(parents=True)
    run.run_json.write_text("{}", "ascii")
    for name in ("config.json", "__0_0.distcp", "common.pt"):
        (folder / name).write_text(json.dumps(name), "utf-8")
    files = {path.name: flushed_digest(path) for path in folder.iterdir()}
    state = Manifest(
        "state/critic", 12, "abc", inputs=(), fingerprint="", files=files, seconds=0.0, committed_at=0.0, attempt=1
    )
    (folder / MANIFEST).write_text(state.to_text(), "ascii")
    return folder


def recipe(base: Path, critic: Path | None) -> Recipe:
    own = {} if critic is None else {"critic": {"path": str(critic)}}
    return fake_recipe(model={"path": str(base), "dtype": "float32", **own})


def test_run_sources_include_the_critic_model(base: Path, state: Path) -> None:
    alone, both = (model_digests(recipe(base, critic)) for critic in (None, state))
    assert (alone.keys(), both.keys()) == ({"model", COMPANIONS}, {"model", COMPANIONS, companions_of("critic")})
    assert alone["model"] != both["model"]
    assert alone[COMPANIONS] == both[COMPANIONS] != both[companions_of("critic")]
    (state / MANIFEST).unlink()
    (state / "config.json").write_text("{}", "utf-8")
    changed = model_digests(recipe(base, state))
    assert {name for name in both if both[name] != changed[name]} == {"model", companions_of("critic")}


def test_corrupt_saved_critic_cannot_start_a_run(base: Path, state: Path) -> None:
    for name in ("__0_0.distcp", "common.pt", "config.json"):
        was = (state / name).read_text("utf-8")
        (state / name).write_text("other", "utf-8")
        with pytest.raises(CorruptArtifactError, match=name):
            model_digests(recipe(base, state))
        (state / name).write_text(was, "utf-8")
    model_digests(recipe(base, state))


@pytest.mark.parametrize(
    ("steps", "keep_last", "stays"), [(12, 2, True), (13, 2, False), (13, "all", True), (100, 3, False)]
)
def test_critic_state_that_its_run_will_delete_is_refused(
    base: Path, state: Path, tmp_path: Path, steps: int, keep_last: object, stays: bool
) -> None:
    first = RunPaths(tmp_path / "runs/first")
    theirs = fake_recipe(steps=steps, checkpoint={"keep_last": keep_last})
    first.recipes.mkdir()
    first.recipe_from(1).write_text(run_dir._sealed(as_recorded(theirs)), "ascii")
    shutil.copytree(state, first.state("actor", 12))
    if stays:
        require_kept(recipe(base, state))
        return
    with pytest.raises(RecipeError, match=f"has done 12 of its {steps} steps") as raised:
        new_run.create(RunPaths(tmp_path / "second"), recipe(base, state), {}, command="train")
    assert raised.value.hint == f"cp -a {state} critic-12  # and --set model.critic.path=critic-12"
    assert not (tmp_path / "second").exists()
    shutil.copytree(state, tmp_path / "critic-12")
    copied = recipe(base, tmp_path / "critic-12")
    require_kept(copied)
    new_run.create(RunPaths(tmp_path / "second"), copied, {}, command="train")
    # The source run is recorded, its path is not.
    expected = {"run": None, "role": "critic", "step": 12, "lineage": "abc"}
    assert run_dir.facts(RunPaths(tmp_path / "second"))["critic_from"] == expected


def test_new_run_records_the_source_of_its_critic(base: Path, state: Path, tmp_path: Path) -> None:
    for name, critic in (("plain", None), ("other", base), ("saved", state)):
        new_run.create(RunPaths(tmp_path / name), recipe(base, critic), {}, command="train")
    assert run_dir.facts(RunPaths(tmp_path / "saved"))["critic_from"] == {
        "run": str(tmp_path / "runs/first"),
        "role": "critic",
        "step": 12,
        "lineage": "abc",
    }
    assert all("critic_from" not in run_dir.facts(RunPaths(tmp_path / name)) for name in ("plain", "other"))
