"""Arguments and options that several commands share, so that they are spelled and explained alike."""

from pathlib import Path
from typing import Annotated

import typer

Recipes = Annotated[
    list[Path], typer.Argument(metavar="RECIPE", help="TOML files; a later one overrides an earlier one.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, e.g. --set steps=40; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, errors included.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, runs/NAME.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder of run directories.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also a line per stage.")]
