"""Layouts are checked against the model's config.json before anything is started."""

import json
from pathlib import Path

import pytest

from ppoctl.core.errors import RecipeError, quoted
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.loading.rules import layout_rules as layout
from ppoctl.recipe.loading.rules.all_rules import rules_of
from ppoctl.recipe.parallel import layouts, processes
from recipe.conftest import model_as_read, refusal

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.toml"

# The quickstart's model has 4 layers, 4 attention heads and 2 key/value heads.
CASES = [
    (
        "check_tensor_parallel",
        "actor.parallel={tensor=4}",
        "4 tensor ranks do not divide the model's 2 key/value heads",
    ),
    (
        "check_tensor_parallel",
        "critic.parallel={tensor=3}",
        "3 tensor ranks do not divide the model's 4 attention heads",
    ),
    ("check_tensor_parallel", "generator.tensor=3", "3 tensor ranks do not divide the model's 4 attention heads"),
    ("check_tensor_parallel", "generator.tensor=4", "4 tensor ranks do not divide the model's 2 key/value heads"),
    (
        "check_pipeline_layers",
        "actor.parallel={pipeline=3}",
        "the model's 4 layers do not divide over 3 pipeline ranks",
    ),
    (
        "check_pipeline_layers",
        "actor.parallel={pipeline=2, first_stage_layers=4}",
        "the model's 4 layers, 4 of them set for the first and last rank, do not divide over 2 pipeline ranks",
    ),
    ("check_ray_address", "cluster.ray_address=auto", "`auto` is not `host:port`"),
    ("check_end_layers", "actor.parallel={last_stage_layers=2}", "a single pipeline rank has all layers"),
    (
        "check_interleaving_needs_pipeline",
        "actor.parallel={stages_per_rank=2}",
        "interleaving needs more than one pipeline rank",
    ),
    (
        "check_interleaved_layers",
        "actor.parallel={pipeline=2, stages_per_rank=4}",
        "2 layers of a pipeline rank do not divide into 4 stages",
    ),
    (
        "check_interleaved_layers",
        "actor.parallel={pipeline=2, stages_per_rank=2, last_stage_layers=3}",
        "3 layers of a pipeline rank do not divide into 2 stages",
    ),
    (
        "check_sequence_parallel",
        "critic.parallel={sequence=true}",
        "sequence parallelism splits over the tensor ranks, but there is only one",
    ),
    (
        "check_offload_needs_colocation",
        "cluster={placement='apart', offload=['actor']}",
        "each process has its own device, so nothing would use the memory that offloading frees",
    ),
    (
        "check_broadcast_needs_separate_devices",
        "cluster.weights=broadcast",
        "a broadcast allows one process per device, but colocated roles share a device",
    ),
    (
        "check_engines_on_one_gpu",
        "generator={engines_per_gpu=3, tensor=2}",
        "an engine that several GPUs compute shares none of them with another engine",
    ),
    ("check_reshardable", "checkpoint.reshardable=dp", "no trained role has a distributed optimizer"),
]


@pytest.mark.parametrize(("rule", "written", "says"), CASES)
def test_layout_that_does_not_fit_model_raises(rule: str, written: str, says: str) -> None:
    assert rule in {check.__name__ for check in rules_of(layout)}
    assert says in str(refusal([QUICKSTART], [written]))


def test_fused_kernels_of_another_activation_raise(tmp_path: Path) -> None:
    sizes = {"model_type": "gemma2", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    written = [model_as_read(tmp_path, **sizes), "critic.kernels=fused"]
    error = refusal([QUICKSTART], written)
    assert "fused kernels exist for SiLU, but the model has `gelu_pytorch_tanh`" in str(error)
    assert "--set critic.kernels=plain" in str(error.hint)
    load([QUICKSTART], ["critic.kernels=fused"])


def test_broadcast_to_engines_of_one_gpu_raises() -> None:
    apart = "cluster={placement='apart', weights='broadcast'}"
    assert "a broadcast allows one process per device, but engines share one" in str(
        refusal([QUICKSTART], ["generator.engines_per_gpu=3", apart])
    )
    load([QUICKSTART], ["generator.engines_per_gpu=1", apart])


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        # Llama 2 13B has 40 heads, and 13,824 columns.
        ({"intermediate_size": 13824, "vocab_size": 32000}, "the model's 13824 columns of an MLP"),
        ({"intermediate_size": 13825, "vocab_size": 32000}, None),
        ({"intermediate_size": 13825, "vocab_size": 32001}, "the model's 32064 rows of the embedding, padded"),
        ({"intermediate_size": 13824, "vocab_size": 32000, "model_type": "qwen3_moe", "num_experts": 5}, None),
    ],
)
def test_tensor_ranks_must_divide_every_split_dimension(
    tmp_path: Path, sizes: dict[str, object], says: str | None
) -> None:
    heads = {"num_attention_heads": 40, "num_key_value_heads": 40, "hidden_size": 5120}
    model = model_as_read(tmp_path, **{"model_type": "llama", **heads, **sizes})
    written = [model, "actor.parallel={tensor=5, sequence=true}"]
    if says is None:
        load([QUICKSTART], written)
        return
    assert says in str(refusal([QUICKSTART], written))


