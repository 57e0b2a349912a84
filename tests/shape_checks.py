"""The type checker of jaxtyping's import hook."""

from collections.abc import Callable
from typing import Any

import beartype


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check a function's shapes in each call. A function within a function stays as it is: beartype would compile its
    check again each time the outer one runs, for each microbatch."""
    return function if "<locals>" in function.__qualname__ else beartype.beartype(function)
