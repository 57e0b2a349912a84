"""torch reads allocator settings as one string and resets all others: each change must keep the rest."""

from collections.abc import Iterator

import pytest
import torch

from ppoctl.core.machine.cuda_memory import fixed_segments, use_expandable_segments
from ppoctl.engines.weights import sharing

ROUNDING = "roundup_power2_divisions:[256:1,512:2,>:4]"


def settings() -> str:
    return torch._C._accelerator_getAllocatorSettings()


@pytest.fixture(autouse=True)
def before() -> Iterator[None]:
    saved = settings()
    yield
    torch._C._accelerator_setAllocatorSettings(saved)


def test_expandable_segments_are_added_to_user_settings():
    torch._C._accelerator_setAllocatorSettings(f"max_split_size_mb:512,{ROUNDING}")
    use_expandable_segments()
    assert settings() == f"max_split_size_mb:512,{ROUNDING},expandable_segments:True"


def test_user_setting_of_expandable_segments_is_kept():
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    use_expandable_segments()
    assert settings() == "expandable_segments:False"


def test_shared_gpu_memory_alone_uses_fixed_segments(monkeypatch):
    """`_OnGpu` allocates with the settings off, on a GPU that does not exist."""
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:512,expandable_segments:True")
    seen: list[str] = []

    def empty(*_: object, **__: object) -> torch.Tensor:
        seen.append(settings())
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(torch.OutOfMemoryError):
        sharing._OnGpu(100, torch.device("cuda"))
    assert seen == ["max_split_size_mb:512,expandable_segments:False"]
    assert settings() == "max_split_size_mb:512,expandable_segments:True"


def test_fixed_segments_stay_off_if_nothing_was_set():
    torch._C._accelerator_setAllocatorSettings("")
    with fixed_segments():
        assert settings() == "expandable_segments:False"
    assert settings() == "expandable_segments:False"
