"""How to read a metric and what to do when it is not healthy, from `guides.toml`: for docs/metrics.md and
`ppoctl recipes metrics NAME`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ppoctl.metric_registry import Metric


@dataclass(frozen=True)
class Guide:
    """What a person who steers by a metric wants to know beside its name."""

    read: str
    """How to read it, in a sentence or two."""
    when: tuple[tuple[str, str], ...]
    """What may be seen, each with what it means and what to do."""


def guide(metric: Metric) -> Guide | None:
    """The guide to a metric; None for one that nobody steers by."""
    found = _file()["metric"].get(metric.name)
    return found and Guide(found["read"], tuple((sees, do) for sees, do in found["when"]))


def guided() -> list[str]:
    """Names of the metrics that have a guide."""
    return list(_file()["metric"])


def groups() -> Mapping[str, str]:
    """What each group of metrics is about, by the first part of their names, in the order of a step."""
    told: dict[str, str] = _file()["group"]
    return told


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "guides.toml").read_text("utf-8"))
