"""Rules across tables: each error names both keys, their values and their origins."""
# ruff: noqa: E501 - a transcript is one line

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from ppoctl.algorithms.sizes import warmup_updates
from ppoctl.core.finding import Level
from ppoctl.recipe import cadence
from ppoctl.recipe.loading import rules
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.loading.rules import (
    all_rules,
    critic_rules,
    environment_rules,
    estimators_rules,
    frozen_rules,
    groups_rules,
    layout_rules,
    lora_rules,
    router_rules,
    slurm_rules,
    value_head_rules,
)
from ppoctl.recipe.loading.rules.all_rules import rules_of
from ppoctl.recipe.loading.rules.metrics_rules import is_lower_better
from recipe.conftest import SMALLEST, Write, refusal

EVAL = "data.eval.e={format='gsm8k', path='e.jsonl'}"

# Settings on top of the smallest recipe (4 prompts x 1 sample, minibatches of 2, window 20 + 13, 10 steps, so 20
# updates of each role), and the message for them.
AHEAD = ("rollout.ahead=1", "ppo.rollout_correction.kind=tis")
PARTIAL = ("rollout.tokens_per_step=5", "ppo.rollout_correction.kind=tis")
CASES: list[tuple[str, list[str], str]] = [
    (
        "check_row_source",
        ["data.train={format='columns', prompt='q', answer='a'}"],
        '--set: [data.train] has no rows: `path` is missing: `data.train.format` = `"columns"` (--set)',
    ),
    (
        "check_row_source",
        ["data.train={format='gsm8k', path='/x.jsonl', dataset={path='org/x'}}"],
        '--set: [data.train] has both `path` and `dataset`: `data.train.path` = `"/x.jsonl"` '
        '(--set), `data.train.dataset.path` = `"org/x"` (--set)',
    ),
    (
        "check_mix_weights",
        ["data.train.weight=2.0"],
        "--set: `weight` applies only to sources of a mix; [data.train] is not one: `data.train.weight` = `2.0` (--set)",
    ),
    (
        "check_mix_weights",
        ["data.eval.e={format='mix', sources={a={format='gsm8k', path='/x.jsonl', weight=0.5}}}"],
        "--set: an evaluation uses each row of each source once, so a weight has no effect: `data.eval.e.sources.a.weight` = `0.5` (--set)",
    ),
    (
        "check_prompt_file_conflicts",
        ["data.train={format='gsm8k', path='/x.jsonl', prompt_file='/p.txt', instruction='i'}"],
        "--set: a prompt file contains the complete prompt, so `instruction` has no effect: `data.train.prompt_file` = "
        '`"/p.txt"` (--set), `data.train.instruction` = `"i"` (--set)',
    ),
    (
        "check_template_arguments",
        ["data.train.template_args.tools=1"],
        "--set: the argument `tools` of the chat template is set by ppoctl: `data.train.template_args.tools` = `1` (--set)",
    ),
    (
        "check_reward_has_ground_truth",
        ["data.train={format='dialogues', path='/x.jsonl'}"],
        "--set: the reward compares with a ground truth, but [data.train] has none: its rows are dialogues: "
        '`data.train.format` = `"dialogues"` (--set), `reward.kind` = `"gsm8k"` (r.toml:13)',
    ),
    (
        "check_loss_penalty_has_gradient",
        ["ppo.kl={place='loss', coef=0.1, estimator='k1'}"],
        '--set: k1 as a loss has a gradient with mean 0, so it has no effect: `ppo.kl.gradient` = `"estimator"` '
        '(default), `ppo.kl.estimator` = `"k1"` (--set)',
    ),
    (
        "check_full_kl_options",
        ["ppo.kl={place='reward', coef=0.1, estimator='full', input_clamp=20.0}"],
        "--set: the full KL has no difference of two log-probs to clamp: `ppo.kl.estimator` = "
        '`"full"` (--set), `ppo.kl.input_clamp` = `20.0` (--set)',
    ),
    (
        "check_full_kl_options",
        ["ppo.kl={place='loss', coef=0.1, estimator='full', gradient='k2'}"],
        '--set: the full KL has its own gradient: `ppo.kl.estimator` = `"full"` (--set), '
        '`ppo.kl.gradient` = `"k2"` (--set)',
    ),
    (
        "check_full_kl_options",
        ["ppo.kl={place='reward', coef=0.1, estimator='full'}", "ppo.old_logprobs=sampler"],
        "--set: the full KL needs a forward pass of the actor, but none is run: "
        '`ppo.kl.estimator` = `"full"` (--set), `ppo.old_logprobs` = `"sampler"` (--set)',
    ),
    (
        "check_adaptive_coef_positive",
        [
            "ppo.kl={place='reward', coef=0.1, adaptive={target_per_sequence=0.1, horizon_seqs=1}}",
            "rollout.samples_per_prompt=2",
        ],
        "--set: one step of 8 sequences may reduce the coefficient to 0 or below: `ppo.kl.adaptive.horizon_seqs` = `1` "
        "(--set)",
    ),
    (
        "check_adaptive_coef_has_kl",
        [
            "ppo.kl={place='loss', coef=0.1, adaptive={target_per_token=0.1}}",
            "ppo.old_logprobs=current",
            "ppo.minibatch_seqs=4",
        ],
        "--set: the coefficient adapts to the KL of the actor's log-probs before its update, but they are not computed: "
        '`ppo.old_logprobs` = `"current"` (--set)',
    ),
    (
        "check_adaptive_coef_has_kl",
        [
            "ppo.kl={place='loss', coef=0.1, estimator='full', adaptive={target_per_token=0.1}}",
            "ppo.old_logprobs=sampler",
        ],
        "--set: the coefficient adapts to the KL of the actor's log-probs before its update, but they are not computed: "
        '`ppo.old_logprobs` = `"sampler"` (--set)',
    ),
    (
        "check_correction_has_trainer_logprobs",
        ["ppo.max_sequence_gap=1.5", "ppo.old_logprobs=sampler"],
        "--set: a correction compares the sampler's log-probs with the trainer's, but the trainer computes none: "
        '`ppo.max_sequence_gap` = `1.5` (--set), `ppo.old_logprobs` = `"sampler"` (--set)',
    ),
    (
        "check_rejection_bounds",
        ["ppo.rollout_rejection={kind='ratio', level='token'}"],
        '--set: k1 has no bound: set `min_ratio` or `max_ratio`: `ppo.rollout_rejection.statistic` = `"k1"` (default), `ppo.rollout_rejection.kind` = `"ratio"` (--set)',
    ),
    (
        "check_rejection_bounds",
        ["ppo.rollout_rejection={kind='ratio', level='token', statistic='k2'}"],
        '--set: k2 has no bound: set `max`: `ppo.rollout_rejection.statistic` = `"k2"` (--set), `ppo.rollout_rejection.kind` = `"ratio"` (--set)',
    ),
    (
        "check_rejection_bounds",
        ["ppo.rollout_rejection={kind='ratio', level='token', statistic='k3', max=0.1, min_ratio=0.5}"],
        "--set: k3 is bounded by `max`, so `min_ratio` has no effect: `ppo.rollout_rejection.min_ratio` = `0.5` (--set), "
        '`ppo.rollout_rejection.statistic` = `"k3"` (--set)',
    ),
    (
        "check_rejection_bounds",
        ["ppo.rollout_rejection={kind='ratio', level='token', max_ratio=2.0, max=0.1}"],
        "--set: k1 is bounded by `min_ratio` or `max_ratio`, so `max` has no effect: `ppo.rollout_rejection.max` = `0.1` "
        '(--set), `ppo.rollout_rejection.statistic` = `"k1"` (default)',
    ),
    (
        "check_minibatch_divides_step",
        ["ppo.minibatch_seqs=3"],
        "--set: the 4 sequences of a step do not divide into minibatches of 3: `ppo.minibatch_seqs` = `3` (--set), "
        "`rollout.prompts_per_step` = `4` (r.toml:9), `rollout.samples_per_prompt` = `1` (default)",
    ),
    (
        "check_minibatch_divides_step",
        ["ppo.critic_minibatch_seqs=3"],
        "--set: the 4 sequences of a step do not divide into minibatches of 3: `ppo.critic_minibatch_seqs` = `3` "
        "(--set), `rollout.prompts_per_step` = `4` (r.toml:9), `rollout.samples_per_prompt` = `1` (default)",
    ),
    (
        "check_microbatch_size",
        ["critic.batching.microbatch_seqs=2", "ppo.critic_minibatch_seqs=1"],
        "--set: a microbatch of 2 sequences is larger than its minibatch of 1: `critic.batching.microbatch_seqs` = "
        "`2` (--set), `ppo.critic_minibatch_seqs` = `1` (--set)",
    ),
    (
        "check_microbatch_size",
        ["actor.batching.microbatch_seqs=4"],
        "--set: a microbatch of 4 sequences is larger than its minibatch of 2: `actor.batching.microbatch_seqs` = `4` "
        "(--set), `ppo.minibatch_seqs` = `2` (r.toml:15)",
    ),
    (
        "check_microbatch_fits_longest_sequence",
        ["critic.batching.max_tokens_per_microbatch=31"],
        "--set: a microbatch of 31 tokens cannot contain a sequence of 32 (prompt + response - 1: the last token is "
        "predicted, not read): `critic.batching.max_tokens_per_microbatch` = `31` (--set), "
        "`rollout.max_prompt_tokens` = `20` (r.toml:10), `rollout.max_new_tokens` = `13` (r.toml:11)",
    ),
    (
        "check_microbatch_fits_longest_sequence",
        ["ppo.truncated=bootstrap", "critic.batching.max_tokens_per_microbatch=32"],
        "--set: a microbatch of 32 tokens cannot contain a sequence of 33 (prompt + response: the critic also reads the last token "
        "of a truncated response): `critic.batching.max_tokens_per_microbatch` = `32` (--set), "
        "`rollout.max_prompt_tokens` = `20` (r.toml:10), `rollout.max_new_tokens` = `13` (r.toml:11)",
    ),
    (
        "check_microbatch_fits_longest_sequence",
        ["actor.batching={max_tokens_per_microbatch=32, forward_max_tokens_per_microbatch=31}"],
        "--set: a microbatch of 31 tokens cannot contain a sequence of 32 (prompt + response - 1: the last token is "
        "predicted, not read): `actor.batching.forward_max_tokens_per_microbatch` = `31` (--set), "
        "`rollout.max_prompt_tokens` = `20` (r.toml:10), `rollout.max_new_tokens` = `13` (r.toml:11)",
    ),
    (
        "check_warmup_fraction",
        ["actor.optimizer.lr_warmup_frac=0.02"],
        "--set: the actor has no warm-up: this fraction of 20 updates rounds to 0: "
        "`actor.optimizer.lr_warmup_frac` = `0.02` (--set)",
    ),
    (
        "check_warmup_length",
        ["actor.optimizer.lr_warmup_updates=21"],
        "--set: a warm-up of 21 updates never ends: the run has only 20 updates of the actor: "
        "`actor.optimizer.lr_warmup_updates` = `21` (--set), `steps` = `10` (r.toml:2)",
    ),
    (
        "check_decay_length",
        ["actor.optimizer={lr=1.0, lr_schedule='linear', lr_warmup_updates=5, lr_decay_updates=5}"],
        "--set: the decay ends at update 5, before the warm-up ends (update 5): `actor.optimizer.lr_decay_updates` = "
        "`5` (--set), `actor.optimizer.lr_warmup_updates` = `5` (--set)",
    ),
    (
        "check_decay_length",
        ["actor.optimizer={lr=1.0, lr_schedule='linear', lr_warmup_frac=0.5, lr_decay_updates=10}"],
        "--set: the decay ends at update 10, before the warm-up ends (update 10): "
        "`actor.optimizer.lr_decay_updates` = `10` (--set), `actor.optimizer.lr_warmup_frac` = `0.5` (--set)",
    ),
    (
        "check_one_warmup_key",
        ["actor.optimizer={lr=1.0, lr_warmup_frac=0.1, lr_warmup_updates=2}"],
        "--set: the warm-up of the actor is set both as a fraction and as a number of updates: "
        "`actor.optimizer.lr_warmup_frac` = `0.1` (--set), `actor.optimizer.lr_warmup_updates` = `2` (--set)",
    ),
    (
        "check_one_warmup_key",
        ["critic.optimizer={lr=1.0, lr_warmup_frac=0.0, lr_warmup_init_frac=0.5}"],
        "--set: `critic.optimizer.lr_warmup_init_frac` is set, but there is no warm-up: "
        "`critic.optimizer.lr_warmup_init_frac` = `0.5` (--set), `critic.optimizer.lr_warmup_updates` = `0` (default)",
    ),
    (
        "check_lr_tick_multiples",
        ["actor.optimizer={lr=1.0, lr_ticks='step', lr_warmup_updates=3}"],
        "--set: the learning rate of the actor changes every 2 updates, and 3 is not a multiple of that: "
        '`actor.optimizer.lr_warmup_updates` = `3` (--set), `actor.optimizer.lr_ticks` = `"step"` (--set)',
    ),
    (
        "check_constant_lr_keys",
        ["actor.optimizer.lr_min_frac=0.1"],
        "--set: `actor.optimizer.lr_min_frac` is set, but a constant learning rate never decays: "
        '`actor.optimizer.lr_min_frac` = `0.1` (--set), `actor.optimizer.lr_schedule` = `"constant"` (default)',
    ),
    (
        "check_expected_step",
        ["ppo.critic_only_until={explained_variance=0, at_most=3}", 'expect."policy/loss"={max=9, at_step=3}'],
        "--set: `policy/loss` is expected at step 3, when only the critic may train: "
        '`expect."policy/loss".at_step` = `3` (--set), `ppo.critic_only_until.at_most` = `3` (--set)',
    ),
    (
        "check_rise_has_two_values",
        ["ppo.critic_only_until={explained_variance=0, at_most=9}", 'expect."policy/loss".rise_min=0.1'],
        "--set: `policy/loss` must rise above its first value, but the run reports it only once: "
        '`expect."policy/loss".rise_min` = `0.1` (--set), `steps` = `10` (r.toml:2)',
    ),
    (
        "check_actor_trains",
        ["ppo.critic_only_steps=10"],
        "--set: the actor never trains: 10 critic-only steps of 10: `ppo.critic_only_steps` = `10` (--set), "
        "`steps` = `10` (r.toml:2)",
    ),
    (
        "check_truncated_factor_sign",
        ["reward.scale={from=[0, 1], to=[-1, 1]}", "reward.unfinished_factor=0.5"],
        "--set: a factor of 0.5 raises the negative reward of a truncated response: "
        "`reward.unfinished_factor` = `0.5` (--set), `reward.scale.to` = `[-1.0, 1.0]` (--set)",
    ),
    (
        "check_part_names",
        ["reward={kind='sum', parts={score={kind='gsm8k'}}}"],
        "--set: `reward/score_mean` is the name of another metric",
    ),
    (
        "check_code_endpoint",
        ["reward={kind='code', sandbox='fusion'}"],
        '--set: a sandbox endpoint requires its address: `reward.sandbox` = `"fusion"` (--set)',
    ),
    (
        "check_code_endpoint",
        ["reward={kind='code', url='http://host:8080/run_code'}"],
        '--set: programs run on this machine, so no endpoint is used: `reward.sandbox` = `"namespaces"` (default), '
        '`reward.url` = `"http://host:8080/run_code"` (--set)',
    ),
    (
        "check_code_endpoint",
        ["reward={kind='sum', parts={tests={kind='code', language='rust'}}}"],
        "--set: programs in `rust` run at an endpoint only: "
        '`reward.parts.tests.sandbox` = `"namespaces"` (default), `reward.parts.tests.language` = `"rust"` (--set)',
    ),
    (
        "check_vllm_reward_model_layout",
        ["reward={kind='sum', parts={judge={kind='model', path='judge', engine='vllm', parallel={tensor=2}}}}"],
        "--set: vLLM runs a reward model in one process; Megatron-Core supports several: "
        '`reward.parts.judge.engine` = `"vllm"` (--set)',
    ),
    (
        "check_offload_without_reward_model",
        ["cluster.offload=['actor', 'reward']"],
        '--set: the reward has no model to offload: `cluster.offload` = `["actor", "reward"]` (--set), '
        '`reward.kind` = `"gsm8k"` (r.toml:13)',
    ),
    (
        "check_positive_nll_reachable",
        ["reward.scale={from=[0, 1], to=[-1, 0]}", "ppo.policy_loss.positive_nll_coef=0.1"],
        "--set: the NLL term trains on responses with a reward above 0, but no response can have one: "
        "`ppo.policy_loss.positive_nll_coef` = `0.1` (--set), `reward.scale.to` = `[-1.0, 0.0]` (--set)",
    ),
    (
        "check_estimator_unbiased_with_filters",
        ["ppo.kl={place='reward', estimator='k3', coef=0.1}", "rollout.top_p=0.9"],
        "--set: k3 is a biased estimate of the KL between a filtered actor and an unfiltered reference: "
        '`ppo.kl.estimator` = `"k3"` (--set), `rollout.top_p` = `0.9` (--set)',
    ),
    (
        "check_best_metric",
        ["checkpoint={best='policy/entropy_mean', best_direction='higher'}"],
        "--set: `policy/entropy_mean` is measured during the actor's update, when the weights it describes "
        'have already been replaced: `checkpoint.best` = `"policy/entropy_mean"` (--set)',
    ),
    (
        "check_whitening_batch",
        ["rollout.prompts_per_step=1", "ppo.minibatch_seqs=1"],
        "--set: whitening the advantages of a single sequence removes the effect of its reward: `ppo.advantages.whiten` = `true` "
        "(default), `rollout.prompts_per_step` = `1` (--set), `rollout.samples_per_prompt` = `1` (default)",
    ),
    (
        "check_dual_clip",
        ["ppo.policy_loss.dual_clip=1.1"],
        "--set: a dual clip of 1.1 is inside the clip at 1 + 0.2: `ppo.policy_loss.dual_clip` = `1.1` (--set), "
        "`ppo.policy_loss.clip_high` = `0.2` (default)",
    ),
    (
        "check_single_update_if_on_policy",
        ["ppo.old_logprobs=current"],
        "--set: the actor has 2 updates per step, but current log-probs equal the old ones only in the first update: "
        '`ppo.old_logprobs` = `"current"` (--set), `ppo.epochs` = `1` (default), `ppo.minibatch_seqs` = `2` (r.toml:15)',
    ),
    (
        "check_reward_penalty_has_logprobs",
        ["ppo.old_logprobs=current", "ppo.minibatch_seqs=4", "ppo.kl={place='reward', coef=0.1}"],
        "--set: a KL penalty in the reward needs the actor's log-probs before its update, but they are not computed: "
        '`ppo.kl.place` = `"reward"` (--set), `ppo.old_logprobs` = `"current"` (--set)',
    ),
    (
        "check_correction_has_trainer_logprobs",
        ["ppo.old_logprobs=sampler", "ppo.rollout_correction.kind=tis"],
        "--set: a correction compares the sampler's log-probs with the trainer's, but the trainer computes none: "
        '`ppo.rollout_correction.kind` = `"tis"` (--set), `ppo.old_logprobs` = `"sampler"` (--set)',
    ),
    (
        "check_normalization_is_on",
        ["ppo.rollout_correction={kind='icepop', normalize_over='tokens'}"],
        "--set: `normalize_over` has no effect, because the weights are not divided by their mean: "
        '`ppo.rollout_correction.normalize_over` = `"tokens"` (--set), `ppo.rollout_correction.normalize` = `false` '
        "(default)",
    ),
    (
        "check_stale_responses_are_corrected",
        ["rollout.ahead=1"],
        "--set: responses are older than the last update, but nothing corrects for the weights that generated them: "
        '`rollout.ahead` = `1` (--set), `ppo.rollout_correction.kind` = `"none"` (default), `ppo.old_logprobs` = '
        '`"trainer"` (default)',
    ),
    (
        "check_stale_responses_are_corrected",
        ["rollout.accept_stale=true"],
        "--set: no response is old, because a step generates its own: `rollout.accept_stale` = `true` (--set), "
        "`rollout.ahead` = `0` (default)",
    ),
    (
        "check_step_has_one_generation",
        [*AHEAD, "ppo.resample.kind=pow"],
        "--set: generation ahead of training does not support rows that are sampled again: `rollout.ahead` = `1` "
        '(--set), `ppo.resample.kind` = `"pow"` (--set)',
    ),
    (
        "check_step_has_one_generation",
        [*AHEAD, "ppo.critic_only_until={explained_variance=0.5, at_most=2}"],
        "--set: generation ahead of training does not support a condition on the critic: `rollout.ahead` = `1` "
        "(--set), `ppo.critic_only_until.explained_variance` = `0.5` (--set)",
    ),
    (
        "check_step_has_one_generation",
        [*AHEAD, "rollout.groups={critic_sees='all'}", "rollout.samples_per_prompt=2"],
        "--set: generation ahead of training does not support a critic that sees all groups: `rollout.ahead` = `1` "
        '(--set), `rollout.groups.critic_sees` = `"all"` (--set)',
    ),
    (
        "check_step_has_one_generation",
        [*PARTIAL, "rollout.groups={}", "rollout.samples_per_prompt=2"],
        "--set: a response of several steps does not support rounds of dynamic sampling: `rollout.tokens_per_step` = "
        "`5` (--set)",
    ),
    (
        "check_step_has_one_generation",
        [*PARTIAL, "rollout.ahead=1", "environment={kind='python', path='env.py:E', turns=2, tokens=20}"],
        "--set: a response of several steps does not support responses of several turns: `rollout.tokens_per_step` = "
        "`5` (--set)",
    ),
    (
        "check_prompts_two_steps_ahead_are_known",
        [*AHEAD, "rollout.ahead=2", "rollout.groups={}", "rollout.samples_per_prompt=2"],
        "--set: generation cannot be two steps ahead: the next step may use the same prompts for further rounds: "
        "`rollout.ahead` = `2` (--set)",
    ),
    (
        "check_prompts_two_steps_ahead_are_known",
        [*PARTIAL, "rollout.ahead=2"],
        "--set: generation cannot be two steps ahead: the next step continues the same responses: `rollout.ahead` = "
        "`2` (--set), `rollout.tokens_per_step` = `5` (--set)",
    ),
    (
        "check_responses_can_continue",
        [*PARTIAL, "rollout.tokens_per_step=13"],
        "--set: no response has more tokens than one step generates, so none continues: `rollout.tokens_per_step` = "
        "`13` (--set), `rollout.max_new_tokens` = `13` (r.toml:11)",
    ),
    (
        "check_responses_can_continue",
        [*PARTIAL, "rollout.stop_strings=['END']"],
        "--set: a stop string that begins in one step and ends in the next would not be found: "
        '`rollout.tokens_per_step` = `5` (--set), `rollout.stop_strings` = `["END"]` (--set)',
    ),
    (
        "check_responses_can_continue",
        [*PARTIAL, "rollout.min_new_tokens=6"],
        "--set: the first step of a response cannot generate its minimum: `rollout.tokens_per_step` = `5` (--set), "
        "`rollout.min_new_tokens` = `6` (--set)",
    ),
    (
        "check_best_actor_is_evaluated",
        [*AHEAD, "checkpoint.best=reward/score_mean"],
        "--set: `reward/score_mean` describes responses of weights that an update has already changed: "
        '`checkpoint.best` = `"reward/score_mean"` (--set), `rollout.ahead` = `1` (--set)',
    ),
    (
        "check_models_stay_on_devices",
        [*AHEAD, "cluster.offload=['critic']"],
        "--set: generator and trainers work at the same time, so none of them can be offloaded: `rollout.ahead` = `1` "
        '(--set), `cluster.offload` = `["critic"]` (--set)',
    ),
    (
        "check_resampling_fits",
        ["ppo.resample={kind='max_min', order='before_whitening'}", "ppo.advantages.whiten=false"],
        "--set: rows are sampled before the advantages are whitened, but the advantages are not whitened: "
        '`ppo.resample.order` = `"before_whitening"` (--set), `ppo.advantages.whiten` = `false` (--set)',
    ),
    (
        "check_reward_scale",
        ["reward.scale={from=[1, 1], to=[0, 1]}"],
        "--set: the lowest score must be below the highest: `reward.scale.from` = `[1.0, 1.0]` (--set)",
    ),
    (
        "check_reward_scale",
        ["reward.scale={from=[0, 1], to=[1, 1]}"],
        "--set: all scores would become the same reward: `reward.scale.to` = `[1.0, 1.0]` (--set)",
    ),
    (
        "check_reward_clip",
        ["reward.clip={low=1, high=1}"],
        "--set: the lowest reward must be below the highest: `reward.clip.low` = `1.0` (--set), "
        "`reward.clip.high` = `1.0` (--set)",
    ),
    (
        "check_overlong_reachable",
        ["reward.overlong.buffer_tokens=200", "rollout.max_new_tokens=100"],
        "--set: a buffer of 200 tokens is longer than a response of 100: `reward.overlong.buffer_tokens` = `200` "
        "(--set), `rollout.max_new_tokens` = `100` (--set)",
    ),
    (
        "check_overlong_reachable",
        ["reward.overlong={buffer_tokens=50, max_tokens=150}", "rollout.max_new_tokens=100"],
        "--set: no response of at most 100 tokens reaches the buffer, which begins at 100: "
        "`reward.overlong.buffer_tokens` = `50` (--set), `reward.overlong.max_tokens` = `150` (--set), "
        "`rollout.max_new_tokens` = `100` (--set)",
    ),
    (
        "check_length_penalty_reachable",
        ["reward.length_penalty={per_token=1, free_tokens=100}", "rollout.max_new_tokens=100"],
        "--set: no response of at most 100 tokens exceeds the 100 tokens without a penalty: "
        "`reward.length_penalty.free_tokens` = `100` (--set), `rollout.max_new_tokens` = `100` (--set)",
    ),
    (
        "check_truncated_factor_used",
        ["ppo.truncated=filter", "reward.unfinished_factor=0.5"],
        "--set: truncated responses are left out, so a factor of their rewards has no effect: "
        '`reward.unfinished_factor` = `0.5` (--set), `ppo.truncated` = `"filter"` (--set)',
    ),
    (
        "check_whitening_batch",
        ["rollout.prompts_per_step=1", "ppo.minibatch_seqs=1", "ppo.advantages.kind=monte_carlo"],
        "--set: whitening the advantages of a single sequence removes the effect of its reward: `ppo.advantages.whiten` = `true` "
        "(default), `rollout.prompts_per_step` = `1` (--set), `rollout.samples_per_prompt` = `1` (default)",
    ),
    (
        "check_reward_has_ground_truth",
        ["reward={kind='exact_match'}"],
        "--set: an exact match with GSM8K's number requires an instruction to answer with only the number: "
        '`reward.kind` = `"exact_match"` (--set), `data.train.format` = `"gsm8k"` (r.toml:6), '
        '`data.train.instruction` = `""` (default)',
    ),
    (
        "check_reward_has_ground_truth",
        ["data.train={format='columns', path='x.jsonl', prompt='q'}"],
        "--set: the reward compares with a ground truth, but [data.train] does not name a column for it: "
        '`data.train.format` = `"columns"` (--set), `reward.kind` = `"gsm8k"` (r.toml:13)',
    ),
    (
        "check_min_new_tokens",
        ["rollout.min_new_tokens=14"],
        "--set: the minimum response length exceeds the maximum: `rollout.min_new_tokens` = `14` (--set), "
        "`rollout.max_new_tokens` = `13` (r.toml:11)",
    ),
    (
        "check_min_new_tokens",
        ["rollout.min_new_tokens=4", "rollout.max_window_tokens=23"],
        "--set: the window is too small for the longest prompt and the shortest response: "
        "`rollout.max_window_tokens` = `23` (--set), `rollout.max_prompt_tokens` = `20` (r.toml:10), "
        "`rollout.min_new_tokens` = `4` (--set)",
    ),
    (
        "check_window_reachable",
        ["rollout.max_window_tokens=34"],
        "--set: no prompt and response together reach the window: `rollout.max_window_tokens` = `34` "
        "(--set), `rollout.max_prompt_tokens` = `20` (r.toml:10), `rollout.max_new_tokens` = `13` (r.toml:11)",
    ),
    (
        "check_stop_token_ids",
        ["rollout.stop_token_ids=[-1]"],
        "--set: stop token ids must be unique and at least 0: `rollout.stop_token_ids` = `[-1]` (--set)",
    ),
    (
        "check_stop_strings",
        ['rollout.stop_strings=["", "Q:"]'],
        '--set: an empty stop string would end every response at once: `rollout.stop_strings` = `["", "Q:"]` (--set)',
    ),
    (
        "check_temperatures",
        ["eval.temperature=2.5"],
        "--set: vLLM does not support temperature `2.5`: it must be between 0.01 and 2.0: "
        "`eval.temperature` = `2.5` (--set)",
    ),
    (
        "check_eval_sample_counts",
        ["eval.pass_at=[1, 8]", "eval.samples_per_prompt=4"],
        "--set: `eval.pass_at` needs 8 responses per prompt, but fewer are generated: `eval.pass_at` = `[1, 8]` "
        "(--set), `eval.samples_per_prompt` = `4` (--set)",
    ),
    (
        "check_eval_sample_counts",
        ["eval.pass_at=[0]"],
        "--set: `eval.pass_at` contains a number below 1: `eval.pass_at` = `[0]` (--set)",
    ),
    (
        "check_eval_sample_counts",
        ["eval.maj_at=[2, 2]", "eval.samples_per_prompt=1001"],
        "--set: `eval.maj_at` contains a number twice: `eval.maj_at` = `[2, 2]` (--set)\n"
        "--set: votes are counted for at most 1000 responses: `eval.maj_at` = `[2, 2]` (--set), "
        "`eval.samples_per_prompt` = `1001` (--set)",
    ),
    (
        "check_eval_sample_counts",
        ["eval.maj_at=[2]", "eval.samples_per_prompt=2", "reward={kind='format', pattern='x'}"],
        "--set: `eval.maj_at` counts votes for answers, but this reward extracts no answers: `eval.maj_at` = "
        '`[2]` (--set), `reward.kind` = `"format"` (--set)',
    ),
    (
        "check_sampled_eval_keys",
        ["eval.passes=greedy", "eval.top_p=0.9"],
        "--set: `eval.top_p` belongs to the sampled pass, but there is none: `eval.top_p` = `0.9` (--set), `eval.passes` = "
        '`"greedy"` (--set)',
    ),
    (
        "check_metrics_reported",
        [EVAL, "eval.passes=greedy", "expect={'eval/e/pass_at_1' = {min=0.0}}"],
        '--set: `eval/e/pass_at_1` belongs to the sampled pass, but there is none: `eval.passes` = `"greedy"` (--set)',
    ),
    (
        "check_metrics_reported",
        [EVAL, "eval.samples_per_prompt=4", "eval.pass_at=[4]", "expect={'eval/e/pass_at_2' = {min=0.0}}"],
        "--set: `eval/e/pass_at_2` needs 2 in `eval.pass_at`",
    ),
    (
        "check_metrics_reported",
        [EVAL, "expect={'eval/e/custom_words' = {min=0.0}}"],
        "--set: `eval/e/custom_words` belongs to a custom metrics function, but there is none",
    ),
    (
        "check_metrics_reported",
        [EVAL, "eval.metrics=m.py:f", "eval.passes=sampled", "expect={'eval/e/greedy_custom_w' = {min=0.0}}"],
        '--set: `eval/e/greedy_custom_w` belongs to the greedy pass, but there is none: `eval.passes` = `"sampled"` (--set)',
    ),
    (
        "check_metrics_reported",
        [EVAL, "eval.pass_at=[1]", "expect={'eval/e/best_at_1' = {min=0.0}}"],
        "--set: `eval/e/best_at_1` requires `eval.pass_score`; without it, `pass_at_k` uses the scores themselves",
    ),
    (
        "check_metrics_reported",
        ["data.eval.e={format='columns', path='e.jsonl', prompt='q'}", "expect={'eval/e/pass_at_1' = {min=0.0}}"],
        "--set: `eval/e/pass_at_1` is computed from scores, but the rows of this set have no ground truth: "
        '`reward.kind` = `"gsm8k"` (r.toml:13)',
    ),
    (
        "check_health_bounds",
        ["health.entropy={min=2.0, max=1.0}"],
        "--set: no value is at least 2.0 and at most 1.0: `health.entropy.min` = `2.0` (--set), `health.entropy.max` = "
        "`1.0` (--set)",
    ),
    (
        "check_stop_rule_has_bound",
        ["health.entropy.action=stop"],
        "--set: [health.entropy] stops the run but has neither `min` nor `max`: `health.entropy.action` = "
        '`"stop"` (--set)',
    ),
    (
        "check_no_secrets",
        ["tracking={kind='mlflow', uri='http://me:hunter2@host'}"],
        "--set: `tracking.uri` contains a password or a token, but a recipe is stored in the run and sent to MLflow",
    ),
    (
        "check_health_metrics",
        ["health.reference_kl.max=1.0"],
        "--set: `health.reference_kl` bounds the KL to a reference, but none is loaded: `ppo.kl.place` = "
        '`"none"` (default)',
    ),
    (
        "check_kl_rule_not_constant",
        ["health.kl.max=0.02", "ppo.old_logprobs=current", "ppo.minibatch_seqs=4"],
        "--set: `health.kl` bounds the KL between old and updated log-probs, which is always 0 with "
        '`ppo.old_logprobs` = `current`: `health.kl.max` = `0.02` (--set), `ppo.old_logprobs` = `"current"` (--set)',
    ),
    (
        "check_expectation_bounds",
        ['expect."policy/entropy".min=1'],
        "--set: no metric is called `policy/entropy`; did you mean `policy/entropy_mean`?",
    ),
    (
        "check_expectation_bounds",
        ['expect."policy/entropy_mean".at_step=2'],
        '--set: `expect."policy/entropy_mean"` has none of `min`, `max` and `rise_min`',
    ),
    (
        "check_expectation_bounds",
        ['expect."policy/entropy_mean"={min=1, max=0}'],
        '--set: no value is at least 1.0 and at most 0.0: `expect."policy/entropy_mean".min` = `1.0` (--set), '
        '`expect."policy/entropy_mean".max` = `0.0` (--set)',
    ),
    (
        "check_expectation_bounds",
        ['expect."policy/entropy_mean"={min=1, at_step=11}'],
        "--set: `policy/entropy_mean` is expected at step 11 of a run of 10 steps: "
        '`expect."policy/entropy_mean".at_step` = `11` (--set), `steps` = `10` (r.toml:2)',
    ),
    (
        "check_until_bounds",
        ['until."policy/entropy".min=1'],
        "--set: no metric is called `policy/entropy`; did you mean `policy/entropy_mean`?",
    ),
    (
        "check_until_bounds",
        ['until."policy/entropy_mean".for_steps=2'],
        '--set: `until."policy/entropy_mean"` has neither `min` nor `max`',
    ),
    (
        "check_until_bounds",
        ['until."policy/entropy_mean"={min=1, max=0}'],
        '--set: no value is at least 1.0 and at most 0.0: `until."policy/entropy_mean".min` = `1.0` (--set), '
        '`until."policy/entropy_mean".max` = `0.0` (--set)',
    ),
    (
        "check_until_bounds",
        ['until."time/rollout_s".max=9'],
        "--set: `time/rollout_s` depends on the machine, so a repeated run could end after another step",
    ),
    (
        "check_until_bounds",
        ['until."memory/values_gib".max=9'],
        "--set: `memory/values_gib` depends on the machine, so a repeated run could end after another step",
    ),
    (
        "check_metrics_reported",
        ['expect."time/values_wait_s".max=1'],
        "--set: `time/values_wait_s` requires that a role is offloaded, but `cluster.offload` lists none: "
        "`cluster.offload` = `[]` (default)",
    ),
    (
        "check_metrics_reported",
        ["ppo.advantages.kind=rloo", "rollout.samples_per_prompt=2", 'expect."time/critic_save_s".max=1'],
        "r.toml:19: [critic] has no effect, because the advantages train no critic: "
        '`critic.optimizer.lr` = `1e-05` (r.toml:19), `ppo.advantages.kind` = `"rloo"` (--set)\n'
        '--set: `time/critic_save_s` belongs to a role that no step of this recipe trains: `ppo.advantages.kind` = `"rloo"` (--set)',
    ),
    (
        "check_expected_step",
        ["checkpoint.every_steps=4", 'expect."time/actor_save_s"={max=1, at_step=9}'],
        "--set: `time/actor_save_s` is expected at step 9, but the run saves no newly trained state then: "
        '`expect."time/actor_save_s".at_step` = `9` (--set), `checkpoint.every_steps` = `4` (--set)',
    ),
    (
        "check_until_can_end",
        ['until."reward/score_mean"={min=1, for_steps=10}'],
        "--set: `reward/score_mean` cannot end the run early: 9 steps before the last report it, fewer than 10: "
        '`until."reward/score_mean".for_steps` = `10` (--set), `steps` = `10` (r.toml:2)',
    ),
    (
        "check_until_can_end",
        [EVAL, 'until."eval/e/pass_at_1".min=0.5'],
        "--set: `eval/e/pass_at_1` cannot end the run early: 0 steps before the last report it, fewer than 1: "
        "`eval.every_steps` = `0` (default), `steps` = `10` (r.toml:2)",
    ),
    (
        "check_until_can_end",  # evaluations follow steps 3, 6 and 9, and the actor first trains at step 10
        [
            EVAL,
            "eval.every_steps=3",
            "steps=12",
            "ppo.critic_only_steps=9",
            'until={"eval/e/pass_at_1"={min=0.5, for_steps=3}, "policy/loss"={max=0}}',
        ],
        "--set: no step before the last reports all metrics of [until]: `steps` = `12` (--set)",
    ),
    (
        "check_metrics_reported",
        ['until."kl/reference_mean".max=1'],
        '--set: `kl/reference_mean` requires a reference, but none is loaded: `ppo.kl.place` = `"none"` (default)',
    ),
    (
        "check_expected_before_end",  # evaluations follow steps 2, 5 and 8; the third value decides first
        [
            EVAL,
            "eval.every_steps=3",
            "eval.first_step=2",
            'until."eval/e/pass_at_1"={min=0.5, for_steps=2}',
            'expect."reward/score_mean"={min=0, at_step=6}',
        ],
        "--set: `reward/score_mean` is expected at step 6, but [until] may end the run after step 5: "
        '`expect."reward/score_mean".at_step` = `6` (--set)',
    ),
    (
        "check_first_evaluation",
        ["eval.first_step=3"],
        "--set: `eval.first_step` is the step of the first of several evaluations, but `eval.every_steps` sets none: "
        "`eval.first_step` = `3` (--set), `eval.every_steps` = `0` (default)",
    ),
    (
        "check_first_evaluation",
        ["eval.every_steps=2", "eval.first_step=11"],
        "--set: the first evaluation follows step 11 of a run of 10 steps: `eval.first_step` = `11` (--set), "
        "`steps` = `10` (r.toml:2)",
    ),
    (
        "check_reference_is_read",
        ["model.reference=org/sft"],
        "--set: `model.reference` has no effect, because no KL penalty reads a reference: `model.reference.path` = "
        '`"org/sft"` (--set), `ppo.kl.place` = `"none"` (default)',
    ),
    (
        "check_reference_sizes",
        ["model.path=Qwen/Qwen2.5-0.5B", "model.reference=Qwen/Qwen2.5-1.5B", "ppo.kl={place='loss', coef=0.1}"],
        "--set: the reference must have the architecture of the actor's model, but its `num_layers` is `28`, not "
        '`24`: `model.reference.path` = `"Qwen/Qwen2.5-1.5B"` (--set), `model.path` = `"Qwen/Qwen2.5-0.5B"` (--set)',
    ),
    (
        "check_metrics_reported",
        ['expect."kl/reference_mean".max=1'],
        '--set: `kl/reference_mean` requires a reference, but none is loaded: `ppo.kl.place` = `"none"` (default)',
    ),
    (
        "check_metrics_reported",
        ['expect."reward/strict_mean".min=0.1'],
        "--set: `reward/strict_mean` equals the score, which is reported as `reward/score_mean`: "
        "`reward.strict` = `true` (default)",
    ),
    (
        "check_metrics_reported",
        ["reward.kind=exact_match", "data.train.instruction=x", 'expect."reward/lenient_mean".min=0.1'],
        "--set: `reward/lenient_mean` is one of two readings of an answer, which only `gsm8k` has: "
        '`reward.kind` = `"exact_match"` (--set)',
    ),
    (
        "check_metrics_reported",
        ['expect."time/eval_s".max=9'],
        "--set: `time/eval_s` requires an evaluation set, but [data.eval] has none",
    ),
    (
        "check_metrics_reported",
        [EVAL, "checkpoint.best=eval/f/pass_at_1"],
        "--set: `eval/f/pass_at_1` names an evaluation set `f`; [data.eval] has `e`: `checkpoint.best` = "
        '`"eval/f/pass_at_1"` (--set)',
    ),
    (
        "check_expected_step",
        ["ppo.critic_only_steps=3", 'expect."policy/loss"={max=9, at_step=3}'],
        "--set: `policy/loss` is expected at step 3, when only the critic trains: "
        '`expect."policy/loss".at_step` = `3` (--set), `ppo.critic_only_steps` = `3` (--set)',
    ),
    (
        "check_expected_step",  # with log-probs before the update, the metric is reported at every step
        ["ppo.old_logprobs=sampler", "ppo.critic_only_steps=3", 'expect."mismatch/gap_k3"={max=9, at_step=3}'],
        "--set: `mismatch/gap_k3` is expected at step 3, when only the critic trains: "
        '`expect."mismatch/gap_k3".at_step` = `3` (--set), `ppo.critic_only_steps` = `3` (--set)',
    ),
    (
        "check_expected_step",
        ['expect."reward/score_mean"={min=0.1, at_step=0}'],
        "--set: `reward/score_mean` is expected at step 0, before the first step; steps count from 1: "
        '`expect."reward/score_mean".at_step` = `0` (--set)',
    ),
    (
        "check_expected_step",
        [EVAL, "eval.every_steps=4", 'expect."eval/e/pass_at_1"={min=0.5, at_step=6}'],
        "--set: `eval/e/pass_at_1` is expected at step 6, but nothing is evaluated then: "
        '`expect."eval/e/pass_at_1".at_step` = `6` (--set), `eval.every_steps` = `4` (--set), `eval.at_start` = `true` '
        "(default)",
    ),
    (
        "check_expected_step",
        [EVAL, "eval.every_steps=4", "eval.at_end=false", 'expect."eval/e/pass_at_1".min=0.5'],
        "--set: `eval/e/pass_at_1` is expected at the end of the run, but nothing is evaluated then: "
        "`eval.every_steps` = `4` (--set), `eval.at_end` = `false` (--set)",
    ),
    (
        "check_expected_step",
        [EVAL, "eval.at_end=false", 'expect."eval/e/pass_at_1"={min=0.5, at_step=10}'],
        "--set: `eval/e/pass_at_1` is expected at step 10, but nothing is evaluated then: "
        '`expect."eval/e/pass_at_1".at_step` = `10` (--set), `eval.every_steps` = `0` (default), `eval.at_end` = '
        "`false` (--set)",
    ),
    (
        "check_rise_has_two_values",
        [EVAL, "eval.at_end=false", 'expect."eval/e/pass_at_1"={rise_min=0.1, at_step=0}'],
        "--set: `eval/e/pass_at_1` must rise above its first value, but the run evaluates only once: "
        '`expect."eval/e/pass_at_1".rise_min` = `0.1` (--set), `eval.at_end` = `false` (--set), `eval.every_steps` = '
        "`0` (default)",
    ),
    (
        "check_best_metric",
        [EVAL, "eval.at_end=false", "checkpoint.best=eval/e/pass_at_1"],
        "--set: `eval/e/pass_at_1` selects the best actor, but no actor is evaluated after a step: `checkpoint.best` = "
        '`"eval/e/pass_at_1"` (--set), `eval.at_end` = `false` (--set), `eval.every_steps` = `0` (default)',
    ),
    (
        "check_rise_has_two_values",
        ["ppo.critic_only_steps=9", 'expect."policy/entropy_mean".rise_min=0.1'],
        "--set: `policy/entropy_mean` must rise above its first value, but the run reports it only once: "
        '`expect."policy/entropy_mean".rise_min` = `0.1` (--set), `steps` = `10` (r.toml:2)',
    ),
    (
        "check_rise_has_two_values",
        [EVAL, "eval.at_start=false", 'expect."eval/e/pass_at_1".rise_min=0.1'],
        "--set: `eval/e/pass_at_1` must rise above its first value, but the run evaluates only once: "
        '`expect."eval/e/pass_at_1".rise_min` = `0.1` (--set), `eval.at_start` = `false` (--set), `eval.every_steps` = '
        "`0` (default)",
    ),
    (
        "check_best_metric",
        ["checkpoint.best=policy/loss"],
        "--set: `policy/loss` does not define which of two actors is better: `checkpoint.best` = "
        '`"policy/loss"` (--set)',
    ),
    (
        "check_best_metric",
        ["checkpoint.best=reward/mean"],
        "--set: no metric is called `reward/mean`; did you mean `reward/score_mean`?: `checkpoint.best` = "
        '`"reward/mean"` (--set)',
    ),
    (
        "check_metrics_reported",
        ["eval.at_end=false", "checkpoint.best=eval/e/pass_at_1"],
        "--set: `eval/e/pass_at_1` names an evaluation set `e`; [data.eval] has none: `checkpoint.best` = "
        '`"eval/e/pass_at_1"` (--set)',
    ),
    (
        "check_best_keys_need_best",
        ["checkpoint.best_keep=3"],
        "--set: `checkpoint.best_keep` is set, but no best actor is kept: `checkpoint.best_keep` = `3` (--set)",
    ),
    (
        "check_best_keys_need_best",
        ["checkpoint.best_direction=lower"],
        "--set: `checkpoint.best_direction` is set, but no best actor is kept: `checkpoint.best_direction` = "
        '`"lower"` (--set)',
    ),
    (
        "check_eval_set_names",
        ["data.eval.'a/b'={format='gsm8k', path='e.jsonl'}"],
        "--set: `a/b` names an evaluation set and must not contain `/`",
    ),
    (
        "check_requires",
        ['requires=["tools", "magic"]'],
        "--set: unknown capability `magic`; known are async, critic-free, sft-start: "
        '`requires` = `["tools", "magic"]` (--set)',
    ),
    (
        "check_without",
        ['without=["tools"]'],
        '--set: the recipe does not require `tools`: `without` = `["tools"]` (--set), `requires` = `[]` (default)',
    ),
]


