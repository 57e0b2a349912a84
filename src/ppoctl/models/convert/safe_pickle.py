"""Safe loading of pickles: only tensors, numbers, names and containers."""

import pickle
import re
from typing import Any

import torch


def load_plain(file: Any, *, mmap: bool | None = None) -> Any:
    """Load the data that `torch.save` wrote into a path or an open file, into host memory. No code in the file runs,
    even if an environment variable allows it. Raises UnpicklingError with a one-line message if the file is damaged
    or contains more than data, and other errors of torch unchanged."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(why(error)) from error


def why(error: BaseException) -> str:
    """Return the reason of an unpickling error in one line, without torch's advice."""
    text = str(error)
    required = re.search(r"GLOBAL ([\w.]+)", text)
    if required:
        return f"requires `{required[1]}`, which no checkpoint needs"
    if "weights_only" in text or "Weights only" in text:
        return "is damaged, or contains more than data"
    return next(iter(text.splitlines()), "") or type(error).__name__
