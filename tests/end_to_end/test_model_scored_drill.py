"""The drill of `test_kill_drill` with a reward model as the scorer: it receives responses as they are generated,
scores them in one batch, and may be killed meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from end_to_end.kill_grid import KEEPS_EACH, States, Walk, every_state, in_ci, resume_each, selected
from fakes.components import fake_components, fake_recipe
from fakes.job import Witness, open_run, result
from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.rewards.batched_model import CollectingScorer
from ppoctl.run.loop.steps import run
from ppoctl.store.journal import read_lines
from ppoctl.store.run_paths import RunPaths

JUDGED = {"kind": "model", "path": "judge", "max_error_frac": 0.5}
AT_THE_END = {"every_steps": 2, "at_start": False}
RECIPE = fake_recipe(steps=2, checkpoint={"every_steps": 2}, rollout=KEEPS_EACH, reward=JUDGED, eval=AT_THE_END)


class Judge:
    """A reward model that rewards even tokens, with rounding that depends on the batch: a run that scored in another
    order or in other batches would end elsewhere."""

    def __init__(self, record: Callable[[str], None]) -> None:
        self.record = record

    def tokens(self, request: ScoreRequest) -> tuple[int, ...]:
        if len(request.token_ids) == 1:
            raise ValueError("too short to judge")
        return request.token_ids

    def scores(self, texts: Sequence[tuple[int, ...]]) -> list[float]:
        self.record("inside reward before the model scores")
        with_previous = zip(texts, [texts[-1], *texts], strict=False)
        found = [sum(id % 2 == 0 for id in text) / len(text) + 1e-3 * sum(other) for text, other in with_previous]
        self.record("inside reward after the model has scored")
        return found


def play(root: Path, witness: Witness) -> None:
    components = fake_components(RECIPE, on_minibatch=witness.on_minibatch, on_file=witness.on_file)
    components = replace(components, scorer=CollectingScorer(Judge(witness.record)), reward_digest="judge")
    run(open_run(root, RECIPE, witness, components=components).job)


@pytest.mark.parametrize("states", ["of own stages", in_ci(), *every_state()])
def test_run_with_a_reward_model_survives_any_kill(folder: Path, states: States) -> None:
    whole = Walk(folder / "whole")
    play(whole.root, Witness(act=whole.on_moment))
    expected = result(whole.root)
    names = [name for left in whole.all for name in left.moments]
    # Two steps, and the evaluation at the end, with a greedy and a sampled pass.
    assert names.count("inside reward before the model scores") == 2 + 2
    reward_lines = [
        line["figures"] for line in read_lines(RunPaths(whole.root).journal) if line.get("stage") == "reward"
    ]
    assert all(metrics["reward/score_std"] > 0 for metrics in reward_lines)
    assert any(metrics["reward/error_frac"] > 0 for metrics in reward_lines)
    scoring = [left for left in whole.all if any(name.startswith("inside reward") for name in left.moments)]
    lefts = {left.number: left for left in (*scoring, *selected(whole.all, states))}
    resume_each(folder, lefts.values(), lambda root: play(root, Witness()), expected)
