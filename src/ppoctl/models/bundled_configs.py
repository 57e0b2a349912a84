"""Configurations of published models that ship with the recipes, so that ppoctl can check a model before it is
downloaded."""

import json
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def recipes_folder() -> Path | None:
    """Return the folder of the bundled recipes, in the installed package or at the top of a checkout; None: there is
    no such folder."""
    candidates = (_PACKAGE / "_recipes", _PACKAGE.parents[1] / "recipes")
    return next((folder for folder in candidates if folder.is_dir()), None)


def carried_folder(hub_id: str) -> Path | None:
    """Return the folder with the bundled config.json of a hub model; None: it is not bundled."""
    recipes = recipes_folder()
    if recipes is None or hub_id.count("/") != 1:
        return None
    folder = recipes / "models" / hub_id.replace("/", "--")
    return folder if (folder / "config.json").is_file() else None


def source_of(folder: Path) -> str:
    """Return the source of a bundled configuration, as text."""
    about = json.loads((folder.parent / "sources.json").read_text("utf-8"))[folder.name.replace("--", "/", 1)]
    return f"{'' if about['verified'] else 'unverified: '}{about['source']}"
