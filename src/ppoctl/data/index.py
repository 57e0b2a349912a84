"""A set of rows that may be large: read once, kept as a few numbers a row, and rendered when it is drawn.

    file, data set, function --stream--> | question no. | content no. |   numbers of each row, in memory
                                                               |
                       contents that differ -> spool: a file without a name, in memory while it is small

The digest of a set is taken on the way, over all rows as they were read. Rows that are left out (repeated, too long)
keep their position, so that the id of a row does not depend on what is left out.
"""

import hashlib
import json
import tempfile
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from ppoctl.data.framing import Framing
from ppoctl.data.loaders import code_digest
from ppoctl.data.rows import Content, DatasetRow, id_begin, question_of, single_tables, stream_contents, tables_of
from ppoctl.errors import DataError
from ppoctl.recipe.row_files import files_of
from ppoctl.recipe.rows import AnyRows, DataTable, PythonRows, SingleTable, StoredRows

SPOOL_BYTES = 64 << 20
"""Bytes of a spool that stay in memory; a larger one lies in the folder for temporary files."""


Counted = Callable[[str, int], None]
"""Callback that hears how many rows of a table have been read, every `EVERY_ROWS` of them."""
EVERY_ROWS = 10_000


class Spool:
    """Texts that are written once and read by their place."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115 - it ends with the object
        weakref.finalize(self, self._file.close)
        self._starts = array("q", [0])
        self._lock = Lock()

    def append(self, text: str) -> int:
        """Write a text; returns its number."""
        told = text.encode()
        self._file.write(told)
        self._starts.append(self._starts[-1] + len(told))
        return len(self._starts) - 2

    def read(self, number: int) -> str:
        """The text of a number. Nothing is appended afterwards."""
        start, end = self._starts[number], self._starts[number + 1]
        with self._lock:
            self._file.seek(start)
            return self._file.read(end - start).decode()


@dataclass
class RowSet:
    """The rows of one table, numbered as they were read."""

    name: str
    """Key of the table below `data`."""
    source: str = ""
    """Name of the rows' source in a mix; empty: there is no mix."""
    digest: str = ""
    """SHA-256 by which `run.json` remembers the rows."""
    questions: "array[int]" = field(default_factory=lambda: array("I"))
    """Number of each row's question; equal questions have one number, the first is 0, and no number is left out."""
    repeats: bytearray = field(default_factory=bytearray)
    """1 for each row with the question and the ground truth of an earlier one."""
    contents: "array[int]" = field(default_factory=lambda: array("I"))
    """Number of what each row says, in the spool."""
    id_ends: list[str] = field(default_factory=list)
    """End of the ids of each question's rows."""
    spool: Spool = field(default_factory=Spool)

    def __len__(self) -> int:
        return len(self.questions)

    def row(self, position: int) -> DatasetRow:
        """One row, with the name of its source, if there is a mix, among its fields."""
        question, answer, fields, place = json.loads(self.spool.read(self.contents[position]))
        id = f"{id_begin(self.name)}{position:06d}{self.id_ends[self.questions[position]]}"
        if self.source:
            fields["source"] = self.source
        return DatasetRow(id, question_of(question), answer, place, fields)

    def first_rows(self) -> Iterator[DatasetRow]:
        """The first row of each question, in order of the questions."""
        known = 0
        for position, question in enumerate(self.questions):
            if question == known:
                known += 1
                yield self.row(position)

    def different_rows(self) -> Iterator[tuple[DatasetRow, int]]:
        """The first of all rows that say the same, in order, and how many say so."""
        times, known = Counter(self.contents), 0
        for position, content in enumerate(self.contents):
            if content == known:
                known += 1
                yield self.row(position), times[content]


