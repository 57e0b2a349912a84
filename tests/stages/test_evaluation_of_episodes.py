"""Rows of an evaluation of episodes: conversation, turns and end, next to the columns of a single turn."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from fakes.components import EvenScorer
from fakes.job import Stops
from ppoctl.algorithms.stages.eval_metrics import Estimates
from ppoctl.algorithms.stages.evaluation import EvaluateStage
from ppoctl.algorithms.stages.generation import SampleGeneration
from ppoctl.core.batch.episodes import Episode, EpisodeTurn
from ppoctl.core.batch.prompts import Message, Prompt, Prompts
from ppoctl.core.batch.records import State
from ppoctl.core.ports import Sample, SampleSetKey, SamplingParams
from ppoctl.show.tracking.mlflow_payloads import table
from ppoctl.store import eval_samples

TURNS = (
    EpisodeTurn(2, "3", observed=4, messages=(Message("tool", "nine"), Message("user", "go on"))),
    EpisodeTurn(1, "2", messages=(Message("tool", "unseen"),)),
)
"""Text of the turns: one odd and one even number, of which the scorer's mean is 0.5."""
EPISODE = Episode(TURNS, "turns", first=(Message("user", "start"),))


class Finished:
    """The finished-samples port: all four samples are finished."""

    def __init__(self, episode: Episode | None) -> None:
        self.episode = episode

    def load(self, sample_set: SampleSetKey) -> dict[str, Sample]:
        sample = Sample("", (3, 1, 7, 7, 7, 7, 2), (0.0,) * 7, False, "3 2", "actor@1:abc", episode=self.episode)
        return {
            key: replace(sample, key=key) for key in (f"held/sampled/{prompt}#{n}" for prompt in "ab" for n in (0, 1))
        }

    def writer(self, sample_set: SampleSetKey, *, to_the_end: bool = False) -> Any:
        return nullcontext(lambda sample: None)


def evaluated(episode: Episode | None) -> tuple[list[dict[str, Any]], dict[str, float], list[str]]:
    """Return rows, metrics and messages of an evaluation whose samples have this episode."""
    lines: list[str] = []
    prompts = tuple(Prompt(name, (5,), f"question {name}", "even") for name in "ab")
    stage = EvaluateStage(
        generation=SampleGeneration(cast(Any, None), cast(Any, Finished(episode)), Stops(), lambda *_: None),
        scorer=EvenScorer(),
        sets={"held": Prompts(0, prompts)},
        sampled=SamplingParams(0.8, 8),
        samples_per_prompt=2,
        seed=3,
        fingerprint="",
        modes=("sampled",),
        estimates=Estimates(pass_at=(2,)),
        printed=1,
        notify=lines.append,
    )
    record = stage.run(State("actor", 1, 1, "abc"))
    return record.rows, record.summary, lines


def test_rows_of_episodes_add_conversation_turns_and_end() -> None:
    rows, metrics, lines = evaluated(EPISODE)
    single, single_metrics, _ = evaluated(None)
    assert rows[0] == {
        **single[0],
        "conversation": [
            {"role": "user", "content": "start"},
            {"role": "assistant", "content": "3"},
            {"role": "tool", "content": "nine"},
            {"role": "user", "content": "go on"},
            {"role": "assistant", "content": "2"},
        ],
        "turns": 2,
        "end": "turns",
    }
    assert not {"conversation", "turns", "end"} & single[0].keys()
    assert metrics == single_metrics
    assert (metrics["eval/held/pass_at_1"], metrics["eval/held/pass_at_2"]) == (0.5, 0.5)
    assert lines == [
        "eval held sampled a: score 0.5, 7 tokens, truncated after 2 turns (turns)\nprompt:\nquestion a\n"
        "user:\nstart\nassistant:\n3\ntool:\nnine\nuser:\ngo on\nassistant:\n2"
    ]


def test_files_and_tables_keep_the_conversation(tmp_path: Path) -> None:
    rows, _, _ = evaluated(EPISODE)
    for name in ("rows.jsonl", "rows.parquet"):
        eval_samples.write(tmp_path / name, rows)
        assert eval_samples.read(tmp_path / name)[3]["conversation"] == rows[3]["conversation"]
    shown = json.loads(table((tmp_path / "rows.jsonl").read_text().splitlines()))
    assert shown["columns"][:5] == ["set", "mode", "prompt", "response", "conversation"]
    first = dict(zip(shown["columns"], shown["data"][0], strict=True))
    assert (json.loads(first["conversation"]), first["turns"], first["end"]) == (rows[0]["conversation"], 2, "turns")
