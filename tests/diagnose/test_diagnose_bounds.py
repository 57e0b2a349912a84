"""Each limit of the rules of `diagnose`: a value just within it, and a value just beyond it. One metric or key
changes at a time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from diagnose.recorded import changed, recorded
from diagnose.test_diagnose_rules import EPISODES, EXPLAINED, KL, REFERENCE, SCORE, SPREAD, TOKENS, TRUNCATED, TURNS
from diagnose.test_diagnose_rules import EQUAL as EQUAL_GROUPS
from for_each import for_each
from ppoctl.core.finding import Level
from ppoctl.show.diagnose.causes import examine
from ppoctl.show.diagnose.curves import Curves

PPO, GRPO = recorded("ppo"), recorded("grpo")
ERRORS, LATE, ENTROPY, CLIPPED = "reward/error_frac", "reward/timeout_frac", "policy/entropy_mean", "policy/clip_frac"
VALUE, RETURN, RIGHT = "value/value_mean", "value/return_mean", "reward/right_mean"
EXPERTS = "policy/experts_unused_frac"


def flat(run: Curves = PPO, *, steps: int = 12, **of: Any) -> Curves:
    """Return the run with metrics that have one value in all of these steps, or these values, and with other keys."""
    metrics = {name: of.pop(name) for name in list(of) if "/" in name}
    series = {name: list(each) if isinstance(each, Sequence) else [each] * steps for name, each in metrics.items()}
    return changed(run, series, **of)


def metric(name: str, run: Curves = PPO, **of: Any) -> Callable[[Any], Curves]:
    return lambda value: flat(run, **{**of, name: value})


FALLEN = [0.5] * 4 + [0.8] * 4 + [0.6] * 4
HOT = {"rollout__temperature": 1.5}
DEAD = {SCORE: 0.0, SPREAD: 0.0}
UNUSED = {SPREAD: 0.3}
RISING = {SCORE: [1.0] * 6 + [4.0] * 6}
NOISE = {SCORE: 0.5, SPREAD: 0.5, VALUE: 0.5, RETURN: 0.5, REFERENCE: 0.05}
HELD = {SCORE: 0.5, SPREAD: 0.625, REFERENCE: 1 / 64, TOKENS: 8.0}

LIMITS: Sequence[tuple[str, str, Callable[[Any], Curves], Sequence[Any], Sequence[Any]]] = (
    # name, kind of the finding, run with a value, values without the finding, values with it
    ("errors", "scorer-errors", metric(ERRORS), [0.0, 0.01], [0.0101]),
    ("timeouts", "scorer-errors", metric(LATE), [0.0, 0.01], [0.0101]),
    ("KL of a step", "learning-rate-high", metric(KL), [0.05], [0.0501]),
    ("KL of an actor that stays", "learning-rate-low", metric(KL, GRPO), [1e-5], [0.99e-5, 0.0]),
    ("equal groups", "groups", metric(EQUAL_GROUPS, GRPO, **{SCORE: 0.5}), [0.9], [0.901]),
    ("truncated", "truncation", metric(TRUNCATED), [0.1], [0.101]),
    ("clipped", "clip", metric(CLIPPED, GRPO), [0.3], [0.301]),
    ("experts that lose their tokens", "experts", lambda u: flat(**{EXPERTS: [0.25] + [u] * 11}), [0.4], [0.401]),
    ("k3 of the mismatch", "mismatch", metric("mismatch/gap_k3"), [0.01], [0.0101]),
    ("gap of the mismatch", "mismatch", metric("mismatch/gap_mean_abs"), [0.05], [0.0501]),
    ("entropy", "entropy", lambda low: flat(**{ENTROPY: [0.5] * 6 + [low] * 6, SCORE: FALLEN, SPREAD: 0.4}),
     [0.0501], [0.05]),
    ("temperature", "temperature", lambda t: flat(**{SCORE: [0.2, 0.3]}, rollout__temperature=t), [1.3], [1.301]),
    ("score at a high temperature", "temperature", metric(SCORE, **HOT), [0.2075], [0.2074]),
    ("endless responses", "template", metric(TRUNCATED, **{SCORE: 0.05, SPREAD: 0.5}), [0.89], [0.9]),
    ("score of endless responses", "template", metric(SCORE, **{TRUNCATED: 0.95, SPREAD: 0.5}), [0.051], [0.05, 0.0]),
    ("score of a hard task", "template", lambda m: flat(**{SCORE: m, SPREAD: (m - m * m) ** 0.5}), [0.1], [0.099]),
    ("equal scores", "reward-dead", metric(SPREAD, **{SCORE: 0.5}), [1.1e-6], [1e-6, 0.0]),
    ("steps of equal scores", "reward-dead", lambda n: flat(**{SPREAD: [0.3] * (12 - n) + [0.0] * n, SCORE: 0.5}),
     [2], [3]),
    ("explained variance near 0", "reward-noise", metric(EXPLAINED, **NOISE), [0.01, -0.01], [0.0099, -0.0099]),
    ("highest explained variance", "reward-noise",
     lambda top: flat(**{**NOISE, EXPLAINED: [0.0, top] + [0.0] * 10}), [0.0201], [0.02]),
    ("steps without explained variance", "reward-noise",
     lambda n: flat(**{**NOISE, EXPLAINED: [0.001] * n}), [9], [10]),
    ("distance of an actor that is judged", "reward-noise",
     lambda kl: flat(**{**NOISE, REFERENCE: kl, EXPLAINED: 0.0}), [0.0199], [0.02]),
    ("known mean of the returns", "reward-noise", lambda v: flat(**{**NOISE, VALUE: v, EXPLAINED: 0.0}),
     [0.2499, 0.7501], [0.25, 0.75]),
    ("penalty", "kl-penalty", lambda coef: flat(**{**HELD, "kl/coef": coef}), [0.499], [0.5]),
    ("distance of a held actor", "kl-penalty", lambda kl: flat(**{**HELD, REFERENCE: kl, "kl/coef": 2.0}),
     [0.0201], [0.02]),
    ("worse than a mean", "explained-variance", metric(EXPLAINED), [-0.1], [-0.101]),
    ("steps of a bad critic", "explained-variance", lambda n: flat(**{EXPLAINED: [-0.2] * n}), [5], [6]),
    ("distance of a gamed score", "scorer", metric(REFERENCE, **RISING), [1.0], [1.001]),
    ("fall of another metric", "scorer", lambda last: flat(
        **{**RISING, REFERENCE: 0.0, RIGHT: [0.5] * 6 + [last] * 6}), [0.351], [0.35]),
    ("distance beside another sign", "scorer", lambda kl: replace_level(
        flat(**{**RISING, REFERENCE: kl, RIGHT: [0.5] * 6 + [0.3] * 6})), [0.5], [0.501]),
    ("growth of responses", "length", lambda last: flat(
        **{**RISING, REFERENCE: 0.0, RIGHT: [0.5] * 6 + [0.3] * 6, TOKENS: [10.0] * 5 + [last] * 7}), [15.0], [15.1]),
)  # fmt: skip


def replace_level(run: Curves) -> Curves:
    """Return the run, of which only errors count as findings."""
    return replace(run, run="only errors")


def kinds(run: Curves) -> list[str]:
    return [each.finding.kind for each in examine(run) if run.run != "only errors" or each.finding.is_error]


@for_each(LIMITS)
def test_rule_begins_exactly_at_its_limit(
    name: str, kind: str, make: Callable[[Any], Curves], silent: Sequence[Any], found: Sequence[Any]
) -> None:
    for value in silent:
        assert kind not in kinds(make(value)), f"{value} is within the limit"
    for value in found:
        assert kind in kinds(make(value)), f"{value} is beyond the limit"


def hint(kind: str, run: Curves) -> str:
    return next(each.finding.hint or "" for each in examine(run) if each.finding.kind == kind)


def level(kind: str, run: Curves) -> Level:
    return next(each.finding.level for each in examine(run) if each.finding.kind == kind)


CHOICES: Sequence[tuple[str, str, Callable[[Any], Curves], Sequence[tuple[Any, str]]]] = (
    # name, kind, run with a value, values and the beginning of their hints
    ("errors and timeouts", "scorer-errors", lambda late: flat(**{ERRORS: 0.05, LATE: late}),
     [(0.05, "ppoctl show"), (0.051, "--set reward.timeout_s=20.0")]),
    ("temperature of groups", "groups",
     lambda t: flat(GRPO, **{EQUAL_GROUPS: 0.95, SCORE: 0.5}, rollout__temperature=t),
     [(0.7, "--set 'rollout.groups"), (0.69, "--set rollout.temperature=1.0")]),
    ("clip of a collapsed entropy", "entropy", lambda high: flat(
        **{ENTROPY: [0.5] * 6 + [0.04] * 6, SCORE: FALLEN, SPREAD: 0.4}, ppo__policy_loss__clip_high=high),
     [(0.28, "--set actor.optimizer.lr="), (0.279, "--set ppo.policy_loss.clip_high=0.28")]),
    ("epochs of a clipped policy", "clip", lambda epochs: flat(GRPO, **{CLIPPED: 0.5}, ppo__epochs=epochs),
     [(1, "--set actor.optimizer.lr="), (2, "--set ppo.epochs=1")]),
    ("limit of turns", "truncation", lambda share: flat(
        **{TRUNCATED: 0.5, TURNS: share}, environment=EPISODES),
     [(0.249, "--set rollout.max_new_tokens="), (0.25, "--set environment.turns=8")]),
    ("rate of a worse critic", "explained-variance", lambda rate: flat(
        **{EXPLAINED: -0.2}, critic__optimizer__lr=rate),
     [(0.004, "--set ppo.critic_epochs=2"), (0.0041, "--set critic.optimizer.lr=4e-4")]),
)  # fmt: skip


@for_each(CHOICES)
def test_hint_changes_exactly_at_its_limit(
    name: str, kind: str, make: Callable[[Any], Curves], hints: Sequence[tuple[Any, str]]
) -> None:
    for value, start in hints:
        assert hint(kind, make(value)).startswith(start), f"{value}: {hint(kind, make(value))}"


def test_level_changes_exactly_at_its_limit() -> None:
    for value, expected in ((0.5, Level.WARNING), (0.501, Level.ERROR)):
        assert level("learning-rate-high", flat(**{KL: value})) == expected
    for value, expected in ((0.49, Level.WARNING), (0.5, Level.ERROR)):
        assert level("truncation", flat(**{**DEAD, TRUNCATED: value})) == expected


def test_state_of_the_broken_step_itself_is_not_offered() -> None:
    broken = {KL: [0.001] * 7 + [0.9] * 5, SCORE: [0.6] * 6 + [0.1] * 6}
    for saved, back in (((3, 6, 8), "--back-to 6"), ((3, 7, 9), "--back-to 7"), ((8, 9), "=1e-5")):
        assert hint("learning-rate-high", replace(flat(**broken), saved=saved)).endswith(back)
