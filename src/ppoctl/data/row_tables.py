"""Recipe tables of data rows: the source of the rows, how each row becomes a prompt, and which rows are used.

A table names its rows as files, as a data set or as a Python function; a mix has several sources. The package `data`
reads the rows.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from ppoctl.core.recipe_table import RESULTS, Array, AtLeastOne, OrAll, Positive, Table

Scalar = bool | int | float | str


class RowTable(Table):
    """Keys of every row format: how rows become prompts, and which rows are used."""

    format: Annotated[str, RESULTS]
    """Format of the rows."""
    system: Annotated[str, RESULTS] = ""
    """System message of each prompt; empty: none."""
    instruction: Annotated[str, RESULTS] = ""
    """Text appended to each question after a line break, if the question is a text and not a chat; empty: none."""
    prompt_file: Annotated[str | None, RESULTS] = None
    """Text file with a template of the user message, in which `{question}` is replaced by the question; absent: the
    question is the user message. The digest of the rows in `run.json` covers this file."""
    template_args: Annotated[dict[str, Scalar], RESULTS] = Field(default_factory=dict)
    """Arguments of the model's chat template by name (`enable_thinking = false`)."""
    fields: Annotated[tuple[str, ...] | None, RESULTS, Array, OrAll] = ()
    """Names of further columns that are passed to the reward and to the environment. "all": every column except the
    question and its ground truth."""
    max_rows: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Number of rows to read, starting with the first row; absent: all rows. Dropped rows are not replaced by later
    rows."""
    long_prompts: Annotated[Literal["error", "drop", "cut"], RESULTS] = "error"
    """Treatment of a row whose prompt has more than `rollout.max_prompt_tokens` tokens. error: the run does not
    start; drop: the row is left out; cut: only the last tokens are kept (verl's `truncation = "left"`), while the
    scorer still receives the full text."""
    duplicates: Annotated[Literal["keep", "drop"], RESULTS] = "keep"
    """Treatment of a row with the same question and ground truth as an earlier row. drop: the row is left out."""
    weight: Annotated[float, RESULTS, Positive] = 1.0
    """Number of times that each row of this source occurs in an epoch of the mix. With a weight below 1, an epoch has
    only this fraction of the rows, and later epochs continue the same seeded order until all rows have been used. The
    weight of a table that is not a source of a mix must be 1."""


class DatasetTable(Table):
    """A data set that the library `datasets` reads."""

    path: Annotated[str, RESULTS]
    """Folder (a relative path starts at the recipe file) or hub id of the data set, which is downloaded if it is not
    in the cache."""
    name: Annotated[str | None, RESULTS] = None
    """Name of the configuration (`main` of `openai/gsm8k`); absent: the only configuration."""
    split: Annotated[str, RESULTS] = "train"
    """Split, in the library's syntax (`train`, `test[:100]`)."""


Paths = Annotated[tuple[str, ...], Array, Field(min_length=1)]


class StoredRows(RowTable):
    """Keys of rows that are stored in files or in a data set of the library `datasets`."""

    path: Annotated[str | Paths | None, RESULTS] = None
    """File, folder (its row files, sorted by name) or glob, or an array of these in reading order. `$NAME` at the
    start is an environment variable; if its value is a relative path, the path starts at the current directory of the
    command. Other relative paths start at the recipe file. Absent: `dataset` names the source of the rows."""
    dataset: DatasetTable | None = None
    """Data set that the library `datasets` reads, instead of `path`."""

    @property
    def named(self) -> str:
        """The source of the rows, as it is written in the recipe."""
        if isinstance(self.path, tuple):
            return ", ".join(self.path)
        return self.path or (self.dataset.path if self.dataset else "nothing")


class Gsm8kRows(StoredRows):
    """Rows of GSM8K's JSONL: `question`, and `answer` ending in `#### N`."""

    format: Annotated[Literal["gsm8k"], RESULTS]
    """Rows with GSM8K's keys, in JSONL or in the data set."""


class ColumnRows(StoredRows):
    """Rows of JSONL or parquet with a prompt and an answer in columns of any name."""

    format: Annotated[Literal["columns"], RESULTS]
    """JSONL or parquet with the columns named by `prompt` and `answer`."""
    prompt: Annotated[str, RESULTS]
    """Column of the question (text, or a list of chat messages)."""
    answer: Annotated[str | None, RESULTS] = None
    """Column of the ground truth; dots select nested columns (`reward_model.ground_truth`). Absent: no ground truth,
    for rewards that do not require it."""


class VerlRows(StoredRows):
    """Rows in the format of verl's scripts: `prompt` is a chat, `reward_model.ground_truth` is the ground truth, and
    all other columns are passed to the reward (`data_source`, `ability`, `extra_info`)."""

    format: Annotated[Literal["verl"], RESULTS]
    """Parquet or JSONL with verl's columns."""
    fields: Annotated[tuple[str, ...] | None, RESULTS, Array, OrAll] = None
    """Names of further columns that are passed to the reward and to the environment. "all": every column except the
    question and its ground truth."""


class DialogueRows(StoredRows):
    """Rows with a `chosen` and a `rejected` dialogue (HH-RLHF). The prompt is the common beginning of both dialogues,
    up to the user's last turn; the two responses are the fields `chosen` and `rejected`. There is no ground truth."""

    format: Annotated[Literal["dialogues"], RESULTS]
    """JSONL or parquet with `chosen` and `rejected`: texts with `Human:` and `Assistant:`, or chats."""


class PythonRows(RowTable):
    """Rows from your own function: mappings with `prompt`, optionally `answer`, and any other keys."""

    format: Annotated[Literal["python"], RESULTS]
    """Your own function."""
    function: Annotated[str, RESULTS]
    """`path.py:name` of the function, which is called with `options` and yields one mapping per row. The path is
    resolved like the path of row files; the digest of the rows in `run.json` covers the file."""
    options: Annotated[dict[str, Any], RESULTS] = Field(default_factory=dict)
    """Arguments of the function by name."""
    fields: Annotated[tuple[str, ...] | None, RESULTS, Array, OrAll] = None
    """Names of further keys of a row that are passed to the reward and to the environment. "all": every key except
    `prompt` and `answer`."""

    @property
    def named(self) -> str:
        """The source of the rows, as it is written in the recipe."""
        return self.function


SingleRows = Annotated[
    Gsm8kRows | ColumnRows | VerlRows | DialogueRows | PythonRows,
    Field(discriminator="format"),
]


class MixRows(Table):
    """Rows of several sources, each in its own format, mixed by weight. The reward receives the name of a row's
    source as the field `source`."""

    format: Annotated[Literal["mix"], RESULTS]
    """Several sources."""
    sources: dict[str, SingleRows] = Field(min_length=1)
    """Sources by name. Each source is a table of any format except `mix`."""

    @property
    def named(self) -> str:
        """The names of the sources."""
        return ", ".join(self.sources)


Rows = Annotated[
    Gsm8kRows | ColumnRows | VerlRows | DialogueRows | PythonRows | MixRows,
    Field(discriminator="format"),
]
AnyRows = Gsm8kRows | ColumnRows | VerlRows | DialogueRows | PythonRows | MixRows
SingleTable = Gsm8kRows | ColumnRows | VerlRows | DialogueRows | PythonRows


class DataTable(Table):
    """Prompts: one training set and any number of named evaluation sets."""

    train: Rows
    """Training prompts, used in a seeded random order, epoch after epoch."""
    eval: dict[str, Rows] = Field(default_factory=dict)
    """Evaluation sets by name."""


def sources_of(table: AnyRows) -> dict[str, SingleTable]:
    """Return the tables of all sources by name; a table that is not a mix is returned under an empty name."""
    return dict(table.sources) if isinstance(table, MixRows) else {"": table}
