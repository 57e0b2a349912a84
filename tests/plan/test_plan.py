"""Batch sizes and schedule of a plan, computed by hand."""

import json
import shutil
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from ppoctl.algorithms.sizes import learning_rate_of, planned_updates
from ppoctl.algorithms.stages.shaping import shaping_steps
from ppoctl.core import units
from ppoctl.plan.flops import WorkPlan
from ppoctl.plan.run_plan import plan
from ppoctl.plan.transfer import TransferPlan
from ppoctl.recipe.loading.load import load
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import MANIFEST, RunPaths
from ppoctl.store.saved_by import SavedBy, saved_by
from recipe.conftest import Write
from rewards.reward_models import reward_model

RECIPES = Path(__file__).parents[2] / "recipes"
QUICKSTART, MODELS = RECIPES / "quickstart", RECIPES / "models"


def test_planned_batches_and_updates(smallest: Path) -> None:
    sets = ["rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "ppo.minibatch_seqs=8"]
    sets += ["ppo.epochs=2", "ppo.critic_epochs=3", "ppo.critic_only_steps=4", "checkpoint.every_steps=3"]
    sets += ["actor.batching.microbatch_seqs=3", "critic.batching.max_tokens_per_microbatch=70"]
    sets += ["actor.optimizer={lr=1e-3, lr_schedule='linear', lr_warmup_updates=12, lr_min_frac=0.1}"]
    planned = plan(load([smallest], sets, {}).recipe)
    batch, actor, critic = planned.batch, planned.roles["actor"], planned.roles["critic"]
    assert batch.sequences_per_step == 24  # 6 prompts x 4 samples
    assert (actor.minibatch_seqs, actor.minibatches_per_epoch) == (8, 3)  # 24 / 8
    assert batch.window_tokens == 33  # 20 + 13
    assert batch.tokens_per_step_max == 24 * 33
    assert batch.new_tokens_per_step_max == 24 * 13
    assert (actor.updates_per_step, critic.updates_per_step) == (6, 9)  # 3 minibatches x 2 and x 3 epochs
    assert (actor.updates_total, critic.updates_total) == (36, 90)  # 6 steps with the actor, 10 with the critic
    assert actor.warmup_steps == 2.0  # 12 updates / 6 per step
    assert actor.lr_first == pytest.approx(1e-3 / 12)
    # Update 35 of 36: progress (35 - 12) / (36 - 12) = 23/24, so 1e-3 x (0.1 + 0.9 / 24).
    assert actor.lr_last == pytest.approx(1e-3 * 0.1375)
    assert actor.microbatches_per_minibatch_max == actor.microbatches_per_minibatch_min == 3  # 8 / 3, rounded up
    assert critic.microbatches_per_minibatch_max == 4  # two sequences of 32 fit into 70
    assert critic.microbatches_per_minibatch_min == 1
    assert (actor.replayed_updates_max, critic.replayed_updates_max) == (18, 27)  # three steps
    assert planned.storage.saves == 4  # after 3, 6, 9 and 10
    assert planned.storage.parameters is None


def test_plan_lists_reward_shaping_in_order(smallest: Path) -> None:
    assert plan(load([smallest], [], {}).recipe).rewards == {"truncated": "responses count as finished"}
    sets = ["reward.scale={from=[0, 1], to=[0, 1.5]}", "reward.clip={low=-1, high=1}", "reward.moments.kind=running"]
    sets += [
        "reward.overlong={buffer_tokens=4, penalty=0.5}",
        "reward.length_penalty={per_token=0.01, free_tokens=8}",
    ]
    sets += ["reward.unfinished_factor=0.25", "ppo.truncated=bootstrap"]
    recipe = load([smallest], sets, {}).recipe
    told = {
        "scale": "0 .. 1 becomes 0 .. 1.5",
        "clip": "to -1 .. 1",
        "moments": "divided by the standard deviation of the run so far",
        "unfinished": "truncated responses x 0.25",
        "overlong": "lower from 9 tokens on, -0.5 at 13, and no lower beyond",
        "length": "-0.01 for each token beyond 8",
        "truncated": "responses continue with the critic's value",
    }
    assert list(plan(recipe).rewards.items()) == list(told.items())
    taken = [type(step).__name__ for step in shaping_steps(recipe.reward, max_new_tokens=13)]
    lengths = ["ScaleTruncated", "PenalizeOverlong", "PenalizeLength"]
    assert taken == ["ApplyScale", "ApplyClip", "NormalizeByRunningStd", *lengths]


def test_plan_lists_alternative_reward_shaping(smallest: Path) -> None:
    sets = ["reward.clip={low=-1, high=1, place='after_moments'}", "reward.overlong={buffer_tokens=4, floor=false}"]
    sets += ["reward.moments={kind='reference', std=2, center=true}", "ppo.truncated=filter"]
    recipe = load([smallest], sets, {}).recipe
    assert list(plan(recipe).rewards.items()) == [
        ("moments", "minus the mean of the first step whose rewards are not all equal, divided by 2"),
        ("clip", "to -1 .. 1"),
        ("overlong", "lower from 9 tokens on, -1 at 13, and lower beyond"),
        ("truncated", "responses are left out of all losses"),
    ]
    taken = [type(step).__name__ for step in shaping_steps(recipe.reward, max_new_tokens=13)]
    assert taken == ["NormalizeByReferenceStd", "ApplyClip", "PenalizeOverlong"]


def test_warmup_may_be_fraction_of_run_and_rate_follow_steps(smallest: Path) -> None:
    # Two updates per step; the actor trains in 7 of 10 steps: 0.35 of 7 steps is 2.45, so 2 steps.
    schedule = "lr=1.0, lr_warmup_frac=0.35, lr_schedule='linear'"
    sets = ["ppo.critic_only_steps=3", f"actor.optimizer={{{schedule}, lr_ticks='step', lr_warmup_init_frac=0.25}}"]
    planned = plan(load([smallest], [*sets, f"critic.optimizer={{{schedule}}}"], {}).recipe)
    actor, critic = planned.roles["actor"], planned.roles["critic"]
    assert (actor.warmup_updates, actor.warmup_steps) == (4, 2.0)
    # Steps of the actor: 1/4 and 5/8 of the peak, then 1, 4/5, 3/5, 2/5, 1/5.
    assert (actor.lr_first, actor.lr_last) == (0.25, pytest.approx(0.2))
    assert (critic.warmup_updates, critic.warmup_steps) == (7, 3.5)  # 0.35 of 20 updates
    assert (critic.lr_first, critic.lr_last) == (1 / 7, pytest.approx(1 / 13))  # 19 of 7 ... 20


def test_critic_minibatch_size_sets_its_updates_and_microbatches(smallest: Path) -> None:
    sets = ["rollout.prompts_per_step=24", "ppo.minibatch_seqs=8", "ppo.critic_minibatch_seqs=12", "ppo.epochs=2"]
    batching = "batching.microbatch_seqs=3"
    planned = plan(load([smallest], [*sets, f"actor.{batching}", f"critic.{batching}"], {}).recipe)
    actor, critic = planned.roles["actor"], planned.roles["critic"]
    assert (critic.minibatch_seqs, critic.minibatches_per_epoch, critic.updates_per_step) == (12, 2, 4)  # 24 / 12
    assert (actor.minibatch_seqs, actor.minibatches_per_epoch, actor.updates_per_step) == (8, 3, 6)
    assert (actor.updates_total, critic.updates_total) == (60, 40)
    assert (actor.microbatches_per_minibatch_max, critic.microbatches_per_minibatch_max) == (3, 4)  # 8 / 3, 12 / 3


def test_interleaved_stages_pad_microbatches_to_all_ranks(smallest: Path) -> None:
    """8 sequences fit in 3 microbatches; two ranks of two stages require 4."""
    sets = ["rollout.prompts_per_step=8", "ppo.minibatch_seqs=8", "actor.batching.microbatch_seqs=3"]
    sets += ["actor.batching.forward_microbatch_seqs=7", "actor.recompute='selective'"]
    counts = []
    for stages in (1, 2):
        layout = f"actor.parallel={{pipeline=2, stages_per_rank={stages}}}"
        actor = plan(load([smallest], [*sets, layout], {}).recipe).roles["actor"]
        counts.append((actor.microbatches_per_minibatch_min, actor.microbatches_per_minibatch_max))
    assert counts == [(3, 3), (4, 4)]
    assert (actor.forward_microbatch, actor.recompute) == ("7 sequences", "selective")


def test_microbatches_split_rank_rows_of_minibatch(smallest: Path) -> None:
    """8 sequences on two data ranks, in microbatches of 3: 2 on each rank, not 3."""
    sets = ["rollout.prompts_per_step=8", "ppo.minibatch_seqs=8", "actor.batching.microbatch_seqs=3"]
    sets += ["actor.parallel={data=2}", "critic.parallel={data=1}", "critic.batching.microbatch_seqs=3"]
    planned = plan(load([smallest], sets, {}).recipe)
    assert (planned.roles["actor"].data_ranks, planned.roles["actor"].microbatches_per_minibatch_max) == (2, 2)
    assert planned.roles["critic"].microbatches_per_minibatch_max == 3


def test_run_shorter_than_save_interval_is_planned_by_its_steps(smallest: Path) -> None:
    sets = [f"model.path={QUICKSTART / 'model'}", "model.dtype=float32", "checkpoint.every_steps=50"]
    best = ["checkpoint.best=reward/score_mean", "checkpoint.best_keep=40"]
    plain, kept = (plan(load([smallest], [*sets, *more], {}).recipe) for more in ([], best))
    assert (plain.roles["actor"].replayed_updates_max, plain.storage.saves) == (20, 1)
    assert plain.storage.states_bytes is not None
    assert plain.storage.parameters is not None
    # One state of each of the 10 steps, and one that is being replaced.
    assert kept.storage.states_bytes == plain.storage.states_bytes + 11 * 4 * plain.storage.parameters


def test_lr_decay_ends_at_lr_decay_updates(smallest: Path) -> None:
    optimizer = "{lr=1.0, lr_schedule='linear', lr_decay_updates=4, lr_min_frac=0.25}"
    recipe = load([smallest], [f"actor.optimizer={optimizer}"], {}).recipe
    rate = learning_rate_of(recipe, "actor")
    assert [rate.at(update) for update in (0, 2, 4, 19)] == pytest.approx([1.0, 0.625, 0.25, 0.25])
    assert plan(recipe).roles["actor"].lr_last == 0.25


def test_reward_model_pass_count_follows_text_length(smallest: Path, tmp_path: Path) -> None:
    """4 sequences of 33 tokens on two data ranks. A microbatch of 64 tokens holds one text; of 66 tokens, two."""
    judge = reward_model(tmp_path / "judge")
    passes = {}
    for most in (32, 64, 66):
        reward = f"reward={{kind='model', path='{judge}', max_tokens={most}, parallel={{data=2}}}}"
        estimate = plan(load([smallest], [reward], {}).recipe).reward_models["reward"]
        assert (estimate.max_tokens, estimate.layout) == (most, "data 2")
        passes[most] = estimate.passes_per_step_max
    assert passes == {32: 2, 64: 2, 66: 1}


def test_planned_processes_and_devices(smallest: Path) -> None:
    alone = plan(load([smallest], [], {}).recipe)
    assert (alone.is_one_process, alone.devices) == (True, 1)
    sets = ["generator.engines=2", "generator.tensor=3", "actor.parallel={data=4}", "critic.parallel={data=5}"]
    shared = plan(load([smallest], sets, {}).recipe)
    assert (shared.processes, shared.devices) == ({"actor": 4, "critic": 5, "generator": 6}, 6)
    assert not shared.is_one_process
    assert plan(load([smallest], [*sets, "cluster={placement='apart'}"], {}).recipe).devices == 15


def test_dataset_rows_and_evaluations_are_counted(write: Write, smallest: Path) -> None:
    write('{"question": 1}\n\n{"question": 2}\n{"question": 3}', "train.jsonl")
    write("{}\n" * 9, "e.jsonl")
    sets = ["data.eval.e={format='gsm8k', path='e.jsonl', max_rows=5}", "eval.samples_per_prompt=3"]
    planned = plan(load([smallest], [*sets, "eval.every_steps=4"], {}).recipe)
    assert planned.train.rows == 3
    assert planned.train.prompts_total == 40
    assert planned.train.epochs == pytest.approx(40 / 3)
    assert planned.eval_sets["e"].rows == 5
    assert planned.evaluation.at_steps == (0, 4, 8, 10)
    assert planned.evaluation.responses_per_evaluation == 5 * (1 + 3)
    assert json.loads(json.dumps(planned.as_dict()))["evaluation"]["at_steps"] == [0, 4, 8, 10]
    shorter = plan(load([smallest], [*sets, "eval.every_steps=4", "eval.at_end=false"], {}).recipe)
    assert shorter.evaluation.at_steps == (0, 4, 8)


def test_missing_dataset_is_unknown_and_not_an_error(smallest: Path) -> None:
    planned = plan(load([smallest], ["data.eval.e={format='gsm8k', path='e.jsonl'}"], {}).recipe)
    assert planned.train.rows is None
    assert planned.train.epochs is None
    assert planned.evaluation.responses_per_evaluation is None


def test_actor_has_no_updates_in_critic_only_steps(smallest: Path) -> None:
    recipe = load([smallest], ["ppo.critic_only_steps=3"], {}).recipe
    assert (planned_updates(recipe, "actor"), planned_updates(recipe, "critic")) == (14, 20)


def test_actor_has_fewest_updates_if_the_critic_trains_alone_as_long_as_allowed(smallest: Path) -> None:
    recipe = load([smallest], ["ppo.critic_only_until={explained_variance=0.25, at_most=3}"], {}).recipe
    planned = plan(recipe)
    actor, critic = planned.roles["actor"], planned.roles["critic"]
    assert (actor.updates_total_min, actor.updates_total) == (14, 20)  # two updates in 7 or 10 steps
    assert (critic.updates_total_min, critic.updates_total) == (20, 20)
    assert planned.algorithm["critic alone"] == "until the explained variance is 0.25, for at most 3 steps"


def test_greedy_responses_are_counted_once_per_prompt(smallest: Path) -> None:
    sets = ["rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "ppo.minibatch_seqs=8"]
    sets += [f"model.path={QUICKSTART / 'model'}", "model.dtype=float32"]
    text = smallest.read_text("utf-8")
    smallest.write_text(text[: text.index("[critic.optimizer]")], "utf-8")
    kinds = ("remax", "grpo")
    remax, grpo = (plan(load([smallest], [*sets, f"ppo.advantages.kind={kind}"], {}).recipe) for kind in kinds)
    assert remax.work is not None
    assert grpo.work is not None
    assert (remax.batch.new_tokens_per_step_max, grpo.batch.new_tokens_per_step_max) == (30 * 13, 24 * 13)
    assert remax.batch.tokens_per_step_max == grpo.batch.tokens_per_step_max == 24 * 33
    assert remax.work.drawing == pytest.approx(grpo.work.drawing * 30 / 24)
    assert (remax.work.forwards, remax.work.updates) == (grpo.work.forwards, grpo.work.updates)
    assert remax.memory is not None
    # 6 rows of the 24 of the rollout, and as many scores with their outcomes.
    assert remax.memory.records["greedy_rollout"] * 4 == remax.memory.records["rollout"]
    assert remax.memory.records["greedy_reward"] == 6 * (4 + 8)
    more = remax.storage.records_bytes - grpo.storage.records_bytes
    assert more == remax.memory.records["greedy_rollout"] + 6 * (4 + 8)
    assert remax.memory.schedule.of("draws") == ("rollout", "greedy_rollout", "eval")


def small_critic(folder: Path) -> Path:
    """One layer of half the width, and the head of a critic: embedding 576 x 64, and the layer's own numbers."""
    model = json.loads((QUICKSTART / "model/config.json").read_text("utf-8"))
    changed = {"hidden_size": 64, "num_hidden_layers": 1, "architectures": ["Qwen2ForSequenceClassification"]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**model, **changed, "layer_types": None}), "utf-8")
    return folder


