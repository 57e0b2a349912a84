"""Which tokens end a response."""

from pathlib import Path

from ppoctl.errors import EnvironmentProblemError
from ppoctl.model.folder import read_json_object


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids of the tokens that end a response: the generation config's, else the model config's. Raises
    EnvironmentProblemError where neither names one."""
    for name in ("generation_config.json", "config.json"):
        found = read_json_object(folder / name).get("eos_token_id")
        if found is None:
            continue
        ids = tuple(found) if isinstance(found, list) else (found,)
        if not ids or not all(isinstance(each, int) for each in ids):
            raise EnvironmentProblemError(
                f"`eos_token_id = {found}` in `{folder / name}` is no token", hint="fetch the model again"
            )
        return ids
    raise EnvironmentProblemError(
        f"model folder `{folder}` names no end-of-sequence token: responses would never end",
        hint="add `eos_token_id` to its generation_config.json",
    )
