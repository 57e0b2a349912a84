"""The product as it is typed: one process per command, real engines, real GSM8K rows."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "recipes/gsm8k-smoke.toml"

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def ppoctl(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ppoctl", *words], cwd=cwd, capture_output=True, text=True, check=False, timeout=500
    )


def answer(cwd: Path, *words: str) -> dict[str, Any]:
    done = ppoctl(cwd, *words, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    return dict(json.loads(done.stdout))


def test_rollout_train_show_eval_and_resume(tmp_path: Path, ppoctl_data: Path) -> None:
    drawn = answer(tmp_path, "rollout", str(SMOKE))
    assert drawn["figures"]["reward/error_frac"] == 0
    trained = ppoctl(tmp_path, "train", str(SMOKE))
    assert trained.returncode == 0, trained.stderr
    assert "step 2/2" in trained.stderr
    assert "Traceback" not in trained.stderr
    # Nothing but our own lines: no warning of a library, no control character.
    assert all(line.startswith(("step ", "saved ", "restored ", "warn")) for line in trained.stderr.splitlines())

    status = answer(tmp_path, "status", "runs/gsm8k-smoke")
    assert (status["state"], status["steps_done"], status["saved_pairs"]) == ("finished", 2, [1, 2])
    assert [attempt["status"] for attempt in status["attempts"]] == ["finished", "finished"]

    sample = answer(tmp_path, "show", "runs/gsm8k-smoke", "--step", "2", "--best")
    assert len(sample["tokens"]) == len(sample["advantages"]) == len(sample["logprobs"]) == len(sample["pieces"])
    assert "".join(sample["pieces"]).startswith(sample["response"][:5])

    evaluated = answer(tmp_path, "eval", "--ckpt", "runs/gsm8k-smoke", "--out", "samples.jsonl")
    last = status["figures"]
    assert evaluated["figures"]["eval/gsm8k/pass_at_1"] == last["eval/gsm8k/pass_at_1"]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2 * 16

    plan = answer(tmp_path, "resume", "runs/gsm8k-smoke", "--plan")
    assert plan == {
        "from_step": 2,
        "items": [
            {"item": f"states/{role}/000002", "action": "restored", "note": ""} for role in ("actor", "critic")
        ],
    }
    refused = ppoctl(tmp_path, "train", str(SMOKE))
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: run directory `runs/gsm8k-smoke` exists\n\nhint: continue it: ppoctl resume runs/gsm8k-smoke\n"
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_in_order(tmp_path: Path, number: int, code: int, ppoctl_data: Path) -> None:
    words = [sys.executable, "-m", "ppoctl", "train", str(SMOKE), "-v", "--set", "steps=50", "--set", "expect={}"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 2/50  values"):
                process.send_signal(number)
                break
        rest = process.stderr.read()
    assert process.returncode == code
    assert "everything finished is committed" in rest
    assert "Traceback" not in rest
    status = answer(tmp_path, "status", "runs/gsm8k-smoke")
    assert status["state"] == ("preempted" if number == signal.SIGTERM else "interrupted")
    leftovers = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    deadline = time.monotonic() + 10
    while leftovers.stdout and time.monotonic() < deadline:
        leftovers = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert leftovers.stdout == ""


BAD_INPUT = [
    (["model.path=nowhere/model"], 3, "model.path"),
    (["data.train.path=missing.jsonl"], 4, "missing.jsonl"),
    (["rollout.max_prompt_tokens=20"], 4, "`rollout.max_prompt_tokens` is 20; 64 of 64 rows"),
    (["rollout.prompts_per_step=128"], 4, "64"),
    (["rollout.promts_per_step=8"], 2, "did you mean `prompts_per_step`"),
    (['steps="two"'], 2, "steps"),
]


@pytest.mark.parametrize(("sets", "code", "says"), BAD_INPUT)
def test_bad_input_is_one_clear_error_and_leaves_nothing(
    tmp_path: Path, ppoctl_data: Path, sets: list[str], code: int, says: str
) -> None:
    done = ppoctl(tmp_path, "train", str(SMOKE), *(word for item in sets for word in ("--set", item)))
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs/gsm8k-smoke").exists()


def test_an_empty_dataset_and_a_runs_folder_that_is_a_file(tmp_path: Path, ppoctl_data: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    empty = ppoctl(tmp_path, "train", str(SMOKE), "--set", f"data.train.path={tmp_path}/empty.jsonl")
    assert empty.returncode in (2, 4)
    assert "empty.jsonl" in empty.stderr
    (tmp_path / "runs").write_text("in the way")
    blocked = ppoctl(tmp_path, "train", str(SMOKE))
    assert blocked.returncode == 8
    assert "cannot write" in blocked.stderr
    assert "Traceback" not in blocked.stderr


def test_an_mlflow_that_cannot_be_reached_costs_nothing(tmp_path: Path, ppoctl_data: Path) -> None:
    uri = 'tracking={kind="mlflow", uri="http://127.0.0.1:9"}'
    done = ppoctl(tmp_path, "train", str(SMOKE), "--set", uri, "--set", "steps=1", "--set", "eval.at_start=false")
    assert done.returncode == 0, done.stderr
    assert "mlflow:" in done.stderr
    assert answer(tmp_path, "status", "runs/gsm8k-smoke")["state"] == "finished"
