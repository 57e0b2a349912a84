"""An index of a set of rows, which may be large.

Rows are read once. The index keeps a few numbers for each row, and a row is rendered when it is used.

    file, data set, function --stream--> | question no. | content no. |   numbers of each row, in memory
                                                               |
                          distinct contents -> spool: a temporary file, in memory while it is small

The digest of a set is computed while the rows are read, and covers all rows. Rows that are left out (repeated, too
long) keep their position, so that the id of a row does not depend on which rows are left out.
"""

import hashlib
import json
import tempfile
import weakref
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from ppoctl.core.errors import DataError
from ppoctl.data.framing import Framing
from ppoctl.data.loaders import code_digest
from ppoctl.data.row_faults import RowFaults, joined
from ppoctl.data.row_files import files_of
from ppoctl.data.row_tables import AnyRows, DataTable, PythonRows, SingleTable, StoredRows
from ppoctl.data.rows import Content, DatasetRow, id_begin, question_of, single_tables, stream_contents, tables_of

SPOOL_BYTES = 64 << 20
"""Maximum size of a spool in memory, in bytes. A larger spool is a file in the folder for temporary files."""


Counted = Callable[[str, int], None]
"""Callback that is called every `EVERY_ROWS` rows, with the name of a table and the number of rows read so far."""
EVERY_ROWS = 10_000


class Spool:
    """Texts that are written once and read by number."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115 - closed with the object
        weakref.finalize(self, self._file.close)
        self._starts = array("q", [0])
        self._lock = Lock()

    def append(self, text: str) -> int:
        """Write a text, and return the number of the text."""
        encoded = text.encode()
        self._file.write(encoded)
        self._starts.append(self._starts[-1] + len(encoded))
        return len(self._starts) - 2

    def read(self, number: int) -> str:
        """Return the text with this number. After the first read, no text may be appended."""
        start, end = self._starts[number], self._starts[number + 1]
        with self._lock:
            self._file.seek(start)
            return self._file.read(end - start).decode()


@dataclass
class RowSet:
    """The rows of one table, numbered in the order of reading."""

    name: str
    """Key of the table below `data`."""
    source: str = ""
    """Name of the source of the rows in a mix; empty: there is no mix."""
    digest: str = ""
    """SHA-256 of the rows, which `run.json` records."""
    questions: "array[int]" = field(default_factory=lambda: array("I"))
    """Question number of each row. Numbers start at 0 and have no gaps. Equal questions have the same number."""
    repeats: bytearray = field(default_factory=bytearray)
    """1 for each row with the question and the ground truth of an earlier row, else 0."""
    contents: "array[int]" = field(default_factory=lambda: array("I"))
    """For each row, the number of its content in the spool."""
    id_ends: list[str] = field(default_factory=list)
    """Question number -> suffix of the ids of its rows."""
    spool: Spool = field(default_factory=Spool)
    faults: tuple[DataError, ...] = ()
    """Errors of invalid rows, which are not among the rows."""
    left_out: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Column -> what the fields lack of its first value (`ParsedRow.left_out`), and number of rows."""
    _shifts: "array[int]" = field(default_factory=lambda: array("q"))
    """For each invalid row, its position less the number of invalid rows before it."""

    def __len__(self) -> int:
        return len(self.questions)

    def row(self, position: int) -> DatasetRow:
        """Return one row. In a mix, the fields of the row include the name of its source."""
        question, answer, fields, place = json.loads(self.spool.read(self.contents[position]))
        in_file = position + bisect_right(self._shifts, position)
        id = f"{id_begin(self.name)}{in_file:06d}{self.id_ends[self.questions[position]]}"
        if self.source:
            fields["source"] = self.source
        return DatasetRow(id, question_of(question), answer, place, fields)

    def remarks(self) -> Iterator[str]:
        """Yield a sentence about each column that is not, or not completely, in the fields."""
        for column, (what, number) in self.left_out.items():
            times = "1 row" if number == 1 else f"{number} rows"
            yield f"`data.{self.name}`: the reward cannot read `{column}` of {times}{what}"

    def skip(self, position: int) -> None:
        """Skip the invalid row at this position of the file."""
        self._shifts.append(position - len(self._shifts))

    def first_rows(self) -> Iterator[DatasetRow]:
        """Yield the first row of each question, in the order of question numbers."""
        known = 0
        for position, question in enumerate(self.questions):
            if question == known:
                known += 1
                yield self.row(position)

    def different_rows(self) -> Iterator[tuple[DatasetRow, int]]:
        """Yield the first row of each distinct content, in row order, and the number of rows with that content."""
        times, known = Counter(self.contents), 0
        for position, content in enumerate(self.contents):
            if content == known:
                known += 1
                yield self.row(position), times[content]


@dataclass
class _Numbering:
    """Mapping from digests to the numbers of the questions and contents that were read so far."""

    row_set: RowSet
    spool: Spool
    questions: dict[bytes, int] = field(default_factory=dict)
    pairs: dict[bytes, int] = field(default_factory=dict)
    contents: dict[bytes, int] = field(default_factory=dict)

    def of(self, content: Content) -> tuple[int, int, int]:
        """Return the numbers of the question, of the pair (question, ground truth), and of the content of a row."""
        question = self.questions.setdefault(content.digest, len(self.questions))
        if question == len(self.row_set.id_ends):
            self.row_set.id_ends.append(content.id_end)
        truth = content.digest + json.dumps(content.answer).encode()
        pair = self.pairs.setdefault(_short(truth), len(self.pairs))
        key = _short(content.digest_input.encode())
        if (number := self.contents.get(key)) is None:
            question_json = json.loads(content.canonical)
            stored = [question_json, content.answer, dict(content.fields), content.place]
            number = self.contents[key] = self.spool.append(json.dumps(stored))
        return question, pair, number


