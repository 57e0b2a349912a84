"""Every result key has a test that gives two values of it and sees two results."""

from importlib import import_module
from pathlib import Path
from typing import Literal, get_args, get_origin

from for_each import for_each
from ppoctl.core.key_path import KeyPath
from ppoctl.core.recipe_table import Effect
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.schema import Recipe
from wiring.cases import HELD

for file in sorted(Path(__file__).parent.glob("test_*_keys.py")):
    import_module(f"wiring.{file.stem}")


def result_keys() -> dict[str, set[str]]:
    """Return dotted key -> its possible values, if these are few."""
    found: dict[str, set[str]] = {}
    for path, key in tree.walk(tree.of(Recipe)):
        if key.effect is Effect.RESULTS:
            annotation = key.field.annotation
            options = {str(option) for option in get_args(annotation)} if get_origin(annotation) is Literal else {"*"}
            found.setdefault(_known_as(path), set()).update(options)
    return found


def _known_as(path: KeyPath) -> str:
    """Return the name under which a key is covered: a scorer's keys mean the same as the reward, a part or a case,
    and an environment's keys in training, in an evaluation or as a case."""
    if path[:2] == ("eval", "environment"):
        path = path[1:]
    if path[:3] == ("environment", "cases", tree.ANY_NAME):
        path = ("environment", *path[3:])
    scorers = (("reward", "parts", tree.ANY_NAME), ("reward", "cases", tree.ANY_NAME), ("reward", "otherwise"))
    around = next((table for table in scorers if path[: len(table)] == table), None)
    if around is None or not tree.keys_at(tree.of(Recipe), ("reward", *path[len(around) :])):
        return ".".join(path)
    return ".".join(("reward", *path[len(around) :]))


TWO_VALUED = [key for key, options in result_keys().items() if options == {"*"} or len(options) > 1]


@for_each(TWO_VALUED)
def test_every_result_key_has_a_two_value_test(key: str) -> None:
    assert HELD.get(key), f"no test in tests/wiring holds `{key}`: add a case to one of test_*_keys.py"


def test_every_tested_key_exists() -> None:
    steps = {f"reward.{step}" for step in ("scale", "clip", "moments", "overlong", "length_penalty")}
    tables = {
        "ppo.advantages",
        "ppo.kl",
        "ppo.kl.adaptive",
        "ppo.policy_loss",
        "ppo.rollout_correction",
        "ppo.rollout_rejection",
        "ppo.resample",
        *steps,
    }
    assert set(HELD) - set(result_keys()) == tables


def test_result_keys_equal_the_two_valued_cases() -> None:
    assert set(result_keys()) - set(TWO_VALUED) == {"critic.on"}  # its only value stands for a value head
