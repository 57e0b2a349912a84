"""`ppoctl show` of conversations, word for word: turns, calls, observations, ends, and hostile texts."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.cells import cell_len

from cli.conftest import RunCli, on_a_terminal
from conventions.test_lightweight_imports import front
from ppoctl.cli import sample_screen
from ppoctl.core.batch.episodes import EndReason
from ppoctl.show.report.episode_parts import EpisodePart
from ppoctl.show.report.shown_sample import ShownSample, read_samples
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stored_samples import END_TEXTS
from store.episodes_on_disk import HOSTILE, episodes, run_of_episodes

# The tokens of the first episode; its turns have 12 and 3 tokens, the observation has 4.
SCREEN = """\
sample  0 of step 1: q0 #0, actor@0:abc
finish  terminated after 19 tokens in 2 turns
end     done: the environment ended the episode
answer  84
reward  ok 1.5

prompt
<|user|>12*7?<|assistant|>

turn 1: 12 tokens, reward 0, mean value +1.550, mean advantage +4.500
  call
  {"a":12}<|eos|>
> calculator {"digits": 2, "expression": "12*7"}

observation: 4 tokens, not in the loss
| tool: 84

turn 2: 3 tokens, reward 1.5, mean value +2.700, mean advantage +16.000
  84<|eos|>

observation: not in the response
| tool: right

token            advantage  value   log-prob  generated
"c"              -1.000     +1.000  -0.500    yes
"all"            +0.000     +1.100  -0.500    yes
"\\n"             +1.000     +1.200  -0.500    yes
"{"              +2.000     +1.300  -0.500    yes
"\\""             +3.000     +1.400  -0.500    yes
"a"              +4.000     +1.500  -0.500    yes
"\\""             +5.000     +1.600  -0.500    yes
":"              +6.000     +1.700  -0.500    yes
"1"              +7.000     +1.800  -0.500    yes
"2"              +8.000     +1.900  -0.500    yes
"}"              +9.000     +2.000  -0.500    yes
"<|eos|>"        +10.000    +2.100  -0.500    yes
"<|user|>"       -          -       -         no: not in the loss
"8"              -          -       -         no: not in the loss
"4"              -          -       -         no: not in the loss
"<|assistant|>"  -          -       -         no: not in the loss
"8"              +15.000    +2.600  -0.500    yes
"4"              +16.000    +2.700  -0.500    yes
"<|eos|>"        +17.000    +2.800  -0.500    yes
"""
DIED = """\
sample  1 of step 1: q1 #0, actor@0:abc
finish  terminated after 2 tokens in 1 turn
end     died: the environment's process ended
answer
reward  error, no score

prompt
<|user|>3?<|assistant|>

turn 1: 2 tokens, reward 0, mean value +2.050, mean advantage +0.000
  3<|eos|>

failure of the environment
| died: exit code -9
| died: \\x1b]0;owned\\x07\\u202e
| died: | tool: 9
| died:   turn 9: 1 token, reward 5\\r\\x9b2J<b>&

token      advantage  value   log-prob
"""
TRUNCATED = """\
sample  2 of step 1: q2 #0, actor@0:abc
finish  truncated after 9 tokens in 2 turns
end     tokens: a limit of tokens
answer
reward  ok -0.25

prompt
<|user|>4?<|assistant|>

turn 1: 3 tokens, reward 0, mean value +3.100, mean advantage +0.000
  {{<|eos|>
> a call that cannot be read: a `}` is\\nmissing

observation: 4 tokens, not in the loss
| tool: no

turn 2: 2 tokens, reward -0.25, mean value +3.750, mean advantage +6.500
  44

token            advantage  value   log-prob  generated
"""
IMITATED = """\
prompt, with 1 message of the environment
<|user|>5?<|user|>6<|assistant|>

turn 1: 51 tokens, reward 0, mean value +6.500, mean advantage +24.000
  \\x1b]0;owned\\x07\\u202e
  | tool: 9
    turn 9: 1 token, reward 5\\r\\x9b2J<b>&<|eos|>
> \\x1b]0;owned\\x07\\u202e\\n| tool: 9\\n  turn 9: 1 token, reward 5\\r\\x9b2J<b>& {"\\u001b]0;owned\\u0007\\u202e
"""
EVALUATED = """\
sample  3 of the evaluation after step 1: held/greedy q3 #0
finish  terminated after 105 tokens in 2 turns
end     done: the environment ended the episode
answer
reward  ok 0.5

prompt
prompt 3

observation
| user: 6

turn 1
  \\x1b]0;owned\\x07\\u202e
  | tool: 9
    turn 9: 1 token, reward 5\\r\\x9b2J<b>&

