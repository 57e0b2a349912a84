"""Responses are scored while others are still generated, and a run that is stopped at any point commits the same
records."""

import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest

from fakes.components import BigramGenerator, fake_components, fake_recipe
from fakes.job import StopError, Witness, open_run, result, stopping_at
from ppoctl.core.batch.records import Rewards
from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.recipe.schema import Recipe
from ppoctl.run.loop.steps import run
from ppoctl.store import manifest as manifests
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import load_record

RECIPE = {"steps": 2, "checkpoint": {"every_steps": 2}, "eval": {"every_steps": 0, "at_start": False}}
EVALUATED = 4 + 4 * 1
"""Samples of the final evaluation, which are scored after all are generated."""


class TokenScorer:
    """Scores in a separate thread, the last request first, with one value for each token: 1 if it is even."""

    def __init__(self) -> None:
        self.requests: list[ScoreRequest] = []
        self._waiting: SimpleQueue[tuple[ScoreRequest, Future[Score]]] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def submit(self, request: ScoreRequest) -> Future[Score]:
        self.requests.append(request)
        future: Future[Score] = Future()
        self._waiting.put((request, future))
        return future

    def close(self) -> None:
        pass

    def _serve(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            for request, future in reversed(batch):
                if future.set_running_or_notify_cancel():
                    token_values = tuple(float(token % 2 == 0) for token in request.token_ids)
                    future.set_result(Score(sum(token_values), "ok", token_values=token_values))


def recipe() -> Recipe:
    return fake_recipe(**RECIPE)


def go(root: Path, witness: Witness) -> tuple[TokenScorer, BigramGenerator, list[int]]:
    """Run until the end or a stop; return the scorer, the generator, and the number of generated samples at each
    request."""
    scorer, at_request = TokenScorer(), list[int]()
    components = fake_components(recipe(), on_minibatch=witness.on_minibatch, on_file=witness.on_file)
    wiring = open_run(root, recipe(), witness, components=replace(components, scorer=scorer))
    assert isinstance(wiring.generator, BigramGenerator)
    submit, generator = scorer.submit, wiring.generator
    scorer.submit = lambda request: (at_request.append(generator.num_generated), submit(request))[1]  # type: ignore[method-assign]
    with suppress(StopError):
        run(wiring.job)
    return scorer, generator, at_request


def test_each_response_is_scored_once_right_after_generation(tmp_path: Path) -> None:
    scorer, _, at_request = go(tmp_path / "run", Witness())
    assert at_request[:16] == list(range(1, 17))
    assert len(scorer.requests) == 16 + EVALUATED


def test_token_scores_are_committed_and_reach_the_advantages(tmp_path: Path) -> None:
    go(tmp_path / "run", Witness())
    paths = RunPaths(tmp_path / "run")
    rewards, rollouts, advantages = (
        load_record(paths, 2, name, manifests.require(paths.stage(2, name)))
        for name in ("reward", "rollout", "advantages")
    )
    assert isinstance(rewards, Rewards)
    assert rewards.token_scores is not None
    even = (rollouts.tokens % 2 == 0) & rollouts.mask
    assert rewards.token_scores.equal(even.float())
    assert advantages.shaped.equal(rewards.scores)


MOMENTS = (
    *(f"2 {stage} {moment}" for stage in ("rollout", "reward") for moment in ("starts", "renamed")),
    "inside rollout after 4 samples",
    "2 critic_update starts",
)


IN_CI = ("2 rollout starts", "2 rollout renamed", "2 reward starts")


@pytest.mark.parametrize(
    "moment", [pytest.param(each, marks=pytest.mark.ci("other moments") if each in IN_CI else ()) for each in MOMENTS]
)
def test_run_stopped_during_overlapped_scoring_commits_the_same(
    moment: str, tmp_path: Path, whole: dict[str, object]
) -> None:
    go(tmp_path / "run", stopping_at(moment))
    scorer, generator, _ = go(tmp_path / "run", Witness())
    assert result(tmp_path / "run") == whole
    if moment == "inside rollout after 4 samples":
        # Loaded samples are scored, too.
        assert (generator.num_generated, len(scorer.requests)) == (4 + 8 + EVALUATED, 8 + 8 + EVALUATED)
    if moment == "2 reward renamed":
        assert len(scorer.requests) == EVALUATED


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    root = tmp_path_factory.mktemp("beside") / "whole"
    go(root, Witness())
    return result(root)
