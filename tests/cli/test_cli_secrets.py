"""A password in a URI is refused, and the refusal never repeats it: not on the screen, not in JSON, not in a
traceback, not in a file."""

import importlib.metadata
import re
import stat
import tempfile
from pathlib import Path

import pytest

from ppoctl.cli.app import run
from ppoctl.core import errors
from ppoctl.core.errors import holds_secret, quoted, without_secrets
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.loading.write import recipe_as_toml
from recipe.conftest import SMALLEST

URI = "http://me:hunter2@host:5000/x"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (URI, "http://host:5000/x"),
        ("no `postgresql://me:hunter2@h/d`, http://a:hunter2@c/d", "no `postgresql://h/d`, http://c/d"),
        ("postgresql://me:hun/ter2@h/d", "postgresql://h/d"),
        ("http://me:hun@ter2@h/d", "http://h/d"),
        ("http://hunter2@h/d", "http://h/d"),
        ("mysql://h/d?user=me&password=hunter2&x=1", "mysql://h/d?user=me&password=...&x=1"),
        ("https://h/d?api_token=hunter2`", "https://h/d?api_token=...`"),
        ("sqlite:////data/me@home/mlflow.db", "sqlite:////data/me@home/mlflow.db"),
        ("postgresql://h/d, ask me@home", "postgresql://h/d, ask me@home"),
    ],
)
def test_without_secrets_removes_only_secrets(text, shown):
    assert without_secrets(text) == shown
    assert holds_secret(text) == (text != shown)


def test_database_user_is_not_a_secret():
    assert not holds_secret("postgresql://me@host/db")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r.toml").write_text(SMALLEST)
    return tmp_path


KIND = '[tracking]\nkind = "mlflow"\n'


def at_uri(value: str) -> str:
    return f"{KIND}uri = {value}\n"


WAYS = {
    "a file": at_uri(f'"{URI}"'),
    "a number of them": at_uri(f'["{URI}"]'),
    "a longer value": at_uri(f'"{"x" * 60} {URI}"'),
    "a table in its place": f'[tracking]\nkind = "mlflow"\nuri = {{of = "{URI}"}}\n',
    "no table": f'tracking = "{URI}"\n',
    "another key": f'[cluster]\nray_address = "{URI}"\n',
    "no key": f'{KIND}url = "{URI}"\n',
    "no kind": f'[tracking]\nkind = "{URI}"\n',
    "no TOML": at_uri(f'"{URI}'),
    "--set": KIND,
    "a broken --set": KIND,
    "a stray word": KIND,
    "the environment": KIND,
    "a broken variable": "",
}


@pytest.mark.parametrize("more", [[], ["--debug"], ["--json"]])
@pytest.mark.parametrize("way", WAYS)
def test_password_in_any_recipe_source_is_refused_without_repeating(folder, monkeypatch, capsys, way, more):
    text = WAYS[way]
    Path("r.toml").write_text(text + SMALLEST if text.startswith("tracking") else SMALLEST + text)
    words = {
        "--set": ["--set", f"tracking.uri={URI}"],
        "a broken --set": ["--set", f"{URI}=1"],
        "a stray word": ["--reward", "--steps", URI],
    }.get(way, [])
    if way == "the environment":
        monkeypatch.setenv("PPOCTL_TRACKING__URI", URI)
    if way == "a broken variable":
        monkeypatch.setenv("PPOCTL_DATA__EVAL", f"{{{URI}")
    assert run(["validate", "r.toml", *words, *more]) == 2
    printed = "".join(capsys.readouterr())
    assert printed
    assert not [piece for piece in ("hunt", "unte", "nter2") if piece in printed], "not a piece of it either"


def test_refused_secret_hint_names_the_alternatives(folder, capsys):
    Path("r.toml").write_text(SMALLEST + at_uri(f'"{URI}"'))
    assert run(["validate", "r.toml"]) == 2
    printed = capsys.readouterr().err
    assert (
        "`tracking.uri` contains a password or a token, but a recipe is stored in the run and sent to MLflow"
        in printed
    )
    assert "MLFLOW_TRACKING_PASSWORD" in printed
    assert '`tracking.uri = "$TRACKING_URI"`' in printed


def test_variable_reference_is_written_by_name(folder, monkeypatch, capsys):
    monkeypatch.setenv("WHERE", URI)
    Path("r.toml").write_text(SMALLEST + at_uri('"$WHERE"'))
    loaded = load([Path("r.toml")])
    for written in (recipe_as_toml(loaded.recipe), str(loaded.resolved()), str(loaded.origins), repr(loaded)):
        assert "hunter2" not in written
    assert loaded.resolved()["tracking"]["uri"] == "$WHERE"
    run(["validate", "r.toml", "--show"])
    assert "hunter2" not in "".join(capsys.readouterr())


def test_error_messages_and_hints_have_no_secrets():
    error = errors.StorageError(f"`{URI}` is full", hint=f"look at {URI}")
    assert (error.message, error.hint, str(error)) == (
        "`http://host:5000/x` is full", "look at http://host:5000/x", "`http://host:5000/x` is full",
    )  # fmt: skip


@pytest.fixture
def failing(monkeypatch, tmp_path):
    """A command that fails in an unforeseen way, with a secret in its message."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fail(_):
        raise ZeroDivisionError(f"at {URI}")

    monkeypatch.setattr(importlib.metadata, "version", fail)


def test_saved_traceback_is_private_and_has_no_secret(failing, tmp_path, capsys):
    for file in ("ppoctl-traceback-1.log", f"ppoctl-traceback-{run.__module__}"):
        (tmp_path / file).symlink_to(tmp_path / "victim")
    logs = []
    for _ in range(2):
        assert run(["--version", "--debug"]) == 1
        printed = capsys.readouterr().err
        assert "hunter2" not in printed
        logs.append(Path(re.search(r"less (\S+)", printed)[1]))
    assert logs[0] != logs[1], "its name cannot be guessed"
    for log in logs:
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        assert "ZeroDivisionError: at http://host:5000/x" in log.read_text()
    assert not (tmp_path / "victim").exists()


def test_hint_arguments_are_shell_quoted():
    assert quoted("runs/my run") == "'runs/my run'"
    assert quoted(Path("$(touch x)")) == "'$(touch x)'"
    assert quoted("runs/my") == "runs/my"