observation
| \\x1b]0;owned\\x07\\u..: \\x1b]0;owned\\x07\\u202e
| \\x1b]0;owned\\x07\\u..: | tool: 9
| \\x1b]0;owned\\x07\\u..:   turn 9: 1 token, reward 5\\r\\x9b2J<b>&

observation
| tool: 2

turn 2
  6
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of_episodes(tmp_path_factory.mktemp("conversations") / "episodes").root


@pytest.fixture
def ask(root: Path, ask: RunCli) -> RunCli:
    return partial(ask, "show", root)


def test_episode_is_shown_as_a_conversation(ask: RunCli) -> None:
    assert ask().out == SCREEN
    assert max(map(len, SCREEN.splitlines())) <= 100


@pytest.mark.parametrize(("row", "screen"), [(1, DIED), (2, TRUNCATED)])
def test_episode_shows_its_failure_or_limit(ask: RunCli, row: int, screen: str) -> None:
    assert ask("--sample", row).out.startswith(screen.rstrip("\n"))


def test_texts_cannot_imitate_other_parts_of_the_screen(ask: RunCli) -> None:
    """The first character of a line shows who wrote it, and no control character reaches the terminal."""
    out = ask("--sample", 3).out
    assert IMITATED.rstrip("\n") in out
    conversation = out[out.index("turn 1") : out.index("\ntoken  ")]
    titles = [line.split(":")[0] for line in conversation.splitlines() if line and line[0] not in " |>"]
    assert titles == ["turn 1", "observation", "turn 2"]
    assert all(char == "\n" or char.isprintable() for char in out)
    assert ask("--eval", "--sample", 3).out == EVALUATED


def test_ends_of_episodes_all_have_a_text() -> None:
    assert END_TEXTS.keys() == {reason for part in get_args(EndReason) for reason in get_args(part)}


def test_lists_have_the_turns_and_the_end(ask: RunCli) -> None:
    lines = ask("--list").out.splitlines()
    assert [line.split() for line in lines[:3]] == [
        [
            *("row", "prompt", "sample", "score", "outcome", "tokens", "finish", "turns", "end"),
            *("advantage", "truth", "response"),
        ],
        ["0", "q0", "0", "1.5", "ok", "19", "terminated", "2", "done", "+6.800", "84", "84"],
        ["1", "q1", "0", "-", "error", "2", "terminated", "1", "died", "-", "3"],
    ]
    assert ask("--eval").out.splitlines()[3].split()[-4:] == ["truncated", "2", "tokens", "44"]
    for words in (("--list",), ("--eval",)):
        rows = json.loads(ask(*words, "--json").out)["samples"]
        assert [(row["turns"], row["end"]) for row in rows] == [(2, "done"), (1, "died"), (2, "tokens"), (2, "done")]


def test_json_of_a_sample_has_the_episode_and_its_mask(ask: RunCli) -> None:
    for row, episode in enumerate(episodes()):
        found = json.loads(ask("--sample", row, "--json").out)
        assert found["episode"] == json.loads(json.dumps(episode.as_json()))
        generated = sum(turn.generated for turn in episode.turns)
        assert found.get("mask", [True] * generated).count(True) == generated
    evaluated = json.loads(ask("--eval", "--sample", 2, "--json").out)
    assert evaluated["conversation"] == [
        {"role": "assistant", "content": "{{"},
        {"role": "tool", "content": "no"},
        {"role": "assistant", "content": "44"},
    ]
    assert (evaluated["turns"], evaluated["end"]) == (2, "tokens")


