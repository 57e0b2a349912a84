"""`eval`: in which order what it needs is asked for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.sockets import BigramGenerator, fake_recipe, fake_sockets
from ppoctl.batch.lineage import initial_state
from ppoctl.batch.records import State
from ppoctl.wire import commands, engines
from ppoctl.wire.commands import Checkpoint


@pytest.mark.parametrize("folder", [None, Path("states/actor/000002")], ids=["the model source", "a saved state"])
def test_the_engine_starts_before_the_actor_is_loaded_and_finds_the_devices_memory_free(
    monkeypatch: pytest.MonkeyPatch, folder: Path | None
) -> None:
    recipe, order = fake_recipe(), list[str]()
    sockets = fake_sockets(recipe)
    start = sockets.actor.start

    def begin(says: str) -> None:
        order.append(says)
        start()

    monkeypatch.setattr(sockets.actor, "start", lambda: begin("actor starts"))
    monkeypatch.setattr(sockets.actor, "load", lambda found: begin(f"actor loads {found}"))

    class Starting(BigramGenerator):
        def prepare(self, state: State) -> None:
            order.append("engine starts")
            super().prepare(state)

    def built(*_: Any, **__: Any) -> Any:
        return replace(sockets, generator=lambda actor_at, *_: Starting(actor_at))

    monkeypatch.setattr(commands.preflight, "require", lambda recipe: None)
    monkeypatch.setattr(engines, "set_threads", lambda recipe: None)
    monkeypatch.setattr(engines, "read_questions", lambda recipe: sockets.questions)
    monkeypatch.setattr(engines, "open_scorer", lambda recipe, questions: sockets.scorer)
    monkeypatch.setattr(engines, "build_engines", built)
    checkpoint = Checkpoint(recipe, initial_state("actor", "bigram"), folder)
    assert commands.evaluate(checkpoint, print).figures
    assert order[:2] == ["engine starts", "actor starts" if folder is None else f"actor loads {folder}"]
    assert sum(line.startswith("actor") for line in order) == 1
