"""`ppoctl preview`: rows of a recipe as the model receives them, and notes on unusual rows."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, Recipes, Sets

if TYPE_CHECKING:
    from ppoctl.start.preflight.prompt_preview import Preview, PreviewedRow


def preview(
    files: Recipes,
    sets: Sets = None,
    set_name: Annotated[
        str, typer.Option("--set-name", metavar="SET", help="`train`, or the name of an evaluation set.")
    ] = "train",
    rows: Annotated[
        int, typer.Option("--rows", metavar="N", min=0, help="Number of rows to show, for each source of a mix.")
    ] = 2,
    json: JsonOption = False,
) -> None:
    """Show rows as the model receives them. Prints text, tokens and stop tokens, and how many rows are too long,
    truncated or repeated."""
    from ppoctl.recipe.loading.load import load
    from ppoctl.start.preflight.prompt_preview import preview as look

    loaded = load(files, sets or ())
    try:
        found = look(
            loaded.recipe, set_name, rows, lambda name, read: render.passing(f"`data.{name}`: {read:,} rows")
        )
    finally:
        render.passing()
    if json:
        render.json(asdict(found))
    else:
        _print(found)


def _print(found: "Preview") -> None:
    for row in found.rows:
        render.heading(render.printable(row.id))
        render.table(list(_of_row(row)))
    render.heading("rows")
    counted = [(key, *(str(number) for number in counts.values())) for key, counts in found.counts.items()]
    render.table(counted, ("table", *next(iter(found.counts.values()))))
    lengths = ", ".join(f"{word} {tokens}" for word, tokens in found.lengths.items())
    render.table(
        [
            ("prompt tokens", f"{lengths} (of {found.measured} prompts)"),
            ("stop tokens", ", ".join(f"{token.id} {token.text!r}" for token in found.stops) or "none"),
            ("stop strings", ", ".join(map(repr, found.stop_strings)) or "none"),
        ]
    )
    for flag in found.flags:
        render.print_stderr(f"note: {render.printable(flag)}")


def _of_row(row: "PreviewedRow") -> Iterator[tuple[str, str]]:
    yield "text", render.printable(row.text)
    yield "tokens", "  ".join(f"{token.id} {token.text!r}" for token in row.tokens)
    count = f"{len(row.tokens)} tokens" + (", truncated" if row.is_cut else "")
    yield "mask", f"{count}; a prompt is not trained on, only the response to it is"
    yield "truth", "none" if row.truth is None else render.printable(row.truth)
    for name, value in row.fields.items():
        yield f"field {name}", render.printable(str(value))
