"""GSM8K: which answers count as correct."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppoctl.core.errors import RewardError
from ppoctl.rewards import gsm8k
from ppoctl.rewards.function import RewardValue
from rewards.asking import request

GOLD = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips.\n#### 72"


@pytest.mark.parametrize(
    ("response", "strict", "lenient"),
    [
        (GOLD, 1, 1),
        ("#### 72", 1, 1),
        ("#### 73", 0, 0),
        ("", 0, 0),
        ("####", 0, 0),
        ("I think it is 72", 0, 1),
        ("#### 41, no: #### 72", 1, 1),
        ("#### 72, no: #### 41", 0, 0),
        ("#### 72 and 5 apples", 1, 0),
        ("#### 72 ####", 1, 1),
        ("#### $72", 0, 1),
        ("####72", 0, 1),
        ("####  72", 0, 1),
        ("#### 72.", 0, 1),
        ("#### 72.0", 0, 1),
        ("#### 072", 0, 1),
        ("#### -72", 0, 0),
        ("#### 7,2", 1, 1),
        ("#### 720", 0, 0),
        ("##### 72", 1, 1),
        ("#### \u0667\u0662", 0, 0),
        ("#### 72 \ud800", 1, 1),
    ],
)
def test_gsm8k_strict_and_lenient_scores(response: str, strict: int, lenient: int) -> None:
    result = gsm8k.score(request(response, GOLD))
    assert (result.value, result.extras) == (float(strict), {"lenient": float(lenient)})
    assert result.answer == gsm8k.strict_number(response)
    result = gsm8k.score(request(response, GOLD), strict=False)
    assert (result.value, result.extras) == (float(lenient), {"strict": float(strict)})
    assert (result.answer is None) == (gsm8k.lenient_number(response) is None)


def test_equal_lenient_numbers_give_the_same_answer() -> None:
    answers = [
        gsm8k.score(request(text, GOLD), strict=False).answer for text in ("1,200", "1200.0", "01200.", "-.5", "x")
    ]
    assert answers == ["1200", "1200", "1200", "-0.5", None]


@pytest.mark.parametrize(
    ("truth", "number"),
    [
        ("so\n#### 1,234", "1234"),
        ("#### -3", "-3"),
        ("72", "72"),
        (" 1,000\n", "1000"),
        ("-0.5", "-0.5"),
        (".5", ".5"),
        ("#### 12 #### 13", "13"),
        ("####12", "12"),
        ("#### 12\r\nthe end", "12"),
    ],
)
def test_gsm8k_truth_is_gold_text_or_bare_number(truth: str, number: str) -> None:
    assert gsm8k.gold_number(truth) == number
    tried = gsm8k.Gsm8kScorer(kind="gsm8k").candidates(truth)
    assert [gsm8k.score(request(text, truth)).value for text in (tried.gold, tried.wrong)] == [1, 0]
    assert gsm8k.score(request(f"#### {number}", truth)).value == 1


@pytest.mark.parametrize("truth", ["", "seventy-two", "the answer is 72", "-", ".", "7 2", "1.2.3"])
def test_gsm8k_truth_without_number_raises(truth: str) -> None:
    with pytest.raises(ValueError, match="neither a number nor a text"):
        gsm8k.score(request("#### 72", truth))


@pytest.mark.parametrize(
    "answer",
    [
        "3/4",
        "2\\sqrt{3}",
        "1e3",
        "2^{10}",
        "5, 7",
        "7:30",
        "$6",
        "72 clips",
        "x=12",
        "1.2.3",
        "3,14",
        ",",
        "",
        "\u22125",
    ],
)
def test_gsm8k_truth_that_is_not_one_number_raises(answer: str) -> None:
    with pytest.raises(ValueError, match="is not one number"):
        gsm8k.score(request("#### 72", f"so 72 it is\n#### {answer}\nthe end"))
    with pytest.raises(RewardError, match="is not one number") as caught:
        gsm8k.Gsm8kScorer(kind="gsm8k").candidates(f"#### {answer}")
    assert caught.value.hint == 'set `kind = "math"`, which reads fractions, formulas and units'


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("It is \u22125.", "-5"),
        ("It is = \u2212 5", "-5"),
        ("It is \uff0d5", "-5"),
        ("It is \u20135", "-5"),
        ("10 \u2212 5", "5"),
        ("10\u20125 pages 10\u201312", "12"),
        ("\u2212$5", "-5"),
        ("in 1e5 steps", "100000"),
        ("1E-3", "0.001"),
        ("1.5\u00d710^3", "1500"),
        (r"$1.5 \times 10^{3}$", "1500"),
        ("\uff11\uff12", "12"),
        ("1\u202f000\u202f000", "1000000"),
        ("1 000", "1000"),
        ("3 1/2", None),
        ("3\u00bd", None),
        ("3/4", None),
        ("2^{10}", None),
        ("10\u00b2", None),
        ("7:30", None),
        (r"\frac{3}{4}", None),
        (r"\sqrt{3}", None),
        ("1e4000", None),
        ("7 \u00f7 3", None),
        ("7 / 3", None),
        ("7//3", None),
        ("3\u20444", None),
        (r"\frac 1 5", None),
        (r"\frac{\sqrt{2}}{5}", None),
        (r"\sqrt 5", None),
        ("5!", None),
        ("It is $5!$", None),
        ("It is 72!", "72"),
        ("0x5", None),
        ("0x1F", None),
        ("1.000.000", None),
        ("1\\,000", "1000"),
        ("Step 2: 5", "5"),
        (r"\boxed{3}", "3"),
        ("Answer: 3", "3"),
    ],
)
def test_gsm8k_lenient_number_is_read_whole_or_not_at_all(response: str, number: str | None) -> None:
    assert gsm8k.lenient_number(response) == number


def test_gsm8k_answer_far_from_end_is_found_unlike_in_verl() -> None:
    response = "#### 72\n" + "and so on " * 40
    assert gsm8k.score(request(response, GOLD)).value == 1
    assert _verl_strict(response) is None
    assert gsm8k.score(request(response, GOLD), last_chars=300) == RewardValue(0.0, {"lenient": 0.0})


_PIECES = st.sampled_from(["#### ", "####", "#", " ", "$", ",", ".", "-", "7", "72", "1,000", "x", "\n"])


@given(st.lists(_PIECES, max_size=40).map("".join))
def test_gsm8k_strict_number_of_last_300_characters_equals_verl(response: str) -> None:
    assert gsm8k.strict_number(response[-300:]) == _verl_strict(response)
    is_right = float(_verl_strict(response) == "72")
    assert gsm8k.score(request(response, GOLD), last_chars=300).value == is_right


@pytest.mark.sampled(2, 4)  # in CI a tenth of each split, with both readings
@pytest.mark.parametrize("tenth", range(10))
@pytest.mark.parametrize(("part", "count"), [("train", 7473), ("test", 1319)])
@pytest.mark.parametrize("last_chars", [None, 300])
def test_gold_gsm8k_answers_score_1_and_other_candidates_0(
    tenth: int, part: str, count: int, last_chars: int | None, ppoctl_data: Path
) -> None:
    lines = (ppoctl_data / "gsm8k" / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    assert len(answers) == count
    for answer in answers[tenth::10]:
        for strict, other in ((True, "lenient"), (False, "strict")):
            keys = {"strict": strict, "last_chars": last_chars}
            tried = gsm8k.Gsm8kScorer(kind="gsm8k", **keys).candidates(answer)
            texts = (tried.gold, tried.wrong, tried.empty, tried.truncated)
            right, off, *less = (gsm8k.score(request(text, answer), **keys) for text in texts)
            assert (right.value, right.extras) == (1.0, {other: 1.0})
            assert (off.value, off.extras) == (0.0, {other: 0.0})
            assert [found.value for found in less] == [0.0, 0.0]


def _verl_strict(response: str) -> str | None:
    """Transcription of verl's `extract_solution(method="strict")`."""
    numbers = re.findall("#### (\\-?[0-9\\.\\,]+)", response[-300:])
    return numbers[-1].replace(",", "").replace("$", "") if numbers else None
