"""`track` lists what MLflow was sent; `tests/tracking` checks that it is sent."""

import json
from pathlib import Path

import pytest

from fakes.components import fake_recipe
from fakes.job import play
from ppoctl.cli.app import run
from ppoctl.show.tracking.forwarder import Sent


def test_track_lists_sent_counts_without_zeros(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    play(root, fake_recipe(steps=1, tracking={"kind": "mlflow", "uri": "http://127.0.0.1:9"}))
    monkeypatch.setattr("ppoctl.show.tracking.mirror.rebuild", lambda *_: Sent(tags=2, files=15))
    assert run(["track", str(root)]) == 0
    assert capsys.readouterr().out == "sent\ntags    2\nfiles  15\n"
    assert run(["track", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**vars(Sent()), "tags": 2, "files": 15}
