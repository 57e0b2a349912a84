"""Formatting of numbers, times and recipe values in a report."""

import math
import time
from typing import Any

from ppoctl.core.errors import without_secrets
from ppoctl.recipe.loading.explain import as_toml

DIGITS = 5
"""Significant digits of a number in the page's JSON."""


def figure(value: float | None) -> str:
    """Return the number with four significant digits; `-` for None."""
    return "-" if value is None else f"{value:.4g}"


def rounded(value: float | None, digits: int = DIGITS) -> float | None:
    """Return the number rounded for the page's JSON. None, nan and infinities give None: JSON cannot contain them."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def moment(unix_s: float) -> str:
    """Return the date and time as text in UTC, because a report may be read in another time zone."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s))


def share(part: float, whole: float) -> str:
    """Return `part` as a percentage of `whole`; `-` if `whole` is not positive."""
    return "-" if whole <= 0 else f"{100 * part / whole:.3g} %"


def toml(value: Any) -> str:
    """Return a recipe value as TOML, without secrets."""
    return "not set" if value is None else without_secrets(as_toml(value))