def test_different_critic_model_has_separate_byte_counts(smallest: Path, tmp_path: Path) -> None:
    small = small_critic(tmp_path / "small")
    sets = [f"model.path={QUICKSTART / 'model'}", "model.dtype=float32"]
    alike = plan(load([smallest], sets, {}).recipe)
    own = plan(load([smallest], [*sets, f"model.critic={{path='{small}', dtype='bfloat16'}}"], {}).recipe)
    assert alike.critic_start is None
    assert own.critic_start is not None
    # Attention 64 x 64 twice, 64 x 32 twice, biases 64 + 2 x 32; MLP 3 x 64 x 384; two norms, a last one; the head.
    numbers = 576 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 128 + 3 * 64 * 384 + 3 * 64 + 64
    assert (own.critic_start.parameters, own.critic_start.dtype) == (numbers, "bfloat16")
    assert own.storage.state_bytes["critic"] == numbers * (2 + 4 + 8)  # bfloat16, main weights, two moments
    assert own.storage.state_bytes["actor"] == alike.storage.state_bytes["actor"]
    assert own.memory is not None
    assert alike.memory is not None
    assert own.memory.roles["critic"].largest.weights == numbers * 2
    assert own.memory.roles["actor"] == alike.memory.roles["actor"]
    assert own.memory.generator == alike.memory.generator
    gone = plan(load([smallest], [*sets, "model.critic=org/gone"], {}).recipe)
    assert (gone.memory, gone.storage.states_bytes) == (None, None)


