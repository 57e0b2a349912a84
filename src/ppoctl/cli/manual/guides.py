"""Guides to metrics, from `guides.toml`: how to read a metric, and what to do when it is not healthy.

docs/metrics.md and `ppoctl recipes metrics NAME` print them."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ppoctl.core.metric_registry import Metric


@dataclass(frozen=True)
class Guide:
    """The guide to one metric."""

    read: str
    """Explanation of how to read the metric, in one or two sentences."""
    when: tuple[tuple[str, str], ...]
    """Pairs of an observation and its meaning, with advice on what to do."""


def guide(metric: Metric) -> Guide | None:
    """Return the guide to a metric; None if it has no guide."""
    entry = _file()["metric"].get(metric.name)
    return entry and Guide(entry["read"], tuple((observation, advice) for observation, advice in entry["when"]))


def guided() -> list[str]:
    """Return the names of the metrics that have a guide."""
    return list(_file()["metric"])


def groups() -> Mapping[str, str]:
    """Return the description of each group of metrics by the first part of its names, in the order of a step."""
    descriptions: dict[str, str] = _file()["group"]
    return descriptions


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "guides.toml").read_text("utf-8"))
