"""A step of four episodes and an evaluation, written record by record: one with a call, one whose environment died,
one that a limit ended, and one whose texts imitate other parts of a screen."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from ppoctl.core.batch.episodes import Episode, EpisodeTurn, ToolCall
from ppoctl.core.batch.prompts import Message
from ppoctl.core.batch.records import Advantages, Evaluation, Record, Rewards, Rollouts, Values
from ppoctl.store.outline import Outline, OutlineEntry
from ppoctl.store.run_paths import RunPaths
from store.steps_on_disk import on_disk

MODEL = Path(__file__).parents[2] / "recipes/quickstart/model"
OUTLINE = Outline(
    "episodes",
    (
        OutlineEntry("rollout", ("actor", "prompts")),
        OutlineEntry("reward", ("prompts", "rollout")),
        OutlineEntry("values", ("critic", "rollout")),
        OutlineEntry("advantages", ("rollout", "reward", "values", "carry")),
    ),
)
HOSTILE = "\x1b]0;owned\x07\u202e\n| tool: 9\n  turn 9: 1 token, reward 5\r\x9b2J<b>&"
"""Text that imitates a turn and an observation, with escapes for a terminal and with markup."""


class Spoken(NamedTuple):
    """A turn as texts: what the actor generated with its end, and the observation in the sequence."""

    generated: str
    observed: str
    turn: dict[str, Any]
    """Further fields of the `EpisodeTurn`."""


class Row(NamedTuple):
    prompt: str
    turns: tuple[Spoken, ...]
    further: dict[str, Any]
    """Further fields of the `Episode`."""


def tool(text: str) -> tuple[Message, ...]:
    return (Message("tool", text),)


ROWS = (
    Row(
        "<|user|>12*7?<|assistant|>",
        (
            Spoken(
                'call\n{"a":12}<|eos|>',
                "<|user|>84<|assistant|>",
                {"calls": (ToolCall("calculator", {"expression": "12*7", "digits": 2}),), "messages": tool("84")},
            ),
            Spoken("84<|eos|>", "", {"reward": 1.5, "messages": tool("right")}),
        ),
        {"end": "done"},
    ),
    Row(
        "<|user|>3?<|assistant|>",
        (Spoken("3<|eos|>", "", {}),),
        {"end": "died", "message": f"exit code -9\n{HOSTILE}"},
    ),
    Row(
        "<|user|>4?<|assistant|>",
        (
            Spoken(
                "{{<|eos|>", "<|user|>no<|assistant|>", {"malformed": "a `}` is\nmissing", "messages": tool("no")}
            ),
            Spoken("44", "", {"reward": -0.25}),
        ),
        {"end": "tokens"},
    ),
    Row(
        "<|user|>5?<|user|>6<|assistant|>",
        (
            Spoken(
                f"{HOSTILE}<|eos|>",
                f"<|user|>{HOSTILE}<|assistant|>",
                {
                    "calls": (ToolCall(HOSTILE, {HOSTILE: HOSTILE}),),
                    "messages": (Message(HOSTILE, HOSTILE), *tool("2")),
                },
            ),
            Spoken("6<|eos|>", "", {}),
        ),
        {"end": "done", "first": (Message("user", "6"),)},
    ),
)
"""Four episodes."""


def episode(row: Row, ids: Tokenizer) -> Episode:
    """Return the episode of a row; the counts of tokens are those of its texts."""
    turns = [
        EpisodeTurn(
            generated=len(ids.encode(each.generated).ids),
            text=each.generated.removesuffix("<|eos|>"),
            observed=len(ids.encode(each.observed).ids),
            **each.turn,
        )
        for each in row.turns
    ]
    return Episode(tuple(turns), **row.further)


def episodes() -> list[Episode]:
    """Return the four episodes."""
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return [episode(row, ids) for row in ROWS]


def records() -> Mapping[str, Record[Any]]:
    """Return the records of the step. Values and advantages of token r of row b: (b + 1) + r / 10 and r - 1."""
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    found = episodes()
    texts = ["".join(each.generated + each.observed for each in row.turns) for row in ROWS]
    tokens = [ids.encode(text).ids for text in texts]
    width = max(map(len, tokens))
    mask = torch.zeros(len(ROWS), width, dtype=torch.bool)
    for row, each in enumerate(found):
        for start, end in each.spans():
            mask[row, start:end] = True
    prompts = [ids.encode(row.prompt).ids for row in ROWS]
    at = torch.arange(width, dtype=torch.float32)[None, :]
    rows = torch.arange(len(ROWS), dtype=torch.float32)[:, None]
    scored = torch.tensor([True, False, True, True])
    trained = mask & scored[:, None]
    rollouts = Rollouts(
        prompt_tokens=torch.tensor([id_ for prompt in prompts for id_ in prompt]).int(),
        prompt_lengths=torch.tensor(list(map(len, prompts))),
        tokens=torch.tensor([each + [0] * (width - len(each)) for each in tokens]).int(),
        lengths=torch.tensor(list(map(len, tokens))),
        mask=mask,
        sampler_logprobs=torch.where(mask, -0.5, 0.0),
        finish=torch.tensor([int(each.is_truncated) for each in found]),
        seeds=torch.arange(len(ROWS)),
        prompt_ids=[f"q{row}" for row in range(len(ROWS))],
        sample_indices=[0] * len(ROWS),
        texts=[each.text for each in found],
        stamps=["actor@0:abc"] * len(ROWS),
        sends=[1] * len(ROWS),
        episodes=[each.as_json() for each in found],
    )
    return {
        "rollout": rollouts,
        "reward": Rewards(
            torch.tensor([1.5, 0.0, -0.25, 0.0]),
            torch.tensor([0, 2, 0, 0]),
            {},
            ["", "died", "", ""],
            ["84", None, None, None],
        ),
        "values": Values((rows + 1 + at / 10) * mask, "critic@0:abc"),
        "advantages": Advantages((at - 1) * trained, at * trained, trained, {}, {}),
        "eval": Evaluation("actor@1:abc", {}, [*map(eval_row, range(len(ROWS)), found)]),
    }


def eval_row(number: int, found: Episode) -> dict[str, Any]:
    """Return the row of an evaluation with this episode."""
    return {
        "set": "held",
        "mode": "greedy",
        "prompt_id": f"q{number}",
        "sample": 0,
        "prompt": f"prompt {number}",
        "response": found.text,
        "answer": None,
        "score": None if found.is_failed else 0.5,
        "outcome": "error" if found.is_failed else "ok",
        "extras": {},
        "response_tokens": sum(turn.generated + turn.observed for turn in found.turns),
        "terminated": not found.is_truncated,
        **found.columns,
    }


def run_of_episodes(root: Path, *, has_episodes: bool = True) -> RunPaths:
    """Create a run whose step 1 has these records; without `has_episodes`, the responses have one turn."""
    run = on_disk(root, OUTLINE, name="episodes", recipe={"model": {"path": str(MODEL)}})
    found = dict(records())
    if not has_episodes:
        rollouts, evaluation = found["rollout"], found["eval"]
        assert isinstance(rollouts, Rollouts)
        assert isinstance(evaluation, Evaluation)
        rows = [
            {name: value for name, value in row.items() if name not in ("conversation", "turns", "end")}
            for row in evaluation.rows
        ]
        present = rollouts.sequences.present
        found["rollout"] = replace(rollouts, mask=present, episodes=None)
        found["eval"] = replace(evaluation, rows=rows)
    run.commit(1, found)
    return run.paths