def test_another_reference_needs_the_memory_of_the_base_model(smallest: Path, tmp_path: Path) -> None:
    other = shutil.copytree(QUICKSTART / "model", tmp_path / "other")
    sets = [f"model.path={QUICKSTART / 'model'}", "model.dtype=float32", "ppo.kl={place='loss', coef=0.1}"]
    alike, own = (plan(load([smallest], [*sets, *more], {}).recipe) for more in ((), (f"model.reference={other}",)))
    assert own.memory is not None
    assert own.memory == alike.memory
    assert own.memory.roles["actor"].largest.reference == own.memory.roles["actor"].largest.weights > 0
    assert own.storage == alike.storage
    assert own.algorithm["KL"] == f"{alike.algorithm['KL']}; reference `{other}`"


def test_plan_lists_algorithm_with_active_settings(smallest: Path) -> None:
    sets = [
        "ppo.advantages={kind='gae', gamma=0.0, gae_lambda=0.9, whiten=false}",
        "ppo.policy_loss={kind='gspo', entropy_coef=0.01}",
        "ppo.kl={place='reward', coef=0.05, estimator='k1', adaptive={target_per_token=0.1, horizon_seqs=200}}",
        "ppo.rollout_correction={kind='tis'}",
        "ppo.rollout_rejection={kind='ratio', level='token', max_ratio=3.0}",
        "ppo.max_sequence_gap=1.5",
    ]
    told = plan(load([smallest], sets, {}).recipe).algorithm
    assert told["advantages"] == "gae: gamma 0, gae_lambda 0.9, whiten off"
    assert told["actor's loss"].startswith("gspo: aggregation sequence_mean_token_mean, entropy_coef 0.01, clip_low")
    assert told["KL"].endswith("adaptive (target_per_token 0.1, horizon_seqs 200)")
    assert told["KL"].startswith("in the reward: estimator k1, coef 0.05")
    assert (
        told["correction"] == "tis: max_ratio 2; ratio: statistic k1, level token, max_ratio 3; max_sequence_gap 1.5"
    )
    assert "early end" not in told
    ends = 'until={"reward/score_mean"={min=0.5}, "policy/entropy_mean"={min=1, max=2}}'
    told = plan(load([smallest], ["ppo.old_logprobs=sampler", ends], {}).recipe).algorithm
    assert told["early end"] == (
        "when `reward/score_mean` is at least 0.5 and `policy/entropy_mean` is at least 1 and at most 2"
    )
    assert told["old log-probs"] == "of the generator, without a forward pass of the actor"


