"""Safe loading of pickles: only tensors, numbers, names and what holds them."""

import pickle
import re
from typing import Any

import torch


def load_plain(file: Any, *, mmap: bool | None = None) -> Any:
    """The data that `torch.save` wrote into a path or an open file, on the host. No code in it runs, whatever the
    environment says. Raises UnpicklingError in one line where it is damaged or asks for more than data, and torch's
    other errors."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(why(error)) from error


def why(error: BaseException) -> str:
    """The reason of an unpickling error in one line, without torch's advice."""
    text = str(error)
    asked = re.search(r"GLOBAL ([\w.]+)", text)
    if asked:
        return f"asks for `{asked[1]}`, which no checkpoint needs"
    if "weights_only" in text or "Weights only" in text:
        return "is damaged, or holds more than data"
    return next(iter(text.splitlines()), "") or type(error).__name__