@pytest.mark.parametrize(("rule", "sets", "line"), CASES, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(CASES)])
def test_broken_rule_reports_its_message(smallest: Path, rule: str, sets: list[str], line: str) -> None:
    assert refusal([smallest], sets, {}).message == line


def test_every_rule_has_a_failing_case() -> None:
    noting = {
        "check_ray_address_used",
        "check_bootstrap_value_is_intended",
        "check_reinforce_is_on_policy",
        "check_generation_may_end_in_the_next_step",
    }
    own_module = (
        critic_rules,
        environment_rules,
        estimators_rules,
        frozen_rules,
        groups_rules,
        layout_rules,
        lora_rules,
        router_rules,
        slurm_rules,
        value_head_rules,
    )
    tested_there = {rule for module in own_module for rule in rules_of(module)}
    expected = {rule.__name__ for rule in {*all_rules.RULES} - tested_there}
    assert {name for name, _, _ in CASES} | noting == expected


def test_rules_of_every_module_are_checked() -> None:
    modules = [import_module(f"{rules.__name__}.{module.name}") for module in iter_modules(rules.__path__)]
    assert {rule for module in modules for rule in rules_of(module)} <= {*all_rules.RULES}
    assert all(map(rules_of, modules))


def test_values_at_rule_bounds_are_accepted(smallest: Path) -> None:
    sets = [
        EVAL,
        "ppo.minibatch_seqs=4",
        "actor.batching.microbatch_seqs=4",
        "ppo.truncated=bootstrap",
        "critic.batching={max_tokens_per_microbatch=32, forward_max_tokens_per_microbatch=33}",
        "reward.overlong={buffer_tokens=13, penalty=0.1}",
        "reward.length_penalty={per_token=1, free_tokens=12}",
        "reward.unfinished_factor=0.5",
        "critic.optimizer={lr=1.0, lr_ticks='step', lr_warmup_updates=10, lr_warmup_init_frac=0.0}",
        "ppo.critic_only_steps=9",
        "ppo.kl={place='loss', coef=0.1, estimator='k1', gradient='k2', adaptive={target_per_token=1.0, horizon_seqs=1}}",
        "ppo.rollout_rejection={kind='ratio', level='token', statistic='k3', max=0.1}",
        "eval.every_steps=4",
        "eval.first_step=4",
        'expect."eval/e/pass_at_1"={min=0.5, max=0.5, at_step=8}',
        'expect."eval/e/greedy_pass_at_1"={rise_min=0.0, at_step=10}',
        'expect."time/rollout_s".max=9',
        "checkpoint={best='advantage/raw_std', best_direction='lower', best_keep=3, keep_last='all'}",
        "health.entropy={min=1.0, max=1.0, action='stop'}",
        "ppo.advantages={kind='gae', gamma=0, gae_lambda=0}",
        "eval.samples_per_prompt=1000",
        "eval.maj_at=[1000]",
        'expect."eval/e/pass_at_1_stderr".max=0.5',
        'expect."eval/e/maj_at_1000_stderr".max=0.5',
    ]
    assert load([smallest], sets, {}).recipe.ppo.critic_only_steps == 9


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (
            [
                "ppo.kl={place='reward', coef=0.1, adaptive={target_per_token=0.1, horizon_seqs=1}}",
                "rollout.prompts_per_step=5",
                "ppo.minibatch_seqs=5",
            ],
            "one step of 5 sequences may reduce the coefficient to 0 or below",
        ),
        (
            ["ppo.kl={place='loss', coef=0.1, adaptive={target_per_token=0.1}}", "rollout.top_k=5"],
            "k3 is a biased estimate of the KL between a filtered actor",
        ),
        (["ppo.policy_loss.dual_clip=1.2"], "a dual clip of 1.2 is inside the clip at 1 + 0.2"),
        (
            ["rollout.max_window_tokens=20"],
            "the window is too small for the longest prompt and the shortest response",
        ),
    ],
)
def test_values_beyond_rule_bounds_are_rejected(smallest: Path, sets: list[str], says: str) -> None:
    caught = refusal([smallest], sets, {})
    assert says in caught.message
    assert len(caught.message.splitlines()) == 1


