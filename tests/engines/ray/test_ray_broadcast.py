"""Real ranks and real engines in separate Ray processes: weights are broadcast directly."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ppoctl.core.batch.records import State
from ppoctl.core.ports import SamplingParams
from ppoctl.engines.megatron.factory import trainer_settings
from ppoctl.engines.megatron.trainer import MegatronActor, trainer_side
from ppoctl.engines.vllm.engine import GenerationRequest
from ppoctl.engines.vllm.fleet import Fleet
from ppoctl.engines.vllm.vllm_settings import VllmSettings
from ppoctl.engines.weights.canary import Canary
from ppoctl.engines.weights.sync import EngineSide, Sync
from ppoctl.recipe.loading.load import load
from ppoctl.run.wire.placed_processes import Placed, place

ROOT = Path(__file__).parents[3]
CHANGES = [
    "actor.parallel={tensor=2, sequence=true}",
    "critic.parallel={}",
    "generator.engines=2",
    "cluster={threads=1, placement='apart', weights='broadcast', start_deadline_s=120}",
    f"model.path={ROOT / 'recipes/quickstart/model'}",
]


@pytest.fixture
def placed() -> Iterator[tuple[Placed, MegatronActor]]:
    recipe = load([ROOT / "recipes/quickstart.toml"], CHANGES, {"PPOCTL_DATA": "none"}).recipe
    of_actor, of_critic = (trainer_settings(recipe, role) for role in ("actor", "critic"))
    made = place(recipe, {"actor": of_actor, "critic": of_critic})
    actor = MegatronActor(of_actor, made.trained["actor"])
    yield made, actor
    made.close()


def kill_when_it_receives(engines: EngineSide, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the engine once, after the call to receive."""
    host: Any = engines.engines[number]
    begin = host.begin

    def kills(method: str, *arguments: Any) -> Any:
        reply = begin(method, *arguments)
        if method == "receive_weights":
            monkeypatch.undo()
            kill(number)
        return reply

    monkeypatch.setattr(host, "begin", kills)


def kill(number: int) -> None:
    """Kill this engine."""
    mine = psutil.Process().children(recursive=True)
    title = f"ray::generator_engine_{number}"
    next(process for process in mine if title in " ".join(process.cmdline())).kill()


def must_not_be_called(*arguments: Any) -> Any:
    raise AssertionError("the trainer has moved on")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_broadcast_survives_engine_deaths_in_sync_and_generation(placed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time the engines' weights and outputs are compared with those of two tensor ranks; the last time the ranks
    are not called."""
    made, actor = placed
    messages: list[str] = []
    table = load([ROOT / "recipes/quickstart.toml"], CHANGES, {"PPOCTL_DATA": "none"}).recipe.generator
    settings = VllmSettings(actor.settings.model, "float32", 128, (1,), table)
    hosts = made.generator(settings, messages.append)

    side = trainer_side(actor, lambda state: actor)
    fleet = Fleet(hosts, Sync(side, hosts, Canary.of("float32", 128, tolerance=None)), 8, messages.append)
    with monkeypatch.context() as small:
        small.setattr(made.trained["actor"].ranks, "bucket_bytes", 2**16)
        actor.start()
        fleet.prepare(State("actor", 0, 0, "first"))
    assert events(messages) == []
    kill_when_it_receives(hosts, 1, monkeypatch)
    fleet.prepare(State("actor", 0, 0, "second"))
    assert len(events(messages)) == 1, messages
    assert events(messages)[0].endswith("; restarting")

    monkeypatch.setattr(fleet._sync, "trainer_at", must_not_be_called)
    fleet.open(SamplingParams(temperature=1.0, max_new_tokens=64))
    fleet.submit([GenerationRequest(f"d{number}", (5, 6, 7), number) for number in range(8)])
    kill(0)
    finished = [one for ended in iter(fleet.finished, []) for one in ended]
    assert {one.finished.id for one in finished} == {f"d{number}" for number in range(8)}
    assert sorted({one.sends for one in finished}) == [1, 2]
    assert len(events(messages)) == 2
    fleet.close()


def events(messages: list[str]) -> list[str]:
    """Return the messages without those of waits on a busy machine."""
    return [line for line in messages if not line.startswith("waiting for ")]
