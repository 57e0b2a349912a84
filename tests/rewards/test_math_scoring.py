r"""Mathematics: which answers count as correct, in any notation."""

import json
import logging
import os
from functools import partial
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from ppoctl.core.batch.scores import Score
from ppoctl.core.errors import RewardError
from ppoctl.rewards import boxed, math_grading
from ppoctl.rewards.math import MathScorer
from rewards.asking import request, scores_of

ANYWHERE = math_grading.score
LAST_BOX = partial(math_grading.score, boxed=True)
AS_TEXT = boxed.score
RULES = {"math_verify": ANYWHERE, "last_box": LAST_BOX, "hendrycks": AS_TEXT}

NOT_ONE_MORE = {
    r"\frac{1}{2004!}": "math-verify rounds to six decimals, and both are 0 then",
    r"\frac{1}{2^{98}}": "likewise",
    ".0000672": "likewise",
    r"0.56 = 56\%": "of an equation math-verify takes the last side, which is not the one that was changed",
    r"\frac{7}{5} + \frac{1}{5} i.": "the full stop behind i leaves only the second term to be compared",
}
"""Ground truths of MATH that math-verify considers equal to a variant with another first number, with the reason."""
EMPTY_TRUTHS = 2
"""Rows of MATH with an empty ground truth: nothing can be compared with it, so such a row has no score."""


@pytest.mark.parametrize(
    ("truth", "response", "anywhere", "last_box", "as_text"),
    [
        (r"\frac{1}{2}", r"\boxed{0.5}", 1, 1, 1),
        (r"\frac{1}{2}", r"\boxed{\frac12}", 1, 1, 1),
        (r"\frac{1}{2}", r"\boxed{\dfrac{2}{4}}", 1, 1, 0),
        (r"\frac{1}{2}", "so it is 1/2", 1, 0, 0),
        (r"\frac{1}{3}", r"\boxed{0.333}", 0, 0, 0),
        (r"\{1,2\}", r"\boxed{\{2, 1\}}", 1, 1, 0),
        ("(1,2)", r"\boxed{(2,1)}", 0, 0, 0),
        ("[0,1)", r"\boxed{\left[0, 1\right)}", 1, 1, 1),
        ("[0,1)", r"\boxed{[0,1]}", 0, 0, 0),
        (r"7\text{ cm}", r"\boxed{7}", 1, 1, 1),
        ("7", r"\boxed{7\text{ miles}}", 1, 1, 1),
        (r"30^\circ", r"\boxed{30}", 1, 1, 1),
        (r"50\%", r"\boxed{0.5}", 1, 1, 0),
        (r"\text{Monday}", r"\boxed{\text{Monday}}", 1, 1, 1),
        (r"\text{Monday}", r"\boxed{Monday}", 1, 1, 0),
        (r"\text{Monday}", r"\boxed{\text{Sunday}}", 0, 0, 0),
        (r"\text{(C)}", r"\boxed{C}", 1, 1, 0),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", 1, 1, 0),
        ("5", r"\boxed{x = 5}", 1, 1, 1),
        ("10080", r"\boxed{10,080}", 1, 1, 0),
        ("12_5", r"\boxed{13_5}", 0, 0, 0),
        ("3", r"\boxed{3} no: \boxed{4}", 0, 0, 0),
        ("3", r"\boxed{1} ... so we have \boxed{3}", 1, 1, 1),
        ("3", r"first \boxed{1} and \boxed{3}", 0, 1, 1),  # math-verify parses both as a set
        ("3", r"\boxed{3", 0, 0, 0),
        ("3", r"\boxed 3$.", 1, 1, 1),
        ("42", "the answer is 42", 1, 0, 0),
        ("42", "42 apples? no: 43", 0, 0, 0),
        ("42", "", 0, 0, 0),
        ("42", "9" * 20_000, 0, 0, 0),
        (r"Thus $x = \boxed{42}$.", r"\boxed{42}", 1, 1, 1),
        ("48+24=72\n#### 1,072", r"\boxed{1072}", 1, 1, 1),
    ],
)
def test_math_answer_is_extracted_and_compared_by_rule(
    truth: str, response: str, anywhere: int, last_box: int, as_text: int
) -> None:
    sample = request(response, truth)
    assert [rule(sample).value for rule in (ANYWHERE, LAST_BOX, AS_TEXT)] == [anywhere, last_box, as_text]


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        ("half of it\n#### 3/4", "3/4", "3"),
        ("a root\n#### 2\\sqrt{3}", "2\\sqrt{3}", "2"),
        ("#### 1e3", "1000", "1"),
        ("#### 2^{10}", "1024", "2"),
        ("#### 5, 7", "5, 7", "5"),
        ("#### 7:30", "7:30", "7"),
        ("#### 9:00", "9:00", "8:00"),
        (r"\text{4:30 p.m.}", r"\text{4:30 p.m.}", r"\text{4:31 p.m.}"),
        ("cost\n#### $12", "12", "13"),
        ("5*3=15\n#### (1, 2)", "(1,2)", "(2,1)"),
        ("1+11\n#### x=12", "12", "11"),
        ("10+2\n####12", "12", "10"),
        ("#### **12**.", "12", "13"),
        ("#### $\\frac{1}{2}$", "\\frac{1}{2}", "1"),
        ("#### 12\r\nthe end", "12", "13"),
        ("so 3\n#### Answer\n\\boxed{12}", "12", "3"),
        ("so \\boxed{3}\n#### 12", "12", "3"),
        ("#### $\\boxed{12}$.", "12", "1"),
        ("#### 3 1/2", "7/2", "2"),
        ("#### 1 234", "1234", "234"),
        ("#### 1\u202f234", "1234", "234"),
        ("#### \u22125", "-5", "5"),
        ("#### \uff11\uff12", "12", "1"),
        ("#### 1.5\u00d710\u00b3", "1500", "1.5"),
        (r"1\,000", "1000", "0"),
        (r"#### 10\,000\text{ m}", "10000", "0"),
        (r"1\ 000", "1000", "0"),
        (r"12\!\,345", "12345", "357"),
        (r"1{,}000.5", "1000.5", "0.5"),
        (r"11,\! 111,\! 100", "11111100", "100"),
        (r"\[x = \boxed{90}^{\circ}\]", "90", "9"),
        (r"**\boxed{5}**", "5", "25"),
        (r"so - $\$\boxed{5}$, 7", "5", "57"),
    ],
)
def test_math_truth_is_read_to_its_end(truth: str, right: str, wrong: str) -> None:
    for text, value in ((right, 1.0), (wrong, 0.0)):
        sample = request(f"It is $\\boxed{{{text}}}$.", truth)
        assert [ANYWHERE(sample).value, LAST_BOX(sample).value] == [value, value]
        if right in truth:  # other spellings are other texts
            assert AS_TEXT(sample).value == value
    assert "of the ground truth" not in str(MathScorer(kind="math").candidates(truth))