def test_suggested_warmup_fraction_is_valid(smallest: Path) -> None:
    sets = ["steps=75", "actor.optimizer.lr_warmup_frac=0.001"]
    hint = str(refusal([smallest], sets, {}).hint).partition("`--set ")[2].rstrip("`")
    # A fraction of 150 updates has two digits.
    assert warmup_updates(load([smallest], [*sets, hint], {}).recipe, "actor") == 2


@pytest.mark.parametrize(
    ("written", "lower"),
    [
        ("{best='reward/score_mean'}", False),
        ("{best='reward/score_mean', best_direction='lower'}", True),
        ("{best='rollout/truncated_frac'}", True),
        ("{best='rollout/truncated_frac', best_direction='higher'}", False),
    ],
)
def test_best_direction_decides_whether_lower_is_better(smallest: Path, written: str, lower: bool) -> None:
    assert is_lower_better(load([smallest], [f"checkpoint={written}"], {}).recipe.checkpoint) == lower


def test_single_sequence_is_allowed_without_whitening(smallest: Path) -> None:
    sets = ["rollout.prompts_per_step=1", "ppo.minibatch_seqs=1", "ppo.advantages={kind='gae', whiten=false}"]
    assert not load([smallest], sets, {}).recipe.ppo.advantages.whiten


