r"""DAPO's rule: the text after the last `Answer:`, with both sides normalized."""

import pytest

from ppoctl.core.errors import RewardError
from ppoctl.rewards import dapo_math
from ppoctl.rewards.dapo_math import DapoMathScorer
from rewards.asking import request


@pytest.mark.parametrize(
    ("response", "truth", "value"),
    [
        ("So it is.\nAnswer: 42", "42", 1),
        ("answer :  42", "42", 1),
        ("Answer:\n42", "42", 1),
        ("Answer: 41\nAnswer: 42", "42", 1),
        ("Answer: 42\nAnswer: 41", "42", 0),
        ("Answer: $x = 42$", "42", 1),
        ("Answer: 42 dollars", "42", 1),
        ("Answer: 1,234", "1234", 1),
        ("Answer: \\boxed{42}", "42", 1),
        ("Answer: \\frac12", "\\frac{1}{2}", 1),
        ("Answer: \\sqrt3", "\\sqrt{3}", 1),
        ("Answer: 90^\\circ", "90", 1),
        ("Answer: \\text{Monday}", "Monday", 1),
        ("Answer: 0.5", "\\frac{1}{2}", 0),
        ("Answer: 42.", "42", 0),
        ("The answer is 42", "42", 0),
        ("Answer:", "42", 0),
        ("", "42", 0),
    ],
)
def test_text_after_last_answer_is_compared(response: str, truth: str, value: float) -> None:
    assert dapo_math.score(request(response, truth)).value == value


@pytest.mark.parametrize(("filler", "value"), [(290, 1), (291, 0)])
def test_only_the_last_300_characters_are_read(filler: int, value: float) -> None:
    response = "Answer: 4\n" + "." * filler  # the first line has ten characters
    assert dapo_math.score(request(response, "4")).value == value
    assert dapo_math.score(request(response, "4"), last_chars=400).value == 1


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("a 3 square meters", "3"),
        ("$5$ or $6$", "5"),
        ("1\\text{ and }x", "1,x"),
        ("1,\\text{and}2", "12"),
        ("\\mbox{cents} 12", "12"),
        ("12,345,678", "12345678"),
        ("1,2,x", "1,2,x"),
    ],
)
def test_dapo_answer_is_normalized(answer: str, normal: str) -> None:
    assert dapo_math.normal_form(answer) == normal


@pytest.mark.parametrize("truth", ["", "units", "x ="])
def test_dapo_truth_without_content_raises(truth: str) -> None:
    with pytest.raises(ValueError, match=r"the ground truth `.*` is empty after it is normalized"):
        dapo_math.score(request("Answer: ways", truth))
    with pytest.raises(RewardError, match=r"the ground truth `.*` is empty after it is normalized"):
        DapoMathScorer(kind="dapo_math").candidates(truth)


@pytest.mark.parametrize(
    "truth",
    [
        *("6*7=42\n#### 42", "x = 3, y = 5", "2x + 3 = 7", "a = b = 5", "$3$ or $5$", "so it is\n42"),
        *("$5$ or seven", "-$5$", "$1.5$ million", "0.\\overline{3}"),
    ],
)
def test_dapo_truth_of_which_a_part_would_be_lost_raises(truth: str) -> None:
    with pytest.raises(RewardError, match=r"only a part of the ground truth `.*` would be read"):
        DapoMathScorer(kind="dapo_math").candidates(truth)


@pytest.mark.parametrize(
    "truth", ["5 feet 3 inches", "10 units 5", "2,3", "3 1/2", "1,\\text{and}2", "10 cm^2", "5 degrees 30 minutes"]
)
def test_dapo_truth_whose_numbers_would_be_joined_raises(truth: str) -> None:
    with pytest.raises(RewardError, match=r"the numbers of the ground truth `.*` would be read as `.*`"):
        DapoMathScorer(kind="dapo_math").candidates(truth)


@pytest.mark.parametrize(
    "truth", ["1,234", "12{,}345", "1,\\!000", "1,234 dollars", "5\\text{ m}^2", "\\frac12", "30^\\circ"]
)
def test_dapo_truth_of_one_number_is_read(truth: str) -> None:
    tried = DapoMathScorer(kind="dapo_math").candidates(truth)
    assert [dapo_math.score(request(text, truth)).value for text in (tried.gold, tried.wrong)] == [1, 0]


@pytest.mark.parametrize("truth", ["x = 42", "f(x) = x^2", "$42$", "$42$ dollars", "\\theta = 42", "$x_1 = 42$"])
def test_dapo_truth_may_have_name_and_dollar_signs(truth: str) -> None:
    tried = DapoMathScorer(kind="dapo_math").candidates(truth)
    assert [dapo_math.score(request(text, truth)).value for text in (tried.gold, tried.wrong)] == [1, 0]


@pytest.mark.parametrize("truth", ["42", "\\frac{19}{2}", "x", "\\text{even}", "-3"])
def test_gold_dapo_answer_beats_other_candidates(truth: str) -> None:
    tried = DapoMathScorer(kind="dapo_math").candidates(truth)
    texts = (tried.gold, tried.wrong, tried.empty, tried.truncated)
    assert [dapo_math.score(request(text, truth)).value for text in texts] == [1, 0, 0, 0]
