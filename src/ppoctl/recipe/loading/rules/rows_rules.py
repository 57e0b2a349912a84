"""Rules about the tables of rows in `[data]`. See `all_rules`."""

from collections.abc import Iterator

from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.data.row_tables import AnyRows, ColumnRows, DialogueRows, SingleTable, StoredRows, sources_of
from ppoctl.recipe.schema import Recipe

TAKEN_ARGUMENTS = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
)  # fmt: skip
"""Arguments of chat templates that the tokenizer or ppoctl sets; a recipe cannot set them."""


def tables_of_rows(recipe: Recipe) -> Iterator[tuple[KeyPath, SingleTable]]:
    """Yield each table of rows with its path; a mix yields the tables of its sources."""
    sets: dict[KeyPath, AnyRows] = {("data", "train"): recipe.data.train}
    sets |= {("data", "eval", name): table for name, table in recipe.data.eval.items()}
    for path, table in sets.items():
        for source, single in sources_of(table).items():
            yield (*path, *(("sources", source) if source else ())), single


def has_truth(table: SingleTable) -> bool:
    """Return whether rows of the table may have a ground truth."""
    return not (isinstance(table, DialogueRows) or (isinstance(table, ColumnRows) and table.answer is None))


def check_row_source(recipe: Recipe) -> Iterator[Finding]:
    for path, table in tables_of_rows(recipe):
        if isinstance(table, StoredRows) and (table.path is None) == (table.dataset is None):
            has_both = table.path is not None
            message = "has both `path` and `dataset`" if has_both else "has no rows: `path` is missing"
            keys = ((*path, "path"), (*path, "dataset", "path")) if has_both else ((*path, "format"),)
            hint = "remove one of the two" if has_both else f"--set {dotted(path)}.path=FILE"
            yield conflict(f"[{dotted(path)}] {message}", keys, hint)


def check_mix_weights(recipe: Recipe) -> Iterator[Finding]:
    for path, table in tables_of_rows(recipe):
        if table.weight == 1:
            continue
        if path[-2] != "sources":
            message = f"`weight` applies only to sources of a mix; [{dotted(path)}] is not one"
        elif path[1] == "eval":
            message = "an evaluation uses each row of each source once, so a weight has no effect"
        else:
            continue
        yield conflict(message, ((*path, "weight"),), f"--set {dotted(path)}.weight=1")


def check_prompt_file_conflicts(recipe: Recipe) -> Iterator[Finding]:
    for path, table in tables_of_rows(recipe):
        if table.prompt_file is not None and table.instruction:
            yield conflict(
                "a prompt file contains the complete prompt, so `instruction` has no effect",
                ((*path, "prompt_file"), (*path, "instruction")),
                "write the instruction into the file",
            )


def check_template_arguments(recipe: Recipe) -> Iterator[Finding]:
    for path, table in tables_of_rows(recipe):
        for name in table.template_args:
            if name in TAKEN_ARGUMENTS:
                yield conflict(
                    f"the argument `{name}` of the chat template is set by ppoctl", ((*path, "template_args", name),)
                )