def test_rules_are_checked_despite_errors_in_other_keys(write: Write) -> None:
    """All rules run in one pass: a misspelled key does not hide a conflict, and a missing value skips only its own
    rules."""
    text = SMALLEST.replace("steps = 10\n", "").replace("minibatch_seqs = 2", "minibatch_seqs = 3")
    sets = ["actor.optimizer.lr_warmup_updates=99", "seed='x'", "critic.optimizer.lrr=1"]
    said = refusal([write(text)], sets, {}).message.splitlines()
    assert [
        part in line
        for part, line in zip(("`seed`", "missing `steps`", "`lrr`", "the 4 sequences"), said, strict=True)
    ]
    assert len(said) == 4


def test_rule_hint_is_one_change(smallest: Path) -> None:
    caught = refusal([smallest], ["ppo.minibatch_seqs=3"], {})
    assert caught.hint == "change the recipe, or add `--set ppo.minibatch_seqs=2`"
    assert load([smallest], ["ppo.minibatch_seqs=2"], {})


def test_evaluations_run_at_start_interval_and_end(smallest: Path) -> None:
    def steps(*sets: str) -> list[int]:
        recipe = load([smallest], sets, {}).recipe
        return [step for step in range(11) if cadence.evaluates(recipe, step)]

    assert steps() == []
    assert steps(EVAL) == [0, 10]
    assert steps(EVAL, "eval.every_steps=4", "eval.at_start=false") == [4, 8, 10]
    assert steps(EVAL, "eval.every_steps=4", "eval.at_end=false") == [0, 4, 8]
    assert steps(EVAL, "eval.every_steps=5", "eval.at_end=false") == [0, 5, 10]
    assert steps(EVAL, "eval.at_end=false", "eval.at_start=false") == []
    assert steps(EVAL, "eval.every_steps=4", "eval.first_step=6") == [0, 6, 10]
    assert steps(EVAL, "eval.every_steps=4", "eval.first_step=2", "eval.at_start=false") == [2, 6, 10]
    assert steps(EVAL, "eval.every_steps=4", "eval.first_step=5", "eval.at_end=false") == [0, 5, 9]
    assert steps(EVAL, "eval.every_steps=1", "eval.first_step=10", "eval.at_end=false") == [0, 10]