def test_saved_critic_state_names_its_run(smallest: Path, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "runs/first")
    folder = small_critic(paths.state("critic", 12))
    rest: dict[str, Any] = {"inputs": (), "fingerprint": "", "files": {}, "seconds": 0.0, "committed_at": 0.0}
    state = Manifest(stage="state/critic", step=12, identity="abc", attempt=1, **rest)
    (folder / MANIFEST).write_text(state.to_text(), "ascii")
    start = plan(load([smallest], [f"model.critic={folder}"], {}).recipe).critic_start
    assert start is not None
    assert start.saved_by == SavedBy(None, "critic", 12, "abc")
    paths.run_json.write_text("{}", "ascii")
    assert saved_by(folder) == SavedBy(str(paths.root), "critic", 12, "abc")
    for copied in (tmp_path / "elsewhere/states/critic/12", folder.with_name("copied")):
        shutil.copytree(folder, copied)
        assert saved_by(copied) == SavedBy(None, "critic", 12, "abc")


def test_quickstart_model_bytes_match_weights_file(smallest: Path) -> None:
    weights = QUICKSTART / "model" / "model.safetensors"
    sets = [f"model.path={QUICKSTART / 'model'}", "model.dtype=float32", "checkpoint.every_steps=4"]
    storage = plan(load([smallest], sets, {}).recipe).storage
    assert storage.parameters is not None
    header = int.from_bytes(weights.read_bytes()[:8], "little") + 8
    assert storage.parameters * 4 == weights.stat().st_size - header
    assert storage.state_bytes["actor"] == storage.parameters * 12  # weights, two moments; no main weights in float32
    assert storage.state_bytes["critic"] == (storage.parameters + 128) * 12  # tied: plus a head of 128 numbers
    pair = sum(storage.state_bytes.values())
    assert storage.states_bytes == pair * (min(ceil(10 / 4), 2) + 2)  # one being written, one saved by a stop
    more = ["checkpoint.keep_last=all", "checkpoint.best=reward/score_mean", "checkpoint.best_keep=4"]
    kept = plan(load([smallest], [*sets, *more], {}).recipe).storage
    assert kept.states_bytes == pair * (3 + 2) + 5 * storage.parameters * 4  # the fifth exists while one is replaced
    assert kept.records_kept_bytes == storage.records_kept_bytes
    assert storage.records_kept_bytes == storage.records_bytes * 8  # two checkpoints, four steps apart


