"""Reading a journal that grows, is torn by a kill, and goes on."""

from itertools import islice
from pathlib import Path

import pytest

from ppoctl.errors import CorruptArtifactError
from ppoctl.tracking.journal_reader import JournalTail, entries


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert list(entries(tmp_path / "journal.jsonl")) == []


def test_reading_goes_on_at_the_end_of_any_entry(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"seq": 1}\n{"seq": 2}\n{"seq": 3}\n')
    first, second, third = entries(path)
    assert [first.body["seq"], second.body["seq"], third.body["seq"]] == [1, 2, 3]
    assert (first.end, third.end) == (11, 33)  # {"seq": 1} and a line break are 11 bytes
    assert list(entries(path, offset=first.end)) == [second, third]
    assert list(entries(path, offset=third.end)) == []


@pytest.mark.parametrize("torn", ['{"seq": 2, "st', '{"seq": 2}', '{"seq": 2, "st{"seq": 3}\n', "\n", "7\n"])
def test_a_torn_line_is_not_read_until_it_is_whole(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"seq": 1}\n' + torn)
    tail = JournalTail(path)
    assert [line["seq"] for line in tail.read()] == [1]
    assert list(tail.read()) == []
    # The store cuts the torn line off at the next start and appends.
    path.write_text('{"seq": 1}\n{"seq": 2, "stage": "rollout"}\n')
    assert [line["seq"] for line in tail.read()] == [2]


def test_a_tail_that_is_read_only_in_part_goes_on_where_it_was_left(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(f'{{"seq": {seq}}}\n' for seq in range(1, 6)))
    tail = JournalTail(path)
    assert [line["seq"] for line in islice(tail.read(), 2)] == [1, 2]
    assert [line["seq"] for line in tail.read()][-1] == 5


def test_a_missing_number_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"seq": 1}\n{"seq": 3}\n')
    tail = JournalTail(path)
    with pytest.raises(CorruptArtifactError, match="from line 1 to line 3"):
        list(tail.read())
