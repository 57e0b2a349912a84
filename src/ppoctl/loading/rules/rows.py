"""Rules of the tables of rows. See `rules` for what a rule is."""

from collections.abc import Iterator

from ppoctl.loading.problems import Conflict, rules_of
from ppoctl.recipe.origins import KeyPath, dotted
from ppoctl.recipe.rows import AnyRows, ColumnRows, DialogueRows, SingleTable, StoredRows, sources_of
from ppoctl.recipe.schema import Recipe

TAKEN_ARGUMENTS = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
)  # fmt: skip
"""Names of a template's arguments that are not a recipe's to set."""


def tables_of_rows(recipe: Recipe) -> Iterator[tuple[KeyPath, SingleTable]]:
    """Every single table of rows, with its path."""
    sets: dict[KeyPath, AnyRows] = {("data", "train"): recipe.data.train}
    sets |= {("data", "eval", name): table for name, table in recipe.data.eval.items()}
    for path, table in sets.items():
        for source, single in sources_of(table).items():
            yield (*path, *(("sources", source) if source else ())), single


def has_truth(table: SingleTable) -> bool:
    """Whether rows of the table may have a ground truth."""
    return not (isinstance(table, DialogueRows) or (isinstance(table, ColumnRows) and table.answer is None))


def check_row_source(recipe: Recipe) -> Iterator[Conflict]:
    for path, table in tables_of_rows(recipe):
        if isinstance(table, StoredRows) and (table.path is None) == (table.dataset is None):
            both = table.path is not None
            says = "names its rows twice, by `path` and by `dataset`" if both else "names no rows: it has no `path`"
            keys = ((*path, "path"), (*path, "dataset", "path")) if both else ((*path, "format"),)
            hint = "remove one of the two" if both else f"--set {dotted(path)}.path=FILE"
            yield Conflict(f"[{dotted(path)}] {says}", keys, hint)


def check_mix_weights(recipe: Recipe) -> Iterator[Conflict]:
    for path, table in tables_of_rows(recipe):
        if table.weight == 1:
            continue
        if path[-2] != "sources":
            says = f"[{dotted(path)}] is no source of a mix, and only such have a weight"
        elif path[1] == "eval":
            says = "an evaluation asks every row of each source once"
        else:
            continue
        yield Conflict(says, ((*path, "weight"),), f"--set {dotted(path)}.weight=1")


def check_prompt_file_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    for path, table in tables_of_rows(recipe):
        if table.prompt_file is not None and table.instruction:
            yield Conflict(
                "a prompt file says all that is said besides the question",
                ((*path, "prompt_file"), (*path, "instruction")),
                "write the instruction into the file",
            )


def check_template_arguments(recipe: Recipe) -> Iterator[Conflict]:
    for path, table in tables_of_rows(recipe):
        for name in table.template_args:
            if name in TAKEN_ARGUMENTS:
                yield Conflict(
                    f"`{name}` of the chat template is set by whoever renders", ((*path, "template_args", name),)
                )


ROW_RULES = rules_of(globals())
