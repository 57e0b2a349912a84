"""Data of a run as MLflow datasets. Pure functions."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LONGEST_DIGEST = 36
"""Largest number of characters of a digest in MLflow."""


@dataclass(frozen=True)
class DataInput:
    """A table of rows."""

    name: str
    """Key of the table: `data.train`, `data.eval.NAME`."""
    digest: str
    kind: str
    """MLflow's kind of source."""
    source: str
    """JSON with the origin of the rows, in the format of that kind."""
    profile: str | None
    """JSON with the numbers of rows; None: not counted."""
    context: str
    """Use of the rows: `train` or `eval`."""


def inputs(facts: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[DataInput]:
    """Return each table of a run whose digest is known, from the run's `run.json` and a resolved recipe."""
    return [
        DataInput(name, digest[:LONGEST_DIGEST], *_source(table), _profile(facts.get("rows", {}), name), context)
        for name, context, table in _tables(recipe.get("data", {}))
        if (digest := facts.get("sources", {}).get(name)) is not None
    ]


def _tables(data: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    if "train" in data:
        yield "data.train", "train", data["train"]
    for name, table in data.get("eval", {}).items():
        yield f"data.eval.{name}", "eval", table


def _source(table: Mapping[str, Any]) -> tuple[str, str]:
    """Return kind and source of a table; the locations of a mix are joined by commas."""
    if dataset := table.get("dataset"):
        source = {"path": dataset["path"], "config_name": dataset.get("name"), "split": dataset.get("split")}
        return "hugging_face", json.dumps(source)
    return "local", json.dumps({"uri": ", ".join(_locations(table))})


def _locations(table: Mapping[str, Any]) -> Iterator[str]:
    for inner in table.get("sources", {}).values():
        yield from _locations(inner)
    named = table.get("path") or table.get("function") or (table.get("dataset") or {}).get("path") or ()
    yield from [named] if isinstance(named, str) else named


def _profile(rows: Mapping[str, Mapping[str, int]], name: str) -> str | None:
    """Return the counts of a table, with its rows under the name that MLflow's pages show; for a mix, their sums."""
    total: Counter[str] = Counter()
    for key, counts in rows.items():
        if key == name or key.startswith(f"{name}.sources."):
            total.update(counts)
    return json.dumps({"num_rows": total["used"], **total}) if total else None
