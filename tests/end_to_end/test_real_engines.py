"""A run on the real engines: SIGKILL at every kind of moment, then resume. See `real_drill.py`."""

import json
from pathlib import Path

import pytest

from end_to_end.cli_process import TESTS, Forked
from end_to_end.real_drill import moments_of_the_grid

pytestmark = pytest.mark.engines

SAMPLE = ["1 rollout inside", "3 actor_update inside"]
IN_CI = ["1 critic_update inside", "2 state/critic written", "2 state/actor renamed", "3 state/actor written"]
"""The stages in which an engine or trainer is active, and a resume of each kind of artifact: samples, records,
updates, states that are saved in the background. The second resume of `SAMPLE` loads states. The grid has every
stage and moment, and `test_kill_drill.py` has them on fakes."""


BACKGROUND_SAVES = [
    "1 state/actor writing",
    "1 state/critic written",
    "1 state/actor renamed",
    "2 state/critic writing",
    "2 state/actor written",
]
"""Moments of saves in the background: while a state is written, between its manifest and its name, after one of a
checkpoint."""


PATIENCE_S = 1700.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run, made by the first drill."""
    return tmp_path_factory.mktemp("whole") / "run"


def start_drill(
    forked: Forked, folder: Path, whole: Path, checkpoint: dict[str, object], moments: list[str], **tables: object
) -> int:
    """Start a drill in a separate process, because this one may hold engines whose threads do not survive a fork."""
    changed = json.dumps({"checkpoint": checkpoint, **tables})
    words = ["end_to_end.real_drill", str(folder), str(whole), changed, json.dumps(moments)]
    with (folder / "out").open("w") as out, (folder / "log").open("w") as log:
        return forked.start(TESTS, words, out, log)


def reached(forked: Forked, folder: Path, pid: int) -> list[str]:
    """Return the moments at which it was killed; fail if the killed run did not end as the undisturbed one."""
    assert forked.wait(pid, timeout_s=PATIENCE_S) == 0, (folder / "log").read_text()[-4000:]
    return list(json.loads((folder / "out").read_text().splitlines()[-1]))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("moments", [SAMPLE, pytest.param(IN_CI, marks=pytest.mark.ci("the moments before"))])
def test_run_killed_during_engine_work_ends_the_same(
    tmp_path: Path, whole: Path, forked: Forked, moments: list[str]
) -> None:
    assert reached(forked, tmp_path, start_drill(forked, tmp_path, whole, {"every_steps": 2}, moments)) == moments


@pytest.mark.slow
@pytest.mark.minutes(1)
@pytest.mark.timeout(900)
def test_run_killed_during_asynchronous_saves_ends_the_same(tmp_path: Path, whole: Path, forked: Forked) -> None:
    assert (
        reached(forked, tmp_path, start_drill(forked, tmp_path, whole, {"every_steps": 1}, BACKGROUND_SAVES))
        == BACKGROUND_SAVES
    )


PARTS = 4


@pytest.mark.slow
@pytest.mark.one_each_time("kills on real engines")
@pytest.mark.minutes(3)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("every_steps", [1, 3])
def test_full_grid_of_kills_on_real_engines(
    tmp_path: Path, whole: Path, forked: Forked, every_steps: int, part: int
) -> None:
    """Every moment of a run is in one of the parts, which take the moments in turn."""
    moments = moments_of_the_grid(every_steps)[part::PARTS]
    checkpoint = {"every_steps": every_steps, "asynchronous": False}
    assert reached(forked, tmp_path, start_drill(forked, tmp_path, whole, checkpoint, moments)) == moments


ENVIRONMENT = {
    "kind": "python",
    "path": f"{Path(__file__).with_name('users_environment.py')}:Counts",
    "turns": 4,
    "tokens": 160,
    "tokens_per_turn": 12,
    "workers": 2,
}
ROLLOUT = {"prompts_per_step": 8, "samples_per_prompt": 2, "max_prompt_tokens": 96, "max_new_tokens": 24}
PPO = {"minibatch_seqs": 8, "kl": {"place": "loss", "coef": 0.01}}
TRAINED = {"optimizer": {"lr": 1e-3}}
LAST_UPDATES = ["2 actor_update inside", "3 actor_update renamed", "3 state/actor written"]
ALGORITHMS: dict[str, tuple[dict[str, object], list[str]]] = {
    "rloo": (
        {"critic": None, "rollout": ROLLOUT, "ppo": {**PPO, "advantages": {"kind": "rloo"}}},
        ["1 rollout inside", "2 advantages written", "2 actor_update inside", "3 actor_update renamed"],
    ),
    "remax": (
        {"critic": None, "rollout": ROLLOUT, "ppo": {**PPO, "advantages": {"kind": "remax"}}},
        ["1 greedy_rollout inside", "2 greedy_rollout renamed", "2 greedy_reward writing", "3 actor_update inside"],
    ),
    "dynamic sampling": (
        {
            "critic": None,
            "rollout": {
                **ROLLOUT,
                "groups": {"max_rounds": 6, "when_short": "use_fewer", "overlap_rounds": True},
            },
            "ppo": {**PPO, "advantages": {"kind": "grpo"}},
        },
        [
            "1 rollout.2 inside",
            "1 reward written",
            "2 keep_groups renamed",
            "2 rollout.2 renamed",
            "3 reward.2 renamed",
            "3 actor_update inside",
        ],
    ),
    "ahead": (
        {"rollout": {**ROLLOUT, "ahead": 1}, "ppo": {**PPO, "rollout_correction": {"kind": "tis"}}},
        [
            "1 next_rollout starts",
            "1 next_rollout writing",
            "2 critic_update inside",
            "2 actor_update renamed",
            "3 reward renamed",
            "3 next_rollout written",
        ],
    ),
    "two ahead": (
        {
            "rollout": {**ROLLOUT, "ahead": 2},
            "ppo": {**PPO, "rollout_correction": {"kind": "tis"}},
            "steps": 4,
            "eval": {"every_steps": 4},
        },
        [
            "1 next_rollout starts",
            "2 rollout inside",
            "2 next_rollout writing",
            "3 critic_update inside",
            "3 actor_update renamed",
            "4 next_rollout written",
        ],
    ),
    "partial rollouts": (
        {
            "critic": None,
            "rollout": {**ROLLOUT, "ahead": 1, "tokens_per_step": 10},
            "ppo": {**PPO, "advantages": {"kind": "grpo"}, "rollout_correction": {"kind": "tis"}},
        },
        [
            "1 partial_rollout inside",
            "1 rollout renamed",
            "2 next_rollout starts",
            "2 actor_update inside",
            "3 rollout written",
        ],
    ),
    "critic sees all": (
        {
            "rollout": {**ROLLOUT, "groups": {"max_rounds": 6, "when_short": "use_fewer", "critic_sees": "all"}},
            "ppo": PPO,
        },
        ["1 keep_groups.2 starts", "2 all_rows renamed", "2 critic_advantages written", "3 critic_update inside"],
    ),
    "episodes": (
        {
            "rollout": {**ROLLOUT, "max_new_tokens": 48, "stop_strings": ["\n", "."]},
            "environment": ENVIRONMENT,
            "reward": {"kind": "environment", "per_turn": True},
            "ppo": PPO,
        },
        ["1 rollout turn", "1 rollout inside", "2 rollout turn", "2 critic_update inside", "3 actor_update inside"],
    ),
    "pf-ppo": (
        {"rollout": ROLLOUT, "ppo": {**PPO, "resample": {"kind": "pow", "order": "before_whitening"}}},
        ["1 resample written", "2 whitening starts", "2 critic_update inside", "3 actor_update inside"],
    ),
    "top layers, shared trunk": (
        {
            "actor": {**TRAINED, "train": {"top_layers": 2}, "freeze": ["decoder.layers.3.mlp.*"]},
            "critic": {**TRAINED, "train": {"top_layers": 1}},
            "ppo": {**PPO, "kl": {"place": "reward", "coef": 0.05}},
        },
        ["1 logprobs inside", "2 critic_update inside", *LAST_UPDATES],
    ),
    "lora": (
        {
            "actor": {**TRAINED, "train": {"lora": {"rank": 4}}},
            "critic": {**TRAINED, "train": {"lora": {"rank": 2, "alpha": 16.0, "targets": ["q_proj", "down_proj"]}}},
            "ppo": {**PPO, "kl": {"place": "reward", "coef": 0.05}},
        },
        ["1 logprobs inside", "2 critic_update inside", *LAST_UPDATES],
    ),
    "value head on the actor": (
        {
            "actor": {**TRAINED, "train": {"top_layers": 3}},
            "critic": {"on": "actor", "head": "mlp", "layers_copied": 1},
            "ppo": {**PPO, "value_loss": {"coef": 0.3, "clip": 0.2}, "truncated": "bootstrap"},
        },
        ["1 logprobs inside", "2 advantages written", *LAST_UPDATES],
    ),
    "optimizer on the CPU": (
        {
            "actor": {"optimizer": {"lr": 1e-3, "on": "cpu"}},
            "critic": {"optimizer": {"lr": 1e-3, "on": "device"}},
            "rollout": ROLLOUT,
            "ppo": PPO,
        },
        ["1 critic_update inside", "1 actor_update inside", *LAST_UPDATES],
    ),
}
"""Tables of each algorithm, and the moments at which its run is killed: those of its own stages, and of updates."""


@pytest.mark.slow
@pytest.mark.one_each_time("kills on real engines")
@pytest.mark.minutes(2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_killed_on_real_engines_ends_the_same(tmp_path: Path, forked: Forked, name: str) -> None:
    tables, moments = ALGORITHMS[name]
    pid = start_drill(forked, tmp_path, tmp_path / "whole", {"every_steps": 3}, moments, **tables)
    assert reached(forked, tmp_path, pid) == moments
