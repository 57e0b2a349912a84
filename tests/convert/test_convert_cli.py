"""`ppoctl convert-ckpt` from the command line: exit code, stdout and stderr, word for word; also for a run."""

import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from cli.conftest import CliResult, RunCli, cli_runner
from fakes.job import PPO_STEP_FUNCTIONS
from ppoctl.algorithms.role_table import BySequences
from ppoctl.core.batch.digest import flushed_digest
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.models.convert.model_files import companions_digest
from ppoctl.models.head import SharedValueHead
from ppoctl.run.wire.sources import COMPANIONS, companions_of
from ppoctl.store import manifest as manifests
from ppoctl.store import run_dir
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import MANIFEST, RunPaths
from recipe.conftest import SMALLEST

Model = Callable[[str], Path]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Model) -> RunCli:
    """Return `ask("convert-ckpt", "base", "out", ...)` in a folder with a model `base`; measured numbers are
    masked."""
    monkeypatch.chdir(tmp_path)
    Path("base").symlink_to(model("qwen2"))
    ask = cli_runner(capsys)

    def asked(*words: str) -> CliResult:
        capsys.readouterr()  # the output of transformers when it writes the model
        said = ask(*words)
        out = re.sub(r"largest difference [\d.e-]+,", "largest difference X,", said.out)
        return CliResult(said.code, out, re.sub(r"in [\d.]+ s", "in X s", said.err))

    return asked