@dataclass
class _Numbering:
    """Numbers of what was read so far, by digests."""

    found: RowSet
    spool: Spool
    questions: dict[bytes, int] = field(default_factory=dict)
    pairs: dict[bytes, int] = field(default_factory=dict)
    contents: dict[bytes, int] = field(default_factory=dict)

    def of(self, content: Content) -> tuple[int, int, int]:
        """Numbers of the question, of question and ground truth, and of all that a row says."""
        question = self.questions.setdefault(content.digest, len(self.questions))
        if question == len(self.found.id_ends):
            self.found.id_ends.append(content.id_end)
        truth = content.digest + json.dumps(content.answer).encode()
        pair = self.pairs.setdefault(_short(truth), len(self.pairs))
        key = _short(content.digest_input.encode())
        if (number := self.contents.get(key)) is None:
            asked = json.loads(content.canonical)
            told = [asked, content.answer, dict(content.fields), content.place]
            number = self.contents[key] = self.spool.append(json.dumps(told))
        return question, pair, number


def read_set(table: SingleTable, *, name: str, source: str = "", counted: Counted | None = None) -> RowSet:
    """The rows of a table. `name` is its key below `data`, `source` its name in a mix; `counted` hears how many have
    been read. A command that has read the same files before, to check them, does not read them again. Raises what
    `stream_contents` and `Framing` raise."""
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
    """What tells whether the files of a table are those that were read; None: nothing does."""
    if not isinstance(table, StoredRows) or table.path is None:
        return None
    files = files_of(table, key=f"data.{name}")
    if table.prompt_file is not None:
        files = [*files, Path(table.prompt_file)]
    try:
        return tuple((str(file), (now := file.stat()).st_ino, now.st_size, now.st_mtime_ns) for file in files)
    except OSError:  # told by whoever reads it
        return None


def _read_set(table: SingleTable, name: str, source: str, counted: Counted | None) -> RowSet:
    found = RowSet(name, source)
    numbering, seen, told = _Numbering(found, found.spool), bytearray(), hashlib.sha256()
    begin = json.dumps(id_begin(name))[1:-1]
    for position, content in enumerate(stream_contents(table, name=name)):
        if source and "source" in content.fields:
            raise DataError(
                f"{content.place} has a field `source`, and in a mix that is the name of the row's source",
                hint=f"--set 'data.{name}.fields=[]'  # or the columns that the reward reads, without `source`",
            )
        if content.numbers is None:
            content.numbers = numbering.of(content)
        question, pair, number = content.numbers
        found.questions.append(question)
        found.contents.append(number)
        if pair == len(seen):
            seen.append(0)
        found.repeats.append(seen[pair])
        seen[pair] = 1
        told.update(f'["{begin}{position:06d}{content.id_end}{content.digest_input}'.encode())
        if counted is not None and (position + 1) % EVERY_ROWS == 0:
            counted(name, position + 1)
    found.digest = _with_further_files(told.hexdigest(), table, name)
    return found


def read_sources(table: AnyRows, *, name: str) -> dict[str, RowSet]:
    """The rows of each source of a table, by the name of the source. Raises what `read_set` raises."""
    tables = single_tables(table, name=name)
    return {source: read_set(single, name=its, source=source) for source, (its, single) in tables.items()}


def digests_of(data: DataTable) -> dict[str, str]:
    """The digests of a recipe's rows by key: `data.train`, `data.eval.NAME`. Raises what `read_set` raises."""
    return {f"data.{name}": digest_of(read_sources(table, name=name)) for name, table in tables_of(data).items()}


def digest_of(sources: Mapping[str, RowSet]) -> str:
    """SHA-256 of ids, questions, answers and further columns, in order, by which `run.json` remembers a dataset: its
    only source's, or that of all of them by name."""
    if "" in sources:
        return sources[""].digest
    return hashlib.sha256(json.dumps([[name, rows.digest] for name, rows in sources.items()]).encode()).hexdigest()


def _short(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()[:16]


def _with_further_files(digest: str, table: SingleTable, name: str) -> str:
    """The digest of the rows, with those of other files that decide what prompts are, if there are any."""
    further = {}
    if table.prompt_file is not None:
        further["prompt_file"] = Framing(table, name=name).prompt_file
    if isinstance(table, PythonRows):
        further["function"] = code_digest(table, key=f"data.{name}")
    if not further:
        return digest
    return hashlib.sha256(json.dumps([digest, further], sort_keys=True).encode()).hexdigest()
