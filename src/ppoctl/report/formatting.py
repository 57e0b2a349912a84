"""How a report writes numbers, times and values of a recipe."""

import math
import time
from typing import Any

from ppoctl.errors import without_secrets
from ppoctl.loading.explain import as_toml

DIGITS = 5
"""Significant digits of a number in the page's JSON."""


def figure(value: float | None) -> str:
    """The number with four digits; `-` for none."""
    return "-" if value is None else f"{value:.4g}"


def rounded(value: float | None) -> float | None:
    """The number as the page's JSON has it; None where there is none, or one that JSON cannot write."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def moment(unix_s: float) -> str:
    """The time in words, in UTC: a report is read elsewhere than where it was made."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s))


def share(part: float, whole: float) -> str:
    """The part of the whole in percent; `-` where there is no whole."""
    return "-" if whole <= 0 else f"{100 * part / whole:.3g} %"


def toml(value: Any) -> str:
    """A value of a recipe as its file would have it, without secrets."""
    return "not set" if value is None else without_secrets(as_toml(value))
