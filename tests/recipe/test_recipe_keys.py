"""`recipes keys` is correct: a default is the value of a recipe without the key, and values outside a range are
rejected."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from for_each import for_each
from ppoctl.cli.manual.keys import REQUIRED, KeyLine, key_lines
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.loading.explain import as_toml
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.loading.origins import DEFAULT
from ppoctl.recipe.schema import Recipe
from recipe.conftest import SMALLEST, Write

LINES = key_lines()
LINES_OF = {key: [line for line in LINES if line.key == key] for key in {line.key for line in LINES}}
COLUMNS = "{format='columns', path='x.jsonl', prompt='p', answer='a'}"
DATASET = "{format='columns', prompt='p', answer='a', dataset={path='org/rows'}}"
SINGLE = [
    COLUMNS,
    DATASET,
    "{format='gsm8k', path='x.jsonl'}",
    "{format='verl', path='x.jsonl'}",
    "{format='python', function='x.py:rows'}",
]
ROWS = [*SINGLE, *(f"{{format='mix', sources={{one={table}}}}}" for table in SINGLE)]
ENVIRONMENTS = [
    f"{{turns=2, tokens=19, {kind}}}"
    for kind in (
        "kind='python', path='package:Environment'",
        "kind='tools', tools=['calculator']",
        "kind='choose', cases={a={kind='python', path='package:Environment'}}",
        "kind='choose', cases={a={kind='tools', tools=['python']}}",
    )
]
RECIPES: list[list[str]] = [
    [],
    ["ppo.kl.place=reward", "ppo.kl.coef=1"],
    ["rollout.groups={keep={min=0.1, max=0.9}}", "rollout.samples_per_prompt=2"],
    ["ppo.kl.place=loss", "ppo.kl.coef=1"],
    ["ppo.advantages.kind=monte_carlo", "reward.clip={low=0, high=1}", "reward.moments.kind=running"],
    ["ppo.advantages.kind=grpo", "rollout.samples_per_prompt=2"],
    ["ppo.advantages.kind=grpo_passk", "rollout.samples_per_prompt=2"],
    ["ppo.advantages.kind=grpo", "rollout.samples_per_prompt=2", "rollout.groups={by='shaped'}"],
    ["ppo.advantages.kind=raw_reward"],
    ["reward.moments.kind=reference", "reward.overlong.buffer_tokens=1", "reward.length_penalty.per_token=1"],
    ["ppo.kl={place='loss', coef=1, adaptive={target_per_token=1}}"],
    ["ppo.kl={place='reward', coef=1, adaptive={target_per_sequence=1}}"],
    *([f"data.{name}={table}"] for name in ("train", "eval.e") for table in ROWS),
    *([f"ppo.rollout_correction.kind={kind}"] for kind in ("tis", "tis_sequence", "icepop", "icepop_sequence")),
    *([f"ppo.resample.kind={kind}"] for kind in ("pow", "max_min", "max_random")),
    ["ppo.rollout_correction={kind='sequence_mask', min_ratio=0.9, max_ratio=1.1}"],
    ["ppo.rollout_rejection={kind='ratio', level='token', min_ratio=0.5}"],
    ["ppo.rollout_rejection={kind='ratio', level='token', max_ratio=2.0}"],
    ["ppo.rollout_rejection={kind='ratio', level='token', statistic='k3', max=0.1}"],
    *([f"ppo.policy_loss.kind={kind}"] for kind in ("gspo", "cispo", "reinforce")),
    ["ppo.policy_loss={kind='python', function='package:loss'}"],
    ["ppo.advantages={kind='python', function='package:estimate'}"],
    ["ppo.advantages={kind='python', function='package:estimate', trains_critic=true}"],
    ["eval.metrics=package:measure"],
    ["tracking.kind=none"],
    ["tracking.uri=x"],
    ["model.critic=org/judge"],
    ["model.reference=org/sft", "ppo.kl={place='loss', coef=1}"],
    [f"data.train={COLUMNS}", f"data.eval.c={COLUMNS}", "reward.scale={from=[0, 1], to=[0, 2]}"],
    ["data.eval.e={format='gsm8k', path='x.jsonl'}", 'expect."eval/e/pass_at_1".min=0'],
    ['expect."reward/score_mean".max=1', 'until."reward/score_mean".max=0'],
    ['until."reward/score_mean"={min=1, for_steps=2}'],
    ["reward.kind=exact_match", "data.train.instruction=x"],
    ["reward={kind='python', function='package:score'}"],
    *([f"reward={{kind='{kind}'}}"] for kind in ("math", "dapo_math", "code")),
    ["reward={kind='length', at_most=9}"],
    ["reward={kind='length', at_least=9}"],
    ["reward={kind='http', url='http://h'}"],
    ["reward={kind='format', pattern='a'}"],
    ["reward={kind='model', path='org/judge', parallel={}}"],
    ["reward={kind='sum', parts={a={kind='gsm8k'}}}"],
    *(
        [f"{key}={table}", f"data.train={SINGLE[3]}"]
        for key in ("environment", "eval.environment")
        for table in ENVIRONMENTS
    ),
    [f"environment={ENVIRONMENTS[0]}", "reward={kind='environment'}"],
    ["reward={kind='choose', cases={a={kind='gsm8k'}}, otherwise={kind='gsm8k'}}"],
    ["actor.batching.microbatch_seqs=1", "critic.batching.microbatch_seqs=1"],
    ["actor.batching.logits_chunk_tokens=8", "health.explained_variance.max=2", "health.kl.min=0"],
    ["actor.parallel={}", "critic.parallel={}"],
    ["critic={on='actor'}"],
    ["actor.train={lora={}}", "critic.train={lora={}}"],
    ["slurm.container={kind='pyxis', image='x'}"],
    ["slurm.container={kind='apptainer', image='x.sif'}"],
]
"""Each key is omitted in one of these recipes and set in another."""


_WITHOUT_CRITIC = {
    "ppo.advantages.kind=grpo",
    "ppo.advantages.kind=grpo_passk",
    "ppo.advantages.kind=raw_reward",
    "ppo.advantages={kind='python', function='package:estimate'}",
}


def fits(line: KeyLine, written: dict[str, Any]) -> bool:
    """Whether the line applies to this recipe, that is, to the alternative that it selects."""
    tag, equals, names = line.only.partition(" = ")
    if not equals:
        return True
    node: Any = written
    around: list[Any] = []
    for name in line.key.split(".")[:-1]:
        node = next(iter(node.values())) if name == tree.ANY_NAME else node.get(name)
        if not isinstance(node, dict):
            return False
        around.append(node)
    return any(f'"{table[tag]}"' in names.split(" or ") for table in around if tag in table)


def test_listed_default_equals_value_of_omitted_key(smallest: Path, write: Write) -> None:
    held: set[KeyLine] = set()
    without_critic = write(SMALLEST.partition("[critic.optimizer]")[0], "without-critic.toml")
    for sets in RECIPES:
        has_critic = not _WITHOUT_CRITIC & {*sets}
        loaded = load([smallest if has_critic else without_critic], sets, {})
        written = loaded.resolved()
        for entry in tree.values(loaded.recipe):
            path, key, value = entry.path, entry.key, entry.value
            if loaded.origins[dotted(path)] != DEFAULT or not isinstance(key.node, tree.Leaf):
                continue
            lines = [line for line in LINES_OF[".".join(with_stars(path))] if fits(line, written)]
            assert [line.default for line in lines] == [as_toml(value)], path
            held |= {*lines}
    left = [line for line in LINES if line.default != REQUIRED and line not in held]
    # No bundled reward works without a ground truth; a user-defined name has no default.
    training = ["ppo.advantages.options.*", "ppo.policy_loss.options.*"]
    named = ["reward.options.*", *training, "eval.metrics.options.*", "slurm.options.*", "slurm.environment.*"]
    sets = [f"data.{name}{inside}" for name in ("train", "eval.*") for inside in ("", ".sources.*")]
    rows = [f"{table}.{key}" for table in sets for key in ("template_args.*", "answer", "options.*")]
    # A digest is read with its function. The keys of a scorer are the same as a component, or as a case.
    remaining = [line.key for line in left if not line.key.endswith(".digest") and not line.key.startswith(_SCORERS)]
    names = [f"{table}.{key}" for table in ("", ".cases.*") for key in ("options.*", "digests.*")]
    of_environments = [f"environment{name}" for name in names]
    of_evaluations = [f"eval.environment{name}" for name in names]
    assert remaining == [*rows, *of_environments, *named[:4], *of_evaluations, *named[4:]]


def test_default_alternative_without_kind_is_marked() -> None:
    only = {line.key: line.only for line in LINES if line.key.startswith("actor.batching.")}
    assert only["actor.batching.max_tokens_per_microbatch"] == "by tokens (the default)"
    assert only["actor.batching.microbatch_seqs"] == "by sequences"
    assert LINES_OF["ppo.kl.place"][0].default == '"none"'


_SCORERS = ("reward.parts.*.", "reward.cases.*.", "reward.otherwise.")


def with_stars(path: KeyPath) -> KeyPath:
    """Return the path with `*` in place of user-defined names."""
    named = {
        "expect": 1,
        "until": 1,
        "data": 2 if path[1:2] == ("eval",) else None,
        "reward": 2 if path[1:2] == ("parts",) else None,
    }.get(path[0])
    starred = path if named is None else (*path[:named], tree.ANY_NAME, *path[named + 1 :])
    for table in {"sources", "cases"} & {*starred}:
        inside = starred.index(table) + 1
        starred = (*starred[:inside], tree.ANY_NAME, *starred[inside + 1 :])
    return starred


def test_every_key_has_one_line() -> None:
    assert {line.key for line in LINES} == {
        ".".join(path) for path, key in tree.walk(tree.of(Recipe)) if isinstance(key.node, tree.Leaf)
    }
    assert len({(line.key, line.only) for line in LINES}) == len(LINES)
    assert all(line.type and line.changes and line.meaning for line in LINES)


BOUNDS = {"at least ": (0, -1), "above ": (1, 0), "at most ": (0, 1), "below ": (-1, 0)}
"""For each word: the positions just inside and just outside, in steps from the bound."""


def accepts(key: tree.RecipeKey, value: object) -> bool:
    held: Any = Annotated[(key.field.annotation, *key.field.metadata)] if key.field.metadata else key.field.annotation
    try:
        TypeAdapter(held).validate_python(value)
    except ValidationError:
        return False
    return True


NUMBERS = [
    (line, key)
    for line in LINES
    if line.type in ("number", "whole number")
    for key in tree.keys_at(tree.of(Recipe), tuple(line.key.split(".")))
    if key.description == line.meaning
]


@for_each(NUMBERS)
def test_listed_range_equals_accepted_range(line: KeyLine, key: tree.RecipeKey) -> None:
    tiny = 1 if line.type == "whole number" else 1e-6
    number = int if line.type == "whole number" else float
    lowest, highest = -(10**9), 10**9
    for part in filter(None, line.range.split(", ")):
        if part.startswith("or "):
            word = part.removeprefix("or ").strip('"')
            assert accepts(key, word)
            assert word in ("off", "all")
            continue
        [word] = [word for word in BOUNDS if part.startswith(word)]
        bound = number(float(part.removeprefix(word)))
        inside, outside = (bound + sign * tiny for sign in BOUNDS[word])
        assert accepts(key, inside), (line, inside)
        assert not accepts(key, outside), (line, outside)
        lowest, highest = (bound, highest) if word in ("at least ", "above ") else (lowest, bound)
    # Without a documented range, all values are accepted.
    assert lowest != -(10**9) or accepts(key, number(lowest))
    assert highest != 10**9 or accepts(key, number(highest))
