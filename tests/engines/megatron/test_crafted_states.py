"""No file of a saved state can run code, and the resulting errors are ppoctl's own."""

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_lab as lab
import pytest
import torch
from layout_lab import settings
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from ppoctl.core.errors import StorageError
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.rank_settings import TrainerSettings

WEIGHT = "decoder.final_layernorm.weight"
CHUNKS = "__0_0.distcp"


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.fixture(scope="module")
def made_from(model: Callable[[str], Path]) -> TrainerSettings:
    """Return a state with objects in it: one process with a distributed optimizer, saved for its own layout."""
    made = settings(model("qwen2"), "actor", ParallelTable(distributed_optimizer=True))
    return replace(made, reshardable="dp")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, made_from: TrainerSettings) -> Path:
    folder = tmp_path_factory.mktemp("states") / "saved"
    folder.mkdir()
    trainer = lab.unstarted(made_from)
    trainer.start()
    lab.save(trainer, folder)
    return folder


def metadata_of(folder: Path) -> Metadata:
    with (folder / ".metadata").open("rb") as file:
        found: Metadata = pickle.load(file)
    return found


def rewrite(folder: Path, metadata: Metadata) -> None:
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def in_metadata(folder: Path, runs: Runs) -> None:
    metadata = metadata_of(folder)
    metadata.planner_data = runs
    rewrite(folder, metadata)


def in_common(folder: Path, runs: Runs) -> None:
    torch.save({**torch.load(folder / "common.pt", weights_only=True), "more": runs}, folder / "common.pt")


def appended(folder: Path, content: Any) -> _StorageInfo:
    """Append a chunk after all others; return its location."""
    with (folder / CHUNKS).open("ab") as file:
        begin = file.tell()
        torch.save(content, file)
        return _StorageInfo(CHUNKS, begin, file.tell() - begin)


def in_a_tensor(folder: Path, runs: Runs) -> None:
    metadata = metadata_of(folder)
    [index] = [index for index in metadata.storage_data if index.fqn == WEIGHT]
    metadata.storage_data[index] = appended(folder, runs)
    rewrite(folder, metadata)


def in_an_object(folder: Path, runs: Runs) -> None:
    metadata = metadata_of(folder)
    kinds = metadata.state_dict_metadata
    objects = [index for index in metadata.storage_data if isinstance(kinds[index.fqn], BytesStorageMetadata)]
    assert objects, "this kind of state has some"
    metadata.storage_data[objects[0]] = appended(folder, [runs])
    rewrite(folder, metadata)


@pytest.mark.parametrize(
    ("crafted", "named"),
    [
        (in_metadata, r"`\.metadata` requires `posix\.mkdir`"),
        (in_common, r"`common\.pt`: requires `posix\.mkdir`"),
        (in_a_tensor, r"requires `posix\.mkdir`"),
        (in_an_object, r"requires `posix\.mkdir`"),
    ],
)
def test_crafted_state_is_rejected_and_runs_no_code(saved, made_from, tmp_path, crafted, named):
    folder, witness = shutil.copytree(saved, tmp_path / "state"), tmp_path / "ran"
    crafted(folder, Runs(witness))
    with pytest.raises(StorageError, match=named) as caught:
        lab.unstarted(made_from).load(folder)
    assert not witness.exists()
    assert "weights_only" not in caught.value.message, "no message says how to run it all the same"
    assert len(caught.value.message.splitlines()) == 1
    assert caught.value.hint is not None


def test_crafted_initial_checkpoint_is_rejected_and_runs_no_code(saved, made_from, model, tmp_path):
    """The other way in: `model.path` names a Megatron folder."""
    folder, witness = shutil.copytree(saved, tmp_path / "state"), tmp_path / "ran"
    shutil.copyfile(model("qwen2") / "config.json", folder / "config.json")
    in_metadata(folder, Runs(witness))
    with pytest.raises(StorageError, match=r"requires `posix\.mkdir`"):
        lab.unstarted(replace(made_from, model=str(folder))).start()
    assert not witness.exists()


@pytest.mark.parametrize("place", ["../elsewhere.distcp", "/etc/hostname"])
def test_state_rejects_chunk_path_outside_its_folder(saved, made_from, tmp_path, place):
    folder = shutil.copytree(saved, tmp_path / "state")
    shutil.copyfile(folder / CHUNKS, tmp_path / "elsewhere.distcp")
    metadata = metadata_of(folder)
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, relative_path=place)
    rewrite(folder, metadata)
    with pytest.raises(StorageError, match=f"names a file outside the folder: `{place}`"):
        lab.unstarted(made_from).load(folder)
