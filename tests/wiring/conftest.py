"""Many small steps: one thread, and no shape checks, because runs on fakes in `tests/loop` and `tests/store` have
them."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def quick() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch.set_num_threads(threads)
