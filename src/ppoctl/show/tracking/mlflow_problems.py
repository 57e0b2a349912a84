"""Errors of MLflow's client: a line about the error, and the command that fixes its cause. Imports no mlflow."""

from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from ppoctl.core.errors import PpoctlError, quoted, without_secrets
from ppoctl.show.tracking.mlflow_run import Address


def reason(problem: Exception) -> str:
    """Return the first line of the error, with the hint of an error of ppoctl, short enough for one line of a log."""
    text = (str(problem).strip().splitlines() or [""])[0] or type(problem).__name__
    hint = f"; {problem.hint}" if isinstance(problem, PpoctlError) and problem.hint else ""
    return without_secrets(text)[:200] + hint


def fix(problem: Exception, address: Address, run: Path) -> str:
    """Return the hint for an upload of a run that failed. If the cause is unknown, it may go away by itself."""
    for texts, hint in _CAUSES:
        if any(text in str(problem) for text in texts):
            return hint(address, run)
    return f"run this again to send the rest: ppoctl track {quoted(run)}"


def _file(address: Address) -> str:
    return quoted(address.uri.removeprefix("sqlite:///"))


def _readonly(address: Address, _: Path) -> str:
    return f"chmod u+w {_file(address)}"


def _unknown_address(_: Address, run: Path) -> str:
    default = f"tracking.uri=sqlite:///{run.resolve().parent / 'mlflow.db'}"
    return f"to use the default database: ppoctl track {quoted(run)} --set {quoted(default)}"


def _schema(address: Address, _: Path) -> str:
    """Return the command for a database whose tables are of another version of MLflow."""
    with suppress(Exception):
        if _is_newer(address):
            return "a newer MLflow wrote the database; install a newer one: pip install --upgrade mlflow"
    return f"an older MLflow wrote the database; copy it, then: mlflow db upgrade {quoted(address.shown)}"


def _is_newer(address: Address) -> bool:
    """Whether this MLflow does not know the version of the database's tables."""
    import sqlalchemy
    from alembic.script import ScriptDirectory
    from mlflow.store.db import utils as database

    with sqlalchemy.create_engine(address.uri).connect() as connection:
        found = connection.execute(sqlalchemy.text("SELECT version_num FROM alembic_version")).scalar()
    configuration: Callable[..., Any] = database._get_alembic_config
    known = ScriptDirectory.from_config(configuration(db_url=""))
    return found not in {revision.revision for revision in known.walk_revisions()}


def _credentials(_: Address, run: Path) -> str:
    return f"ppoctl track {quoted(run)}  # after you have exported MLFLOW_TRACKING_TOKEN"


def _server(address: Address, _: Path) -> str:
    """Return the command that prints the version of a server that lacks a part of the interface."""
    own = metadata.version("mlflow")
    return f"the client is MLflow {own}; the server's version: curl {quoted(address.shown.rstrip('/') + '/version')}"


_CAUSES: tuple[tuple[tuple[str, ...], Callable[[Address, Path], str]], ...] = (
    (("readonly database",), _readonly),
    (("unable to open database file", "unsupported URI"), _unknown_address),
    (("out-of-date database schema", "Can't locate revision"), _schema),
    (("error code 401", "error code 403", "PERMISSION_DENIED"), _credentials),
    (("error code 404", "error code 405", "ENDPOINT_NOT_FOUND", "not in a valid JSON format"), _server),
)
"""Texts in errors, and the hint for their cause."""
