"""Reading a journal that grows, is torn by a kill, and goes on."""

from itertools import islice
from pathlib import Path

import pytest

from ppoctl.batch.sealed import sealed_line
from ppoctl.errors import CorruptArtifactError
from ppoctl.tracking.journal_reader import JournalTail, entries


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert list(entries(tmp_path / "journal.jsonl")) == []


def lines(*numbers: int) -> bytes:
    return b"".join(sealed_line({"seq": number}) for number in numbers)


def test_reading_goes_on_at_the_end_of_any_entry(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(lines(1, 2, 3))
    first, second, third = entries(path)
    assert [first.body["seq"], second.body["seq"], third.body["seq"]] == [1, 2, 3]
    assert (first.end, third.end) == (len(lines(1)), path.stat().st_size)
    assert list(entries(path, offset=first.end)) == [second, third]
    assert list(entries(path, offset=third.end)) == []


@pytest.mark.parametrize("torn", [b'{"seq": 2, "st', lines(2)[:-1]])
def test_a_torn_line_is_not_read_until_it_is_whole(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(lines(1) + torn)
    tail = JournalTail(path)
    assert [line["seq"] for line in tail.read()] == [1]
    assert list(tail.read()) == []
    # The store cuts the torn line off at the next start and appends.
    path.write_bytes(lines(1, 2))
    assert [line["seq"] for line in tail.read()] == [2]


@pytest.mark.parametrize("damaged", [b'{"seq": 2, "st{"seq": 3}\n', b"\n", b"7\n", lines(2).replace(b"2", b"3", 1)])
def test_a_line_that_ends_and_is_not_as_it_was_written_is_named(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(lines(1) + damaged)
    with pytest.raises(CorruptArtifactError, match=r"journal\.jsonl` is corrupt: line 2"):
        list(JournalTail(path).read())


def test_a_tail_that_is_read_only_in_part_goes_on_where_it_was_left(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(lines(1, 2, 3, 4, 5))
    tail = JournalTail(path)
    assert [line["seq"] for line in islice(tail.read(), 2)] == [1, 2]
    assert [line["seq"] for line in tail.read()][-1] == 5


def test_numbers_may_be_left_out_by_damage_and_never_come_twice(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(lines(1, 3))
    assert [line["seq"] for line in JournalTail(path).read()] == [1, 3]
    path.write_bytes(lines(1, 3, 3))
    with pytest.raises(CorruptArtifactError, match="from line 3 to line 3"):
        list(JournalTail(path).read())
