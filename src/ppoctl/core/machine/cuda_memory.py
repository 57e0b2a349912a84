"""Settings of torch's GPU memory allocator in this process."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_EXPANDABLE = "expandable_segments"
_SETTING = re.compile(r"(\w+):(\[[^\]]*\]|[^,\[]+)")  # a list contains commas


def use_expandable_segments() -> None:
    """Make segments of GPU memory expandable. Microbatches differ in length, so memory that one microbatch frees
    would not fit the next microbatch. A setting of the user is kept."""
    settings = _settings()
    if _EXPANDABLE not in settings:
        _set({**settings, _EXPANDABLE: "True"})


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Context in which other processes can open new GPU memory over CUDA IPC. With expandable segments, that would
    require a system call that containers forbid."""
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
