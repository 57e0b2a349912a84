"""A tracking URI given by the name of a variable is passed to MLflow and nowhere else."""

from pathlib import Path

import pytest

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.recipe.tracking_table import MlflowTracking
from ppoctl.show.tracking.mlflow_run import address_of

NAMED = MlflowTracking(kind="mlflow", uri="$WHERE")


@pytest.mark.parametrize(
    ("uri", "resolved"),
    [
        ("$WHERE", "http://me:hunter2@host"),
        ("${WHERE}/sub", "http://me:hunter2@host/sub"),
        ("http://host/$WHERE", "http://host/$WHERE"),
    ],
)
def test_uri_variable_is_resolved_only_when_mlflow_is_opened(
    tmp_path: Path, monkeypatch, uri: str, resolved: str
) -> None:
    monkeypatch.setenv("WHERE", "http://me:hunter2@host")
    address = address_of(MlflowTracking(kind="mlflow", uri=uri), tmp_path)
    assert address.uri == resolved
    assert "hunter2" not in address.shown
    assert "hunter2" not in repr(address)
    assert address.artifacts is None, "a server knows where they go"


def test_unset_uri_variable_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("WHERE", raising=False)
    with pytest.raises(EnvironmentProblemError, match=r"`tracking\.uri` is `\$WHERE`") as caught:
        address_of(NAMED, tmp_path)
    assert caught.value.hint == "export WHERE=VALUE"
