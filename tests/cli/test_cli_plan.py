"""`ppoctl plan` about memory: each section word for word once; tests/plan/test_memory.py checks the numbers."""

import json
from pathlib import Path

import pytest

from ppoctl.cli.app import run
from ppoctl.core.machine import memory
from ppoctl.plan.memory import driver

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.toml")


def keys(*texts: str) -> list[str]:
    """Return the `--set` options of these keys."""
    return [word for text in texts for word in ("--set", text)]


FEW_ROWS = keys("data.train.max_rows=400", "data.eval.heldout.max_rows=8")
ONE_PROCESS = keys("actor.parallel={}", "critic.parallel={}", "generator.engines=1", "cluster.offload=[]")
ONE_PROCESS += keys("checkpoint.reshardable=full")
LARGE = [str(ROOT / "recipes" / "dsr1-7b.toml"), *keys("generator.compile=true"), *ONE_PROCESS]
SPLIT = "{tensor=2, pipeline=2, data=2, sequence=true, distributed_optimizer=true}"
LAYOUT = keys(f"actor.parallel={SPLIT}", f"critic.parallel={SPLIT}")


@pytest.fixture(autouse=True)
def _a_machine_with_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "free_shared_memory", lambda: 2**40)
    monkeypatch.setenv("PPOCTL_DATA", "/data")


def output_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert run(["plan", "--full", *words]) == code
    return capsys.readouterr().out


def test_plan_of_the_quickstart_on_a_laptop(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, QUICKSTART)
    here = f", {memory.machine_bytes() / 2**30:,.3g} GiB"
    screen = """\
disk
  checkpoints     8, of which 2 are kept
  records         at most 412 KiB a step, 4.02 MiB at a time
  parameters      862,336
  one checkpoint  9.87 MiB actor, 9.87 MiB critic
  disk            79 MiB, with one checkpoint being written and one of a stop

memory (estimates, CPU)
  of the largest rank           actor     critic
  parameters                    862,336   862,464
  weights                       3.29 MiB  3.29 MiB
  gradients                     3.29 MiB  3.29 MiB
  moments                       6.58 MiB  6.58 MiB
  reference                     3.29 MiB  -
  between calls                 16.4 MiB  13.2 MiB
  update, in addition           229 MiB   227 MiB
  forward pass, in addition     38.5 MiB  38.5 MiB
  peak                          246 MiB   240 MiB
  all processes, between calls  16.4 MiB  13.2 MiB

  generator     3.57 MiB weights
  KV cache      256 MiB: 131,072 tokens, 1365 sequences of full length
  driver        784 KiB for samples of a step, then 824 KiB of records
  weights sent  one bucket, 3.29 MiB, read by all engines

stages, on this machine with all processes, 8 GiB
  rollout        1.28 GiB  fits
  reward         1.23 GiB  fits
  values         1.27 GiB  fits
  logprobs       1.27 GiB  fits
  advantages     1.23 GiB  fits
  critic_update  1.46 GiB  fits
  actor_update   1.46 GiB  fits
  eval           1.28 GiB  fits
  actor_save     1.23 GiB  fits
  critic_save    1.23 GiB  fits
  actor_load     1.21 GiB  fits
  critic_load    1.21 GiB  fits
  no role is offloaded

contents of this machine with all processes
  actor weights         3.29 MiB  always
  actor gradients       3.29 MiB  always
  actor optimizer       6.58 MiB  always
  reference             3.29 MiB  always
  actor activations     38.5 MiB  rollout, logprobs, eval
  actor activations     229 MiB   actor_update
  critic weights        3.29 MiB  always
  critic gradients      3.29 MiB  always
  critic optimizer      6.58 MiB  always
  critic activations    38.5 MiB  values
  critic activations    227 MiB   critic_update
  generator weights     3.57 MiB  always
  KV cache              256 MiB   always
  weights in transfer   13.2 MiB  rollout, eval
  states being written  19.7 MiB  all except actor_load, critic_load
  libraries             950 MiB   always
  samples and records   784 KiB   rollout
  samples and records   824 KiB   all except rollout
  published weights     3.29 MiB  always
"""
    assert out[out.index("disk\n") :].replace(here, ", 8 GiB") == screen