def test_early_end_is_accepted_at_its_bounds(smallest: Path) -> None:
    """Evaluations follow steps 4 and 8, so the run may end after step 8, and a later step may not be expected."""
    until = 'until."eval/e/pass_at_1"={min=0.5, max=0.5, for_steps=2}'
    sets = [EVAL, "eval.every_steps=4", until, 'expect."reward/score_mean"={min=0.0, at_step=8}']
    recipe = load([smallest], sets, {}).recipe
    ending = [step for step in range(11) if cadence.evaluates(recipe, step, ends_early=step == 6)]
    assert ending == [0, 4, 6, 8, 10]
    saving = load([smallest], ["checkpoint.every_steps=4"], {}).recipe
    assert [step for step in range(1, 11) if cadence.saves(saving, step, ends_early=step == 6)] == [4, 6, 8, 10]


def notes_on(file: Path, *sets: str) -> list[str]:
    """Return the notes on a recipe, with their hints."""
    recipe = load([file], sets, {}).recipe
    found = all_rules.violations(recipe, lambda _: "--set")
    assert {finding.level for finding in found} <= {Level.NOTE}
    return [f"{finding.what}; {finding.hint}" for finding in found]


def test_unused_ray_address_is_noted(smallest: Path) -> None:
    address = "cluster.ray_address=head:6379"
    assert notes_on(smallest, address) == [
        'Ray is not used: each role is one process on this machine: `cluster.ray_address` = `"head:6379"` (--set); '
        "change the recipe, or add `--set 'actor.parallel={data=2}'`"
    ]
    assert notes_on(smallest, address, "actor.parallel={data=2}") == notes_on(smallest) == []


