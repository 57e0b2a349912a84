"""Tools of a user. Only processes of environments import them."""

import asyncio
import os
import time
from typing import Annotated, Any, Literal

from pydantic import Field


def weather(city: str, unit: Literal["C", "F"] = "C", days: Annotated[int, Field(ge=1)] = 1) -> dict[str, Any]:
    """Return the weather of a city."""
    return {"city": city, "degrees": 21.5, "unit": unit, "days": days}


async def slow_sum(numbers: list[float]) -> float:
    """Add numbers."""
    await asyncio.sleep(0.01)
    return sum(numbers)


def misbehaves(what: str) -> Any:
    """Do what the argument names."""
    if what == "hang":
        time.sleep(600)
    if what == "exit":
        os._exit(3)
    if what == "raise":
        raise LookupError(f"nothing found by {object()}")
    return {"bytes": b"\xff", "set": {1, 2}, "surrogate": "\ud800", "none": None, "large": "x" * 10**7}.get(
        what, what
    )


def unannotated(value):  # type: ignore[no-untyped-def]
    return value


def no_schema(value: asyncio.Event) -> str:
    return ""
