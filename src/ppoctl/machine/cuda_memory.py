"""Settings of torch's GPU memory allocator in this process."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_EXPANDABLE = "expandable_segments"
_SETTING = re.compile(r"(\w+):(\[[^\]]*\]|[^,\[]+)")  # a list contains commas


def use_expandable_segments() -> None:
    """Let segments of GPU memory grow. Microbatches differ in length, so memory that one of them frees would not fit
    the next. A value that the user has set is kept."""
    settings = _settings()
    if _EXPANDABLE not in settings:
        _set({**settings, _EXPANDABLE: "True"})


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Context in which new GPU memory can be opened by other processes over CUDA IPC. Expandable segments would need
    a system call that containers forbid."""
    settings = _settings()
    _set({**settings, _EXPANDABLE: "False"})
    try:
        yield
    finally:
        _set({**settings, _EXPANDABLE: settings.get(_EXPANDABLE, "False")})


def _settings() -> dict[str, str]:
    settings = str(torch._C._accelerator_getAllocatorSettings())
    return {name.strip(): value for name, value in _SETTING.findall(settings)}


def _set(settings: dict[str, str]) -> None:
    # torch resets every setting that the string does not contain.
    torch._C._accelerator_setAllocatorSettings(",".join(f"{name}:{value}" for name, value in settings.items()))