EXPERT_CASES = [
    (
        "check_expert_count",
        "actor.parallel={data=4, expert=4}",
        "4 expert ranks do not divide the model's 6 experts of a layer",
        "--set actor.parallel.expert=3",
    ),
    (
        "check_expert_count",
        "critic.parallel={data=3, expert_tensor=3}",
        "3 expert tensor ranks do not divide the model's 32 columns of an expert",
        "--set critic.parallel.expert_tensor=2",
    ),
    (
        "check_expert_ranks",
        "actor.parallel={data=2, tensor=2, sequence=true, expert=3, expert_tensor=2}",
        "3 expert ranks of 2 each do not divide the 2 tensor x 1 context x 2 data ranks that they consist of",
        "--set actor.parallel.data=6",
    ),
    (
        "check_experts_need_sequence_parallel",
        "actor.parallel={tensor=2, expert=2}",
        "without sequence parallelism, 2 tensor ranks would send them the same tokens",
        "--set actor.parallel.sequence=true",
    ),
]


@pytest.mark.parametrize(("rule", "written", "says", "hint"), EXPERT_CASES)
def test_layout_that_does_not_fit_experts_raises(experts: str, rule: str, written: str, says: str, hint: str) -> None:
    assert rule in {check.__name__ for check in rules_of(layout)}
    caught = refusal([QUICKSTART], [experts, written])
    assert says in str(caught)
    assert hint in str(caught.hint)


@pytest.mark.parametrize(("key", "size"), [("expert", 2), ("expert_tensor", 2)])
def test_expert_ranks_require_model_with_experts(key: str, size: int) -> None:
    with pytest.raises(RecipeError, match=f"the model has no experts for {size} ranks to share") as caught:
        load([QUICKSTART], [f"actor.parallel={{data=2, {key}={size}}}"])
    assert f"--set actor.parallel.{key}=1" in str(caught.value.hint)


@pytest.mark.parametrize(
    "table",
    [
        "{data=2, expert=2}",
        "{tensor=2, sequence=true, data=3, expert=3, expert_tensor=2}",
        "{data=4, expert_tensor=4}",
        "{context=2, data=2, expert=2, expert_tensor=2}",
    ],
)
def test_layout_that_fits_experts_is_accepted(experts: str, table: str) -> None:
    taken = load([QUICKSTART], [experts, f"actor.parallel={table}"]).recipe.actor.parallel
    assert taken is not None
    assert "expert" in taken.describe()
    # Expert ranks regroup the other ranks: they are not additional processes.
    assert taken.world_size == taken.tensor * taken.context * taken.data


@pytest.mark.parametrize(
    ("table", "span"),
    [
        (ParallelTable(data=2, expert=2), True),
        (ParallelTable(data=2), False),
        (ParallelTable(tensor=2, data=2, expert=2), False),
        (ParallelTable(tensor=2, data=2, expert=2, expert_tensor=2), True),
        (ParallelTable(tensor=3, data=2, expert=2), True),
        (ParallelTable(context=2, data=2, expert=2), False),
        (ParallelTable(context=2, data=2, expert=4), True),
    ],
)
def test_experts_span_data_depends_on_expert_rank_layout(table: ParallelTable, *, span: bool) -> None:
    """Ranks 0, 1, 2 are the first data rank's three: the second pair of expert ranks is 2 and 3."""
    assert table.experts_span_data == span


