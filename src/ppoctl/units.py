"""Numbers in words: bytes and counts with a unit, three figures. Light."""


def size(num_bytes: int) -> str:
    """The bytes with a unit, three figures."""
    number = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:,.3g} TiB"


def number(count: int) -> str:
    """The count in thousands, millions or billions, three figures."""
    value = float(count)
    for unit in ("", "K", "M"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:,.3g}B"
