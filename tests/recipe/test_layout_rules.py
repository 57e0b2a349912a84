"""Layouts are checked against the model's config.json, before anything is started."""

from pathlib import Path

import pytest

from ppoctl.errors import RecipeError
from ppoctl.recipe.layout_rules import LAYOUT_RULES
from ppoctl.recipe.load import load
from ppoctl.recipe.parallel import ParallelTable, layouts, processes

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.toml"

# The quickstart's model has 4 layers, 4 attention heads and 2 key/value heads.
CASES = [
    (
        "tensor_ranks_divide_the_heads",
        "actor.parallel={tensor=4}",
        "4 tensor ranks do not divide the model's 2 key/value heads",
    ),
    (
        "tensor_ranks_divide_the_heads",
        "critic.parallel={tensor=3}",
        "3 tensor ranks do not divide the model's 4 attention heads",
    ),
    (
        "tensor_ranks_divide_the_heads",
        "generator.tensor=3",
        "3 tensor ranks do not divide the model's 4 attention heads",
    ),
    (
        "tensor_ranks_divide_the_heads",
        "generator.tensor=4",
        "4 tensor ranks do not divide the model's 2 key/value heads",
    ),
    (
        "every_pipeline_rank_has_layers",
        "actor.parallel={pipeline=3}",
        "the model's 4 layers do not divide over 3 pipeline ranks",
    ),
    (
        "every_pipeline_rank_has_layers",
        "actor.parallel={pipeline=2, first_stage_layers=4}",
        "the model's 4 layers besides the 4 of the written ends do not divide over 1 pipeline ranks",
    ),
    (
        "layers_of_an_end_need_a_pipeline",
        "actor.parallel={last_stage_layers=2}",
        "one pipeline rank has all layers",
    ),
    (
        "several_stages_per_rank_need_a_pipeline",
        "actor.parallel={stages_per_rank=2}",
        "one pipeline rank has nobody to interleave with",
    ),
    (
        "stages_of_a_rank_have_the_same_number_of_layers",
        "actor.parallel={pipeline=2, stages_per_rank=4}",
        "2 layers of a pipeline rank do not divide into 4 stages",
    ),
    (
        "stages_of_a_rank_have_the_same_number_of_layers",
        "actor.parallel={pipeline=2, stages_per_rank=2, last_stage_layers=3}",
        "3 layers of a pipeline rank do not divide into 2 stages",
    ),
    (
        "sequence_parallelism_needs_tensor_ranks",
        "critic.parallel={sequence=true}",
        "sequence parallelism splits over the tensor ranks, and there is one",
    ),
    (
        "states_that_fit_fewer_layouts_have_a_distributed_optimizer",
        "checkpoint.reshardable=dp",
        "neither role has a distributed optimizer",
    ),
]


@pytest.mark.parametrize(("rule", "written", "says"), CASES)
def test_a_layout_that_does_not_fit_the_model_is_refused(rule: str, written: str, says: str) -> None:
    assert rule in {known.__name__ for known in LAYOUT_RULES}
    with pytest.raises(RecipeError) as caught:
        load([QUICKSTART], [written])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "table",
    [
        "{tensor=2, sequence=true}",
        "{pipeline=2, first_stage_layers=1}",
        "{pipeline=2, stages_per_rank=2}",
        "{data=3}",
    ],
)
def test_a_layout_that_fits_is_taken(table: str) -> None:
    assert load([QUICKSTART], [f"actor.parallel={table}"]).recipe.actor.parallel is not None


@pytest.mark.parametrize("placement", ["colocated", "apart"])
def test_engines_are_free(placement: str) -> None:
    written = ["generator.engines=3", "generator.tensor=2", f"cluster={{kind='local', placement='{placement}'}}"]
    assert processes(load([QUICKSTART], written).recipe)["generator"] == 6


def test_the_critic_follows_the_actor_unless_its_table_is_written() -> None:
    alone = ParallelTable()
    assert layouts(load([QUICKSTART]).recipe) == {"actor": alone, "critic": alone}
    follows = layouts(load([QUICKSTART], ["actor.parallel={tensor=2}"]).recipe)
    assert follows == {"actor": ParallelTable(tensor=2), "critic": ParallelTable(tensor=2)}
    apart = layouts(load([QUICKSTART], ["actor.parallel={tensor=2}", "critic.parallel={data=2}"]).recipe)
    assert apart["critic"] == ParallelTable(data=2)
    assert (apart["actor"].world_size, apart["actor"].model_ranks, apart["critic"].model_ranks) == (2, 2, 1)


def test_a_layout_in_words() -> None:
    table = ParallelTable(tensor=4, pipeline=2, stages_per_rank=3, data=5, sequence=True, distributed_optimizer=True)
    assert table.describe() == "tensor 4, pipeline 2, stages per rank 3, data 5, sequence, distributed optimizer"
    assert ParallelTable().describe() == "one process"