def test_layers_of_each_pipeline_rank_divide_into_its_stages(tmp_path: Path) -> None:
    """8 layers: 2 on the first rank, and 3 on each of the others."""
    base = json.loads((QUICKSTART.with_suffix("") / "model/config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(base | {"num_hidden_layers": 8, "layer_types": None}), "utf-8")
    layout = "{pipeline=3, first_stage_layers=2, last_stage_layers=3, stages_per_rank=3}"
    with pytest.raises(RecipeError, match="2 layers of a pipeline rank do not divide into 3 stages"):
        load([QUICKSTART], [f"model.critic={tmp_path}", f"critic.parallel={layout}"])


@pytest.mark.parametrize(
    "table",
    [
        "{tensor=2, sequence=true}",
        "{pipeline=2, first_stage_layers=1}",
        "{pipeline=2, stages_per_rank=2}",
        "{data=3}",
    ],
)
def test_layout_that_fits_model_is_accepted(table: str) -> None:
    assert load([QUICKSTART], [f"actor.parallel={table}"]).recipe.actor.parallel is not None


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("actor.parallel={tensor=2}", "2 tensor ranks do not divide the model's 3 attention heads"),
        ("critic.parallel={tensor=2}", "2 tensor ranks do not divide the model's 3 attention heads"),
        ("critic.parallel={pipeline=4}", "the model's 6 layers do not divide over 4 pipeline ranks"),
    ],
)
def test_critic_layout_is_checked_against_critic_model(tmp_path: Path, table: str, says: str) -> None:
    """Also if the critic's layout follows the actor's, whose model has 4 heads and layers."""
    base = json.loads((QUICKSTART.with_suffix("") / "model/config.json").read_text("utf-8"))
    own = {**base, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96, "num_hidden_layers": 6}
    own.pop("layer_types")
    (tmp_path / "config.json").write_text(json.dumps(own), "utf-8")
    [line] = refusal([QUICKSTART], [f"model.critic={tmp_path}", table]).message.splitlines()
    assert says in line
    assert f'`model.critic.path` = `"{tmp_path}"`' in line
    # A critic that follows the actor keeps the rest of its layout.
    follows = [f"model.critic={tmp_path}", "actor.parallel={tensor=2, data=3}"]
    caught = refusal([QUICKSTART], follows)
    hint = "critic.parallel={data=3}"
    assert f"--set {quoted(hint)}" in str(caught.hint)
    assert load([QUICKSTART], [*follows, hint]).recipe.critic.parallel == ParallelTable(data=3)
    fits = [f"model.critic={tmp_path}", "actor.parallel={tensor=2}", "critic.parallel={pipeline=3}"]
    assert load([QUICKSTART], fits).recipe.critic.parallel == ParallelTable(pipeline=3)


@pytest.mark.parametrize("placement", ["colocated", "apart"])
def test_generator_processes_are_engines_times_tensor_ranks(placement: str) -> None:
    written = ["generator.engines=3", "generator.tensor=2", f"cluster={{placement='{placement}'}}"]
    assert processes(load([QUICKSTART], written).recipe)["generator"] == 6


def test_critic_layout_follows_actor_unless_set() -> None:
    alone = ParallelTable()
    assert layouts(load([QUICKSTART]).recipe) == {"actor": alone, "critic": alone}
    follows = layouts(load([QUICKSTART], ["actor.parallel={tensor=2}"]).recipe)
    assert follows == {"actor": ParallelTable(tensor=2), "critic": ParallelTable(tensor=2)}
    apart = layouts(load([QUICKSTART], ["actor.parallel={tensor=2}", "critic.parallel={data=2}"]).recipe)
    assert apart["critic"] == ParallelTable(data=2)
    assert (apart["actor"].world_size, apart["actor"].model_ranks, apart["critic"].model_ranks) == (2, 2, 1)
    long = ParallelTable(tensor=2, pipeline=3, context=5, data=7)
    assert (long.model_ranks, long.stage_ranks, long.world_size) == (6, 70, 210)


def test_layout_description_lists_parallel_sizes() -> None:
    table = ParallelTable(tensor=4, pipeline=2, stages_per_rank=3, context=2, data=5, sequence=True)
    assert table.describe() == "tensor 4, pipeline 2, stages per rank 3, context 2, data 5, sequence"
    assert ParallelTable(data=2, distributed_optimizer=True).describe() == "data 2, distributed optimizer"
    assert ParallelTable().describe() == "one process"


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("generator.tensor=16", "generator.tensor=2"),  # 4 heads allow 4 ranks, 2 key/value heads do not
        ("actor.parallel={pipeline=3}", "actor.parallel.pipeline=2"),
    ],
)
def test_hint_of_layout_error_is_valid(written: str, hint: str) -> None:
    caught = refusal([QUICKSTART], [written])
    assert caught.hint is not None
    assert f"--set {hint}`" in caught.hint
    load([QUICKSTART], [hint])