def test_single_turns_are_shown_without_fields_of_episodes(tmp_path: Path, ask: RunCli) -> None:
    paths = run_of_episodes(tmp_path / "single", has_episodes=False)
    for words in (("--sample", 1), ("--eval", "--sample", 1), ("--list",), ("--eval",)):
        shown = json.loads(run_show(ask, paths, *words, "--json"))
        fields = shown["samples"][0] if "samples" in shown else shown
        assert not {"episode", "mask", "turns", "end", "conversation"} & fields.keys()
    screen = run_show(ask, paths, "--sample", 1)
    assert "\nresponse\n3<|eos|>\n" in screen
    assert "end  " not in screen


def run_show(ask: Any, paths: RunPaths, *words: object) -> str:
    """Return the output of `show` for another run than the fixture's."""
    return str(ask.func(*ask.args[:1], paths.root, *words).out)


def test_conversations_are_shown_without_torch(root: Path) -> None:
    heavy = {"torch", "transformers", "jaxtyping", "pyarrow"}
    commands = (("show", str(root)), ("show", str(root), "--eval", "--sample", "3"), ("show", str(root), "--list"))
    found = front(*commands)
    assert [(found[words]["code"], heavy & set(found[words]["loaded"])) for words in commands] == [(0, set())] * 3  # type: ignore[call-overload]


def backgrounds(text: str) -> list[tuple[str, str]]:
    """Return (background, text) of each coloured piece."""
    return re.findall(r"\x1b\[48;2;([\d;]+)m([^\x1b]*)", text)


def tinted(by: sample_screen.TokenMetric, capsys: pytest.CaptureFixture[str], root: Path) -> list[tuple[str, str]]:
    [sample] = read_samples(RecordedRun(RunPaths(root)), 1, [0])
    sample_screen.print_sample(sample, by)
    return backgrounds(capsys.readouterr().out)


def test_colours_have_one_scale_and_leave_out_observations(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Advantages of the turns are -1 to 10 and 15 to 17, so the strongest colour is that of the last token. The mean
    of the generated values is 1.78."""
    on_a_terminal(monkeypatch, width=100)
    coloured = tinted("advantage", capsys, root)
    assert [piece for _, piece in coloured] == [
        "c", "\n  ", "{", '"', "a", '"', ":", "1", "2", "}", "<|eos|>", "8", "4", "<|eos|>",
    ]  # fmt: skip
    assert coloured[-1] == ("0;100;0", "<|eos|>")
    assert coloured[10] == (f"0;{(60 + int(140 * 10 / 17)) // 2};0", "<|eos|>")
    sides = [piece for colour, piece in tinted("value", capsys, root) if colour.startswith("0;")]
    assert sides == ["1", "2", "}", "<|eos|>", "8", "4", "<|eos|>"], "values above the mean"


def test_long_observations_are_wrapped_behind_their_prefix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"{'word ' * 20}\n{'x' * 90}"
    from ppoctl.core.batch.prompts import Message

    part = EpisodePart("observation", (Message("tool", text), Message(HOSTILE, "short")), calls=(text,))
    sample_screen.print_conversation([part])
    assert max(map(len, capsys.readouterr().out.splitlines())) > 100, "without a terminal, lines are complete"
    on_a_terminal(monkeypatch, width=40)
    sample_screen.print_conversation([part])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert all(line.startswith(("| tool: ", "> ", "| \\x1b]0;owned\\x07\\u..: ")) for line in lines)
    assert max(map(cell_len, lines)) <= 40
    assert "".join(line.removeprefix("| tool: ") for line in lines if line.endswith("x") and "| tool" in line) == (
        "x" * 90
    )


def test_shown_sample_without_episode_has_no_turns() -> None:
    sample = ShownSample(1, 0, "p", 0, "a", "q", "r", "", "terminated", "ok", 1.0, [1], ["t"], [0.0], None, None)
    assert (sample.turns, sample.end) == (None, None)
    assert not {"mask", "episode"} & sample.as_dict().keys()
