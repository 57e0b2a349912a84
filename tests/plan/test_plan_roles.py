"""Plans of recipes that train one role or three, and bytes of records, computed by hand."""

from pathlib import Path

import pytest

from ppoctl.algorithms.choose import step_function_at
from ppoctl.algorithms.estimators.raw_reward import RawRewardAdvantages
from ppoctl.algorithms.forward_specs import ValuesSpec
from ppoctl.algorithms.ppo import PPO
from ppoctl.algorithms.role_table import TrainedTable
from ppoctl.algorithms.trace import RunStage, StepFunction, StepInputs, StepOutputs
from ppoctl.algorithms.update_specs import ValueUpdateSpec
from ppoctl.cli import plan as screen
from ppoctl.cli.plan_summary import print_summary
from ppoctl.core.batch.fields import RecordField
from ppoctl.plan.flops import WorkPlan
from ppoctl.plan.memory.driver import StepBatch, object_store_bytes, record_bytes
from ppoctl.plan.memory.estimate import Memory, estimate_here
from ppoctl.plan.run_plan import Plan, plan
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.schema import Recipe

MODEL = Path(__file__).parents[2] / "recipes/quickstart/model"
DEEPSEEK_7B = Path(__file__).parents[2] / "recipes/models/deepseek-ai--DeepSeek-R1-Distill-Qwen-7B"


class WithJudge(Recipe):
    """A recipe with a third trained role."""

    judge: TrainedTable


def with_critic(file: Path, *sets: str, model: Path = MODEL) -> Recipe:
    return load([file], [f"model.path={model}", "model.dtype=float32", *sets], {}).recipe


def without_critic(file: Path, *sets: str, model: Path = MODEL) -> Recipe:
    recipe = with_critic(file, *sets, model=model)
    ppo = recipe.ppo.model_copy(update={"advantages": RawRewardAdvantages(kind="raw_reward")})
    return recipe.model_copy(update={"critic": None, "ppo": ppo})


def with_judge(file: Path, *sets: str) -> Recipe:
    """The third role has the keys of the critic."""
    recipe = with_critic(file, *sets)
    return WithJudge.model_construct(**dict(recipe), judge=recipe.critic)


def _two_critics(run_stage: RunStage, inputs: StepInputs) -> StepOutputs:
    """PPO, and a second role that learns the same returns."""
    outputs = PPO.run(run_stage, inputs)
    rollouts, rewards = outputs.samples[0]
    values = run_stage(ValuesSpec("judge_values", role="judge"), inputs.states["judge"], rollouts)
    update = ValueUpdateSpec("judge_update", role="judge")
    judge = run_stage(update, inputs.states["judge"], rollouts, values, rewards)
    return StepOutputs({**outputs.states, "judge": judge}, outputs.carry, outputs.samples)


def planned(recipe: Recipe) -> Plan:
    """Return the plan, with two critics if the recipe has two."""
    three = StepFunction("two_critics", _two_critics)

    def choose(each: Recipe, step: int) -> StepFunction:
        return three if isinstance(each, WithJudge) else step_function_at(each, step)

    return plan(recipe, choose=choose)


def all_items(memory: Memory) -> set[tuple[str, str]]:
    """Return role and name of all items."""
    pools = [*memory.places, *([memory.node] if memory.node else [])]
    return {(item.role, item.name) for pool in pools for item in pool.items}


def test_plan_of_recipe_without_critic_counts_only_policy(smallest: Path) -> None:
    both, alone = plan(with_critic(smallest)), plan(without_critic(smallest))
    assert alone.roles == {"actor": both.roles["actor"]}
    assert alone.as_dict()["roles"].keys() == {"actor"}
    assert alone.processes == {"actor": 1, "generator": 1}
    assert "critic's loss" in both.algorithm
    same = {name: text for name, text in both.algorithm.items() if name not in ("critic's loss", "advantages")}
    assert alone.algorithm == {**same, "advantages": "raw_reward: gamma 1, whiten"}
    assert alone.critic_start is None

    state = both.storage.state_bytes["actor"]
    assert alone.storage.state_bytes == {"actor": state}
    assert alone.storage.states_bytes == 4 * state  # two are kept, one is being written, one is saved by a stop
    assert alone.work is not None
    passed = alone.work.drawing
    assert alone.work == WorkPlan(drawing=passed, forwards=passed, updates=3 * passed)  # one epoch

    assert alone.memory is not None
    assert both.memory is not None
    assert alone.memory.roles == {"actor": both.memory.roles["actor"]}
    assert not any("critic" in text for item in all_items(alone.memory) for text in item)
    assert ("critic", "critic weights") in all_items(both.memory)


def test_model_of_critic_that_is_not_trained_is_not_planned(smallest: Path) -> None:
    own = "model.critic=org/gone"
    assert plan(with_critic(smallest, own)).critic_start is not None
    alone = plan(without_critic(smallest, own))
    assert alone.critic_start is None
    assert alone.memory is not None


