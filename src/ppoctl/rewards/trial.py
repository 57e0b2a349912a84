r"""Trial of a reward before a run: many rows, each with responses whose expected ranking is known.

    gold, wrong, empty, cut          the four responses that every run also tries when it starts (`probe`)
    other end, a part                wrong answers that a scorer accepts if it reads only a part of the ground truth
    at great length, hedged, ...     the correct answer as a policy in training might write it
    question, no answer, guess       trivial responses, which should get no reward
    boxed, plain, tags, ...          the correct answer in the formats of other rewards
    attacks                          responses that make scorers hang or die; on the first row only

All answers are copied from the text of the row (`verbatim`), never read by the scorer that they test. `findings`
evaluates the results. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ppoctl.core.batch.prompts import Prompt
from ppoctl.core.batch.scores import Finish, Score, Scorer, ScoreRequest
from ppoctl.core.errors import RewardError
from ppoctl.rewards.combined_scores import flush_all_scorers
from ppoctl.rewards.environment_reward import EnvironmentScorer
from ppoctl.rewards.probe import Encode, probed_rows, result_of
from ppoctl.rewards.reward_rows import ADD_TRUTH
from ppoctl.rewards.scorer_table import Candidates, ScorerTable
from ppoctl.rewards.verbatim import other_answer, parts_of, verbatim_answer

FILLER = "Let me think about this step by step. "
LENGTHS = (1, 4, 16, 64)
"""Numbers of sentences in the responses of growing length without content."""
LONG = 52
"""Number of sentences that together have about 2,000 characters."""
_REPEATS = 20

TRIVIAL = {
    "empty": "",
    "no answer": "I do not know.",
    "guess": "The answer is 42.",
}
"""Trivial responses, independent of the question."""
PARTS = ("a part", "the last part")
PARTLY_RIGHT = ("other end", *PARTS)
"""Wrong answers that share one end with the answer of a row."""
ATTACKS = {
    "a tower of powers": "The answer is $\\boxed{9^{9^{9^{9}}}}$.\n#### 9^9^9^9\nAnswer: 9^9^9^9",
    "20,000 numbers": " ".join(map(str, range(20_000))),
    "5,000 brackets": "\\[" * 2_500 + "(" * 2_500,
    "one letter 50,000 times": "a" * 50_000,
    "no letters": "\x00\x1b[2J\ud800\u202e",
}
"""Responses that make some scorers hang, die or raise."""


@dataclass(frozen=True)
class Tried:
    """One response to one row, and its score."""

    row: str
    name: str
    text: str
    score: Score


@dataclass(frozen=True)
class Trial:
    """Scores of all responses that were tried with one scorer."""

    scorer: str
    """Key of the scorer in the recipe, and its kind: `reward (gsm8k)`."""
    has_gold: bool
    rows: tuple[str, ...]
    """Ids of the rows, including rows with faults."""
    tried: tuple[Tried, ...]
    faults: Mapping[str, str] = field(default_factory=dict)
    """Row id -> why no response could be tried on the row."""
    opened: Mapping[str, str] = field(default_factory=dict)
    """Row id -> text that a scored response must contain, and with which the prompt of the row already ends."""

    @property
    def names(self) -> list[str]:
        """Names of the responses, in order."""
        return list(dict.fromkeys(response.name for response in self.tried))

    def of(self, name: str) -> list[Tried]:
        """Return the responses of all rows that have this response name, such as `gold`."""
        return [response for response in self.tried if response.name == name]

    def scored(self, name: str) -> list[float]:
        """Return the scores of all rows for the response that has this name. Responses without a score are left
        out."""
        return [response.score.value for response in self.of(name) if response.score.value is not None]

    def as_gold(self, name: str) -> float | None:
        """Return the fraction of rows on which this response scored at least as much as the gold answer; None: no row
        has both scores."""
        gold = {response.row: response.score.value for response in self.of("gold")}
        both = [
            (response.score.value, right)
            for response in self.of(name)
            if response.score.value is not None and (right := gold.get(response.row)) is not None
        ]
        return sum(value >= right for value, right in both) / len(both) if both else None


def chosen_rows(reward: ScorerTable, prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` rows, evenly spaced. If rows select their scorer, add the first row of each scorer."""
    count = min(count, len(prompts))
    spaced = [prompts[number * len(prompts) // count] for number in range(count)]
    first = probed_rows(reward, prompts) if len(reward.singles) > 1 else ()
    return list({prompt.id: prompt for prompt in (*spaced, *first)}.values())


def trials(scorer: Scorer, reward: ScorerTable, prompts: Sequence[Prompt], encode: Encode) -> list[Trial]:
    """Score the test responses of these rows, and return a trial for each scorer that the rows select. Raises
    RewardError if a score cannot be trained on, or if a scorer does not start."""
    groups: dict[int, list[Prompt]] = {}
    faults: dict[str, str] = {}
    for prompt in prompts:
        try:
            groups.setdefault(id(reward.of_row(prompt.fields)), []).append(prompt)
        except RewardError as error:
            faults[prompt.id] = error.message
    names = {id(table): _name(reward, path, table) for path, table in reward.scorers.items()}
    by_scorer = [
        _trial(scorer, names.get(key, _name(reward, (), reward)), rows, encode, reward)
        for key, rows in groups.items()
    ]
    if faults:
        by_scorer.append(Trial("no scorer", has_gold=False, rows=tuple(faults), tried=(), faults=faults))
    return by_scorer


def _trial(scorer: Scorer, name: str, prompts: Sequence[Prompt], encode: Encode, reward: ScorerTable) -> Trial:
    submitted: list[tuple[str, str, str, Future[Score]]] = []
    faults: dict[str, str] = {}
    if isinstance(reward.of_row(prompts[0].fields), EnvironmentScorer):
        return Trial(name, has_gold=False, rows=tuple(prompt.id for prompt in prompts), tried=())
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
            submitted.append((prompt.id, kind, text, scorer.submit(request)))
        is_first = False
    flush_all_scorers([scorer])
    tried = tuple(Tried(row, kind, text, result_of(future, reward)) for row, kind, text, future in submitted)
    return Trial(name, has_gold, tuple(prompt.id for prompt in prompts), tried, faults, _opened(reward, prompts))


def _opened(reward: ScorerTable, prompts: Sequence[Prompt]) -> dict[str, str]:
    opened: dict[str, str] = {}
    for prompt in prompts:
        for single in reward.of_row(prompt.fields).singles:
            if single.required_text and prompt.text.rstrip().endswith(single.required_text.strip()):
                opened[prompt.id] = single.required_text.strip()
    return opened


def responses(table: ScorerTable, prompt: Prompt) -> dict[str, str]:
    """Return the responses to try on a row, by name. Raises RewardError if its ground truth is missing or cannot be
    read."""
    if table.reads_truth and prompt.answer is None:
        raise RewardError("there is no ground truth", hint=ADD_TRUTH)
    candidates = None if prompt.answer is None else table.candidates(prompt.answer)
    question = {"question": prompt.messages[-1].content or ""} if prompt.messages else {}
    if candidates is None:
        truth = {} if prompt.answer is None else {"ground truth": prompt.answer, **_in_all_formats(prompt.answer)}
        lengths = {f"{count} x filler": (FILLER * count).strip() for count in LENGTHS}
        return {**TRIVIAL, **question, **truth, **lengths}
    return {
        "gold": candidates.gold,
        "wrong": candidates.wrong,
        "empty": candidates.empty,
        "cut": candidates.truncated,
        **_partly_right(table, prompt.answer or ""),
        **question,
        **{name: text for name, text in TRIVIAL.items() if text},
        **_variants(candidates),
        **{name: text for name, text in _in_all_formats(prompt.answer or "").items() if text != candidates.gold},
    }


def _partly_right(table: ScorerTable, truth: str) -> dict[str, str]:
    """Return responses with wrong answers that share one end with the answer of a row."""
    answer = verbatim_answer(truth)
    other = other_answer(answer, at_the_end=True)
    wrong = {} if other == other_answer(answer) else {"other end": other}
    wrong |= dict(zip(PARTS, parts_of(answer), strict=False))
    worded = {name: table.response_with(text, truth) for name, text in wrong.items()}
    return {name: text for name, text in worded.items() if text is not None}


def _variants(candidates: Candidates) -> dict[str, str]:
    filler = (FILLER * LONG).strip()
    return {
        "gold, then wrong": f"{candidates.gold}\n\n{candidates.wrong}",
        "wrong, then gold": f"{candidates.wrong}\n\n{candidates.gold}",
        "gold repeated": "\n\n".join([candidates.gold] * _REPEATS),
        "filler, gold": f"{filler}\n\n{candidates.gold}",
        "gold, filler": f"{candidates.gold}\n\n{filler}",
        "filler, wrong": f"{filler}\n\n{candidates.wrong}",
    }


def _in_all_formats(truth: str) -> dict[str, str]:
    answer = verbatim_answer(truth)
    return {
        "as `#### 7`": f"It follows.\n#### {answer}",
        "as `\\boxed{7}`": f"It follows.\nThe answer is $\\boxed{{{answer}}}$.",
        "as `Answer: 7`": f"It follows.\nAnswer: {answer}",
        "as `<answer>7</answer>`": f"<think>It follows.</think>\n<answer>{answer}</answer>",
        "as `it is 7.`": f"It follows that it is {answer}.",
        "as `7`": answer,
    }


def _name(reward: ScorerTable, path: tuple[str, ...], table: ScorerTable) -> str:
    key = ".".join(("reward", *path))
    return f"{key} ({getattr(table, 'kind', getattr(reward, 'kind', ''))})"
