"""Test the scorer before training: a gold answer must score higher than a wrong, an empty and a truncated answer.

The probe detects swapped arguments, a constant reward, and a reward that does not match the dataset. For a kind
without a gold answer, it checks only that some response gets a score and that all scores are finite. Imports no
torch. It cannot check whether the scorer parses the responses of the model well: read the first rollouts for that.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice

from ppoctl.core.batch.prompts import Prompt
from ppoctl.core.batch.scores import Finish, Score, Scorer, ScoreRequest
from ppoctl.core.errors import NonFiniteError, RewardError, ServiceLostError
from ppoctl.rewards.combined_scores import flush_all_scorers
from ppoctl.rewards.function import is_trainable
from ppoctl.rewards.reward_rows import ADD_TRUTH
from ppoctl.rewards.scorer_table import ScorerTable

Encode = Callable[[str, Finish], tuple[int, ...]]
"""Function that returns the token ids of a response with this text and finish reason. The last id is the end token if
the response terminated."""

PROBED_ROWS = 4
"""Number of rows on which gold answers are tried before the first step."""
_SEARCHED_ROWS = 10_000
_SHOWN_CHARS = 60
MEND = "fix the scorer where it raised: every response must get a number, or a reason why it has none"
"""Hint for a scorer that raised an error."""
_WITHOUT_GOLD = {"short": "The answer is 42.", "empty": ""}
"""Responses that are tried if the kind of reward cannot build a gold answer."""


@dataclass(frozen=True)
class ProbeRow:
    """The responses tried on one row, and their scores, by name."""

    id: str
    truth: str | None
    tried: Mapping[str, str]
    scores: Mapping[str, Score]

    @property
    def is_sound(self) -> bool:
        """Whether all scores can be trained on. If a gold answer was tried, also whether each response has a score
        and the gold answer has the highest score."""
        values = {name: score.value for name, score in self.scores.items() if score.value is not None}
        if not values or not all(map(is_trainable, values.values())):
            return False
        if "gold" not in self.tried:
            return True
        others = [value for name, value in values.items() if name != "gold"]
        return values.keys() == self.tried.keys() and max(others) < values["gold"]

    def describe(self) -> str:
        """Return the scores as text: "gold scored 0, wrong scored 1, ..."."""
        return ", ".join(f"{name} {_describe(score)}" for name, score in self.scores.items())


def probed_rows(reward: ScorerTable, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the first `PROBED_ROWS` rows. If rows select their scorer, add the first row of each scorer among the
    first `_SEARCHED_ROWS` rows."""
    first = dict.fromkeys(range(min(PROBED_ROWS, len(prompts))))
    by_scorer: dict[int, int] = {}
    if len(reward.singles) > 1:
        for number, prompt in enumerate(islice(prompts, _SEARCHED_ROWS)):
            with suppress(RewardError):  # `RowCheck` reports all rows without a scorer
                by_scorer.setdefault(id(reward.of_row(prompt.fields)), number)
    return [prompts[number] for number in first | dict.fromkeys(by_scorer.values())]


def probe(scorer: Scorer, reward: ScorerTable, prompts: Sequence[Prompt], encode: Encode) -> list[ProbeRow]:
    """Build test responses for each prompt and score them, in order. Raises RewardError that names the row if its
    ground truth is missing or the reward cannot read it."""
    tried = [_responses(reward, prompt) for prompt in prompts]
    submitted = [
        {name: scorer.submit(_request(prompt, text, encode)) for name, text in texts.items()}
        for prompt, texts in zip(prompts, tried, strict=True)
    ]
    flush_all_scorers([scorer])
    return [
        ProbeRow(prompt.id, prompt.answer, texts, {name: result_of(score, reward) for name, score in futures.items()})
        for prompt, texts, futures in zip(prompts, tried, submitted, strict=True)
    ]


def require_sound(probed: Sequence[ProbeRow], reward: ScorerTable) -> None:
    """Raise RewardError that names the first row that fails the probe, and its scores. A row fails if its gold answer
    does not score higher than all other responses. A row also fails if no response has a score to train on, or if its
    scorer could not be reached."""
    for row in probed:
        if unreachable := [score.message for score in row.scores.values() if score.outcome == "unreachable"]:
            raise RewardError(
                f"row `{row.id}` has no score: {unreachable[0]}",
                hint=start_services(reward),
            )
        if row.is_sound:
            continue
        if "gold" in row.tried:
            raise RewardError(
                f"the reward does not prefer the gold answer of row `{row.id}`: {row.describe()} "
                f"(ground truth `{_shown(row.truth or '')}`, gold answer tried `{_shown(row.tried['gold'])}`)",
                hint="check that `reward.kind` fits the `answer` column",
            )
        raise RewardError(
            f"the reward has no score to train on for row `{row.id}`: {row.describe()}",
            hint=MEND
            if any(score.outcome == "error" for score in row.scores.values())
            else "check that `reward.kind` fits the columns of `data.train`",
        )


def start_services(reward: ScorerTable) -> str:
    """Return the hint for a service that does not answer: the keys that name services, and their values."""
    urls = {".".join(("reward", *path, "url")): getattr(table, "url", None) for path, table in reward.scorers.items()}
    named = [f"`{key}` is `{url}`" for key, url in urls.items() if url is not None]
    return f"start the service and run the command again; {', '.join(named)}"


def result_of(future: Future[Score], reward: ScorerTable) -> Score:
    """Return the score of a submitted request. Raises RewardError if the score cannot be trained on or the service is
    down. During a run, the errors of these cases suggest a resume. Here, nothing has been generated yet."""
    try:
        return future.result()
    except ServiceLostError as error:
        raise RewardError(error.message, hint=start_services(reward)) from error
    except NonFiniteError as error:  # before a run, this means a wrong reward, not an unhealthy run
        raise RewardError(error.message, hint=error.hint) from error


def _request(prompt: Prompt, text: str, encode: Encode) -> ScoreRequest:
    return ScoreRequest.about(prompt, text, "terminated", encode(text, "terminated"))


def _responses(reward: ScorerTable, prompt: Prompt) -> dict[str, str]:
    try:
        scorer = reward.of_row(prompt.fields)
        candidates = None if prompt.answer is None else scorer.candidates(prompt.answer)
    except RewardError as error:
        raise RewardError(f"row `{prompt.id}`: {error.message}", hint=error.hint) from error
    if scorer.reads_truth and prompt.answer is None:
        raise RewardError(f"row `{prompt.id}` has no ground truth", hint=ADD_TRUTH)
    return _WITHOUT_GOLD if candidates is None else asdict(candidates)


def _describe(score: Score) -> str:
    return f"got no score ({score.message})" if score.value is None else f"scored {score.value:g}"


def _shown(text: str) -> str:
    """Return the last characters of a text, without line breaks: the answer is usually at the end."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else f"...{line[-_SHOWN_CHARS:]}"
