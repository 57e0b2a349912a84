"""Weights in transfer: split into buckets, packed into one buffer, and unpacked."""

import pytest
import torch

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.engines.weights.bucket import bucket_of, flatten, in_buckets
from ppoctl.models.convert.checksum import checksum_of

TENSORS = [
    ("a", torch.arange(6, dtype=torch.float32).view(2, 3)),
    ("b", torch.tensor([1.5], dtype=torch.bfloat16)),
    ("c", torch.arange(12, dtype=torch.float32).view(3, 4).t()),  # not contiguous
    ("empty", torch.empty(0, 4)),
    ("number", torch.tensor(7.0)),
]


def test_buckets_are_bounded_and_larger_tensor_goes_alone() -> None:
    sizes = [40, 40, 40, 400, 100, 4]
    tensors = [(f"t{n}", torch.zeros(size // 4)) for n, size in enumerate(sizes)]
    found = [[name for name, _ in bucket] for bucket in in_buckets(tensors, 100)]
    assert found == [["t0", "t1"], ["t2"], ["t3"], ["t4"], ["t5"]]
    small = [(f"t{n}", torch.zeros(10)) for n in range(6)]
    assert [len(bucket) for bucket in in_buckets(small, 100)] == [2, 2, 2]
    assert [len(bucket) for bucket in in_buckets(tensors[3:5], 100)] == [1, 1]
    assert list(in_buckets([], 100)) == []


def test_flattened_tensors_are_exact_copies() -> None:
    flat = flatten(TENSORS)
    assert flat.data.nbytes == 32 + 16 + 48 + 0 + 16  # each starts at a multiple of 16
    for (name, found), (expected_name, expected) in zip(flat.tensors(), TENSORS, strict=True):
        assert name == expected_name
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    flat.data[0] = 1
    assert TENSORS[0][1][0, 0] == 0
    assert flatten([]).tensors() == []


def test_local_bucket_holds_original_tensors_and_checksums() -> None:
    bucket = bucket_of(TENSORS[:3])
    assert [tensor.data_ptr() for _, tensor in bucket.tensors()] == [t.data_ptr() for _, t in TENSORS[:3]]
    assert bucket.checksums == {name: checksum_of(tensor) for name, tensor in TENSORS[:3]}
    assert bucket.checksums["c"].shape == (4, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksum_ignores_sign_of_zero_but_not_values(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=dtype)
    signed, changed = tensor.clone(), tensor.clone()
    signed[0], changed[3] = -0.0, 3.0625
    assert checksum_of(signed) == checksum_of(tensor)
    assert checksum_of(changed) != checksum_of(tensor)
    assert checksum_of(tensor.view(2, 2)) != checksum_of(tensor)


class Elsewhere:
    """Content on another machine."""

    def is_near(self) -> bool:
        return False

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        raise AssertionError


def test_bucket_is_read_from_first_reachable_location() -> None:
    near = flatten(TENSORS)
    assert [name for name, _ in bucket_of(TENSORS, Elsewhere(), near).tensors()] == [name for name, _ in TENSORS]
    with pytest.raises(EnvironmentProblemError, match=r"cannot read any of the 2 copies"):
        bucket_of(TENSORS, Elsewhere(), Elsewhere()).tensors()