def test_flops_of_a_step(smallest: Path) -> None:
    """4 sequences of 20 + 13 tokens. Weights of a layer: queries and output 128 x 128 each, keys and values 128 x 64
    each, MLP 3 x 128 x 384. A token takes one multiplication and one addition per weight."""
    sets = [f"model.path={QUICKSTART / 'model'}", "ppo.epochs=2", "ppo.critic_epochs=3"]
    weights, tokens, pairs = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384), 33, 33 * 34 // 2
    layers = 2 * weights * tokens + 4 * 128 * 4 * pairs
    actor, critic = 4 * (layers + 2 * 576 * 128 * tokens), 4 * (layers + 2 * 128 * tokens)
    work = plan(load([smallest], sets, {}).recipe).work
    assert work == WorkPlan(drawing=actor, forwards=actor + critic, updates=3 * (2 * actor + 3 * critic))
    with_reference = plan(load([smallest], [*sets, "ppo.kl={place='loss', coef=0.1}"], {}).recipe).work
    assert with_reference is not None
    assert with_reference.forwards == 2 * actor + critic
    by_sampler = plan(load([smallest], [*sets, "ppo.old_logprobs=sampler"], {}).recipe).work
    assert by_sampler is not None
    assert by_sampler.forwards == critic
    assert plan(load([smallest], ["model.path=org/gone"], {}).recipe).work is None


