"""The reward and the prompts of recipes/trlx: the probability of a label is that of transformers' own pipeline."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from transformers import pipeline

from ppoctl.core.batch.prompts import Message
from ppoctl.core.batch.scores import ScoreRequest
from rewards.classifiers import classifier

FOLDER = Path(__file__).parents[2] / "recipes" / "trlx" / "sentiment"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_sentiment_reward_equals_pipeline_of_transformers(tmp_path: Path) -> None:
    """The label is found by its name, the text is that of prompt and response, and only its beginning is read."""
    folder = classifier(tmp_path / "judge", "POSITIVE", "NEUTRAL", "NEGATIVE")
    texts = [("I saw a", " film"), ("dull", ""), ("so much of it " * 3, "that it is cut")]
    judge = pipeline("text-classification", str(folder), top_k=None, truncation=True, device="cpu")
    positive = module("reward").positive
    seen = []
    for prompt, response in texts:
        sample = ScoreRequest("1", f"<s>{prompt}", (Message("user", prompt),), response, None, {}, "terminated")
        expected = {each["label"]: each["score"] for each in judge([prompt + response])[0]}
        assert positive(sample, classifier=str(folder)) == pytest.approx(expected["POSITIVE"], abs=1e-6)
        assert positive(sample, classifier=str(folder), label="NEGATIVE") == pytest.approx(
            expected["NEGATIVE"], abs=1e-6
        )
        seen.append(expected["POSITIVE"])
    assert max(seen) - min(seen) > 0.05


def test_prompt_is_first_four_words_of_review(tmp_path: Path) -> None:
    prompts = module("prompts")
    words = [prompts.first_words(review) for review in ("One  of\nthe other reviewers", "Bad <br /> film")]
    assert words == ["One of the other", "Bad <br /> film"]
    prompts.write(words, tmp_path / "train.jsonl")
    lines = (tmp_path / "train.jsonl").read_text("utf-8")
    assert lines == '{"prompt": "One of the other"}\n{"prompt": "Bad <br /> film"}\n'
