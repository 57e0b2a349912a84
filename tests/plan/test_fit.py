"""The search of `plan --fit`: its sums against the estimate of `plan`, its result against all combinations, and what
it proposes for bundled recipes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, islice, product
from pathlib import Path

import pytest

from fakes.components import fake_recipe
from plan.fit_page import moves_of
from plan.small_model import SMALL
from ppoctl.core.key_path import dotted
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.plan.fit.choices import FitCandidate, RoleChoice, candidate_of, changes, choice_of, settled, split_layout
from ppoctl.plan.fit.footprint import occupants
from ppoctl.plan.fit.proposed import Proposals
from ppoctl.plan.fit.search import MARGIN_GIB, PLACES, RECOMPUTE, FitSearch, Found, TrainedParts
from ppoctl.plan.fit.seconds import (
    StepSeconds,
    decode_seconds,
    offload_seconds,
    optimizer_seconds,
    sequences_at_once,
)
from ppoctl.plan.memory.assumptions import GIB
from ppoctl.plan.memory.driver import StepBatch
from ppoctl.plan.memory.estimate import estimate_here, misfit
from ppoctl.plan.memory.generator_memory import GeneratorBytes
from ppoctl.plan.shared_sizes import shapes_of
from ppoctl.recipe.loading.load import Loaded, load
from ppoctl.recipe.loading.rules.all_rules import violations
from ppoctl.recipe.schema import GeneratorTable, Recipe
from ppoctl.start.preflight.fitting import proposals_for, settings_of, toml_of

RECIPES = Path(__file__).parents[2] / "recipes"
AHEAD = ("rollout.ahead=1", "ppo.rollout_correction.kind=tis", "cluster.offload=[]")


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOCTL_DATA", "/data")


@cache
def loaded(name: str, *sets: str) -> Loaded:
    return load([RECIPES / f"{name}.toml"], sets)


def is_valid(recipe: Recipe) -> bool:
    return not violations(recipe, lambda key: "")


def searched(recipe: Recipe, gib: float, gpus: int) -> FitSearch:
    shapes = shapes_of(recipe)
    assert shapes is not None
    return FitSearch(recipe, shapes, gib, gpus, is_valid)


def parts_of(recipe: Recipe) -> TrainedParts:
    return {role: table.train for role, table in recipe.trained.items()}


@cache
def proposed(name: str, gib: float, gpus: int | None, *sets: str) -> Proposals:
    return proposals_for(loaded(name, *sets), sets, gib, gpus, lambda text: None)


def keys_of(proposals: Proposals) -> list[set[str]]:
    return [set(map(dotted, each.changes)) for each in proposals.found]


# --- The arithmetic of time


def test_seconds_of_an_optimizer_step_on_the_device_and_on_the_cpu() -> None:
    """Two data ranks split 1,000 parameters, or each has all of them."""
    split = ParallelTable(data=2, distributed_optimizer=True)
    assert optimizer_seconds(1000, split, 2, "device") == pytest.approx(500 * 30 / 4.8e12)
    moved, computed = 500 * 6 / 25e9, 500 * 30 * 2 / 200e9
    assert optimizer_seconds(1000, split, 2, "cpu") == pytest.approx(moved + computed)
    whole = ParallelTable(data=2)
    assert optimizer_seconds(1000, whole, 4, "cpu") == pytest.approx(1000 * 8 / 25e9 + 1000 * 32 * 2 / 200e9)
    of_tensor_ranks = ParallelTable(tensor=4, sequence=True)
    assert optimizer_seconds(1000, of_tensor_ranks, 2, "device") == pytest.approx(250 * 30 / 4.8e12)


def test_offloaded_bytes_cross_the_bus_twice() -> None:
    assert offload_seconds(50_000_000_000) == 4.0


def test_round_trips_of_offloaded_roles() -> None:
    """Weights of the actor stay from its update to the next rollout, and return for log-probs; weights of the critic
    are on the GPU for values and for its update. Optimizers and reference are on the GPU once in a step."""
    search = searched(loaded("own/llama-3.2-1b-32g").recipe, 47.0, 1)
    memory = estimate_here(search.base, 47.0)
    assert memory is not None
    for role in ("actor", "critic"):
        rank = memory.roles[role].largest
        [process] = search.footprints.role(role, choice_of(search.base, role))
        assert process.moved == 2 * rank.weights + rank.main_weights + rank.moments + rank.reference


BATCH = StepBatch(12, prompt_tokens=10, response_tokens=30, has_reference=False, reference_in_loss=False)


def test_a_smaller_cache_decodes_in_more_waves() -> None:
    """12 sequences on two engines: 6 of each engine, at once, or 4 and then 2. A sequence has 4,000 bytes."""
    table = GeneratorTable(engines=2)
    for full_sequences, at_once, waves in ((9, 6, 1), (4, 4, 2), (1, 1, 6)):
        engine = GeneratorBytes(7000, 0, 0, full_sequences, 4000)
        assert sequences_at_once(12, table, engine) == at_once
        # On average, a cached sequence has its prompt and half of its response: 25 of 40 tokens.
        each = (7000 + at_once * 2500) / 2.4e12
        assert decode_seconds(BATCH, SMALL, table, engine, 12) == pytest.approx(30 * waves * each)
    limited = table.model_copy(update={"max_concurrent_seqs": 3})
    assert sequences_at_once(12, limited, GeneratorBytes(7000, 0, 0, 9, 4000)) == 3


def test_tensor_ranks_of_an_engine_reduce_twice_in_each_layer() -> None:
    table, engine = GeneratorTable(engines=1, tensor=2), GeneratorBytes(7000, 0, 0, 12, 4000)
    each = (7000 + 12 * 2500) / 2.4e12 + 2 * 2 * (1e-5 + 2 * 12 * 8 * 2 / 2 / 450e9)
    assert decode_seconds(BATCH, SMALL, table, engine, 12) == pytest.approx(30 * each)


def test_decoding_overlaps_with_all_other_work_if_generation_is_ahead() -> None:
    """Decoding takes 5 s, or 12 s, and the rest 3 + 4 s."""
    rest = StepSeconds(passes=3.0) + StepSeconds(updates=3.0, offload=1.0)
    assert (rest.total, (StepSeconds(decoding=5.0) + rest).total) == (7.0, 12.0)
    for decoding, total in ((5.0, 7.0), (12.0, 12.0)):
        for step in (StepSeconds(decoding, overlaps=True) + rest, rest + StepSeconds(decoding, overlaps=True)):
            assert (step.total, step.rank) == (total, (total, decoding + 7.0))
    for ahead, overlaps in (((), False), (AHEAD, True)):
        search = searched(loaded("own/llama-3.2-1b-24g", *ahead).recipe, 33.0, 1)
        assert search.measured(candidate_of(search.base)).seconds.overlaps is overlaps


# --- Memory as a sum


def test_roles_of_a_gpu_and_their_pipeline_stages() -> None:
    layouts = {"actor": ParallelTable(pipeline=2, data=2), "critic": ParallelTable(pipeline=4)}
    assert list(occupants(layouts)) == [
        (("actor", 0), ("critic", 0)),
        (("actor", 0), ("critic", 1)),
        (("actor", 1), ("critic", 2)),
        (("actor", 1), ("critic", 3)),
    ]
    assert list(occupants({"actor": ParallelTable(data=2), "critic": ParallelTable()})) == [
        (("actor", 0), ("critic", 0)),
        (("actor", 0),),
    ]


@pytest.mark.parametrize("offload", [(), ("actor",), ("critic", "generator"), ("actor", "critic", "generator")])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_sum_of_processes_equals_the_estimate_of_plan(tensor: int, pipeline: int, offload: tuple[str, ...]) -> None:
    recipe = loaded("own/llama-3.2-1b-24g").recipe
    search = searched(recipe, 47.0, 4)
    layout = split_layout(ParallelTable(), 4, tensor, pipeline, 1)
    candidate = replace(candidate_of(search.base), offload=offload)
    for role, recompute in (("actor", "selective"), ("critic", "none")):
        choice = replace(candidate.roles[role], layout=layout, recompute=recompute)
        candidate = candidate.with_role(role, choice)
    engines = candidate.generator.model_copy(update={"engines": 2, "tensor": 2, "gpu_memory_frac": 0.3})
    candidate = replace(candidate, generator=engines)
    memory = estimate_here(settled(search.base, candidate), 47.0)
    assert memory is not None
    assert search.measured(candidate).peak == max(pool.fullest.bytes for pool in memory.places)


def test_sum_of_processes_contains_reward_models() -> None:
    recipe = loaded("verl/qwen2-7b_rm").recipe
    search = searched(recipe, 79.0, 8)
    for offload in (("actor", "critic", "generator"), ("actor", "critic", "generator", "reward")):
        candidate = replace(candidate_of(search.base), offload=offload)
        memory = estimate_here(settled(search.base, candidate), 79.0)
        assert memory is not None
        assert search.measured(candidate).peak == max(pool.fullest.bytes for pool in memory.places)


# --- The search


def everything(search: FitSearch, tensor: int = 1) -> list[Found]:
    """Return all valid settings of a recipe that fit with these tensor ranks, by trying every combination of the
    values of each key."""
    base, found = search.base, list[Found]()
    layout = split_layout(ParallelTable(), search.gpus, tensor, 1, 1)
    own = {role: replace(choice_of(base, role), layout=layout) for role in base.trained}
    budgets, fracs = (30001, 32768), [percent / 100 for percent in range(2, 91)]
    choices = {
        role: [
            replace(
                choice,
                optimizer_on=place,
                recompute=recompute,
                batching=choice.batching.model_copy(update={"max_tokens_per_microbatch": budget}),
            )
            for place, recompute, budget in product(PLACES, RECOMPUTE, budgets)
        ]
        for role, choice in own.items()
    }
    offloads = [each for size in range(4) for each in combinations(("actor", "critic", "generator"), size)]
    offloads = [each for each in offloads if is_valid(settled(base, replace(candidate_of(base), offload=each)))]
    tables = [
        base.generator.model_copy(update={"gpu_memory_frac": frac, "engines": search.gpus // ranks, "tensor": ranks})
        for frac, ranks in product(fracs[::8], range(1, search.gpus + 1))
    ]
    for actor, critic, offload, table in product(choices["actor"], choices["critic"], offloads, tables):
        if search.footprints.engine_bytes(table).full_sequences == 0:
            continue
        measured = search.measured(FitCandidate({"actor": actor, "critic": critic}, table, offload))
        if search.fits(measured):
            found.append(measured)
    return found


@pytest.mark.parametrize(
    ("gib", "gpus", "new", "ahead"),
    [
        (33.0, 1, 29489, ()),
        pytest.param(45.0, 1, 29489, (), marks=pytest.mark.ci("33.0")),
        (42.0, 1, 4001, AHEAD),  # decoding and the rest take nearly the same time
        (42.0, 2, 4001, AHEAD),
    ],
)
def test_no_combination_is_faster_than_the_search(gib: float, gpus: int, new: int, ahead: Sequence[str]) -> None:
    """Sequences of 30,000 tokens leave two sizes of microbatches, and three sequences at once few sizes of the
    cache."""
    sets = [*ahead, f"rollout.max_prompt_tokens={30001 - new}", f"rollout.max_new_tokens={new}"]
    sets += ["generator.max_concurrent_seqs=3"]
    for role in ("actor", "critic"):
        sets += [f"{role}.batching={{max_tokens_per_microbatch=30001, logits_chunk_tokens=256}}"]
    sets += ["rollout.prompts_per_step=2", "ppo.minibatch_seqs=4"]
    recipe = loaded("own/llama-3.2-1b-24g", *sets).recipe
    search = searched(recipe, gib, gpus)
    tried = [found for tensor in range(1, gpus + 1) for found in everything(search, tensor)]
    best = min(tried, key=lambda each: each.seconds.total)
    first = next(search.fastest(parts_of(recipe)))
    assert search.fits(first)
    assert first.seconds.total <= best.seconds.total * (1 + 1e-9)
    assert first.seconds.total == pytest.approx(best.seconds.total, rel=0.02)  # the cache has other sizes


@pytest.mark.parametrize(("gib", "gpus", "ahead"), [(22.5, 1, ()), (33.0, 2, AHEAD)])
def test_results_of_the_search_are_in_the_order_of_their_time(gib: float, gpus: int, ahead: Sequence[str]) -> None:
    recipe = loaded("own/llama-3.2-1b-24g", *ahead).recipe
    search = searched(recipe, gib, gpus)
    found = list(islice(search.fastest(parts_of(recipe)), 20))
    times = [each.seconds.total for each in found]
    assert times == sorted(times)
    assert len(times) > 5
    assert all(search.fits(each) for each in found)


def test_nothing_is_offloaded_if_generation_is_ahead() -> None:
    """Without `ahead`, most settings that fit on this GPU offload roles, and so do the nearest on a small one."""
    for ahead, offloads in ((("cluster.offload=[]",), True), (AHEAD, False)):
        recipe = loaded("own/llama-3.2-1b-24g", *ahead).recipe
        found = list(searched(recipe, 33.0, 1).fastest(parts_of(recipe)))
        nearest = searched(recipe, 6.0, 1).nearest(parts_of(recipe))
        assert found
        assert nearest is not None
        assert {bool(each.candidate.offload) for each in found} == {False, offloads}
        assert bool(nearest.candidate.offload) is offloads


# --- Proposals


CASES: dict[str, tuple[str, float, int | None, Sequence[str], set[str]]] = {
    "recomputation and token budgets": (
        "own/llama-3.2-1b-24g",
        22.5,
        None,
        (),
        {"actor.recompute", "actor.batching.max_tokens_per_microbatch"},
    ),
    "offload": ("own/llama-3.2-1b-24g", 22.5, None, ["cluster.offload=[]"], {"cluster.offload"}),
    "KV cache and optimizer on the CPU": (
        "own/llama-3.2-1b-24g",
        16.0,
        None,
        (),
        {"generator.gpu_memory_frac", "actor.optimizer.on", "actor.recompute"},
    ),
    "layout and engines": ("own/llama-3.2-1b-24g", 22.5, 2, (), {"actor.parallel", "generator.engines"}),
    "part that trains": ("own/qwen3-4b-80g", 22.5, None, (), {"actor.train", "critic.train"}),
    "roles apart": (
        "nemo-rl/gsm8k-2n8g-dynbatch-noncolocated",
        22.5,
        1,
        (),
        {"cluster.placement", "cluster.offload"},
    ),
}
LARGE = {
    "a larger model": (
        "own/qwen3-4b-80g", 47.0, None, (), {"generator.gpu_memory_frac", "actor.optimizer.on", "actor.recompute"},
    ),
    "more layouts": ("own/qwen3-4b-80g", 79.0, 2, (), {"actor.parallel", "generator.engines"}),
    "roles apart on eight": (
        "nemo-rl/gsm8k-2n8g-dynbatch-noncolocated", 22.5, 8, (), {"cluster.placement", "cluster.offload"},
    ),
}  # fmt: skip


IN_CI = [pytest.param(case, marks=pytest.mark.ci("smaller models and fewer GPUs")) for case in LARGE]


@pytest.mark.parametrize("case", [*CASES, *IN_CI])
def test_each_kind_of_change_is_proposed_and_plan_agrees(case: str, tmp_path: Path) -> None:
    name, gib, gpus, sets, expected = (CASES | LARGE)[case]
    proposals = proposed(name, gib, gpus, *sets)
    assert any(expected <= keys for keys in keys_of(proposals))
    # Settings that keep the results come first.
    assert [bool(each.results) for each in proposals.found] == sorted(bool(each.results) for each in proposals.found)
    for each in proposals.found:
        assert bool(each.results) == any(key[-1] == "train" for key in each.changes)
        again = loaded(name, *sets, *settings_of(each.changes)).recipe
        assert again == each.recipe
        overlay = tmp_path / "overlay.toml"
        overlay.write_text("\n".join(toml_of(each.changes)), "utf-8")
        written = tmp_path / "written.toml"
        written.write_text("\n".join(text.replace("=", " = ", 1) for text in sets), "utf-8")
        files = [RECIPES / f"{name}.toml", written, overlay]
        assert load(files).recipe == each.recipe
        memory = estimate_here(again, gib)
        assert memory is not None
        assert misfit(memory) is None
        assert max(pool.fullest.bytes for pool in memory.places) <= (gib - MARGIN_GIB) * GIB


def test_no_proposal_contains_all_changes_of_a_faster_one() -> None:
    found = proposed("own/llama-3.2-1b-24g", 22.5, None).found
    assert len(found) == 3
    for fast, slow in combinations(found, 2):
        if fast.seconds.total <= slow.seconds.total:
            assert not fast.changes.items() <= slow.changes.items()


def test_recipe_that_fits_and_is_fast_is_proposed_without_changes() -> None:
    """The first proposal as a recipe of its own has no faster neighbour."""
    first = proposed("own/llama-3.2-1b-24g", 22.5, None).found[0]
    sets = settings_of(first.changes)
    again = proposed("own/llama-3.2-1b-24g", 22.5, None, *sets)
    assert dict(again.found[0].changes) == {}
    assert again.found[0].seconds.total == pytest.approx(again.as_it_is.total)


def test_role_that_trains_a_part_keeps_it() -> None:
    found = proposed(
        "own/qwen3-4b-80g", 22.5, None, "actor.train={top_layers=5}", "critic.train={top_layers=6}"
    ).found
    assert found
    assert all(not each.results for each in found)


def test_nearest_settings_if_nothing_fits() -> None:
    proposals = proposed("own/llama-3.2-1b-24g", 6.0, 1)
    assert proposals.found == ()
    assert proposals.nearest is not None
    peak = max(pool.fullest.bytes for pool in proposals.nearest.memory.places)
    assert peak > (6.0 - MARGIN_GIB) * GIB
    assert proposed("own/llama-3.2-1b-24g", 2.0, 1).nearest is None  # the weights of an engine do not fit


def test_every_key_that_the_search_changes_belongs_to_one_move() -> None:
    recipe = loaded("verl/qwen2-7b_rm").recipe
    search = searched(recipe, 79.0, 2)
    candidate = candidate_of(search.base)
    for role, choice in candidate.roles.items():
        changed = RoleChoice(split_layout(choice.layout, 2, 2, 1, 1), choice.train, "cpu", "full", choice.batching)
        candidate = candidate.with_role(role, changed)
    keys = [dotted(key) for key in changes(recipe, settled(search.base, candidate))]
    assert [len(moves_of([key])) for key in keys] == [1] * 5


def test_misfit_hint_is_the_search() -> None:
    memory = estimate_here(loaded("own/qwen3-4b-80g").recipe, 22.5)
    assert memory is not None
    error = misfit(memory)
    assert error is not None
    assert error.hint == "ppoctl plan RECIPE --fit 22.5"


def test_recipe_without_changes_has_none() -> None:
    recipe = fake_recipe(seed=7)
    assert changes(recipe, settled(recipe, candidate_of(recipe))) == {}
