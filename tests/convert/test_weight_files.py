"""The weights of a folder are the files that transformers reads; a folder with two sets of weights is refused."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.modeling_utils import _get_resolved_checkpoint_files

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.models.convert.headers import PICKLE, SAFETENSORS, weight_files
from ppoctl.models.convert.hugging_face import open_weights

ONE, TWO = torch.ones(2), torch.zeros(3)
SHARDS = {"a": "part-1", "b": "part-2"}


def write(folder: Path, name: str, **tensors: torch.Tensor) -> None:
    if name.endswith(".bin") or PICKLE in name:
        torch.save(tensors, folder / name)
    else:
        save_file(tensors, folder / name)


def write_index(folder: Path, name: str, files: dict[str, str], mark: bytes = b"") -> None:
    text = json.dumps({"metadata": {"total_size": 20}, "weight_map": files})
    (folder / f"{name}.index.json").write_bytes(mark + text.encode())


def shards(folder: Path, name: str) -> None:
    end = name.rpartition(".")[2]
    write(folder, f"part-1.{end}", a=ONE)
    write(folder, f"part-2.{end}", b=TWO)
    write_index(folder, name, {tensor: f"{file}.{end}" for tensor, file in SHARDS.items()})


def whole(folder: Path, name: str) -> None:
    write(folder, name, a=ONE, b=TWO)


def whole_with_its_index(folder: Path, name: str) -> None:
    whole(folder, name)
    write_index(folder, name, {"a": name, "b": name})


def whole_with_an_index_of_deleted_files(folder: Path, name: str) -> None:
    whole(folder, name)
    write_index(folder, name, {"a": "part-1.gone", "c": "part-2.gone"})


def whole_among_others(folder: Path, name: str) -> None:
    whole(folder, name)
    for other in ("model.fp16.safetensors", "consolidated.safetensors", "model-00001-of-00002.safetensors"):
        write(folder, other, a=TWO)


FOLDERS = [shards, whole, whole_with_its_index, whole_with_an_index_of_deleted_files, whole_among_others]


@pytest.mark.parametrize("name", [SAFETENSORS, PICKLE])
@pytest.mark.parametrize("make", FOLDERS)
def test_weights_are_the_files_of_transformers(tmp_path: Path, name: str, make: object) -> None:
    make(tmp_path, name)  # type: ignore[operator]
    theirs, _ = _get_resolved_checkpoint_files(str(tmp_path), None, None, None, None, False)
    assert [str(file) for file in weight_files(tmp_path, name)] == sorted(theirs)
    weights = open_weights(tmp_path, allow_pickle=True)
    assert {tensor: weights.tensor(tensor).tolist() for tensor in weights.specs} == {"a": [1, 1], "b": [0, 0, 0]}


def test_safetensors_are_read_next_to_pickles_as_in_transformers(tmp_path: Path) -> None:
    whole(tmp_path, SAFETENSORS)
    write(tmp_path, PICKLE, a=TWO)
    theirs, _ = _get_resolved_checkpoint_files(str(tmp_path), None, None, None, None, False)
    assert theirs == [str(tmp_path / SAFETENSORS)]
    assert open_weights(tmp_path, allow_pickle=True).tensor("a").tolist() == [1, 1]


@pytest.mark.parametrize("name", [SAFETENSORS, PICKLE])
def test_file_and_shards_are_refused_until_the_hint_is_followed(tmp_path: Path, name: str) -> None:
    shards(tmp_path, name)
    write(tmp_path, name, a=2 * ONE, b=TWO)
    with pytest.raises(
        EnvironmentProblemError, match=f"two sets of weights: `{name}`.*{name}.index.json`.*`part-1"
    ) as no:
        open_weights(tmp_path, allow_pickle=True)
    subprocess.run(no.value.hint, shell=True, check=True)  # type: ignore[arg-type]
    assert open_weights(tmp_path, allow_pickle=True).tensor("a").tolist() == [2, 2]


def test_weights_and_an_adapter_are_refused_until_the_hint_is_followed(tmp_path: Path) -> None:
    whole(tmp_path, SAFETENSORS)
    write(tmp_path, "adapter_model.safetensors", a=TWO)
    (tmp_path / "adapter_config.json").write_text("{}", "utf-8")
    with pytest.raises(EnvironmentProblemError, match=r"`model.safetensors`, and the adapter `adapter_model") as no:
        open_weights(tmp_path, allow_pickle=False)
    subprocess.run(no.value.hint, shell=True, check=True)  # type: ignore[arg-type]
    assert open_weights(tmp_path, allow_pickle=False).tensor("a").tolist() == [1, 1]
    assert len(list((tmp_path / "adapter").iterdir())) == 2


@pytest.mark.parametrize("name", [SAFETENSORS, PICKLE])
@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"a": "part-1", "b": "part-3"}, "`part-3.{}` is missing from model folder"),
        ({"a": "part-1"}, None),
        ({"a": "part-1", "c": "part-2"}, "tensor `b` of `.*` is in a file but not in the index"),
        ({"a": "part-1", "b": "part-2", "c": "part-2"}, "tensor `c` of `.*` is in the index but in no file"),
        ({"a": "part-1", "b": "twice"}, "tensor `a` is in `.*/part-1.{0}` and in `.*/twice.{0}`"),
        ({"a": "../part-1"}, r"it names `\.\./part-1.{}`, but weights must be next to their index"),
    ],
)
def test_index_that_disagrees_with_its_files_is_refused(
    tmp_path: Path, name: str, files: dict[str, str], says: str | None
) -> None:
    shards(tmp_path, name)
    end = name.rpartition(".")[2]
    write(tmp_path, f"twice.{end}", a=ONE, b=TWO)
    write_index(tmp_path, name, {tensor: f"{file}.{end}" for tensor, file in files.items()}, b"\xef\xbb\xbf")
    if says is None:  # a file that the index does not name is not read
        assert set(open_weights(tmp_path, allow_pickle=True).specs) == {"a"}
        return
    with pytest.raises(EnvironmentProblemError, match=says.format(end)) as caught:
        open_weights(tmp_path, allow_pickle=True)
    assert shlex.split(caught.value.hint or "")