@pytest.mark.parametrize(
    "truth",
    [
        "#### Step 2\nso 5",
        "half of 3\nis 3/4",
        r"\boxed{\frac{1}{2}",
        r"#### \boxed{3}/4",
        r"the roots are \boxed{3} and $\boxed{5}$",
        r"-\boxed{5}",
        r"-$\boxed{5}$",
        r"$x = - \boxed{5}$",
        r"\boxed{5}/7",
        r"2\boxed{5}",
        r"3 \cdot \boxed{5}",
        r"\frac{\boxed{5}}{7}",
        r"\boxed{5}^2",
        r"\boxed{5} - 1",
        r"\boxed{5}\pi",
        r"\boxed5",
        r"so \boxed{3}, no: \boxed",
        r"1.5 \text{ million}",
        r"\boxed{\$1.5\text{ million}}",
        "#### \n72",
    ],
)
def test_math_truth_of_which_a_part_would_be_lost_raises(truth: str) -> None:
    with pytest.raises(RewardError, match=r"ground truth") as caught:
        MathScorer(kind="math").candidates(truth)
    assert caught.value.hint == "correct the row, or name a column that has only the answer"
    for rule in RULES.values():
        with pytest.raises(ValueError, match="ground truth"):
            rule(request(r"\boxed{3}", truth))


@pytest.mark.parametrize("truth", ["1.000.000", "1.000,5", "0x1F", "2024-01-05", "192.168.1.1", r"3\,4", r"2\ 1/2"])
def test_truth_that_math_verify_reads_as_several_numbers_raises(truth: str) -> None:
    for rule in ("math_verify", "last_box"):
        with pytest.raises(RewardError, match="would be read as several numbers"):
            MathScorer(kind="math", rule=rule).candidates(truth)
        with pytest.raises(ValueError, match="would be read as several numbers"):
            RULES[rule](request(r"\boxed{0}", truth))
    assert AS_TEXT(request(rf"\boxed{{{truth}}}", truth)).value == 1


def test_empty_line_after_mark_is_named() -> None:
    with pytest.raises(RewardError, match="the line after the last `####` of the ground truth is empty"):
        MathScorer(kind="math").candidates("#### \n72")


def test_truth_of_which_math_verify_reads_a_part_raises() -> None:
    with pytest.raises(ValueError, match="math-verify reads only `1` of the ground truth"):
        ANYWHERE(request(r"\boxed{1}", r"1 \text{ m } 2 \text{ cm}"))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("truth", ["", "  ", r"\boxed{}", "####"])
