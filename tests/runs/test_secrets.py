"""A password in a URI is never written into a run."""

from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.components import fake_recipe
from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.recipe.loading.load import load
from ppoctl.run import session
from ppoctl.store.outline import Outlines
from recipe.conftest import SMALLEST


def test_unset_variable_is_reported_before_anything_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WHERE", raising=False)
    (tmp_path / "r.toml").write_text(SMALLEST + '[tracking]\nkind = "mlflow"\nuri = "$WHERE"\n')
    with pytest.raises(EnvironmentProblemError, match=r"`tracking\.uri` is `\$WHERE`"):
        session.prepare(load([tmp_path / "r.toml"]).recipe, datetime(2026, 1, 2))


def test_traceback_of_an_attempt_has_no_secret(tmp_path: Path) -> None:
    attempt: Any = SimpleNamespace(number=1, paths=SimpleNamespace(attempt=lambda _: tmp_path))
    journal: Any = SimpleNamespace(event=lambda *_, **__: None)
    watcher: Any = SimpleNamespace(
        mirror=None, tensorboard=None, stage=(0, "start"), lost=dict, early_end=None, unkept_since=None
    )
    with pytest.raises(ZeroDivisionError), session._ending(fake_recipe(), journal, Outlines({}), attempt, watcher):
        raise ZeroDivisionError("at http://me:hunter2@host")
    kept = (tmp_path / "traceback.txt").read_text()
    assert "ZeroDivisionError: at http://host" in kept
    assert "hunter2" not in kept