def test_plan_of_a_large_model_on_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, *LARGE, *LAYOUT, "--gpu-gib", "80", code=7)
    screen = """\
memory (estimates, GPU)
  of the largest rank           actor          critic
  parameters                    1,903,953,408  1,903,953,408
  pipeline stage                0              0
  microbatches in flight        2              2
  weights                       3.55 GiB       3.55 GiB
  gradients                     7.09 GiB       7.09 GiB
  main weights                  3.55 GiB       3.55 GiB
  moments                       7.09 GiB       7.09 GiB
  reference                     3.55 GiB       -
  gather buffer                 70 MiB         70 MiB
  between calls                 24.9 GiB       21.3 GiB
  update, in addition           32.9 GiB       32.9 GiB
  forward pass, in addition     1.04 GiB       1.04 GiB
  peak                          57.7 GiB       54.2 GiB
  all processes, between calls  199 GiB        159 GiB

  generator     14.2 GiB weights
  KV cache      37.8 GiB: 708,066 tokens, 69 sequences of full length
  driver        1.41 GiB for samples of a step, then 1.5 GiB of records
  weights sent  30 buckets, the largest 1.02 GiB, read by all engines
  assumed: GPU memory of CUDA contexts, NCCL, fragmentation and CUDA graphs is taken from reports;
  docs/gpu.md lists the numbers, which ppoctl has not measured

stages, on the fullest of 8 GPUs (actor, critic, generator), 80 GiB
  rollout        109 GiB  28.7 GiB too much
  reward         104 GiB  23.5 GiB too much
  values         105 GiB  24.7 GiB too much
  logprobs       105 GiB  24.7 GiB too much
  correction     104 GiB  23.5 GiB too much
  advantages     104 GiB  23.5 GiB too much
  critic_update  140 GiB  59.7 GiB too much
  actor_update   140 GiB  59.7 GiB too much
  eval           109 GiB  28.7 GiB too much
  actor_save     104 GiB  23.5 GiB too much
  critic_save    104 GiB  23.5 GiB too much
  actor_load     104 GiB  23.5 GiB too much
  critic_load    104 GiB  23.5 GiB too much
  no role is offloaded

contents of the fullest of 8 GPUs (actor, critic, generator)
  actor weights         3.55 GiB  always
  actor gradients       7.09 GiB  always
  actor optimizer       10.6 GiB  always
  reference             3.55 GiB  always
  actor gather buffer   70 MiB    always
  actor activations     1.04 GiB  rollout, logprobs, eval
  actor activations     32.9 GiB  actor_update
  fragments             107 MiB   rollout, logprobs, eval
  fragments             3.29 GiB  actor_update
  CUDA contexts         1.8 GiB   always
  NCCL                  2.5 GiB   always
  critic weights        3.55 GiB  always
  critic gradients      7.09 GiB  always
  critic optimizer      10.6 GiB  always
  critic gather buffer  70 MiB    always
  critic activations    1.04 GiB  values
  critic activations    32.9 GiB  critic_update
  fragments             107 MiB   values
  fragments             3.29 GiB  critic_update
  generator weights     14.2 GiB  always
  KV cache              37.8 GiB  always
  CUDA graphs           1 GiB     always
  weights in transfer   4.06 GiB  rollout, eval

host memory of a node with 8 GPUs, at most 390 GiB
  rollouts in ranks     4 GiB     always
  states being written  191 GiB   all except actor_load, critic_load
  staging               1 GiB     actor_save
  gathered for a save   170 GiB   actor_save
  read by a load        170 GiB   actor_load
  libraries             7.18 GiB  always
  staging               1 GiB     critic_save
  gathered for a save   158 GiB   critic_save
  read by a load        158 GiB   critic_load
  samples and records   1.41 GiB  rollout
  samples and records   1.5 GiB   all except rollout
  published weights     14.2 GiB  always
  object store          576 MiB   always

largest items in critic_update, and what to do
  KV cache            37.8 GiB  lower `generator.gpu_memory_frac`
  critic activations  32.9 GiB  raise `critic.parallel.context`, or set `critic.recompute`
  generator weights   14.2 GiB  raise `generator.tensor`
  actor optimizer     10.6 GiB  raise `actor.parallel.data` with `distributed_optimizer = true`
  if every role is offloaded, no stage needs more than 66.2 GiB (rollout):
    --set 'cluster.offload=["actor", "critic", "generator"]'
"""
    assert out[out.index("memory (") :] == screen