def test_plan_advises_engines_that_fit_and_that_the_loader_accepts(smallest: Path) -> None:
    """A model of 1.2B: three engines on a GPU of 80 GiB, and none more where contexts and graphs do not fit."""
    model = [f"model.path={MODELS / 'meta-llama--Llama-3.2-1B'}", "model.dtype=bfloat16"]
    many = [*model, "rollout.prompts_per_step=512", "cluster.offload=['actor', 'critic', 'generator']"]

    def advised(gpu_gib: float, *sets: str) -> int:
        return plan(load([smallest], [*many, *sets], {}).recipe, gpu_gib).advised_engines_per_gpu

    assert advised(80.0) == 3
    assert advised(80.0, "generator.engines_per_gpu=2") == 3
    assert advised(80.0, "generator.tensor=2") == 1
    assert advised(80.0, "cluster={placement='apart', weights='broadcast', offload=[]}") == 1
    assert advised(80.0, "generator.gpu_memory_frac=0.99") == 1


MOE_LAYER = 4 * 2048**2 + 3 * 2048 + 3 * 2048 * 5632
"""Parameters of attention, its biases, and the shared expert of a layer of Qwen1.5-MoE."""
MOE_BYTES = 2 * (24 * (MOE_LAYER + 60 * 3 * 2048 * 1408 + 61 * 2048 + 2 * 2048) + 2048 + 2 * 151936 * 2048)
"""26.665 GiB: also experts, router, gate of the shared expert, norms, embedding and output layer."""
LORA = "actor.train={lora={rank=8}}"


