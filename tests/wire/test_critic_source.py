"""A critic or a reference with its own model: the source that the run records."""

import json
import shutil
from pathlib import Path

import pytest

from fakes.components import fake_recipe
from fakes.fingerprints import STAGES, stage_fingerprint
from ppoctl.core.batch.digest import flushed_digest
from ppoctl.core.batch.sealed_json import sealed_line
from ppoctl.core.errors import CorruptArtifactError, EnvironmentProblemError, RecipeError, StorageError
from ppoctl.models.convert.frozen_base import FrozenBase, write_frozen_base
from ppoctl.recipe.schema import Recipe
from ppoctl.run import new_run
from ppoctl.run.changed_settings import require_same_run
from ppoctl.run.run_recipe import as_recorded
from ppoctl.run.wire.sources import COMPANIONS, companions_of, model_digests, require_same_sources
from ppoctl.start.preflight.critic_state import require_kept
from ppoctl.store import run_dir
from ppoctl.store.manifest import Manifest
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import MANIFEST, RunPaths


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


def first_run(state: Path, **tables: object) -> RunPaths:
    """Give the run that saved this state a recorded recipe, and a state of its actor of the same step."""
    run = RunPaths(state.parents[2])
    run.recipes.mkdir()
    run.recipe_from(1).write_text(run_dir._sealed(as_recorded(fake_recipe(**tables))), "ascii")
    shutil.copytree(state, run.state("actor", 12))
    return run


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


def test_run_sources_include_the_reference(base: Path, state: Path, tmp_path: Path) -> None:
    def referring(reference: Path) -> Recipe:
        model = {"path": str(base), "dtype": "float32", "reference": {"path": str(reference)}}
        return fake_recipe(model=model)

    alone, both = model_digests(recipe(base, None)), model_digests(referring(state))
    assert both.keys() == {"model", COMPANIONS, companions_of("reference")}
    assert alone["model"] != both["model"]
    run = RunPaths(tmp_path / "second")
    new_run.create(run, referring(state), both, command="train")
    assert RecordedRun(run).facts["reference_from"]["step"] == 12
    require_same_sources(RecordedRun(run), both)
    # A copy has no manifest that would notice the change of one byte.
    copied = tmp_path.parent / "copied"  # short: the message cuts long values, and a worker has a long folder
    shutil.copytree(state, copied, ignore=shutil.ignore_patterns(MANIFEST))
    assert model_digests(referring(copied)) == both
    (copied / "__0_0.distcp").write_text("x", "utf-8")
    with pytest.raises(StorageError, match=r"`model` is not what run .* was made from"):
        require_same_sources(RecordedRun(run), model_digests(referring(copied)))
    with pytest.raises(RecipeError, match=r"`model\.reference\.path` is `.*copied.*`, but the run was made from"):
        require_same_run(RecordedRun(run), referring(copied))


def test_run_sources_include_the_adapter_that_a_role_starts_from(base: Path, tmp_path: Path) -> None:
    """Its configuration too, which is not in a model folder."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
        (adapter / name).write_text(name, "utf-8")

    def digests(role: str, **start: str) -> dict[str, str]:
        trained = {"optimizer": {"lr": 0.1}, "train": {"lora": start}}
        return model_digests(fake_recipe(model={"path": str(base), "dtype": "float32"}, **{role: trained}))

    alone, actor, critic = (
        digests("actor"),
        digests("actor", start=str(adapter)),
        digests("critic", start=str(adapter)),
    )
    assert alone.keys() == actor.keys() == critic.keys()
    assert alone == model_digests(recipe(base, None))
    assert len({alone["model"], actor["model"], critic["model"]}) == 3
    run = RunPaths(tmp_path / "run")
    new_run.create(run, recipe(base, None), actor, command="train")
    (adapter / "README.md").write_text("x", "utf-8")
    require_same_sources(RecordedRun(run), digests("actor", start=str(adapter)))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_text("x", "utf-8")
        with pytest.raises(StorageError, match=r"`model` is not what run .* was made from"):
            require_same_sources(RecordedRun(run), digests("actor", start=str(adapter)))
        (adapter / name).write_text(name, "utf-8")


def test_only_stages_that_read_the_reference_have_it_in_their_fingerprint() -> None:
    model = {"path": "bigram", "dtype": "float32"}
    one, other = (fake_recipe(model={**model, **own}) for own in ({}, {"reference": {"path": "other"}}))
    assert {stage for stage in STAGES if stage_fingerprint(stage, one) != stage_fingerprint(stage, other)} == {
        "logprobs",
        "actor_update",
    }


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
    first_run(state, steps=steps, checkpoint={"keep_last": keep_last})
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
    assert RecordedRun(RunPaths(tmp_path / "second")).facts["critic_from"] == expected


def test_deleted_state_with_the_frozen_weights_of_another_is_refused(base: Path, state: Path, tmp_path: Path) -> None:
    first_run(state, steps=13)
    second = tmp_path / "copied"
    second.mkdir()
    require_kept(recipe(base, second))
    write_frozen_base(second, FrozenBase(str(state), "0"))
    with pytest.raises(RecipeError, match=f"`{second}`, which has its frozen weights from `{state}`, and") as raised:
        require_kept(recipe(base, second))
    assert str(raised.value.hint).startswith(f"ppoctl convert-ckpt {second} critic-12 --to hf  # and --set model.c")
    write_frozen_base(second, FrozenBase(str(tmp_path / "gone"), "0"))
    with pytest.raises(EnvironmentProblemError, match="which is not on this machine"):
        require_kept(recipe(base, second))


def test_state_of_a_run_that_ended_early_stays(base: Path, state: Path) -> None:
    first = first_run(state, steps=13)
    about = {"attempt": 1, "at": 1.0, "status": "finished", "exit_code": 0}
    lines = [
        {"seq": 1, "event": "attempt_started", "pid": 1, "host": "elsewhere", **about},
        {"seq": 2, "event": "attempt_ended", "until": "`a` is 1", **about},
    ]
    first.journal.write_bytes(b"".join(map(sealed_line, lines)))
    require_kept(recipe(base, state))
    first.journal.write_bytes(sealed_line(lines[0]))
    with pytest.raises(RecipeError, match="has done 12 of its 13 steps"):
        require_kept(recipe(base, state))


def test_new_run_records_the_source_of_its_critic(base: Path, state: Path, tmp_path: Path) -> None:
    for name, critic in (("plain", None), ("other", base), ("saved", state)):
        new_run.create(RunPaths(tmp_path / name), recipe(base, critic), {}, command="train")
    assert RecordedRun(RunPaths(tmp_path / "saved")).facts["critic_from"] == {
        "run": str(tmp_path / "runs/first"),
        "role": "critic",
        "step": 12,
        "lineage": "abc",
    }
    assert all("critic_from" not in RecordedRun(RunPaths(tmp_path / name)).facts for name in ("plain", "other"))
