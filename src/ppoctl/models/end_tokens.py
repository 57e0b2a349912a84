"""The tokens that end a response."""

from pathlib import Path

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.models.folder import read_json_object


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids of the tokens that end a response: from the generation config, or else from the model config.
    Raises EnvironmentProblemError if neither config names an end token."""
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(folder / name).get("eos_token_id")
        if value is None:
            continue
        ids = tuple(value) if isinstance(value, list) else (value,)
        if not ids or not all(isinstance(id, int) for id in ids):
            raise EnvironmentProblemError(
                f"`eos_token_id = {value}` in `{folder / name}` is not a token id", hint="fetch the model again"
            )
        return ids
    raise EnvironmentProblemError(
        f"model folder `{folder}` names no end-of-sequence token: responses would never end",
        hint="add `eos_token_id` to its generation_config.json",
    )
