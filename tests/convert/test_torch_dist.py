"""Megatron's format is written one tensor at a time, any reader can read it, and no code in it runs."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

from convert.test_conversion import Runs, run, same, weights
from ppoctl.core.errors import EnvironmentProblemError, StorageError
from ppoctl.models.convert.torch_dist import METADATA, TorchDist
from ppoctl.models.convert.torch_dist_writer import TorchDistWriter
from ppoctl.models.convert.transformer_engine import transformer_engine_name

Model = Callable[[str], Path]


def small(folder: Path, file_bytes: int = 2**30) -> Path:
    """Write a whole tensor, and a tensor in three slices."""
    folder.mkdir()
    writer = TorchDistWriter(folder, file_bytes)
    writer.write("whole", torch.arange(12.0).view(3, 4))
    for layer in range(3):
        writer.write("layers", torch.full((2, 5), layer, dtype=torch.bfloat16), ((layer, 3),))
    writer.finish({"role": "actor"})
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("file_bytes", [1, 2**30])
def test_torch_reads_the_written_checkpoint(tmp_path: Path, file_bytes: int) -> None:
    folder = small(tmp_path / "c", file_bytes)
    assert len(list(folder.glob("*.distcp"))) == (4 if file_bytes == 1 else 1)
    read = {"whole": torch.zeros(3, 4), "layers": torch.zeros(3, 2, 5, dtype=torch.bfloat16)}
    dcp.load(read, storage_reader=FileSystemReader(folder), no_dist=True)
    assert torch.equal(read["whole"], torch.arange(12.0).view(3, 4))
    assert torch.equal(read["layers"][:, 0, 0], torch.tensor([0, 1, 2], dtype=torch.bfloat16))


def test_slice_is_read_without_the_other_slices(tmp_path: Path) -> None:
    folder = small(tmp_path / "c", 1)
    (folder / "__0_1.distcp").unlink()
    assert torch.equal(TorchDist(folder).read("layers", (2,)), torch.full((2, 5), 2, dtype=torch.bfloat16))
    with pytest.raises(StorageError, match="`layers`"):
        TorchDist(folder).read("layers", (0,))


def test_sharded_tensor_is_assembled(tmp_path: Path) -> None:
    """Two halves of the columns, as tensor ranks write them."""
    folder = small(tmp_path / "c")
    with (folder / METADATA).open("rb") as file:
        metadata = pickle.load(file)
    stored = metadata.state_dict_metadata["layers"]
    stored.chunks.pop()
    with (folder / METADATA).open("wb") as file:
        pickle.dump(metadata, file)
    whole = TorchDist(folder)
    assert whole.read("layers", (1,)).shape == (2, 5)
    with pytest.raises(StorageError, match=r"`layers` .* incomplete: it has 20 of 30"):
        whole.read("layers")


def test_metadata_with_code_is_refused(tmp_path: Path) -> None:
    folder = small(tmp_path / "c")
    with (folder / METADATA).open("wb") as file:
        pickle.dump(Runs(tmp_path / "ran"), file)
    with pytest.raises(StorageError, match=r"requires `pathlib\.?\w*\.Path\.touch`|requires `builtins\.getattr`"):
        TorchDist(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["__0_0.distcp", METADATA, "metadata.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_damaged_checkpoint_is_a_storage_error(tmp_path: Path, name: str, damage: str) -> None:
    file = small(tmp_path / "c") / name
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(StorageError):
        TorchDist(tmp_path / "c").read("layers")


def rewritten(folder: Path, target: Path, names: Callable[[str], str], *, layers_apart: bool = False) -> Path:
    """Write the checkpoint under other keys, with its configuration; on request, each layer as a separate tensor."""
    state = TorchDist(folder)
    target.mkdir()
    writer = TorchDistWriter(target, 2**30)
    for key, stored in state.tensors.items():
        if layers_apart and "layers." in key:
            for layer in range(stored.size[0]):
                writer.write(names(key.replace("layers.", f"layers.{layer}.")), state.read(key, (layer,)))
        else:
            writer.write(names(key), state.read(key))
    writer.finish({})
    for file in folder.glob("*.json"):
        if file.name != "metadata.json":
            (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize(
    ("kind", "layers_apart"),
    [
        ("qwen2", False),
        ("qwen3-moe-mixed", True),
        pytest.param("qwen2", True, marks=pytest.mark.ci("qwen3-moe-mixed, True")),
        pytest.param("qwen3-moe-mixed", False, marks=pytest.mark.ci("qwen2, False")),
    ],
)
def test_transformer_engine_names_are_read(model: Model, tmp_path: Path, kind: str, layers_apart: bool) -> None:
    """Keys as other Megatron-Core programs write them, with layers together or separate. In the mixed model only the
    second layer has experts; its norm is a separate module in both specs."""
    run(model(kind), "megatron", tmp_path / "ours")

    def fused(key: str) -> str:
        return transformer_engine_name(key, has_experts="layers.1." in key)

    theirs = rewritten(tmp_path / "ours", tmp_path / "theirs", fused, layers_apart=layers_apart and kind == "qwen2")
    assert any("layer_norm_weight" in key for key in TorchDist(theirs).tensors)
    run(theirs, "hf", tmp_path / "out")
    assert same(weights(tmp_path / "out"), weights(model(kind)))


def test_unknown_parameter_is_named(model: Model, tmp_path: Path) -> None:
    run(model("qwen2"), "megatron", tmp_path / "ours")
    odd = rewritten(tmp_path / "ours", tmp_path / "odd", lambda key: key.replace("final_layernorm", "last_layernorm"))
    with pytest.raises(EnvironmentProblemError, match=r"`decoder\.final_layernorm\.weight` is missing"):
        run(odd, "hf", tmp_path / "out")
