"""The drill of `test_kill_drill` with everything adaptive, and everything that depends on the sampler's log-probs, at
once.

The sampler's log-probs differ from the trainer's, so that every bound is active. With `rounding` they also differ in
the last digits when a token is generated again, as those of real engines do.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from end_to_end.kill_grid import KEEPS_EACH, States, Walk, every_state, in_ci, resume_each, selected
from fakes.components import BigramGenerator, fake_components, fake_recipe
from fakes.job import Witness, open_run, result
from ppoctl.core.ports import Sample, SampleRequest, SamplingParams
from ppoctl.run.loop.steps import run
from ppoctl.store.journal import read_lines
from ppoctl.store.run_paths import RunPaths

EVERYTHING = {
    "epochs": 2,
    "minibatch_seqs": 4,
    "kl": {
        "place": "loss",
        "estimator": "k3",
        "coef": 0.05,
        "gradient": "importance",
        "output_clamp": 0.4,
        "adaptive": {"target_per_token": 0.001, "horizon_seqs": 50},
    },
    "rollout_correction": {"kind": "icepop", "min_ratio": 0.75, "max_ratio": 1.3, "normalize": True},
    "rollout_rejection": {"kind": "ratio", "level": "token", "max_ratio": 1.4},
    "max_sequence_gap": 1.35,
}
RECIPE = fake_recipe(checkpoint={"every_steps": 3}, rollout={**KEEPS_EACH, "prompts_per_step": 4}, ppo=EVERYTHING)


class SkewedGenerator(BigramGenerator):
    """A generator whose log-probs differ from the trainer's; they are equal for a sample that is generated again, up
    to `rounding`."""

    def __init__(self, actor_at: Any, rounding: float) -> None:
        super().__init__(actor_at)
        self.rounding = rounding

    def generate(self, request: SampleRequest, params: SamplingParams) -> Sample:
        sample = super().generate(request, params)
        places = torch.arange(len(sample.logprobs)) + request.seed % 97
        gap = 0.4 * torch.sin(0.9 * places) + self.rounding * torch.cos(places)
        return replace(sample, logprobs=tuple((torch.tensor(sample.logprobs) + gap).tolist()))


def play(root: Path, witness: Witness | None = None, *, rounding: float = 0.0) -> None:
    def generator(actor_at: Any, notify: Any, logs: Any) -> SkewedGenerator:
        return SkewedGenerator(actor_at, rounding)

    seen = witness or Witness()
    components = replace(
        fake_components(RECIPE, on_minibatch=seen.on_minibatch, on_file=seen.on_file), generator=generator
    )
    run(open_run(root, RECIPE, seen, components=components).job)


def correction_metrics(root: Path) -> dict[str, list[float]]:
    """Return the metrics of all steps, by name."""
    found: dict[str, list[float]] = {}
    for line in read_lines(RunPaths(root).journal):
        for name, value in line.get("figures", {}).items():
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("states", ["of own stages", in_ci(), *every_state()])
def test_corrected_run_with_adaptive_kl_survives_any_kill(folder: Path, states: States) -> None:
    whole = Walk(folder / "whole")
    play(whole.root, Witness(act=whole.on_moment))
    expected, seen = result(whole.root), correction_metrics(whole.root)
    assert all(0 < share < 1 for name in ("capped", "rejected") for share in seen[f"correction/{name}_frac"])
    assert max(seen["correction/dropped_seqs"]) > 0
    assert len(set(seen["kl/coef"])) == 3

    resume_each(folder, selected(whole.all, states), play, expected)


@pytest.mark.parametrize("states", ["of own stages", in_ci(), *every_state()])
def test_committed_correction_is_kept_after_a_resume(folder: Path, states: States) -> None:
    """The last rollout is generated in two attempts whose log-probs differ in the last digits, so the actor ends
    elsewhere. A run killed after the commit ends there, too, with engines whose log-probs would differ again."""
    first = Walk(folder / "first")

    def within_rollout(number: int, name: str) -> None:
        if name.startswith("inside rollout after"):
            first.on_moment(number, name)

    play(first.root, Witness(act=within_rollout))
    last = first.all[-1]
    second = Walk(folder / "second")
    last.restore(second.root)
    play(second.root, Witness(act=second.on_moment), rounding=1e-6)
    expected = result(second.root)
    assert expected["states"] != result(first.root)["states"], "the rounding reaches nothing"
    names = [left.moments[0] for left in second.all]
    committed = next(place for place, name in enumerate(names) if name.startswith("3 reward"))
    lefts = selected(second.all[committed:], states)
    assert len(lefts) >= (4 if states == "of own stages" else 6)
    resume_each(folder, lefts, partial(play, rounding=-3e-6), expected)