def test_monte_carlo_returns_with_bootstrap_are_noted(smallest: Path) -> None:
    both = ["ppo.advantages={kind='monte_carlo'}", "ppo.truncated=bootstrap"]
    assert notes_on(smallest, *both) == [
        "the critic's value is added to the return of each truncated response, but the advantages use no values "
        'elsewhere: `ppo.truncated` = `"bootstrap"` (--set), `ppo.advantages.kind` = `"monte_carlo"` (--set); '
        "change the recipe, or add `--set ppo.truncated=terminal`"
    ]
    for others in (both[:1], both[1:], [both[0], "ppo.truncated=filter"]):
        assert notes_on(smallest, *others) == []


def test_saves_of_each_step_two_steps_ahead_are_noted(smallest: Path) -> None:
    two = [*AHEAD, "rollout.ahead=2"]
    every, few = "checkpoint.every_steps=1", ["checkpoint.every_steps=3", "eval.every_steps=2"]
    assert notes_on(smallest, *two, every) == [
        "each step is saved, and then waits for the generation that it began: responses are older than with 1, and "
        "steps not shorter: `rollout.ahead` = `2` (--set), `checkpoint.every_steps` = `1` (--set); change the recipe, "
        "or add `--set checkpoint.every_steps=5`"
    ]
    assert len(notes_on(smallest, *two, *few, "eval.every_steps=1")) == 1
    for others in ([*two, *few], [*AHEAD, every]):
        assert notes_on(smallest, *others) == []


@pytest.mark.parametrize(
    ("sets", "updates"),
    [
        ([], 2),
        (["ppo.minibatch_seqs=4"], 1),
        (["ppo.minibatch_seqs=4", "ppo.epochs=2"], 2),
        (["ppo.epochs=3"], 6),
        # The critic's own epochs add no updates of the actor.
        (["ppo.minibatch_seqs=4", "ppo.critic_epochs=2"], 1),
    ],
)
def test_reinforce_with_several_updates_per_step_is_noted(smallest: Path, sets: list[str], updates: int) -> None:
    notes = notes_on(smallest, "ppo.policy_loss.kind=reinforce", *sets)
    assert len(notes) == (updates > 1)
    assert all(f"the actor makes {updates} updates per step" in note for note in notes)
    assert all(note.endswith("`--set ppo.epochs=1 --set ppo.minibatch_seqs=4`") for note in notes)
    assert notes_on(smallest, *sets) == []
