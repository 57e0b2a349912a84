"""JSON schemas of the tools of an environment, which a child process computes."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from ppoctl.core.batch.episodes import EnvironmentFailure
from ppoctl.core.errors import RecipeError
from ppoctl.core.user_functions import digest_of
from ppoctl.environments.environment_process import EnvironmentProcess
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.scorer_output import Dropped


def schemas_of(spec: ScorerSpec, functions: Sequence[str]) -> list[dict[str, Any]]:
    """Return the JSON schemas of the tools that an environment offers. A child process imports them, once for
    each content of the files of the user's `functions`.

    Raises RecipeError if the environment cannot be imported, or a tool has no schema.
    """
    return list(json.loads(_schemas(json.dumps(asdict(spec)), tuple(map(digest_of, functions)))))


@cache
def _schemas(spec_json: str, _: tuple[str, ...]) -> str:
    """Return the schemas as JSON, so that no caller changes the cached value."""
    spec = ScorerSpec(**json.loads(spec_json))
    dropped = Dropped(f"environment `{spec.known_as}`")
    process = EnvironmentProcess(spec, dropped, seconds=0.0)
    try:
        schemas = process.schemas()
    finally:
        process.close()
        process.reap()
        dropped.report()
    if isinstance(schemas, EnvironmentFailure):
        raise RecipeError(f"the tools of `{spec.known_as}` have no JSON schema: {schemas.message}", hint=spec.hint)
    return json.dumps(schemas)
