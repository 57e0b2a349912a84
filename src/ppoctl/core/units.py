"""Format byte counts and other counts with a unit and three significant digits. This module imports only the standard
library."""


def size(num_bytes: int) -> str:
    """Return the number of bytes with a unit and three significant digits."""
    number = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:,.3g} TiB"


def number(count: int) -> str:
    """Return the count in thousands, millions or billions with three significant digits."""
    value = float(count)
    for unit in ("", "K", "M"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:,.3g}B"


def counted(count: int, noun: str) -> str:
    """Return the count with its noun, which has an `s` unless the count is 1."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