@pytest.fixture(scope="module")
def states(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the saved states of both roles at step 2, and of the actor at step 4."""
    paths = RunPaths(tmp_path_factory.mktemp("trained"))
    rollouts = lab.make_rollouts()
    actor, critic = lab.actor(model("qwen2"), dtype="bfloat16"), lab.critic(model("qwen2"), dtype="bfloat16")
    for step in (2, 4):
        actor.update(rollouts, [lab.minibatch(rollouts)], lab.policy_objective(rollouts))
        save(paths, "actor", step, lambda folder: lab.save(actor, folder))
    critic.update(rollouts, [lab.minibatch(rollouts)], lab.value_objective(rollouts))
    save(paths, "critic", 2, lambda folder: lab.save(critic, folder))
    return paths.states


@pytest.fixture
def trained(ask: RunCli, model: Model, states: Path) -> RunPaths:
    """Return a run with these states."""
    paths = RunPaths(Path("runs/small"))
    shutil.copytree(model("qwen2"), "source")
    recipe = SMALLEST.replace('"base"', f'"{Path("source").resolve()}"')
    paths.root.parent.mkdir()
    sources = {COMPANIONS: companions_digest(Path("source"))}
    run_dir.create(paths, recipe_toml=recipe, resolved=PPO_STEP_FUNCTIONS, facts={"sources": sources})
    shutil.copytree(states, paths.states, dirs_exist_ok=True)
    return paths


def save(paths: RunPaths, role: str, step: int, write: Callable[[Path], None]) -> None:
    folder = paths.state(role, step)
    folder.mkdir(parents=True)
    write(folder)
    files = {path.name: flushed_digest(path) for path in folder.iterdir()}
    rest = {"inputs": (), "fingerprint": "", "seconds": 0.0, "committed_at": time.time(), "attempt": 1}
    manifest = Manifest(stage=f"state/{role}", step=step, identity="0", files=files, **rest)  # type: ignore[arg-type]
    (folder / MANIFEST).write_text(manifest.to_text(), "ascii")


def test_convert_prints_the_checks_of_a_round_trip(ask: RunCli) -> None:
    assert ask("convert-ckpt", "base", "there", "--to", "megatron") == CliResult(
        0,
        """\
Hugging Face folder base: qwen2 actor, 45.4K parameters, float32

check                  compared
names, shapes, dtypes        27
digests                      27  bit for bit
padding rows                 54  zero
configuration                26
log-probs                   112  largest difference X, allowed 0.00077
entropies                   112  largest difference X, allowed 0.00043

verified: there
""",
        "wrote 27 tensors, 0.2 MiB, in X s\nreport: there/ppoctl-conversion.json\n",
    )
    said = ask("convert-ckpt", "there", "back", "--to", "hf", "--json")
    report = json.loads(said.out)
    assert (said.code, report["verified"], report["out"], report["source"]["path"]) == (0, True, "back", "there")
    assert json.loads(Path("back/ppoctl-conversion.json").read_text("utf-8"))["tensors"].keys() == (
        load_file("back/model.safetensors").keys()
    )


def test_bit_flipped_since_a_conversion_is_found(ask: RunCli) -> None:
    """Both sides of the comparison would read the damaged file."""
    assert ask("convert-ckpt", "base", "there", "--to", "megatron", "--no-parity").code == 0
    assert "record of the source         27" in ask("convert-ckpt", "there", "fine", "--to", "hf", "--no-parity").out
    file = Path("there/__0_0.distcp")
    weights = load_file("base/model.safetensors")["model.layers.1.mlp.down_proj.weight"].numpy().tobytes()
    data = bytearray(file.read_bytes())
    data[data.index(weights) + 5] ^= 1
    file.write_bytes(data)
    said = ask("convert-ckpt", "there", "back", "--to", "hf", "--no-parity")
    assert (said.code, Path("back").exists()) == (5, False)
    assert "error: tensor `model.layers.1.mlp.down_proj.weight` of `there` differs from the record" in said.err


def test_last_saved_actor_exports_to_transformers(ask: RunCli, trained: RunPaths) -> None:
    said = ask("convert-ckpt", "runs/small", "out", "--to", "hf")
    assert said.code == 0
    assert said.out.splitlines()[0] == ("actor of `runs/small` at step 4: qwen2 actor, 45.4K parameters, bfloat16")
    assert AutoModelForCausalLM.from_pretrained("out").dtype is torch.bfloat16
    assert ask("convert-ckpt", "runs/small", "earlier", "--to", "hf", "--step", "2", "--no-parity").code == 0
    assert not torch.equal(
        *(load_file(f"{each}/model.safetensors")["model.norm.weight"] for each in ("out", "earlier"))
    )
    # The folder of a state works as well as the run.
    assert ask("convert-ckpt", "runs/small/states/actor/000004", "again", "--to", "hf", "--no-parity").code == 0
    assert Path("again/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()


def test_critic_of_a_run_exports_as_a_classifier(ask: RunCli, trained: RunPaths) -> None:
    said = ask("convert-ckpt", "runs/small", "out", "--to", "hf", "--role", "critic")
    assert said.code == 0
    assert said.out.splitlines()[0].startswith("critic of `runs/small` at step 2: qwen2 critic,")
    assert "values under a probe" in said.out
    loaded, info = AutoModelForSequenceClassification.from_pretrained("out", output_loading_info=True)
    assert not any(info.values())
    assert loaded.config.num_labels == 1


def test_run_without_a_critic_converts_and_refuses_the_role(ask: RunCli, trained: RunPaths) -> None:
    shutil.rmtree(trained.states / "critic")
    (trained.best / "000004").mkdir(parents=True)
    (trained.best / "000004" / MANIFEST).touch()
    assert ask("convert-ckpt", "runs/small", "out", "--to", "hf", "--no-parity").code == 0
    for role in ("critic", "best", "nothing"):
        said = ask("convert-ckpt", "runs/small", "other", "--to", "hf", "--role", role)
        assert said == CliResult(
            2,
            "",
            f"""\
error: run `runs/small` has no saved state of role `{role}`; roles with saved states: actor

hint: ppoctl convert-ckpt runs/small trained --to hf --role actor
""",
        )


def test_third_role_of_a_run_converts_as_a_model_with_a_value_head(ask: RunCli, trained: RunPaths) -> None:
    def copy_critic(folder: Path) -> None:
        for file in trained.state("critic", 2).iterdir():
            if file.name != MANIFEST:
                shutil.copyfile(file, folder / file.name)

    save(trained, "second", 2, copy_critic)
    for source, words in (("runs/small", ["--role", "second"]), ("runs/small/states/second/000002", [])):
        said = ask("convert-ckpt", source, Path(source).name, "--to", "hf", "--no-parity", *words)
        assert "runs/small` at step 2: qwen2 second," in said.out.splitlines()[0]
        assert "score.weight" in load_file(f"{Path(source).name}/model.safetensors")


def test_critic_with_its_own_model_is_exported_as_that_model(ask: RunCli, model: Model) -> None:
    layout, own = RunPaths(Path("runs/small")), lab.model_folder("llama-small", Path("own"))
    written = f'"{Path("base").resolve()}"\ncritic = "{own.resolve()}"'
    layout.root.parent.mkdir()
    sources = {COMPANIONS: "not this one's", companions_of("critic"): companions_digest(own)}
    recipe = SMALLEST.replace('"base"', written)
    run_dir.create(layout, recipe_toml=recipe, resolved=PPO_STEP_FUNCTIONS, facts={"sources": sources})
    critic = lab.critic(own)
    save(layout, "critic", 2, lambda folder: lab.save(critic, folder))
    said = ask("convert-ckpt", "runs/small", "out", "--to", "hf", "--role", "critic")
    assert said.code == 0
    assert said.out.splitlines()[0].startswith("critic of `runs/small` at step 2: llama critic,")
    assert AutoModelForSequenceClassification.from_pretrained("out").config.hidden_size == 24
    (own / "config.json").write_text((own / "config.json").read_text() + " ")
    assert ask("convert-ckpt", "runs/small", "again", "--to", "hf", "--role", "critic").code == 8


@pytest.mark.parametrize(
    "name", ["config.json", pytest.param("tokenizer_config.json", marks=pytest.mark.ci("config.json"))]
)
def test_state_with_a_changed_configuration_is_refused(ask: RunCli, trained: RunPaths, name: str) -> None:
    """Both sides of the comparison would read the same wrong configuration, and agree."""
    changed = Path("source", name)
    changed.write_text('{"rope_theta": 5.0}' if not changed.exists() else changed.read_text() + " ")
    said = ask("convert-ckpt", "runs/small", "out", "--to", "hf")
    assert (said.code, said.out, Path("out").exists()) == (8, "", False)
    assert said.err == (
        f"error: config.json or the tokenizer in `{Path('source').resolve()}` is not what run `runs/small` was made "
        "from\n\nhint: put it back, or name a folder that has it: --like FOLDER\n"
    )
    assert ask("eval", "--ckpt", "runs/small/states/actor/000004").code == 8
    assert ask("convert-ckpt", "runs/small", "out", "--to", "hf", "--like", "base").code == 0


def test_model_source_without_its_configuration_is_refused(ask: RunCli, trained: RunPaths) -> None:
    Path("source/config.json").unlink()
    said = ask("convert-ckpt", "runs/small", "out", "--to", "hf")
    assert (said.code, Path("out").exists()) == (8, False)
    assert "is not what run `runs/small` was made from" in said.err


def test_invalid_conversion_record_is_named(ask: RunCli) -> None:
    assert ask("convert-ckpt", "base", "there", "--to", "megatron", "--no-parity").code == 0
    Path("there/ppoctl-conversion.json").write_text("{")
    said = ask("convert-ckpt", "there", "back", "--to", "hf", "--no-parity")
    assert (said.code, Path("back").exists()) == (5, False)
    assert "`there/ppoctl-conversion.json` is not a record of a conversion" in said.err


def test_state_folder_is_found_from_inside_its_run(
    ask: RunCli, trained: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path("out").resolve()
    monkeypatch.chdir(trained.root / "states" / "actor")
    assert ask("convert-ckpt", "000004", str(out), "--to", "hf").code == 0


def test_state_outside_a_run_requires_a_model_folder(ask: RunCli, trained: RunPaths) -> None:
    shutil.copytree(trained.state("actor", 4), "a/b/c/alone")
    said = ask("convert-ckpt", "a/b/c/alone", "out", "--to", "hf")
    assert said.code == 2
    assert "the state is not in a run directory" in said.err
    assert "--like FOLDER" in said.err
    assert ask("convert-ckpt", "a/b/c/alone", "out", "--to", "hf", "--like", "base").code == 0


def test_unhealthy_state_is_noted(ask: RunCli, trained: RunPaths) -> None:
    state = trained.state("actor", 4)
    manifest = manifests.read(state)
    assert manifest is not None
    (state / MANIFEST).write_text(replace(manifest, extra={"healthy": False}).to_text())
    said = ask("convert-ckpt", "runs/small", "out", "--to", "hf", "--json")
    note = "a health rule stopped the run at this state: its last step was not healthy"
    assert json.loads(said.out)["notes"] == [note]
    assert f"note: {note}\n" in said.err


def test_value_head_on_the_policy_is_left_out_and_noted(ask: RunCli, trained: RunPaths, model: Model) -> None:
    head = SharedValueHead("mlp", 1)
    batching = BySequences(microbatch_seqs=1)
    made = TrainerSettings("actor", str(model("qwen2")), torch.bfloat16, batching, value_head=head)
    save(trained, "actor", 6, lambda folder: lab.save(lab.started(made), folder))
    said = ask("convert-ckpt", "runs/small", "out", "--to", "hf")
    note = "the value head on the policy's model is not written: no Hugging Face class has it"
    assert (said.code, f"note: {note}\n" in said.err) == (0, True)
    assert load_file("out/model.safetensors").keys() == load_file("base/model.safetensors").keys()


def test_step_without_a_saved_state_lists_the_saved_steps(ask: RunCli, trained: RunPaths) -> None:
    assert ask("convert-ckpt", "runs/small", "out", "--to", "hf", "--step", "3") == CliResult(
        2,
        "",
        """\
error: run `runs/small` has no saved state of the actor at step 3; saved steps: 2, 4

hint: ppoctl convert-ckpt runs/small trained --to hf --step 4
""",
    )


def test_flipped_bit_in_a_state_is_found_before_writing(ask: RunCli, trained: RunPaths) -> None:
    file = trained.state("actor", 4) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    said = ask("convert-ckpt", "runs/small", "out", "--to", "hf")
    assert (said.code, Path("out").exists()) == (8, False)
    assert said.err.startswith("error: `runs/small/states/actor/000004/__0_0.distcp` is corrupt: digest")


ERRORS = {
    "no such source": (
        ["./nowhere", "out", "--to", "hf"],
        3,
        "error: `./nowhere` does not exist\n\nhint: ls .\n",
    ),
    "a folder of nothing": (
        ["/", "out", "--to", "hf"],
        3,
        "error: `/` is not a run, a Megatron folder or a Hugging Face folder\n\nhint: ls -a /\n",
    ),
    "no format": (["base", "out"], 2, "error: missing option `--to`: one of hf, megatron, peft\n"),
    "another format": (["base", "out", "--to", "gguf"], 2, "error: invalid value for `--to`: `gguf` is not one of"),
    "the same format": (["base", "out", "--to", "hf"], 2, "error: `base` is already in that format (`--to hf`)\n"),
    "an existing folder": (["base", "base", "--to", "megatron"], 2, "error: `base` exists\n"),
    "no parent": (["base", "no/out", "--to", "megatron"], 8, "error: `no` is not a folder\n\nhint: mkdir -p no\n"),
    "a step of no run": (["base", "out", "--to", "megatron", "--step", "3"], 2, "error: `--step 3` requires a run"),
    "a role of no run": (
        ["base", "out", "--to", "megatron", "--role", "judge"],
        2,
        "error: `--role judge` requires a run with this role, and `base` is not a run;",
    ),
    "files of no bytes": (
        ["base", "out", "--to", "megatron", "--shard-gib", "0"],
        2,
        "error: `--shard-gib 0` must be",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_impossible_conversions_are_refused_with_a_hint(ask: RunCli, what: str) -> None:
    words, code, err = ERRORS[what]
    said = ask("convert-ckpt", *words)
    assert (said.code, said.out) == (code, "")
    assert said.err.startswith(err)
    assert "hint: " in said.err
    assert sorted(path.name for path in Path().iterdir()) == ["base"]


def test_unverified_conversion_is_marked_as_not_verified(ask: RunCli) -> None:
    said = ask("convert-ckpt", "base", "out", "--to", "megatron", "--no-verify")
    assert said.out.splitlines()[1:] == ["left out: --no-verify", "NOT VERIFIED: out"]
    said = ask("convert-ckpt", "base", "other", "--to", "megatron", "--no-parity")
    assert said.out.splitlines()[-2:] == ["left out: --no-parity", "NOT VERIFIED: other"]


def test_cast_is_printed(ask: RunCli) -> None:
    said = ask("convert-ckpt", "base", "out", "--to", "megatron", "--dtype", "bfloat16", "--no-parity")
    assert said.out.splitlines()[0] == ("Hugging Face folder base: qwen2 actor, 45.4K parameters, cast to bfloat16")


def test_convert_help_has_examples(ask: RunCli) -> None:
    said = ask("convert-ckpt", "--help")
    assert said.code == 0
    assert "\n    ppoctl convert-ckpt runs/my trained --to hf" in said.out