@pytest.mark.parametrize(
    ("gpu_gib", "sets", "later", "through", "seconds"),
    [
        (80.0, [], MOE_BYTES, "GPU memory", 13.79),  # 26.665 / 2.9 x 1.5
        (80.0, ["cluster.weights=store"], MOE_BYTES, "host memory", 40.46),  # 26.665 / 2.9 x 4.4
        (80.0, ["generator.engines=9"], MOE_BYTES, "host memory", 40.46),  # two nodes
        (80.0, ["cluster={placement='apart', weights='broadcast'}"], MOE_BYTES, None, None),
        (80.0, [LORA], 2 * 24 * MOE_LAYER, "GPU memory", 13.79),
        (80.0, [LORA, "cluster.offload=['actor']"], 2 * 24 * MOE_LAYER, "GPU memory", 13.79),
        (80.0, [LORA, "cluster.offload=['generator']"], MOE_BYTES, "GPU memory", 13.79),
        (None, [LORA], 2 * 24 * MOE_LAYER, None, None),
    ],
)
def test_transfer_of_a_mixture(
    smallest: Path, gpu_gib: float | None, sets: list[str], later: int, through: str | None, seconds: float | None
) -> None:
    model = [f"model.path={MODELS / 'Qwen--Qwen1.5-MoE-A2.7B-Chat'}", "model.dtype=bfloat16"]
    found = plan(load([smallest], [*model, *sets], {}).recipe, gpu_gib).transfer
    assert found is not None
    assert (found.bytes, found.later_bytes, found.through) == (MOE_BYTES, later, through)
    assert found.seconds == (None if seconds is None else pytest.approx(seconds, abs=0.01))
    # 40.46 s through host memory, 26.665 / 26 x 41 s to write, 19 s to start
    restart = None if gpu_gib is None else pytest.approx(101.51, abs=0.01)
    assert found.restart_seconds == restart


def test_engines_of_a_dense_model_never_restart_for_a_transfer(smallest: Path) -> None:
    """862,336 parameters in float32."""
    model = [f"model.path={QUICKSTART / 'model'}", "model.dtype=float32"]
    found = plan(load([smallest], model, {}).recipe, 80.0).transfer
    size = 4 * 862_336
    assert found == TransferPlan(size, size, "GPU memory", pytest.approx(size / 2**30 / 2.9 * 1.5), None)
    assert plan(load([smallest], ["model.path=org/gone"], {}).recipe, 80.0).transfer is None


@pytest.mark.parametrize("name", ["qwen1.5_moe_a2.7b-gsm8k_megatron", "moonlight16b_a3b_gsm8k_megatron"])
def test_table_of_transfers_equals_plan(name: str) -> None:
    planned = plan(load([RECIPES / f"verl/{name}.toml"], [], {"PPOCTL_DATA": "/data"}).recipe, 80.0)
    memory, transfer = planned.memory, planned.transfer
    assert memory is not None
    assert transfer is not None
    [place] = memory.places
    [in_place] = (stage.bytes for stage in place.stages if stage.stage == "rollout")
    found = (transfer.bytes, in_place, in_place - memory.sending.experts)
    weights, changing, restarting = map(units.size, found)
    in_place_s, restart_s = f"{transfer.seconds:.0f} s", f"{transfer.restart_seconds:.0f} s"
    row = f"| `verl/{name}` | {weights} | {in_place_s}, {changing} in `rollout` | {restart_s}, {restarting} |"
    assert row in (RECIPES.parent / "docs/gpu.md").read_text()
