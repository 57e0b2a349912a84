"""Configurations of published models that ship with the recipes, so that a model is judged before it is fetched."""

import json
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def recipes_folder() -> Path | None:
    """Folder of the recipes that ship: inside the installed package, or at the top of a checkout; None: there is
    none."""
    places = (_PACKAGE / "_recipes", _PACKAGE.parents[1] / "recipes")
    return next((place for place in places if place.is_dir()), None)


def carried_folder(hub_id: str) -> Path | None:
    """Folder with the config.json, and nothing else, of a model of the hub; None where it does not ship."""
    recipes = recipes_folder()
    if recipes is None or hub_id.count("/") != 1:
        return None
    folder = recipes / "models" / hub_id.replace("/", "--")
    return folder if (folder / "config.json").is_file() else None


def source_of(folder: Path) -> str:
    """Where a configuration that ships came from, in words."""
    about = json.loads((folder.parent / "sources.json").read_text("utf-8"))[folder.name.replace("--", "/", 1)]
    return f"{'' if about['verified'] else 'unverified: '}{about['source']}"
