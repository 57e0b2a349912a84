"""Which processes of engines start before the driver's imports."""

import contextlib
from pathlib import Path

import psutil
import pytest

from fakes.nvml import NO_LIBRARY, FakeNvml
from leftover import all_gone
from ppoctl.engines.child.process import taken
from ppoctl.engines.vllm.own_process import engine_process, prepared_process
from ppoctl.recipe.loading.load import load
from ppoctl.run.wire.prestart import cpu_threads, prestarted_engines, vllm_settings

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.toml"


@pytest.mark.parametrize(
    ("driver", "visible", "sets", "prepared", "complete"),
    [
        (FakeNvml(count=1), None, [], 1, 0),
        (FakeNvml(count=1), None, ["generator.engines_per_gpu=2"], 2, 0),
        (FakeNvml(count=1), "", [], 0, 1),
        (FakeNvml(fault=NO_LIBRARY), None, [], 0, 1),
        (FakeNvml(count=1), None, ["model.path=no/such-model"], 0, 0),
        (FakeNvml(fault=NO_LIBRARY), None, ["model.path=no/such-model"], 0, 0),
        (FakeNvml(count=1), None, ["generator.engines=2"], 0, 0),  # Ray starts them
    ],
)
def test_engines_prepare_on_a_gpu_and_start_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
    driver: FakeNvml,
    visible: str | None,
    sets: list[str],
    prepared: int,
    complete: int,
) -> None:
    driver.plant(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    recipe, folder = load([QUICKSTART], sets).recipe, Path(load([QUICKSTART]).recipe.model.path)
    settings, threads = vllm_settings(recipe, folder), cpu_threads(recipe)
    before = set(psutil.Process().children())
    with prestarted_engines(recipe):
        started = [child.pid for child in set(psutil.Process().children()) - before]
        with contextlib.ExitStack() as owned:
            for number, like in (
                (prepared, prepared_process(settings, threads)),
                (complete, engine_process(settings, threads)),
            ):
                found = [taken(like.target) for _ in range(number + 1)]
                for child in found[:number]:
                    assert child is not None
                    owned.callback(child.close)
                assert found[number] is None
    assert len(started) == prepared + complete
    assert all_gone(started)