def read_set(table: SingleTable, *, name: str, source: str = "", counted: Counted | None = None) -> RowSet:
    """Return the rows of a table.

    `name` is the key of the table below `data`, and `source` the name of the table in a mix. `counted` is called with
    the number of rows that were read. Raises the errors of `scan_set`, and DataError if rows are invalid.
    """
    rows = scan_set(table, name=name, source=source, counted=counted)
    if rows.faults:
        raise joined(rows.faults)
    return rows


def scan_set(table: SingleTable, *, name: str, source: str = "", counted: Counted | None = None) -> RowSet:
    """Return the valid rows of a table, and the errors of the others. The parameters are those of `read_set`.

    Results are cached, so that a command that checks files and then uses the files reads them only once. Raises the
    errors of `stream_contents` and `Framing`.
    """
    state = _state_of(table, name)
    if state is None:
        return _read_set(table, name, source, counted)
    key = (name, source, table.model_dump_json(), state)
    if key not in _READ:
        for old in list(_READ)[: len(_READ) + 1 - _KEPT_SETS]:
            del _READ[old]
        _READ[key] = _read_set(table, name, source, counted)
    return _READ[key]


_READ: dict[tuple[str, str, str, object], RowSet] = {}
_KEPT_SETS = 16


def _state_of(table: SingleTable, name: str) -> object:
    """Return the identity of the files of a table, by which changes of the files are detected.

    None means that the identity is unknown, so the rows must not be cached.
    """
    if not isinstance(table, StoredRows) or table.path is None:
        return None
    files = files_of(table, key=f"data.{name}")
    if table.prompt_file is not None:
        files = [*files, Path(table.prompt_file)]
    try:
        return tuple((str(file), (stat := file.stat()).st_ino, stat.st_size, stat.st_mtime_ns) for file in files)
    except OSError:  # the error is reported when the file is read
        return None


def _read_set(table: SingleTable, name: str, source: str, counted: Counted | None) -> RowSet:
    rows, faults = RowSet(name, source), RowFaults()
    numbering, seen, digest = _Numbering(rows, rows.spool), bytearray(), hashlib.sha256()
    begin = json.dumps(id_begin(name))[1:-1]
    for position, content in enumerate(stream_contents(table, faults, name=name)):
        if content is None:
            rows.skip(position)
            continue
        if source and "source" in content.fields:
            raise DataError(
                f"{content.place} has a field `source`, which in a mix is the name of the row's source",
                hint=f"--set 'data.{name}.fields=[]'  # or list the columns that the reward reads, except `source`",
            )
        for column, what in content.left_out.items():
            first, number = rows.left_out.get(column, (what, 0))
            rows.left_out[column] = first, number + 1
        if content.numbers is None:
            content.numbers = numbering.of(content)
        question, pair, number = content.numbers
        rows.questions.append(question)
        rows.contents.append(number)
        if pair == len(seen):
            seen.append(0)
        rows.repeats.append(seen[pair])
        seen[pair] = 1
        digest.update(f'["{begin}{position:06d}{content.id_end}{content.digest_input}'.encode())
        if counted is not None and (position + 1) % EVERY_ROWS == 0:
            counted(name, position + 1)
    rows.faults = faults.errors()
    rows.digest = _with_further_files(digest.hexdigest(), table, name)
    return rows


def read_sources(table: AnyRows, *, name: str) -> dict[str, RowSet]:
    """Return source name -> rows for each source of a table. Raises the errors of `read_set`."""
    tables = single_tables(table, name=name)
    return {source: read_set(single, name=key, source=source) for source, (key, single) in tables.items()}


def digests_of(data: DataTable) -> dict[str, str]:
    """Return table key (`data.train`, `data.eval.NAME`) -> digest of the rows. Raises the errors of `read_set`."""
    return {f"data.{name}": digest_of(read_sources(table, name=name)) for name, table in tables_of(data).items()}


def digest_of(sources: Mapping[str, RowSet]) -> str:
    """Return the SHA-256 of the ids, questions, answers and further columns of all rows, in row order.

    `run.json` records this digest. For a mix, it is computed from the names and digests of the sources.
    """
    if "" in sources:
        return sources[""].digest
    return hashlib.sha256(json.dumps([[name, rows.digest] for name, rows in sources.items()]).encode()).hexdigest()


def _short(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()[:16]


def _with_further_files(digest: str, table: SingleTable, name: str) -> str:
    """Return the digest of the rows, combined with the digests of other files that the prompts depend on."""
    files = {}
    if table.prompt_file is not None:
        files["prompt_file"] = Framing(table, name=name).prompt_file
    if isinstance(table, PythonRows):
        files["function"] = code_digest(table, key=f"data.{name}")
    if not files:
        return digest
    return hashlib.sha256(json.dumps([digest, files], sort_keys=True).encode()).hexdigest()
