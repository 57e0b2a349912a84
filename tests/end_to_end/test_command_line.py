"""ppoctl as typed: one process per command, real engines, real GSM8K rows.

Lightweight commands (`status`, `resume --plan`) and, in CI, one complete `train` use new interpreters; the others are
forked from a process that has done the imports (`fork_server.py`).
"""

import gzip
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from end_to_end.cli_process import Forked, fresh

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "recipes/gsm8k-smoke.toml"
OURS = ("step ", "loading ", "reading ", "trying ", "starting ", "replaying ", "restored ", "checking ", "warn")
"""Prefixes of the lines of a successful run."""

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def answer(command: Command, cwd: Path, *words: str) -> dict[str, Any]:
    done = command(cwd, *words, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        pytest.param(["plan", str(SMOKE)], marks=pytest.mark.ci("the other two")),
        ["train", str(SMOKE), "--set", 'steps="two"'],
    ],
)
def test_forked_command_has_the_output_of_a_fresh_process(tmp_path: Path, forked: Forked, words: list[str]) -> None:
    one, other = forked(tmp_path, *words), fresh(tmp_path, *words)
    assert (one.returncode, one.stdout, without_waits(one)) == (other.returncode, other.stdout, without_waits(other))
    assert one.stdout or without_waits(one)


def without_waits(done: "subprocess.CompletedProcess[str]") -> list[str]:
    """Return the lines of stderr, without those that a slow command adds to say what it is doing."""
    return [line for line in done.stderr.splitlines() if not line.startswith("checking ")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, ppoctl_data: Path, forked: Forked) -> Path:
    """Return a folder with `runs/gsm8k-smoke`: one command has made its first rollout, another has trained it. The
    critic has two processes, in Ray, and the roles are offloaded in turn."""
    folder = tmp_path_factory.mktemp("trained")
    layout = ("--set", "critic.parallel.data=2", "--set", "cluster.offload=['actor', 'critic', 'generator']")
    assert answer(forked, folder, "rollout", str(SMOKE), *layout)["figures"]["reward/error_frac"] == 0
    require_only_own_lines(forked(folder, "train", str(SMOKE), *layout))
    return folder


def require_only_own_lines(done: "subprocess.CompletedProcess[str]") -> None:
    """Fail if the run did not succeed, or printed warnings of libraries or control characters."""
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stderr
    assert "Traceback" not in done.stderr
    assert all(line.startswith(OURS) for line in done.stderr.splitlines())


@pytest.mark.ci("the same command, forked, and the imports of test_lightweight_imports.py")
def test_new_interpreter_trains_without_warnings(tmp_path: Path, ppoctl_data: Path) -> None:
    require_only_own_lines(fresh(tmp_path, "train", str(SMOKE)))


@pytest.fixture(scope="module")
def evaluated(trained: Path, forked: Forked) -> dict[str, Any]:
    return answer(forked, trained, "eval", "--ckpt", "runs/gsm8k-smoke", "--out", "samples.jsonl")["figures"]


def test_trained_run_is_shown(trained: Path, forked: Forked) -> None:
    status = answer(fresh, trained, "status", "runs/gsm8k-smoke")
    assert (status["state"], status["steps_done"], status["saved_steps"]) == ("finished", 2, [1, 2])
    assert [attempt["status"] for attempt in status["attempts"]] == ["finished", "finished"]
    for stage in ("values", "logprobs", "critic_update", "actor_update"):
        assert status["figures"][f"throughput/{stage}_tokens_per_s"] > 1
        assert 0 < status["figures"][f"throughput/{stage}_mfu"] < 1
    assert 0 < status["figures"]["time/transfer_s"] < status["figures"]["time/rollout_s"]
    for stage in ("rollout", "values", "logprobs", "critic_update", "actor_update"):
        assert 0.1 < status["figures"][f"memory/{stage}_gib"] < 100
        assert 0 < status["figures"][f"time/{stage}_wait_s"] < status["figures"][f"time/{stage}_s"]
    assert all(status["figures"][f"time/{role}_save_s"] > 0 for role in ("actor", "critic"))
    log = (trained / "runs/gsm8k-smoke/logs/attempt-2/vllm-engine-0.log").read_text()
    assert re.search(r"(imported vLLM|vLLM was imported before,) in \d+\.\d s, started the engine in \d+\.\d s", log)
    sample = answer(forked, trained, "show", "runs/gsm8k-smoke", "--step", "2", "--best")
    assert len(sample["tokens"]) == len(sample["advantages"]) == len(sample["logprobs"]) == len(sample["pieces"])
    assert "".join(sample["pieces"]).startswith(sample["response"][:5])


