"""Ask the scorer before training does: a gold answer must beat a wrong, an empty and a truncated one.

It catches swapped arguments, a reward that is constant, a reward that does not know this dataset's answers, and a
recipe whose reward and data do not belong together. Of a kind that knows no gold answer it sees that some response
gets a score, and that all scores are numbers. Imports no torch. It cannot tell whether a response of the model will
be *read* well: look at the first rollouts for that.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice

from ppoctl.batch.prompts import Prompt
from ppoctl.batch.scores import Finish, Score, Scorer, ScoreRequest
from ppoctl.errors import NonFiniteError, RewardError, ServiceLostError
from ppoctl.rewards.combined_scores import flush_all_scorers
from ppoctl.rewards.function import is_trainable
from ppoctl.rewards.table import ScorerTable

Encode = Callable[[str, Finish], tuple[int, ...]]
"""The token ids that a response of this text has, which ended so; the id that ends it is the last where it did."""

PROBED_ROWS = 4
"""Gold answers are tried on so many rows before the first step."""
_LOOKED_AT = 10_000
_SHOWN_CHARS = 60
MEND = "mend the scorer where it raised: every response is to get a number, or a reason why it has none"
"""The hint where what scores has failed itself."""
_WITHOUT_GOLD = {"short": "The answer is 42.", "empty": ""}
"""Responses that are tried where nobody knows a good one."""


@dataclass(frozen=True)
class ProbeRow:
    """What each response that was tried on one row scored, by name."""

    id: str
    truth: str | None
    tried: Mapping[str, str]
    scores: Mapping[str, Score]

    @property
    def is_sound(self) -> bool:
        """Whether each score that there is can be trained on, and, where a gold answer was tried, each response has
        one and gold's is above all others."""
        values = {name: score.value for name, score in self.scores.items() if score.value is not None}
        if not values or not all(map(is_trainable, values.values())):
            return False
        if "gold" not in self.tried:
            return True
        others = [value for name, value in values.items() if name != "gold"]
        return values.keys() == self.tried.keys() and max(others) < values["gold"]

    def describe(self) -> str:
        """`gold` scored 0, `wrong` scored 1, ..."""
        return ", ".join(f"{name} {_said(score)}" for name, score in self.scores.items())


def probed_rows(reward: ScorerTable, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first rows, and where rows choose their scorer, the first of each among the first `_LOOKED_AT`."""
    found = dict.fromkeys(range(min(PROBED_ROWS, len(prompts))))
    chosen: dict[int, int] = {}
    if len(reward.singles) > 1:
        for number, prompt in enumerate(islice(prompts, _LOOKED_AT)):
            with suppress(RewardError):  # of all rows without a scorer `RowCheck` tells
                chosen.setdefault(id(reward.of_row(prompt.fields)), number)
    return [prompts[number] for number in found | dict.fromkeys(chosen.values())]


def probe(scorer: Scorer, reward: ScorerTable, prompts: Sequence[Prompt], encode: Encode) -> list[ProbeRow]:
    """Score all responses that are tried on the prompts, in order. Raises RewardError naming the row that lacks a
    ground truth, or whose truth the reward cannot read."""
    tried = [_tried(reward, prompt) for prompt in prompts]
    asked = [
        {name: scorer.submit(_ended(prompt, text, encode)) for name, text in texts.items()}
        for prompt, texts in zip(prompts, tried, strict=True)
    ]
    flush_all_scorers([scorer])
    return [
        ProbeRow(prompt.id, prompt.answer, texts, {name: result_of(each, reward) for name, each in futures.items()})
        for prompt, texts, futures in zip(prompts, tried, asked, strict=True)
    ]


def require_sound(probed: Sequence[ProbeRow], reward: ScorerTable) -> None:
    """Raises RewardError naming the first row whose gold answer does not beat all others, or of which no response has
    a score that can be trained on, with what each scored; or whose scorer could not be asked."""
    for row in probed:
        if unasked := [score.message for score in row.scores.values() if score.outcome == "unreachable"]:
            raise RewardError(
                f"row `{row.id}` has no score: {unasked[0]}",
                hint=start_services(reward),
            )
        if row.is_sound:
            continue
        if "gold" in row.tried:
            raise RewardError(
                f"the reward does not prefer the gold answer of row `{row.id}`: {row.describe()} "
                f"(ground truth `{_shown(row.truth or '')}`, gold answer tried `{_shown(row.tried['gold'])}`)",
                hint="check that `reward.kind` and the `answer` column belong together",
            )
        raise RewardError(
            f"the reward has no score to train on for row `{row.id}`: {row.describe()}",
            hint=MEND
            if any(score.outcome == "error" for score in row.scores.values())
            else "check that `reward.kind` and the columns of `data.train` belong together",
        )


def start_services(reward: ScorerTable) -> str:
    """The hint where a service does not answer: the keys that name services, and their values."""
    urls = {".".join(("reward", *path, "url")): getattr(table, "url", None) for path, table in reward.scorers.items()}
    named = [f"`{key}` is `{url}`" for key, url in urls.items() if url is not None]
    return f"start the service and type the command again; {', '.join(named)}"


def result_of(future: Future[Score], reward: ScorerTable) -> Score:
    """The score that was asked for. Raises RewardError of one that cannot be trained on, and of a service that is not
    there: nothing was drawn yet that could be gone on with."""
    try:
        return future.result()
    except ServiceLostError as error:
        raise RewardError(error.message, hint=start_services(reward)) from error
    except NonFiniteError as error:  # here it is the reward that is wrong, and no run that is unhealthy
        raise RewardError(error.message, hint=error.hint) from error


def _ended(prompt: Prompt, text: str, encode: Encode) -> ScoreRequest:
    return ScoreRequest.about(prompt, text, "terminated", encode(text, "terminated"))


def _tried(reward: ScorerTable, prompt: Prompt) -> dict[str, str]:
    try:
        scorer = reward.of_row(prompt.fields)
        candidates = None if prompt.answer is None else scorer.candidates(prompt.answer)
    except RewardError as error:
        raise RewardError(f"row `{prompt.id}`: {error.message}", hint=error.hint) from error
    if scorer.reads_truth and prompt.answer is None:
        raise RewardError(f"row `{prompt.id}` has no ground truth", hint="name its column as `data.train.answer`")
    return _WITHOUT_GOLD if candidates is None else asdict(candidates)


def _said(score: Score) -> str:
    return f"gave no score ({score.message})" if score.value is None else f"scored {score.value:g}"


def _shown(text: str) -> str:
    """The end of a text on one line: where the answer stands."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else f"...{line[-_SHOWN_CHARS:]}"