@pytest.mark.parametrize("placement", ["colocated", "apart"])
def test_gpus_of_recipe_without_critic(smallest: Path, placement: str) -> None:
    sets = [f"cluster.placement={placement}", "actor.parallel={data=2}"]
    memory = estimate_here(without_critic(smallest, *sets), 80.0)
    assert memory is not None
    names = {
        "colocated": ["the fullest of 2 GPUs (actor, generator)"],
        "apart": ["the actor's GPU", "the generator's GPU"],
    }
    assert [place.name for place in memory.places] == names[placement]
    items = [item for place in memory.places for item in place.items]
    assert {item.role for item in items} == {"actor", "generator"}
    assert memory.node is not None
    [lower] = {item.lower for item in memory.node.items if item.name == "libraries"}
    assert lower == "lower `actor.parallel` and `generator.engines`"


def test_object_store_without_critic_holds_two_calls_of_policy(smallest: Path) -> None:
    """1,000,000 prompts of 20 + 13 tokens: ids, two lengths, log-probs of two models, advantages and the mask."""
    sets = ["rollout.prompts_per_step=1000000", "ppo.minibatch_seqs=100", "ppo.kl={place='loss', coef=0.1}"]
    assert object_store_bytes(without_critic(smallest, *sets), 2**40) == 2 * 1_000_000 * (33 * 4 + 2 * 8 + 13 * 13)


def test_plan_of_three_roles_counts_each(smallest: Path) -> None:
    alike = ["critic.optimizer={lr=1e-5}"]
    two, three = plan(with_critic(smallest, *alike)), planned(with_judge(smallest, *alike))
    assert three.roles == {**two.roles, "judge": two.roles["critic"]}
    assert three.processes == {"actor": 1, "critic": 1, "judge": 1, "generator": 1}
    assert three.algorithm["judge's loss"] == two.algorithm["critic's loss"]

    states = three.storage.state_bytes
    assert states == {**two.storage.state_bytes, "judge": two.storage.state_bytes["critic"]}
    assert three.storage.states_bytes == 4 * sum(states.values())
    assert two.work is not None
    assert three.work is not None
    of_actor = two.work.drawing
    of_critic = two.work.forwards - of_actor
    assert three.work == WorkPlan(of_actor, of_actor + 2 * of_critic, 3 * (of_actor + 2 * of_critic))

    assert two.memory is not None
    assert three.memory is not None
    assert three.memory.roles == {**two.memory.roles, "judge": two.memory.roles["critic"]}
    assert {("judge", f"judge {part}") for part in ("weights", "gradients", "optimizer")} < all_items(three.memory)


def test_screen_has_one_column_for_each_role(smallest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for recipe, roles in (
        (without_critic(smallest), ["actor"]),
        (with_critic(smallest), ["actor", "critic"]),
        (with_judge(smallest), ["actor", "critic", "judge"]),
    ):
        found = planned(recipe)
        screen.print_full(recipe, found)
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[lines.index(["updates"]) + 1] == roles
        assert ["of", "the", "largest", "rank", *roles] in lines
        [total] = [line for line in lines if line[:4] == ["optimizer", "steps", "in", "total"]]
        assert total[4:] == [str(role.updates_total) for role in found.roles.values()]
        print_summary(found, on_gpus=False)
        [updates] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  updates ")]
        assert [part.split()[0] for part in updates.removeprefix("  updates ").split(", ")] == roles


def test_processes_are_listed_by_role(smallest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = without_critic(smallest, "actor.parallel={data=2}")
    screen.print_full(recipe, plan(recipe))
    out = capsys.readouterr().out
    listed = out[out.index("processes\n") : out.index("updates\n")].splitlines()[1:]
    assert [line.split()[0] for line in listed if line] == ["actor", "generator", "devices", "Ray"]


def test_offload_advice_names_trained_roles(smallest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for build, roles in ((without_critic, '"actor", "generator"'), (with_critic, '"actor", "critic", "generator"')):
        recipe = build(smallest, model=DEEPSEEK_7B)
        screen.print_full(recipe, plan(recipe, 80.0))
        assert f"--set 'cluster.offload=[{roles}]'" in capsys.readouterr().out


def test_record_bytes_are_sums_over_fields() -> None:
    """5 sequences of 7 + 20 tokens."""
    batch = StepBatch(5, prompt_tokens=7, response_tokens=20, has_reference=False, reference_in_loss=False)
    cases = {
        ("bool", "B R"): 100,
        ("int32", "B R"): 400,
        ("float32", "B R"): 400,
        ("int64", "B"): 40,
        ("float32", "B"): 20,
        ("int32", "T"): 5 * 7 * 4,
        ("float32", ""): 4,
        ("text", "B"): 5 * 20 * 4,  # four characters for each token
        ("json", "B"): 0,
        ("json", ""): 0,
    }
    for (dtype, axes), size in cases.items():
        assert record_bytes([RecordField("field", dtype, axes)], batch) == size
    assert record_bytes([RecordField("field", *case) for case in cases], batch) == sum(cases.values())
    assert record_bytes([], batch) == 0
    with pytest.raises(KeyError):
        record_bytes([RecordField("field", "float64", "B")], batch)
    with pytest.raises(KeyError):
        record_bytes([RecordField("field", "float32", "R")], batch)