def test_plan_with_each_process_on_its_own_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    layout = keys("actor.parallel={tensor=4, data=2}", "critic.parallel={tensor=4, data=2}")
    layout += keys("generator.engines=4", "generator.tensor=2", 'cluster.placement="apart"')
    batching = keys('actor.recompute="full"', "actor.batching.forward_max_tokens_per_microbatch=40000")
    out = output_of(capsys, *LARGE, *layout, *batching, "--gpu-gib", "80")
    screen = """\
processes
  actor      8: tensor 4, data 2
  critic     8: tensor 4, data 2
  generator  8: 4 engines share one queue, each split over 2 processes
  devices    24: one for each process
  Ray        started by the run, on this machine; for several nodes use `--on slurm` or `cluster.ray_address`

updates
                                 actor                 critic
  epochs                         1                     1
  sequences per minibatch        256                   256
  minibatches per epoch          8                     8
  optimizer steps per step       8                     8
  optimizer steps in total       320                   320
  warm-up                        80 updates, 10 steps  none
  learning rate, first           0                     2e-05
  learning rate, peak            1e-06                 2e-05
  learning rate, last            1e-06                 2e-05
  microbatches per minibatch     1 to 128              1 to 128
  forward microbatch, maximum    40,000 tokens         10,240 tokens
  activation recomputation       full                  none
  replayed by a resume, maximum  80 updates            80 updates

"""
    assert out[out.index("processes") : out.index("data\n")] == screen
    assert "  generator     7.09 GiB weights in each process\n" in out
    assert "sequences of full length in each engine\n" in out
    screen = """\
stages, each process on its own GPU, 80 GiB
                 the actor's GPU        the critic's GPU        the generator's GPU
  rollout        43.5 GiB         fits  31.5 GiB          fits  55.9 GiB             fits
"""
    assert out[out.index("stages, ") : out.index("  reward ")] == screen
    titles = [line for line in out.splitlines() if line.startswith(("contents of", "host memory"))]
    assert titles == [
        "contents of the actor's GPU",
        "contents of the critic's GPU",
        "contents of the generator's GPU",
        "host memory of a node with 8 GPUs (the fullest of 3), at most 110 GiB",
    ]


def test_plan_of_colocated_roles_with_offload(capsys: pytest.CaptureFixture[str]) -> None:
    offload = keys('cluster.offload=["actor", "critic", "generator"]')
    out = output_of(capsys, *LARGE, *LAYOUT, "--gpu-gib", "80", *offload)
    assert "  rollout        66.2 GiB  fits\n" in out
    screen = """\
  offloaded while others compute: actor, critic, generator

contents of the fullest of 8 GPUs (actor, critic, generator)
  actor weights         3.55 GiB  all except reward, values, critic_update, critic_save, critic_load
  actor gradients       7.09 GiB  actor_update, actor_save, actor_load
  actor optimizer       10.6 GiB  actor_update, actor_save, actor_load
  reference             3.55 GiB  logprobs, correction, advantages
"""
    assert out[out.index("  offloaded while") : out.index("  actor gather buffer")] == screen
    assert "\n  offloaded             142 GiB   all except actor_load\n" in out


def test_plan_on_a_machine_that_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, *LARGE)
    screen = """\
largest items in actor_update, and what to do
  states being written  191 GiB   set `checkpoint.asynchronous = false`
  actor optimizer       85.1 GiB  use more nodes (`cluster.ray_address`) or a smaller model
  actor activations     81.5 GiB  raise `actor.parallel.context`, or set `actor.recompute`
  critic optimizer      79 GiB    use more nodes (`cluster.ray_address`) or a smaller model
"""
    assert out[out.index("largest items") :] == screen


@pytest.mark.parametrize(
    ("family", "assumed"),
    [
        ("qwen3_moe", "assumed: all experts receive equally many tokens"),
        ("gemma2", "assumed: attention keeps its scores"),
        ("gemma3_text", "assumed: the KV cache holds full contexts also in layers with a sliding window"),
    ],
)
def test_plan_states_its_assumptions_about_a_family(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, family: str, assumed: str
) -> None:
    numbers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 20000}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    own = {"qwen3_moe": experts, "gemma2": {**caps, "sliding_window": 32}, "gemma3_text": {"sliding_window": 32}}[
        family
    ]
    config = {"model_type": family, "eos_token_id": 1, **numbers, **heads, **own}
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = output_of(capsys, *LARGE, *keys(f"model.path={tmp_path}"))
    assert out.count("assumed: ") == (2 if family == "gemma2" else 1)
    assert assumed in out
    assert "assumed: " not in output_of(capsys, QUICKSTART, *FEW_ROWS)
    if family == "gemma2":
        out = output_of(capsys, *LARGE, *keys(f"model.path={tmp_path}"), "--gpu-gib", "1", code=7)
        assert "  warning: attention of the actor has no flash kernel and keeps 3.22 GiB of scores" in out


