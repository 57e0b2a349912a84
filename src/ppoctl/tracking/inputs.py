"""Data that a run is made from, as MLflow's datasets. Pure."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LONGEST_DIGEST = 36
"""Most characters of a digest that MLflow takes."""


@dataclass(frozen=True)
class DataInput:
    """One table of rows."""

    name: str
    """Key of the table: `data.train`, `data.eval.NAME`."""
    digest: str
    kind: str
    """MLflow's word for the kind of source."""
    source: str
    """JSON that says where the rows come from, in the words of that kind."""
    profile: str | None
    """JSON of the numbers of rows; None: nobody has counted them."""
    context: str
    """What they are for: `train`, `eval`."""


def inputs(facts: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[DataInput]:
    """Inputs of a run, by its `run.json` and a resolved recipe: a table whose digest is known is one."""
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
    """Kind and source; several places, as a mix has them, stand one behind the other."""
    if dataset := table.get("dataset"):
        told = {"path": dataset["path"], "config_name": dataset.get("name"), "split": dataset.get("split")}
        return "hugging_face", json.dumps(told)
    return "local", json.dumps({"uri": ", ".join(_places(table))})


def _places(table: Mapping[str, Any]) -> Iterator[str]:
    for inner in table.get("sources", {}).values():
        yield from _places(inner)
    named = table.get("path") or table.get("function") or (table.get("dataset") or {}).get("path") or ()
    yield from [named] if isinstance(named, str) else named


def _profile(rows: Mapping[str, Mapping[str, int]], name: str) -> str | None:
    """Counts of a table, with its rows under the name that MLflow's pages show; of a mix, those of its sources."""
    total: Counter[str] = Counter()
    for key, counts in rows.items():
        if key == name or key.startswith(f"{name}.sources."):
            total.update(counts)
    return json.dumps({"num_rows": total["used"], **total}) if total else None
