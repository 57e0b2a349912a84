"""docs/scaling.md shows the current output of its commands, and the steps that `benchmarks/simulate.py` computes."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from ppoctl.cli.app import run
from ppoctl.models.shape_reader import shape_if_known
from ppoctl.plan.memory.estimate import estimate_here
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
AHEAD = "rollout.ahead=1"
HEADER = "| settings | H200, `ahead = 0` | `ahead = 1` | H100, `ahead = 0` | `ahead = 1` |"
PAGE = (ROOT / "docs" / "scaling.md").read_text("utf-8")
COMMANDS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
SHOWN = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "shown"), list(zip(COMMANDS, SHOWN, strict=True)), ids=["steps", "memory"])
def test_scaling_page_shows_command_output(
    command: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, python, *words = shlex.split(command)
    assert (path, python) == ("PYTHONPATH=src", "python")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PPOCTL_DATA", "/data")
    if words[:2] == ["-m", "ppoctl"]:
        code = run(words[2:])
    else:
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as ended:
            run_path(words[0], run_name="__main__")
        code = ended.value.code
    written = capsys.readouterr()
    errors = [line for line in written.err.splitlines() if not line.startswith("note: ")]
    assert (errors, code or 0) == ([], 0)
    assert written.out.endswith(shown), "put the new output in, and read what the page says about it again"


@pytest.fixture
def recipe_with(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that returns the recipe of the page with settings."""
    monkeypatch.setenv("PPOCTL_DATA", "/data")
    monkeypatch.chdir(ROOT)
    return lambda *sets: load([ROOT / "recipes" / "dsr1-7b.toml"], ["cluster.ray_address=HEAD:6379", *sets]).recipe


@cache
def benchmark() -> dict[str, Any]:
    return run_path(str(ROOT / "benchmarks" / "simulate.py"), run_name="simulate")


def step_on_64(recipe: Recipe, units: Any) -> Any:
    shape = shape_if_known(recipe.model.path)
    assert shape is not None
    return next(step for step in benchmark()["simulate"](recipe, shape, units) if step.gpus == 64)


COLOCATED = ("cluster.offload=[]", "generator.gpu_memory_frac=0.3")


def test_step_with_generation_ahead_takes_the_longer_side(recipe_with: Any) -> None:
    slow = replace(benchmark()["Units"](), decode_utilisation=0.1)
    for units, is_long in ((benchmark()["Units"](), False), (slow, True)):
        alone, ahead = (step_on_64(recipe_with(*COLOCATED, *sets), units) for sets in ((), (AHEAD,)))
        assert ahead.costs == pytest.approx(alone.costs)
        generation = ahead.rollout_s + ahead.asking_s + ahead.samples_s
        training = ahead.reward_s + ahead.forward_s + ahead.critic_update_s + ahead.actor_update_s + ahead.data_s
        assert (generation > training) is is_long
        around = ahead.weights_s + ahead.commit_s + ahead.save_s
        assert alone.step_s == pytest.approx(around + generation + training)
        assert ahead.step_s == pytest.approx(around + max(generation, training))
        work = ahead.forward_s + ahead.critic_update_s + ahead.actor_update_s
        assert alone.scaling_s == pytest.approx(ahead.rollout_s + work)
        assert ahead.scaling_s == pytest.approx(max(ahead.rollout_s, work))


def test_output_names_what_overlap_hides(recipe_with: Any, capsys: pytest.CaptureFixture[str]) -> None:
    apart = ("cluster.offload=[]", "cluster.placement=apart", "cluster.weights=broadcast")
    for sets, is_bound in ((COLOCATED, True), (apart, False)):
        benchmark()["show"](recipe_with(*sets, AHEAD), benchmark()["Units"]())
        out = capsys.readouterr().out
        assert out.count("hidden by overlap") == 2
        assert ("the times of steps are lower bounds" in out) is is_bound


def test_simulated_save_waits_for_the_shorter_step(recipe_with: Any) -> None:
    """A slow disk: the next save waits for the previous one, which a longer step would have hidden."""
    units = replace(benchmark()["Units"](), disk_bytes_s=2e6)
    alone, ahead = (step_on_64(recipe_with(*COLOCATED, *sets), units) for sets in ((), (AHEAD,)))
    assert ahead.save_s - alone.save_s == pytest.approx(ahead.hidden_s)


def test_measured_units_by_hand(recipe_with: Any) -> None:
    """32 sequences in each engine: 15.2 GB of weights, and 57,344 bytes of cache for each of 6,144 tokens on average.
    The page of the GPU has each measured number."""
    units = benchmark()["UNITS"]["h100"]
    read = 2 * 7_615_616_512 + 32 * 6144 * 57_344
    each = read / (3.35e12 * 0.58) + 32 * 0.68 * 0.024 / 512
    assert step_on_64(recipe_with(), units).rollout_s == pytest.approx(8192 * each, rel=0.001)
    # The measurement that they come from: 3 GB of weights and 12 GB of cache, 512 sequences, 24 ms.
    assert 15e9 / (3.35e12 * 0.58) + 512 * units.decode_row_s == pytest.approx(0.024, rel=0.01)
    assert units.gpu_flops * units.update_utilisation == pytest.approx(0.32 * 989e12)
    gpu = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    measured = ("24 ms per engine step", "32 % busy", "0.36 of the matrix rate (798 TFLOP/s)", "0.32 of the peak")
    assert [text for text in (*measured, "54 GB/s") if text not in gpu] == []
    for one in benchmark()["UNITS"].values():
        assert [name for name, _, means in one.described() if not means.endswith(")")] == []


@pytest.mark.parametrize(
    ("share", "changed"), [("forward", ["forward_s"]), ("update", ["critic_update_s", "actor_update_s"])]
)
def test_share_of_the_matrix_rate_is_that_of_its_passes(share: str, changed: Sequence[str], recipe_with: Any) -> None:
    units = replace(benchmark()["Units"](), gpu_nic_bytes_s=inf, balance_row_s=0.0)
    twice = replace(units, **{f"{share}_utilisation": 0.7})
    before, after = (step_on_64(recipe_with(), each).costs for each in (units, twice))
    names = ("forward_s", "critic_update_s", "actor_update_s")
    halved = {name: before[name] / (2 if name in changed else 1) for name in names}
    assert {name: after[name] for name in names} == pytest.approx(halved)


def test_table_of_generation_ahead_shows_computed_steps(recipe_with: Any) -> None:
    """Each row has its settings. They fit on a GPU with the memory of the units."""
    lines = PAGE.splitlines()
    first = lines.index(HEADER)
    rows = [line.strip("| ").split(" | ") for line in lines[first + 2 : lines.index("", first)]]
    assert len(rows) == 3
    for settings, *cells in rows:
        sets = shlex.split("".join(re.findall(r"`(.*)`", settings)))
        expected = []
        for units in benchmark()["UNITS"].values():
            for ahead in ((), (AHEAD,)):
                if ahead and not {"cluster.offload=[]"} & set(sets):
                    expected.append("refused")
                    continue
                recipe = recipe_with(*sets, *ahead)
                expected.append(f"{step_on_64(recipe, units).step_s:.0f} s")
                memory = estimate_here(recipe, units.gpu_gib)
                assert memory is not None
                assert all(pool.fullest.fits for pool in memory.places)
        assert cells == expected, settings
