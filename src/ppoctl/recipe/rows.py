"""Tables of rows: where questions come from, how each becomes a prompt, and which of them are used.

Every table names its rows in one way (files, a data set, a function of the user's own), and a mix is made of several.
Nothing here reads a row; see `data`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from ppoctl.recipe_table import RESULTS, Array, AtLeastOne, OrAll, Positive, Table

Scalar = bool | int | float | str


class RowTable(Table):
    """Keys that the rows of every format have: how they become prompts, and which of them are used."""

    format: Annotated[str, RESULTS]
    """Format of the rows."""
    system: Annotated[str, RESULTS] = ""
    """System message of each prompt; empty: none."""
    instruction: Annotated[str, RESULTS] = ""
    """Text appended to each text question after a line break; empty: none."""
    prompt_file: Annotated[str | None, RESULTS] = None
    """Text file in which `{question}` stands for the question; absent: the question is the message. The digest of the
    rows in `run.json` covers it."""
    template_args: Annotated[dict[str, Scalar], RESULTS] = Field(default_factory=dict)
    """Arguments of the model's chat template by name (`enable_thinking = false`)."""
    fields: Annotated[tuple[str, ...] | None, RESULTS, Array, OrAll] = ()
    """Further columns that the reward is given, by these names. "all": every column that is not the question or its
    ground truth."""
    max_rows: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Number of first rows to read; absent: all. Rows that are dropped are not replaced by later ones."""
    long_prompts: Annotated[Literal["error", "drop", "cut"], RESULTS] = "error"
    """What becomes of a row whose prompt has more than `rollout.max_prompt_tokens`. error: the run does not start;
    drop: the row is left out; cut: only the last tokens are kept (verl's `truncation = "left"`), and a
    scorer is still told the whole text, of which the model saw the end."""
    duplicates: Annotated[Literal["keep", "drop"], RESULTS] = "keep"
    """What becomes of a row that has the question and the ground truth of an earlier one. drop: it is left out."""
    weight: Annotated[float, RESULTS, Positive] = 1.0
    """Number of times that each row of this source comes in an epoch of its mix. A fraction is a share of the rows,
    in a seeded order that goes on from epoch to epoch until all have come. Outside of a mix it stays 1."""


class DatasetTable(Table):
    """A data set that the library `datasets` reads."""

    path: Annotated[str, RESULTS]
    """Folder (a relative path starts at the recipe file) or hub id, which is fetched where it is not in the cache."""
    name: Annotated[str | None, RESULTS] = None
    """Name of the configuration (`main` of `openai/gsm8k`); absent: the only one."""
    split: Annotated[str, RESULTS] = "train"
    """Split, in the library's own words (`train`, `test[:100]`)."""


Paths = Annotated[tuple[str, ...], Array, Field(min_length=1)]


class StoredRows(RowTable):
    """Keys of rows that are stored: in files, or in a data set of the library `datasets`."""

    path: Annotated[str | Paths | None, RESULTS] = None
    """File, folder (its row files, by name) or glob, or an array of those, read in this order. `$NAME` at the start
    is an environment variable; if its value is relative, it starts where the command was typed. Other relative paths
    start at the recipe file. Absent: `dataset` names the rows."""
    dataset: DatasetTable | None = None
    """Data set that the library `datasets` reads, in place of `path`."""

    @property
    def named(self) -> str:
        """What a person named, in few words."""
        if isinstance(self.path, tuple):
            return ", ".join(self.path)
        return self.path or (self.dataset.path if self.dataset else "nothing")


class Gsm8kRows(StoredRows):
    """Rows of GSM8K's JSONL: `question`, and `answer` ending in `#### N`."""

    format: Annotated[Literal["gsm8k"], RESULTS]
    """Rows with GSM8K's own keys, in JSONL or in the data set."""


class ColumnRows(StoredRows):
    """Rows of JSONL or parquet with a prompt and an answer in columns of any name."""

    format: Annotated[Literal["columns"], RESULTS]
    """JSONL or parquet with the columns named by `prompt` and `answer`."""
    prompt: Annotated[str, RESULTS]
    """Column of the question (text, or a list of chat messages)."""
    answer: Annotated[str | None, RESULTS] = None
    """Column of the ground truth; dots reach into nested columns (`reward_model.ground_truth`). Absent: there is
    none, for rewards that need none."""


class VerlRows(StoredRows):
    """Rows as verl's scripts write them: `prompt` is a chat, `reward_model.ground_truth` the truth, and all else goes
    to the reward (`data_source`, `ability`, `extra_info`)."""

    format: Annotated[Literal["verl"], RESULTS]
    """Parquet or JSONL with verl's columns."""
    fields: Annotated[tuple[str, ...] | None, RESULTS, Array, OrAll] = None
    """Further columns that the reward is given, by these names. "all": every column that is not the question or its
    ground truth."""


class DialogueRows(StoredRows):
    """Rows with a `chosen` and a `rejected` dialogue (HH-RLHF): the prompt is what both begin with, up to the user's
    last turn, and the two responses are the fields `chosen` and `rejected`. There is no ground truth."""

    format: Annotated[Literal["dialogues"], RESULTS]
    """JSONL or parquet with `chosen` and `rejected`: texts with `Human:` and `Assistant:`, or chats."""


class PythonRows(RowTable):
    """Rows that a function of your own gives: mappings with `prompt`, `answer` (or none) and whatever else."""

    format: Annotated[Literal["python"], RESULTS]
    """A function of your own."""
    function: Annotated[str, RESULTS]
    """`path.py:name` of the function, which is called with `options` and gives one mapping after the other. The path
    is read as that of a file of rows; the digest of the rows in `run.json` covers the file."""
    options: Annotated[dict[str, Any], RESULTS] = Field(default_factory=dict)
    """Arguments of the function by name."""
    fields: Annotated[tuple[str, ...] | None, RESULTS, Array, OrAll] = None
    """Further keys of a row that the reward is given, by these names. "all": every one but `prompt` and `answer`."""

    @property
    def named(self) -> str:
        """What a person named."""
        return self.function


SingleRows = Annotated[
    Gsm8kRows | ColumnRows | VerlRows | DialogueRows | PythonRows,
    Field(discriminator="format"),
]


class MixRows(Table):
    """Rows of several sources, each in its own format, mixed by their weights. The reward is given the name of a
    row's source as the field `source`."""

    format: Annotated[Literal["mix"], RESULTS]
    """Several sources."""
    sources: dict[str, SingleRows] = Field(min_length=1)
    """Sources by name, each a table of another format."""

    @property
    def named(self) -> str:
        """What a person named, in few words."""
        return ", ".join(self.sources)


Rows = Annotated[
    Gsm8kRows | ColumnRows | VerlRows | DialogueRows | PythonRows | MixRows,
    Field(discriminator="format"),
]
AnyRows = Gsm8kRows | ColumnRows | VerlRows | DialogueRows | PythonRows | MixRows
SingleTable = Gsm8kRows | ColumnRows | VerlRows | DialogueRows | PythonRows


class DataTable(Table):
    """Prompts: one training set, any number of named evaluation sets."""

    train: Rows
    """Training prompts, drawn in a seeded order, epoch after epoch."""
    eval: dict[str, Rows] = Field(default_factory=dict)
    """Evaluation sets by name."""


def sources_of(table: AnyRows) -> dict[str, SingleTable]:
    """The single tables of a table of rows by the name of their source; the name of one that is no mix is empty."""
    return dict(table.sources) if isinstance(table, MixRows) else {"": table}
