"""What `ppoctl plan` says about memory, word for word; the numbers are worked in tests/recipe/test_memory.py."""

import json
from pathlib import Path

import pytest

from ppoctl.cli.app import run
from ppoctl.recipe.memory import estimate

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.toml")
LARGE = [str(ROOT / "recipes" / "dsr1-7b.toml"), "--set", f"model.path={ROOT / 'docs' / 'dsr1-7b'}"]
LAYOUT = ["--set", "actor.parallel={tensor=2, pipeline=2, data=2, sequence=true, distributed_optimizer=true}"]


@pytest.fixture(autouse=True)
def _a_machine_of_8_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "machine_bytes", lambda: 8 * 2**30)
    monkeypatch.setenv("PPOCTL_DATA", "/data")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["plan", *words]) == 0
    return capsys.readouterr().out


def test_the_quickstart_on_a_laptop(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, QUICKSTART)
    assert (
        out[out.index("disk\n") :]
        == """\
disk
  saves       8, of which 2 pairs are kept
  records     at most 508 KiB a step, 4.96 MiB at one time
  parameters  862,336
  one pair    9.87 MiB actor, 9.87 MiB critic
  disk        59.2 MiB, one pair being written included

memory (estimates, CPU)
  of the largest rank           actor     critic
  parameters                    862,336   862,464
  weights                       3.29 MiB  3.29 MiB
  gradients                     3.29 MiB  3.29 MiB
  moments                       6.58 MiB  6.58 MiB
  reference                     3.29 MiB  -
  between calls                 16.4 MiB  13.2 MiB
  update, on top                229 MiB   227 MiB
  forward pass, on top          38.5 MiB  38.5 MiB
  at most                       246 MiB   240 MiB
  all processes, between calls  16.4 MiB  13.2 MiB

  generator  3.57 MiB weights
  KV cache   256 MiB: 131,072 tokens, 1365 sequences of full length
  driver     880 KiB for samples of a step, then 0.992 MiB of records

stages, on this machine with all processes, 8 GiB
  rollout        879 MiB   fits
  reward         840 MiB   fits
  values         879 MiB   fits
  logprobs       879 MiB   fits
  advantages     840 MiB   fits
  critic_update  1.04 GiB  fits
  actor_update   1.04 GiB  fits
  eval           879 MiB   fits
  in all of them: actor weights, actor gradients, actor optimizer, reference, critic weights, critic
  gradients, critic optimizer, generator weights, KV cache, samples and records, libraries; nothing
  is moved out
"""
    )


def test_a_large_model_on_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, *LARGE, *LAYOUT, "--gpu-gib", "80")
    assert (
        out[out.index("memory") :]
        == """\
memory (estimates, GPU)
  of the largest rank           actor          critic
  parameters                    1,903,953,408  1,903,953,408
  pipeline stage                0              0
  weights                       3.55 GiB       3.55 GiB
  gradients                     7.09 GiB       7.09 GiB
  main weights                  3.55 GiB       3.55 GiB
  moments                       7.09 GiB       7.09 GiB
  reference                     3.55 GiB       -
  gather buffer                 70 MiB         70 MiB
  between calls                 24.9 GiB       21.3 GiB
  update, on top                32.9 GiB       32.9 GiB
  forward pass, on top          1.04 GiB       1.04 GiB
  at most                       57.7 GiB       54.2 GiB
  all processes, between calls  199 GiB        159 GiB

  generator     14.2 GiB weights
  KV cache      37.8 GiB: 708,066 tokens, 69 sequences of full length
  driver        1.48 GiB for samples of a step, then 1.5 GiB of records
  weights sent  86 buckets through the driver, the largest 1.02 GiB

stages, on a GPU with a rank of each role and the generator, 80 GiB
  rollout        99.1 GiB  19.1 GiB too much
  reward         98.1 GiB  18.1 GiB too much
  values         99.1 GiB  19.1 GiB too much
  logprobs       99.1 GiB  19.1 GiB too much
  advantages     98.1 GiB  18.1 GiB too much
  critic_update  131 GiB   51 GiB too much
  actor_update   131 GiB   51 GiB too much
  eval           99.1 GiB  19.1 GiB too much
  in all of them: actor weights, actor gradients, actor optimizer, reference, critic weights, critic
  gradients, critic optimizer, generator weights, KV cache; nothing is moved out

what is largest in critic_update, and what to do
  KV cache           37.8 GiB  lower `generator.gpu_memory_frac`
  critic at work     32.9 GiB  lower `critic.batching.max_tokens_per_microbatch`
  generator weights  14.2 GiB  choose a smaller model
  actor optimizer    10.6 GiB  raise `actor.parallel.data` with `distributed_optimizer = true`
"""
    )


def test_on_a_machine_that_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, *LARGE)
    says = out[out.index("what is largest") :]
    assert (
        says
        == """\
what is largest in actor_update, and what to do
  actor optimizer   85.1 GiB  take more nodes (`cluster.ray_address`) or a smaller model
  actor at work     81.5 GiB  lower `actor.batching.max_tokens_per_microbatch`
  critic optimizer  79 GiB    take more nodes (`cluster.ray_address`) or a smaller model
  actor gradients   28.4 GiB  take more nodes (`cluster.ray_address`) or a smaller model
"""
    )


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    memory = json.loads(said(capsys, *LARGE, *LAYOUT, "--gpu-gib", "80", "--json"))["memory"]
    actor = memory["roles"]["actor"]
    assert [rank["stage"] for rank in actor["ranks"]] == [0, 1]
    rank = actor["ranks"][1]
    assert rank["peak"] == rank["resident"] + max(rank["update"], rank["forward"])
    assert rank["kept"]["total"] == sum(size for name, size in rank["kept"].items() if name != "total")
    assert memory["place"]["bytes"] == 80 * 2**30
    assert {stage["stage"]: stage["fits"] for stage in memory["stages"]}["actor_update"] is False
    assert memory["pair"] == actor["state"] + memory["roles"]["critic"]["state"]
    found = json.loads(said(capsys, *LARGE, "--simulate", "--json"))
    assert [step["gpus"] for step in found["same_step"]] == [8, 64, 256, 1024]
    assert found["growing_step"][1]["step_s"] > 0
    assert found["units"]["gpu_flops"] == 989e12


def test_an_unknown_model_cannot_be_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", LARGE[0], "--simulate"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: `model.path = deepseek-ai/DeepSeek-R1-Distill-Qwen-7B` is no local folder of a known family: nothing "
        "to simulate with\n\nhint: name a folder with the model's config.json: --set model.path=FOLDER\n"
    )