def test_evaluation_of_a_run_equals_its_last_one(trained: Path, forked: Forked, evaluated: dict[str, Any]) -> None:
    last = answer(forked, trained, "status", "runs/gsm8k-smoke")["figures"]
    assert evaluated["eval/gsm8k/pass_at_1"] == last["eval/gsm8k/pass_at_1"]
    assert len((trained / "samples.jsonl").read_text().splitlines()) == 2 * 16


@pytest.mark.ci("test_evaluation_of_a_run_equals_its_last_one, test_evaluate.py and test_convert_cli.py")
def test_exported_actor_is_evaluated_like_its_run(trained: Path, forked: Forked, evaluated: dict[str, Any]) -> None:
    forked.succeeds(trained, "convert-ckpt", "runs/gsm8k-smoke", "trained", "--to", "hf")
    exported = answer(forked, trained, "eval", str(SMOKE), "--ckpt", "trained", "--out", "exported.jsonl")
    assert exported["figures"] == evaluated
    assert (trained / "exported.jsonl").read_bytes() == (trained / "samples.jsonl").read_bytes()


def test_finished_run_has_nothing_to_resume(trained: Path, forked: Forked) -> None:
    plan = answer(fresh, trained, "resume", "runs/gsm8k-smoke", "--plan")
    assert plan == {
        "from_step": 2,
        "finished_samples": [],
        "items": [
            {"item": f"states/{role}/000002", "action": "restored", "note": ""} for role in ("actor", "critic")
        ],
        "notes": [],
        "steps_to_come": [],
    }
    refused = forked(trained, "train", str(SMOKE))
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: run directory `runs/gsm8k-smoke` exists\n\nhint: continue it: ppoctl resume runs/gsm8k-smoke\n"
    )


def test_step_of_a_run_is_profiled_in_every_process(trained: Path, forked: Forked) -> None:
    before = answer(fresh, trained, "resume", "runs/gsm8k-smoke", "--plan")
    profiles = answer(forked, trained, "profile", "runs/gsm8k-smoke", "--step", "2")["processes"]
    slowest = {profile["process"]: {kernel["name"] for kernel in profile["slowest"]} for profile in profiles}
    assert list(slowest) == ["driver", "actor", "critic-0", "critic-1", "generator-0"]
    traces = {name: trained / f"runs/gsm8k-smoke/profile/step-000002/trace-{name}.json.gz" for name in slowest}
    assert {profile["process"]: trained / profile["trace"] for profile in profiles} == traces
    for name in ("actor", "critic-0", "critic-1"):
        assert "aten::mm" in slowest[name], slowest
        assert "backward" in gzip.decompress(traces[name].read_bytes()).decode().lower(), name
    assert any("onednn_mm" in name for name in slowest["generator-0"]), slowest
    assert answer(fresh, trained, "resume", "runs/gsm8k-smoke", "--plan") == before


@pytest.mark.ci("test_stops.py, test_early_signals.py")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signal_ends_the_run_gracefully(
    tmp_path: Path, number: int, code: int, ppoctl_data: Path, forked: Forked
) -> None:
    words = ["train", str(SMOKE), "-v", "--set", "steps=50", "--set", "expect={}"]
    with forked.running(tmp_path, *words) as process:
        for line in process.stderr:
            if line.startswith("step 2/50  values"):
                assert processes_in(tmp_path)
                process.send_signal(number)
                break
        rest = process.stderr.read()
    assert process.returncode == code
    assert "everything finished is committed" in rest
    assert "Traceback" not in rest
    status = answer(fresh, tmp_path, "status", "runs/gsm8k-smoke")
    assert status["state"] == ("preempted" if number == signal.SIGTERM else "interrupted")
    deadline = time.monotonic() + 10
    while processes_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_in(tmp_path) == []


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return processes that work in this folder or have it in their arguments; a run's scorers inherit its folder."""
    found = psutil.process_iter(["cwd", "cmdline"])
    return [
        process
        for process in found
        if process.info["cwd"] == str(folder) or str(folder) in " ".join(process.info["cmdline"] or ())
    ]


BAD_INPUT = [
    (["model.path=nowhere/model"], 3, "model.path"),
    (["rollout.max_prompt_tokens=20"], 4, "`rollout.max_prompt_tokens` is 20; 64 of 64 rows"),
    (["rollout.promts_per_step=8"], 2, "did you mean `prompts_per_step`"),
]


@pytest.mark.parametrize(("sets", "code", "says"), BAD_INPUT)
def test_bad_input_is_one_clear_error_and_leaves_no_files(
    tmp_path: Path, ppoctl_data: Path, forked: Forked, sets: list[str], code: int, says: str
) -> None:
    done = forked(tmp_path, "train", str(SMOKE), *(word for item in sets for word in ("--set", item)))
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs/gsm8k-smoke").exists()
