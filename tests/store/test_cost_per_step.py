"""A step takes as many file operations late in a run as early in it."""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fakes.components import fake_recipe
from fakes.job import Witness, play

FILE_EVENTS = ("open", "os.", "shutil.")


class Operations:
    """Counts Python's file system calls, step by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: dict[int, Counter[str]] = {}
        self.bytes_read: Counter[int] = Counter()
        self._step = 0
        self._listening = True
        sys.addaudithook(self._on_event)
        for name in ("stat", "pread"):  # no audit event covers these
            monkeypatch.setattr(os, name, self._counting(name, getattr(os, name)))

    def begin(self, number: int, moment: str) -> None:
        words = moment.split()
        if words[1:] == ["rollout", "starts"]:
            self._step = int(words[0])

    def end(self) -> None:
        self._listening = False  # an audit hook cannot be removed

    def _on_event(self, event: str, details: tuple[Any, ...]) -> None:
        if self._listening and event.startswith(FILE_EVENTS):
            self.steps.setdefault(self._step, Counter())[event] += 1

    def _counting(self, name: str, function: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            found = function(*args, **options)
            if self._listening:
                self.steps.setdefault(self._step, Counter())[name] += 1
                if name == "pread":
                    self.bytes_read[self._step] += len(found)
            return found

        return counted


@pytest.mark.parametrize(
    "last",
    [
        20,
        pytest.param(40, marks=pytest.mark.ci("20")),
        pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_file_operations_per_step_do_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    # Ends with a step that saves, evaluates, removes an old step and keeps one for reading, like step 10.
    operations = Operations(monkeypatch)
    recipe = fake_recipe(
        steps=last + 1,
        eval={"every_steps": 5},
        rollout={"prompts_per_step": 2, "samples_per_prompt": 1, "max_prompt_tokens": 4, "max_new_tokens": 2},
        ppo={"epochs": 1, "minibatch_seqs": 2},
        checkpoint={"every_steps": 2, "keep_rollouts_every_steps": 10},
    )
    try:
        play(tmp_path / "run", recipe, Witness(act=operations.begin))
    finally:
        operations.end()
    early, late = operations.steps[10], operations.steps[last]
    assert sum(early.values()) > 100
    assert sum(late.values()) <= sum(early.values()) * 1.05, late - early
    assert operations.bytes_read[last] < 1.1 * operations.bytes_read[10]
