"""`ppoctl plan --fit`, word for word; tests/plan/test_fit.py checks the search."""

import json
import shlex
from pathlib import Path

import pytest

from ppoctl.cli.app import run

RECIPES = Path(__file__).parents[2] / "recipes"
LLAMA = str(RECIPES / "own/llama-3.2-1b-24g.toml")
QWEN = [str(RECIPES / "own/qwen3-4b-80g.toml")]
QWEN += ["--set", "actor.train={top_layers=2}", "--set", "critic.train={top_layers=2}"]


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOCTL_DATA", "/data")
    monkeypatch.setenv("COLUMNS", "100")


def test_proposals_for_one_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", LLAMA, "--fit", "22.5"]) == 0
    first, second, *_ = capsys.readouterr().out.split("\n\n")[1:]
    assert (
        first
        == """\
1. 0.89 x, does not change the results
  memory  20.6 GiB in `critic_update`, on the GPU (actor, critic, generator)
  host    50.9 GiB on a node with 1 GPU
  time    offload 9%, optimizer 7%, microbatches 4%, decoding 9%, 256 full sequences at once in each engine
  --set actor.recompute=none --set actor.optimizer.on=cpu --set critic.recompute=none --set critic.batching.max_tokens_per_microbatch=2048
  as a recipe file after yours:
    actor.recompute = "none"
    actor.optimizer.on = "cpu"
    critic.recompute = "none"
    critic.batching.max_tokens_per_microbatch = 2048"""  # noqa: E501
    )
    assert second.startswith("2. 0.90 x, does not change the results\n")
    [printed] = [line for line in first.splitlines() if line.startswith("  --set ")]
    assert run(["plan", LLAMA, *shlex.split(printed), "--gpu-gib", "22.5"]) == 0
    assert "  memory       fits: 20.6 GiB of 22.5 GiB in `critic_update`" in capsys.readouterr().out


def test_generation_ahead_overlaps_with_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    ahead = ["rollout.ahead=1", "ppo.rollout_correction.kind=tis", "cluster.offload=[]"]
    words = ["plan", LLAMA, *(word for each in ahead for word in ("--set", each)), "--fit", "33"]
    assert run(words) == 0
    out = capsys.readouterr().out
    row = "  overlap  decoding runs beside all other work: the step is the longer of both\n"
    assert out.count(row) == out.count("does not change the results") > 0
    assert "the time of a step is a lower bound" in " ".join(out.split())
    assert run([*words, "--json"]) == 0
    for each in json.loads(capsys.readouterr().out)["proposals"]:
        seconds = each["seconds"]
        rest = sum(seconds[name] for name in seconds if name not in ("decoding", "total"))
        assert (each["decoding_overlaps"], seconds["total"]) == (True, pytest.approx(max(seconds["decoding"], rest)))
    assert run(["plan", LLAMA, "--fit", "33"]) == 0
    out = capsys.readouterr().out
    assert "overlap" not in out
    assert "lower bound" not in out


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *QWEN, "--fit", "12"]) == 7
    out, err = capsys.readouterr()
    assert out.startswith("own-qwen3-4b-80g on 1 GPU of 12 GiB: no recipe fits with 1.5 GiB to spare\nthe nearest:\n")
    assert (
        "error: no recipe fits on 1 GPU of 12 GiB: the nearest needs 19.8 GiB in `rollout`, 9.31 GiB more than there "
        "are with 1.5 GiB to spare\n"
    ) in err
    assert f"hint: ppoctl plan {shlex.join(QWEN)} --fit 12 --gpus 2\n" in err


def test_proposals_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *QWEN, "--fit", "12", "--json"]) == 7
    answer = json.loads(capsys.readouterr().out)
    assert answer["proposals"] == []
    assert answer["error"]["exit_code"] == 7
    nearest = answer["nearest"]
    assert nearest["gpu_bytes"] > 12 * 2**30
    assert nearest["stage"] == "rollout"
    assert [text.partition("=")[0] for text in nearest["set"]] == [
        line.partition(" = ")[0] for line in nearest["toml"].splitlines()
    ]


def test_hint_of_a_plan_that_does_not_fit_is_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *QWEN, "--gpu-gib", "12"]) == 7
    assert capsys.readouterr().err.endswith(f"hint: ppoctl plan {shlex.join(QWEN)} --fit 12\n")


def test_number_of_gpus_requires_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", LLAMA, "--gpus", "2"]) == 2
    err = capsys.readouterr().err
    assert "`--gpus 2` requires `--fit`" in err
    assert f"hint: ppoctl plan {LLAMA} --fit 80 --gpus 2\n" in err


def test_model_without_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", LLAMA, "--set", "model.path=org/unknown", "--fit", "22.5"]) == 3
    assert "the memory is unknown without the config.json" in capsys.readouterr().err
