r"""A reward is tried before a run is: many rows, each with responses of which it is known how they should fare.

    gold, wrong, empty, cut          the four that are tried at every start, too (`probe`)
    at great length, hedged, ...     the right answer as a policy in training might write it
    question, no answer, guess       what costs nothing to write, and should earn nothing
    boxed, plain, tags, ...          the right answer in the formats of other rewards
    attacks                          what makes a scorer hang or die; on the first row only

`findings` judges what came of it. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from ppoctl.batch.prompts import Prompt
from ppoctl.batch.scores import Finish, Score, Scorer, ScoreRequest
from ppoctl.errors import RewardError
from ppoctl.rewards.boxed import stated
from ppoctl.rewards.combined_scores import flush_all_scorers
from ppoctl.rewards.probe import Encode, probed_rows, result_of
from ppoctl.rewards.table import Candidates, ScorerTable

FILLER = "Let me think about this step by step. "
LENGTHS = (1, 4, 16, 64)
"""Sentences of the responses that say nothing, at growing length."""
LONG = 52
"""Sentences of about 2,000 characters."""
_REPEATS = 20

TRIVIAL = {
    "empty": "",
    "no answer": "I do not know.",
    "guess": "The answer is 42.",
}
"""Responses that anybody can write, whatever the question."""
ATTACKS = {
    "a tower of powers": "The answer is $\\boxed{9^{9^{9^{9}}}}$.\n#### 9^9^9^9\nAnswer: 9^9^9^9",
    "20,000 numbers": " ".join(map(str, range(20_000))),
    "5,000 brackets": "\\[" * 2_500 + "(" * 2_500,
    "one letter 50,000 times": "a" * 50_000,
    "no letters": "\x00\x1b[2J\ud800\u202e",
}
"""Responses over which scorers hang, die or choke."""


@dataclass(frozen=True)
class Tried:
    """One response to one row, and what it scored."""

    row: str
    name: str
    text: str
    score: Score


@dataclass(frozen=True)
class Trial:
    """What one scorer said of all that was tried."""

    scorer: str
    """Its place in the recipe and its kind: `reward (gsm8k)`."""
    has_gold: bool
    rows: tuple[str, ...]
    """Ids of the rows, those with faults included."""
    tried: tuple[Tried, ...]
    faults: Mapping[str, str] = field(default_factory=dict)
    """Row id -> why nothing could be tried on it."""

    @property
    def names(self) -> list[str]:
        """Names of what was tried, in order."""
        return list(dict.fromkeys(each.name for each in self.tried))

    def of(self, name: str) -> list[Tried]:
        """All responses of one name, by row."""
        return [each for each in self.tried if each.name == name]

    def scored(self, name: str) -> list[float]:
        """The scores that responses of one name got."""
        return [each.score.value for each in self.of(name) if each.score.value is not None]

    def as_gold(self, name: str) -> float | None:
        """Share of rows on which this response scored at least what the gold answer did; None: none has both."""
        gold = {each.row: each.score.value for each in self.of("gold")}
        both = [
            (each.score.value, right)
            for each in self.of(name)
            if each.score.value is not None and (right := gold.get(each.row)) is not None
        ]
        return sum(value >= right for value, right in both) / len(both) if both else None


def chosen_rows(reward: ScorerTable, prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """So many rows, evenly spaced; where rows choose their scorer, also the first of each."""
    count = min(count, len(prompts))
    spaced = [prompts[number * len(prompts) // count] for number in range(count)]
    first = probed_rows(reward, prompts) if len(reward.singles) > 1 else ()
    return list({prompt.id: prompt for prompt in (*spaced, *first)}.values())


def trials(scorer: Scorer, reward: ScorerTable, prompts: Sequence[Prompt], encode: Encode) -> list[Trial]:
    """All that is tried on these rows, scored; a trial for each scorer of the reward that chooses by row. Raises
    RewardError of a score that cannot be trained on, and where the scorer does not start."""
    groups: dict[int, list[Prompt]] = {}
    faults: dict[str, str] = {}
    for prompt in prompts:
        try:
            groups.setdefault(id(reward.of_row(prompt.fields)), []).append(prompt)
        except RewardError as error:
            faults[prompt.id] = error.message
    names = {id(table): _name(reward, path, table) for path, table in reward.scorers.items()}
    found = [
        _trial(scorer, names.get(key, _name(reward, (), reward)), rows, encode, reward)
        for key, rows in groups.items()
    ]
    if faults:
        found.append(Trial("no scorer", has_gold=False, rows=tuple(faults), tried=(), faults=faults))
    return found


def _trial(scorer: Scorer, name: str, prompts: Sequence[Prompt], encode: Encode, reward: ScorerTable) -> Trial:
    asked: list[tuple[str, str, str, Future[Score]]] = []
    faults: dict[str, str] = {}
    has_gold, is_first = False, True
    for prompt in prompts:
        try:
            texts = responses(reward.of_row(prompt.fields), prompt)
        except RewardError as error:
            faults[prompt.id] = error.message
            continue
        has_gold = has_gold or "gold" in texts
        for kind, text in (texts | ATTACKS if is_first else texts).items():
            finish: Finish = "truncated" if kind == "cut" else "terminated"
            request = ScoreRequest.about(prompt, text, finish, encode(text, finish))
            asked.append((prompt.id, kind, text, scorer.submit(request)))
        is_first = False
    flush_all_scorers([scorer])
    tried = tuple(Tried(row, kind, text, result_of(future, reward)) for row, kind, text, future in asked)
    return Trial(name, has_gold, tuple(prompt.id for prompt in prompts), tried, faults)


def responses(table: ScorerTable, prompt: Prompt) -> dict[str, str]:
    """What is tried on a row, by name. Raises RewardError where its truth is missing or cannot be read."""
    if table.reads_truth and prompt.answer is None:
        raise RewardError("there is no ground truth", hint="name its column as `data.train.answer`")
    known = None if prompt.answer is None else table.candidates(prompt.answer)
    question = {"question": prompt.messages[-1].content} if prompt.messages else {}
    if known is None:
        truth = {} if prompt.answer is None else {"ground truth": prompt.answer, **_in_all_formats(prompt.answer)}
        lengths = {f"{count} x filler": (FILLER * count).strip() for count in LENGTHS}
        return {**TRIVIAL, **question, **truth, **lengths}
    return {
        "gold": known.gold,
        "wrong": known.wrong,
        "empty": known.empty,
        "cut": known.truncated,
        **question,
        **{name: text for name, text in TRIVIAL.items() if text},
        **_written_otherwise(known),
        **{name: text for name, text in _in_all_formats(prompt.answer or "").items() if text != known.gold},
    }


def _written_otherwise(known: Candidates) -> dict[str, str]:
    filler = (FILLER * LONG).strip()
    return {
        "gold, then wrong": f"{known.gold}\n\n{known.wrong}",
        "wrong, then gold": f"{known.wrong}\n\n{known.gold}",
        "gold repeated": "\n\n".join([known.gold] * _REPEATS),
        "filler, gold": f"{filler}\n\n{known.gold}",
        "gold, filler": f"{known.gold}\n\n{filler}",
        "filler, wrong": f"{filler}\n\n{known.wrong}",
    }


def _in_all_formats(truth: str) -> dict[str, str]:
    answer = truth.strip()
    with suppress(ValueError):
        answer = stated(truth)
    return {
        "as `#### 7`": f"It follows.\n#### {answer}",
        "as `\\boxed{7}`": f"It follows.\nThe answer is $\\boxed{{{answer}}}$.",
        "as `Answer: 7`": f"It follows.\nAnswer: {answer}",
        "as `<answer>7</answer>`": f"<think>It follows.</think>\n<answer>{answer}</answer>",
        "as `it is 7.`": f"It follows that it is {answer}.",
        "as `7`": answer,
    }


def _name(reward: ScorerTable, path: tuple[str, ...], table: ScorerTable) -> str:
    where = ".".join(("reward", *path))
    return f"{where} ({getattr(table, 'kind', getattr(reward, 'kind', ''))})"
