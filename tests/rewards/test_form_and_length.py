"""Rewards for the format and the length of a response, independent of its content."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from ppoctl.rewards import format, length
from ppoctl.rewards.format import FormatScorer
from ppoctl.rewards.length import LengthScorer
from rewards.asking import request

R1 = r"(?s)<think>.*?</think>\s*<answer>.*?</answer>"
GOOD = "<think>48 + 24\nis 72</think>\n<answer>72</answer>"


@pytest.mark.parametrize(
    ("response", "whole", "anywhere"),
    [(GOOD, 1, 1), (f" {GOOD}\n", 1, 1), (f"{GOOD} so", 0, 1), ("<answer>72</answer>", 0, 0), ("", 0, 0)],
)
def test_format_matches_whole_response_or_anywhere(response: str, whole: int, anywhere: int) -> None:
    assert format.score(request(response, None), pattern=R1, whole=True).value == whole
    assert format.score(request(response, None), pattern=R1, whole=False).value == anywhere


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (R1, "<think>"),
        ("(<think>).*", "<think>"),
        ("(?:<think>).*", "<think>"),
        ("(?P<t><think>).*", "<think>"),
        ("(?s:<think>.*)", "<think>"),
        ("^[<]think>.*", "<think>"),
        (r"\A\n?\s*<think>.*", "<think>"),
        ("(?s).*<think>.*</think>", "<think>"),
        ("(?=.*<think>)(?!.*<b>).*", "<think>"),
        ("<think>{1}.*", "<think>"),
        ("(?:<think>){1,2}.*", "<think>"),
        ("<think>\nWell, .*", "<think>"),
        ("(?:<think>a|<think>b)", "<think>"),
        (r"\\boxed\{", "\\boxed{"),
        ("<think>.*|.*", ""),
        ("(<think>)?.*", ""),
        (r"\d+ apples", ""),
        ("[ab]+<think>", ""),
    ],
)
def test_text_that_each_match_contains_is_found(pattern: str, text: str) -> None:
    assert FormatScorer(kind="format", pattern=pattern).required_text == text


def test_invalid_regular_expression_raises_when_recipe_is_read() -> None:
    with pytest.raises(ValidationError, match="not a Python regular expression: unterminated character set"):
        FormatScorer(kind="format", pattern="[a")


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ({"at_most": 4}, [1, 1, 1, 0, 0]),
        ({"at_least": 4}, [0, 0, 1, 1, 1]),
        ({"at_most": 4, "fall": 4}, [1, 1, 1, 0.5, 0]),
        ({"at_least": 4, "at_most": 4, "fall": 4}, [0, 0.5, 1, 0.5, 0]),
        ({"at_least": 4, "at_most": 4, "fall": 1}, [0, 0, 1, 0, 0]),
        ({"at_least": 8, "fall": 8}, [0, 0.25, 0.5, 0.75, 1]),
    ],
)
def test_length_reward_is_1_in_bounds_and_falls_linearly(keys: dict[str, int], values: list[float]) -> None:
    requests = [replace(request("", None), token_ids=tuple(range(tokens))) for tokens in (0, 2, 4, 6, 8)]
    assert [length.score(response, unit="tokens", **keys).value for response in requests] == values


@pytest.mark.parametrize(
    ("keys", "message"),
    [({}, "every length has the reward 1"), ({"at_least": 9, "at_most": 8}, "`at_least` is above")],
)
def test_bounds_without_effect_or_reversed_raise(keys: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LengthScorer(kind="length", **keys)  # type: ignore[arg-type]


def test_length_counts_tokens_characters_or_words() -> None:
    response = replace(request("two  words\n", None), token_ids=(5, 6, 7))
    counted = {unit: n for unit in ("tokens", "characters", "words") for n in range(20) if _is(response, unit, n)}
    assert counted == {"tokens": 3, "characters": 11, "words": 2}


def _is(response: object, unit: str, count: int) -> bool:
    return length.score(response, unit=unit, at_least=count, at_most=count).value == 1  # type: ignore[arg-type]
