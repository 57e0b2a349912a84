"""One engine per kind of head for the whole session: starting one costs seconds."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from vllm_bench import Bench, write_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: on two shared cores, waiting for a second thread costs ten times the computation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            write_model(folders[kind], tied=kind == "tied")
        return folders[kind]

    return folder_of


@pytest.fixture(scope="session")
def benches(model_folder: Callable[[str], Path]) -> Iterator[Callable[[str], Bench]]:
    made: dict[str, Bench] = {}

    def bench_of(kind: str) -> Bench:
        if kind not in made:
            made[kind] = Bench.start(model_folder(kind))
        return made[kind]

    yield bench_of
    for bench in made.values():
        bench.generator.close()


@pytest.fixture(params=["tied", "untied"])
def bench(request: pytest.FixtureRequest, benches: Callable[[str], Bench]) -> Bench:
    return benches(request.param)


@pytest.fixture
def tied(benches: Callable[[str], Bench]) -> Bench:
    return benches("tied")


@pytest.fixture
def untied(benches: Callable[[str], Bench]) -> Bench:
    return benches("untied")
