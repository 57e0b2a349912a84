"""Settings of torch's allocator of GPU memory, for this process."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_EXPANDABLE = "expandable_segments"
_SETTING = re.compile(r"(\w+):(\[[^\]]*\]|[^,\[]+)")  # a list has commas of its own


def use_expandable_segments() -> None:
    """Let pieces of GPU memory grow: microbatches differ in length, and what was freed of one does not fit the next.
    What a person has set stays."""
    settings = _settings()
    if _EXPANDABLE not in settings:
        _set({**settings, _EXPANDABLE: "True"})


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Within it new GPU memory is of the kind that other processes can open by CUDA IPC: the other kind goes through
    a system call that containers refuse."""
    settings = _settings()
    _set({**settings, _EXPANDABLE: "False"})
    try:
        yield
    finally:
        _set({**settings, _EXPANDABLE: settings.get(_EXPANDABLE, "False")})


def _settings() -> dict[str, str]:
    written = str(torch._C._accelerator_getAllocatorSettings())
    return {name.strip(): value for name, value in _SETTING.findall(written)}


def _set(settings: dict[str, str]) -> None:
    # torch resets whatever the string does not name.
    torch._C._accelerator_setAllocatorSettings(",".join(f"{name}:{value}" for name, value in settings.items()))