def test_empty_math_truth_raises(rule: partial[object], truth: str) -> None:
    with pytest.raises(ValueError, match="ground truth is empty"):
        rule(request(r"\boxed{}", truth))


def test_unparsable_math_truth_raises() -> None:
    with pytest.raises(ValueError, match=r"cannot read the ground truth `\}\{`"):
        math_grading.score(request(r"\boxed{1}", "}{"))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_last_chars_limits_math_response(rule: partial[object]) -> None:
    sample = request(r"\boxed{42}" + " and so on" * 10, "42")
    assert [rule(sample, last_chars=chars) for chars in (None, 200, 60)] == [
        rule(sample),
        rule(sample),
        rule(request("", "42")),
    ]
    assert rule(sample) != rule(request("", "42"))


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (r"\tfrac{1}{2}", r"\frac{1}{2}"),
        ("1/2", r"\frac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"\frac123", r"\frac{1}{2}3"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        ("k = 7", "7"),
        (".5x", "0.5x"),
        (r"\$32\%", "32"),
        ("90^{\\circ}", "90"),
        (r"5 \text{ cm}", "5"),
        (r"440\text{ cm}^2", "440"),
        (r"1 \text{ m} 2 \text{ cm}", r"1 \text{ m} 2 \text{ cm}"),  # two units: compared as text
    ],
)
def test_equivalent_math_spellings_are_the_same(text: str, same: str) -> None:
    assert boxed.is_same(text, same)
    assert boxed.is_same(same, text)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        (r"19 \text{ and }43", "19"),
        (r"2, 3, \text{ and } 4", r"2, 3, \text{ and } 5"),
        ("abc=7", "7"),
        ("x/2", r"\frac{x}{2}"),
        (r"1\frac", "1"),
        (r"\sqrt", ""),
    ],
)
def test_non_equivalent_math_texts_differ(text: str, other: str) -> None:
    assert not boxed.is_same(text, other)


@pytest.mark.parametrize("part", range(40))
@pytest.mark.sampled(1)
def test_gold_math_and_aime_answers_beat_other_candidates(part: int, ppoctl_data: Path) -> None:
    files = [ppoctl_data / "verl-parquet" / "math" / f"{name}.parquet" for name in ("train", "test")]
    truths = [row["ground_truth"] for file in files for row in parquet.read_table(file)["reward_model"].to_pylist()]
    lines = (ppoctl_data / "aime24" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    truths += [json.loads(line)["answer"] for line in lines]
    assert (len(truths), truths.count("")) == (12_530, EMPTY_TRUTHS)
    step = 40 if os.environ.get("CI") else 160  # of each part, CI tries all truths
    for truth in sorted(set(truths) - {""})[part::step]:
        for name, rule in RULES.items():
            tried = MathScorer(kind="math", rule=name).candidates(truth)
            values = [rule(request(text, truth)).value for text in (tried.gold, tried.truncated, tried.empty)]
            assert (name, truth, values) == (name, truth, [1, 0, 0])
            if truth not in NOT_ONE_MORE:
                assert (name, truth, rule(request(tried.wrong, truth)).value) == (name, truth, 0)


def test_math_reward_reads_gold_gsm8k_answers(ppoctl_data: Path) -> None:
    lines = (ppoctl_data / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:100]
    for answer in (json.loads(line)["answer"] for line in lines):
        tried = MathScorer(kind="math").candidates(answer)
        assert [math_grading.score(request(text, answer)).value for text in (tried.gold, tried.wrong)] == [1, 0]


def test_math_candidates_are_boxed_and_wrong_number_differs() -> None:
    tried = MathScorer(kind="math").candidates(r"\frac{19}{2}")
    assert tried.gold == "It follows.\nThe answer is $\\boxed{\\frac{19}{2}}$."
    assert tried.wrong == "It follows.\nThe answer is $\\boxed{\\frac{20}{2}}$."
    assert r"\boxed{1729}" in MathScorer(kind="math").candidates("x").wrong
    with pytest.raises(RewardError, match="ground truth is empty"):
        MathScorer(kind="math").candidates(" ")


def test_slow_sympy_comparison_times_out_for_its_own_sample_only() -> None:
    requests = [request(text, "42") for text in (r"\boxed{42}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{42}")]
    right = Score(1.0, "ok", answer="42")
    results = scores_of(MathScorer(kind="math", timeout_s=2.0), *requests)
    assert results == [right, Score(None, "timeout", "no score within 2 s"), right]


def test_math_verify_logs_no_errors() -> None:
    assert not logging.getLogger("math_verify.parser").isEnabledFor(logging.ERROR)