def test_plan_json_has_all_memory_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    memory = json.loads(output_of(capsys, *LARGE, *LAYOUT, "--gpu-gib", "80", "--json", code=7))["memory"]
    actor = memory["roles"]["actor"]
    assert [rank["stage"] for rank in actor["ranks"]] == [0, 1]
    rank = actor["ranks"][1]
    assert rank["peak"] == rank["resident"] + max(rank["update"], rank["forward"])
    assert rank["kept"]["total"] == sum(size for name, size in rank["kept"].items() if name != "total")
    [found] = memory["places"]
    assert found["room"] == 80 * 2**30
    assert {stage["stage"]: stage["fits"] for stage in found["stages"]}["actor_update"] is False
    assert {item["name"] for item in found["items"]} >= {"actor weights", "KV cache"}


def test_plan_json_has_the_findings(capsys: pytest.CaptureFixture[str]) -> None:
    doubtful = ("ppo.policy_loss.kind=reinforce", "ppo.epochs=2")
    [found] = json.loads(output_of(capsys, QUICKSTART, *FEW_ROWS, *keys(*doubtful), "--json"))["findings"]
    assert (found["level"], found["kind"], found["where"]) == ("note", "recipe", "--set")
    assert "all but the first are off-policy" in found["what"]


def processes(capsys: pytest.CaptureFixture[str], *sets: str) -> str:
    out = output_of(capsys, QUICKSTART, *FEW_ROWS, *keys(*sets))
    return out[out.index("processes\n") : out.index("\nupdates")]


def test_plan_reports_idle_processes_and_unused_ray(capsys: pytest.CaptureFixture[str]) -> None:
    screen = """\
processes
  actor      100: data 100; 36 of its data ranks get no row of a minibatch
  critic     2: data 2
  generator  8: 8 engines share one queue; 92 of 100 devices have no engine
  devices    100: each is shared by one process of every role
  Ray        started by the run, on this machine
"""
    assert processes(capsys, "actor.parallel={data=100}", "critic.parallel={data=2}", "generator.engines=8") == screen
    screen = """\
processes
  all roles  in the process of the command; vLLM in a second process
  Ray        not started: `cluster.ray_address` is not used
"""
    assert processes(capsys, "cluster.ray_address=head:6379") == screen
    assert "  Ray        the cluster at `head:6379`" in processes(
        capsys, "generator.engines=2", "cluster.ray_address=head:6379"
    )


def test_plan_reports_engines_that_cannot_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = json.loads((ROOT / "recipes/quickstart/model/config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    sets = ["generator.kv_cache_mib=1", "rollout.max_new_tokens=1000", f"model.path={tmp_path}"]
    out = output_of(capsys, QUICKSTART, *FEW_ROWS, *keys(*sets))
    assert "  rollout        1.06 GiB   no cache for one sequence\n" in out
    assert out.endswith(
        "  vLLM will not start: a sequence of full length needs 2.08 MiB, more than its KV cache has; raise\n"
        "  `generator.kv_cache_mib`\n"
    )


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [
        (
            "verl/moonlight16b_a3b_gsm8k_megatron",
            """\
  transfer          29.7 GiB
                    about 45s without the network: one H100 sent 2.9 GiB of a dense model through host memory in 4.4s
                    about 1m 51s if the engines restart: only if vLLM computes experts without Triton's kernels
""",
        ),
        (
            "own/qwen1.5-moe-lora-80g",
            """\
  transfer          26.7 GiB first, then 2.3 GiB
                    the first about 14s: one H100 sent 2.9 GiB of a dense model through GPU memory in 1.5s
                    about 1m 42s if the engines restart: only if vLLM computes experts without Triton's kernels
""",
        ),
    ],
)
def test_plan_of_a_transfer(capsys: pytest.CaptureFixture[str], recipe: str, rows: str) -> None:
    out = output_of(capsys, str(ROOT / "recipes" / f"{recipe}.toml"), "--gpu-gib", "80")
    assert out[out.index("  transfer ") : out.index("\nalgorithm")] == rows
