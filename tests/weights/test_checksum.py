"""The checksum depends on the bytes in logical order and nothing else: any flipped bit or exchange is detected. Sent
and loaded weights are compared by it, name by name."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ppoctl.core.errors import WeightSyncError
from ppoctl.models.convert import checksum as module
from ppoctl.models.convert.checksum import LoadedWeight, SentChecksums, checksum_of, checksum_of_bytes, require_equal


def data(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def in_python(content: bytes) -> int:
    """Return the checksum computed with Python integers."""
    modulus = 2**64

    def mix(word: int, place: int) -> int:
        x = (word + place * 0x9E3779B97F4A7C15) % modulus
        x = (x ^ (x >> 32)) * 0xBF58476D1CE4E5B9 % modulus
        return x ^ (x >> 29)

    whole = len(content) // 8
    words = [int.from_bytes(content[8 * i : 8 * i + 8], "little") for i in range(whole)]
    words += [int.from_bytes(content[8 * whole :], "little"), len(content)]
    total = sum(mix(word, place) for place, word in enumerate(words, start=1)) % modulus
    return total - modulus if total >= modulus // 2 else total


@given(st.binary(max_size=100), st.integers(1, 4))
def test_checksum_matches_formula_for_any_round_size(content, words_per_round):
    tensor = torch.tensor(list(content), dtype=torch.uint8)
    assert checksum_of_bytes(tensor, {"cpu": words_per_round}) == in_python(content)


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 64])
def test_any_flipped_bit_changes_checksum(num_bytes):
    original = data(num_bytes)
    seen = {checksum_of_bytes(original)}
    for bit in range(8 * num_bytes):
        flipped = original.clone()
        flipped[bit // 8] ^= 1 << (bit % 8)
        seen.add(checksum_of_bytes(flipped))
    assert len(seen) == 8 * num_bytes + 1


def test_swapping_elements_changes_checksum():
    orders = ([1.0, -1.0, 2.0], [-1.0, 1.0, 2.0])
    found = {checksum_of_bytes(torch.tensor(values, dtype=torch.float64)) for values in orders}
    assert len(found) == 2


def test_checksum_depends_on_length():
    assert len({checksum_of_bytes(torch.zeros(n, dtype=torch.uint8)) for n in range(40)}) == 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float16])
def test_checksum_ignores_strides_shape_and_dtype(dtype):
    tensor = data(6 * 8 * 8).view(dtype).view(6, -1)
    expected = checksum_of_bytes(tensor)
    assert checksum_of_bytes(tensor.t().contiguous().t()) == expected
    assert checksum_of_bytes(tensor.view(-1)) == expected
    assert checksum_of_bytes(tensor.view(torch.uint8)) == expected
    assert checksum_of_bytes(tensor.t()) != expected
    inside = torch.cat([tensor.view(-1)[:1], tensor.view(-1)])[1:]
    assert checksum_of_bytes(inside) == expected


def test_checksum_accepts_scalars_empty_tensors_and_parameters():
    assert checksum_of_bytes(torch.tensor(1.0)) == checksum_of_bytes(torch.ones(1))
    assert checksum_of_bytes(torch.zeros(0)) == checksum_of_bytes(torch.zeros(0, 4))
    assert checksum_of_bytes(torch.nn.Parameter(torch.ones(3))) == checksum_of_bytes(torch.ones(3))


def test_checksum_treats_nan_and_negative_zero_as_bytes():
    assert checksum_of_bytes(torch.tensor([torch.nan])) == checksum_of_bytes(torch.tensor([torch.nan]))
    assert checksum_of_bytes(torch.tensor([0.0])) != checksum_of_bytes(torch.tensor([-0.0]))


ONES, TWOS = checksum_of(torch.ones(3)), checksum_of(torch.full((3,), 2.0))
NAMES = ("a", "b")


def sent(**checksums: object) -> SentChecksums:
    made = SentChecksums()
    made.add(checksums)
    return made


A, B = LoadedWeight("a", ONES, tied_to=None), LoadedWeight("b", TWOS, tied_to=None)
HEAD = LoadedWeight("head", ONES, tied_to="a")


def test_require_equal_accepts_matching_weights() -> None:
    require_equal(NAMES, sent(a=ONES, b=TWOS), [A, B])
    require_equal(NAMES, sent(a=ONES, b=TWOS), [A, B, HEAD])


@pytest.mark.parametrize(
    ("arrived", "loaded", "says"),
    [
        (sent(a=ONES), [A, B], "`b` was announced but never sent \\(1 of 2 were\\)"),
        (sent(a=ONES, b=TWOS), [A], "`b` was sent, but the engine has no such weight"),
        (sent(a=ONES, b=TWOS, c=ONES), [A, B], "`c` was sent but not announced"),
        (sent(a=ONES, b=TWOS), [A, B, LoadedWeight("c", ONES, tied_to=None)], "`c` is held by the engine"),
        (sent(a=ONES, b=ONES), [A, B], "`b` was sent as float32.* but the engine holds float32"),
        (
            sent(a=ONES, b=TWOS),
            [A, B, replace(HEAD, checksum=TWOS)],
            "`head` was sent with `a`, to which",
        ),
    ],
)
def test_require_equal_names_differing_weight(arrived: SentChecksums, loaded: list[LoadedWeight], says: str) -> None:
    with pytest.raises(WeightSyncError, match=says):
        require_equal(NAMES, arrived, loaded)


def test_sent_checksums_reject_duplicate_tensor() -> None:
    once = sent(a=ONES)
    with pytest.raises(WeightSyncError, match="`a` left the trainer twice"):
        once.add({"a": ONES})


class LargestAllocations(TorchDispatchMode):
    """Records the bytes of each new tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            self.places[storage.data_ptr()] = storage.nbytes()
        return found


@pytest.mark.parametrize("is_transposed", [False, True])
def test_checksum_memory_does_not_grow_with_tensor(is_transposed):
    """It takes at most 64 MiB with a GPU's chunk sizes, for a tensor of any size (here 32 MiB)."""
    weight = torch.full((64, 2**18), 3.0, dtype=torch.bfloat16)
    seen = weight.view(2**18, 64).t() if is_transposed else weight
    with LargestAllocations() as allocations:
        checksum_of(seen, {"cpu": module.WORDS_PER_ROUND["cuda"]})
    own = {place: size for place, size in allocations.places.items() if place != weight.data_ptr()}
    assert max(own.values()) <= 4 * 2**20
    assert sum(sorted(own.values(), reverse=True)[:9]) <= 64 * 2**20
