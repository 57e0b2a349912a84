"""Texts of the bounds on a metric, in `[expect]` and `[until]`."""


def bounds_text(low: float | None, high: float | None) -> str:
    """Return the bounds as text, such as `at least 0.8`; empty: there are none."""
    parts = ["" if low is None else f"at least {low:g}", "" if high is None else f"at most {high:g}"]
    return " and ".join(filter(None, parts))


def is_within(value: float, low: float | None, high: float | None) -> bool:
    """Return whether the value meets both bounds. NaN meets none."""
    return (low is None or value >= low) and (high is None or value <= high)
