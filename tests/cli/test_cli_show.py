"""`ppoctl show`: samples of runs on fakes, one in full and in lists; screens word for word."""

import io
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from cli.conftest import CliResult, RunCli, on_a_terminal
from conventions.test_lightweight_imports import front
from fakes.components import fake_components, fake_recipe
from ppoctl.cli import pager, render, sample_list, sample_screen, show
from ppoctl.cli.app import run
from ppoctl.core.batch.scores import FINISH_REASONS, REWARD_OUTCOMES
from ppoctl.core.errors import RecipeError
from ppoctl.run import new_run, session
from ppoctl.show.report.shown_sample import read_samples
from ppoctl.store import record_file, sample_query
from ppoctl.store.manifest import require
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import ResumePlan
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.sample_join import JoinedRecords
from ppoctl.store.sample_query import Before, SampleFilter, flips, ordered
from ppoctl.store.stage_runner import load_record
from ppoctl.store.stored_samples import SampleRow, StepRecords, spans

MODEL = Path(__file__).parents[2] / "recipes/quickstart/model"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of three steps of eight samples on fakes, all kept, with evaluations after 0, 2 and 3; their
    tokens are read with the quickstart's tokenizer."""
    recipe = fake_recipe(model={"path": str(MODEL), "dtype": "float32"}, checkpoint={"keep_rollouts_every_steps": 1})
    paths = RunPaths(tmp_path_factory.mktemp("show") / "fake")
    new_run.create(paths, recipe, {"model": "a" * 64, "data": "b" * 64}, command="train")
    session.attempt_run(
        session.OpenedRun(paths, {1: recipe}, fake_components(recipe), plan=ResumePlan(start=0, items=()))
    )
    return paths.root


@pytest.fixture
def ask(root: Path, ask: RunCli) -> RunCli:
    return partial(ask, "show", root)


def listed(ask: RunCli, *words: object) -> list[dict[str, Any]]:
    """Return the samples of a list, from the JSON output."""
    found: list[dict[str, Any]] = json.loads(ask(*words, "--json").out)["samples"]
    return found


def test_records_read_without_torch_equal_the_loaded_records(root: Path) -> None:
    paths = RunPaths(root)
    for stage in ("rollout", "reward", "values", "logprobs", "advantages", "eval"):
        whole = load_record(paths, 3, stage, require(paths.stage(3, stage)))
        plain = record_file.read(paths, 3, stage)
        assert plain is not None
        assert plain.kind == whole.kind
        assert record_file.required(plain.kind) <= plain.fields.keys()
        for name, value in plain.fields.items():
            theirs = getattr(whole, name)
            assert value.tolist() == theirs.tolist() if hasattr(theirs, "tolist") else value == theirs
    assert record_file.read(paths, 3, "correction") is None


def test_show_imports_no_torch_or_transformers(root: Path) -> None:
    heavy = {"torch", "transformers", "jinja2", "jaxtyping", "pyarrow", "huggingface_hub"}
    forms = ((), ("--list",), ("--eval", "--sort", "flipped"), ("--sample", "1"), ("--prompt", "p9"), ("--step", "9"))
    commands = tuple(("show", str(root), *form) for form in forms)
    found = front(*commands)
    assert [found[words]["code"] for words in commands] == [0, 0, 0, 0, 0, 2]
    assert [heavy & set(found[words]["loaded"]) for words in commands] == [set()] * 6  # type: ignore[call-overload]


def test_option_choices_match_the_record_values() -> None:
    assert get_args(show.Finish) == FINISH_REASONS
    assert get_args(show.Outcome) == REWARD_OUTCOMES
    assert get_args(sample_list.Sort) == get_args(sample_query.SortKey)
    assert set(get_args(sample_screen.TokenMetric)) == set(sample_screen.LEGENDS)


def test_sample_screen_shows_every_metric_of_its_tokens(root: Path, ask: RunCli) -> None:
    out = ask("--step", 2, "--sample", 3).out.splitlines()
    [sample] = read_samples(RecordedRun(RunPaths(root)), 2, [3])
    assert out[0] == f"sample  3 of step 2: p5 #1, {sample.stamp}"
    assert out[1] == f"finish  {sample.finish} after {len(sample.tokens)} tokens"
    assert out[2:4] == ["answer  even", f"reward  ok {sample.score:g}"]
    assert sample.advantages is not None
    assert sample.values is not None
    assert sample.kl is not None
    figures = zip(sample.advantages, sample.values, sample.logprobs, sample.kl, strict=True)
    table = [line.split()[-4:] for line in out[-len(sample.tokens) :]]
    assert table == [[f"{a:+.3f}", f"{v:+.3f}", f"{p:.3f}", f"{k:+.4f}"] for a, v, p, k in figures]
    assert out[-len(sample.tokens) - 1].split() == ["token", "advantage", "value", "log-prob", "kl"]
    assert "green" not in "".join(out)


def test_kl_is_the_recorded_full_kl_or_the_logprob_gap_to_reference(root: Path) -> None:
    records = StepRecords.read(RecordedRun(RunPaths(root)), 3)  # in the first step the actor equals the reference
    rollouts, logprobs = (record_file.read(RunPaths(root), 3, name) for name in ("rollout", "logprobs"))
    assert rollouts is not None
    assert logprobs is not None
    length, fields = int(rollouts["lengths"][2]), logprobs.fields

    def with_fields(changed: dict[str, Any]) -> StepRecords:
        count = records.num_seqs
        places = tuple((record_file.PlainRecord("logprobs", changed), row) for row in range(count))
        return replace(records, logprobs=JoinedRecords(places))

    assert records.kl(2) == pytest.approx((fields["actor"] - fields["reference"])[2, :length].tolist())
    without = {name: value for name, value in fields.items() if name != "actor"}  # as if the update had used its own
    assert with_fields(without).kl(2) == pytest.approx(
        (rollouts["sampler_logprobs"] - fields["reference"])[2, :length].tolist()
    )
    assert with_fields({"full_kl": fields["actor"] * 0 + 0.5}).kl(2) == [0.5] * length
    assert with_fields({}).kl(2) is None


def test_best_and_worst_are_chosen_after_filtering(ask: RunCli) -> None:
    rows = listed(ask, "--list")
    scores = [row["score"] for row in rows]
    assert json.loads(ask("--best", "--json").out)["score"] == max(scores)
    assert json.loads(ask("--worst", "--json").out)["score"] == min(scores)
    middle = sorted(scores)[3]
    assert json.loads(ask("--best", "--max-reward", middle, "--json").out)["score"] == middle


def test_list_has_a_line_per_sample(ask: RunCli) -> None:
    result = ask("--list")
    lines = result.out.splitlines()
    head = ["row", "prompt", "sample", "score", "outcome", "tokens", "finish", "advantage", "truth", "response"]
    assert lines[0].split() == head
    rows = listed(ask, "--list")
    first = rows[0]
    cells = ["0", "p8", "0", f"{first['score']:.6g}", "ok", str(first["tokens"]), first["finish"]]
    assert lines[1].split()[:8] == [*cells, f"{first['advantage']:+.3f}"]
    assert lines[1].split()[8] == first["truth"]
    assert lines[1].endswith(first["response"])
    assert len(lines) == 1 + 8
    assert result.err == "8 of 8 samples of step 3\n"
    assert ask("--list", "--limit", 2).err == "2 of 8 samples of step 3, 6 more with --limit 8\n"
    assert len(listed(ask, "--list", "--limit", 2)) == 2


def test_mean_advantage_is_over_unmasked_tokens(root: Path, ask: RunCli) -> None:
    records = StepRecords.read(RecordedRun(RunPaths(root)), 3)
    [row] = listed(ask, "--list", "--limit", 1)
    whole = records.advantages.value("advantages", 0)[: row["tokens"]]
    assert row["advantage"] == pytest.approx(float(whole.mean()))
    records.advantages.value("mask", 0)[1:] = False
    assert records.row(0).advantage == pytest.approx(float(whole[0]))
    records.advantages.value("mask", 0)[:] = False
    assert records.row(0).advantage is None
    nothing = JoinedRecords((None,) * records.num_seqs)
    assert replace(records, advantages=nothing, rewards=nothing).row(0).outcome == "not scored"


def test_damaged_record_is_named_and_not_shown(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(root, tmp_path / "damaged")
    file = RunPaths(copy).stage(3, "advantages") / "record.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert run(["show", str(copy), "--list"]) == 8
    assert f"`{file}` is corrupt: digest" in capsys.readouterr().err


GREEN, RED, PLAIN = "48;2;0", "48;2;2", ""


def colours(text: str) -> list[str]:
    """Return the colour of each piece of the response, if it has one."""
    return [GREEN if part.startswith(GREEN) else RED for part in re.findall(r"\x1b\[(48[0-9;]*)m", text)]


@pytest.mark.parametrize(
    ("by", "found"), [("advantage", [GREEN, RED]), ("value", [RED, GREEN]), ("kl", [GREEN, GREEN])]
)
def test_token_colours_follow_the_requested_metric(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    by: sample_screen.TokenMetric,
    found: list[str],
) -> None:
    [sample] = read_samples(RecordedRun(RunPaths(root)), 3, [0])
    figures = {"advantages": [1.0, -1.0], "values": [0.25, 0.75], "kl": [0.5, 0.5], "logprobs": [-1.0, -2.0]}
    two = replace(sample, tokens=[5, 6], pieces=["a", "b"], **figures)
    sample_screen.print_sample(two, by)
    assert "\x1b" not in capsys.readouterr().out
    on_a_terminal(monkeypatch)
    sample_screen.print_sample(two, by)
    out = capsys.readouterr().out
    assert colours(out) == found
    assert f"\n({sample_screen.LEGENDS[by]})\n" in out
    sample_screen.print_sample(replace(two, advantages=None))
    assert "green" not in capsys.readouterr().out
    with pytest.raises(RecipeError, match="step 3 has no `kl` of tokens; recorded: advantage, value"):
        sample_screen.print_sample(replace(two, kl=None), "kl")


def test_character_of_several_tokens_is_shown_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [sample] = read_samples(RecordedRun(RunPaths(root)), 3, [0])
    two = replace(
        sample, tokens=[5, 6], pieces=["\u00e9", ""], advantages=None, values=None, kl=None, logprobs=[-1.0, -2.0]
    )
    sample_screen.print_sample(replace(two, response="\u00e9"))
    assert capsys.readouterr().out.splitlines()[-5:] == [
        "\u00e9",
        "",
        "token             log-prob",
        '"\u00e9"               -1.000',
        "(same character)  -2.000",
    ]
    sample_screen.print_sample(replace(two, response="e", unknown=[False, True]))
    assert capsys.readouterr().out.splitlines()[-8:] == [
        "\u00e9",
        "",
        "response as scored",
        "e",
        "",
        "token                     log-prob",
        '"\u00e9"                       -1.000',
        "6 (not in the tokenizer)  -2.000",
    ]


def test_list_is_limited_to_the_screen_height(ask: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch, lines=9)
    result = ask("--list", "--no-pager")
    assert result.err.splitlines()[-1] == "4 of 8 samples of step 3, 4 more with --limit 8"
    assert len(result.out.splitlines()) == 1 + 4


def test_characters_outside_the_stdout_encoding_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert render.printable("caf\u00e9\x1b \u4e2d\n") == "caf\\xe9\\x1b \\u4e2d\n"


def test_prompt_option_lists_its_samples_of_all_steps(ask: RunCli) -> None:
    result = ask("--prompt", "p5")
    assert result.out.splitlines()[0].split()[:2] == ["step", "row"]
    assert [row["step"] for row in listed(ask, "--prompt", "p5")] == [2, 2]
    assert result.err == "2 of 2 samples of step 2\n"
    held = listed(ask, "--eval", "--prompt", "p101")
    assert [row["step"] for row in held] == sorted(row["step"] for row in held)
    assert {row["step"] for row in held} == {0, 2, 3}
    head = ask("--eval", "--prompt", "p101").out.split()[:3]
    assert head == ["step", "row", "set"]
    assert {row["step"] for row in listed(ask, "--eval", "--prompt", "p101", "--step", 2)} == {2}
    wrong = ask("--prompt", "p55")
    assert wrong.code == 2
    assert wrong.err.startswith("error: the run has no samples of prompt `p55`; did you mean `p5`?\n")


def test_evaluation_samples_are_listed_and_shown(ask: RunCli) -> None:
    rows = listed(ask, "--eval")
    assert {row["step"] for row in rows} == {3}
    assert {row["set"] for row in rows} == {"held/greedy", "held/sampled"}
    assert {row["set"] for row in listed(ask, "--eval-set", "held/greedy")} == {"held/greedy"}
    assert listed(ask, "--eval-set", "held") == rows
    assert "advantage" not in ask("--eval").out.splitlines()[0]
    number = rows[-1]["row"]
    out = ask("--eval", "--sample", number).out.splitlines()
    last = rows[-1]
    assert out[0] == f"sample  {number} of the evaluation after step 3: {last['set']} p103 #{last['sample']}"
    assert out[3:5] == [f"given   {last['response'].split()[0]}", f"reward  ok {last['score']:g}"]
    assert out[-1] == last["response"]
    parsed = json.loads(ask("--eval", "--sample", number, "--json").out)
    assert (parsed["step"], parsed["row"], parsed["prompt"]) == (3, number, "question 103")


def test_filters_select_matching_samples(ask: RunCli) -> None:
    rows = listed(ask, "--list")
    for finish in FINISH_REASONS:
        assert listed(ask, "--finish", finish) == [row for row in rows if row["finish"] == finish]
    word = rows[2]["response"].split()[-1]
    assert listed(ask, "--grep", word) == [row for row in rows if word in row["response"]]
    assert listed(ask, "--min-reward", 0.5) == [row for row in rows if row["score"] >= 0.5]
    result = ask("--outcome", "refused")
    assert result == CliResult(0, "", "no sample matches; step 3 has 8\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--best", "--worst"), "`--worst` and `--best` cannot be combined"),
        (("--best", "--list"), "`--best` and `--list` cannot be combined"),
        (("--sample", 1, "--sort", "reward"), "`--sample` and `--sort` cannot be combined"),
        (("--sample", 1, "--grep", "x"), "`--sample` selects one row and cannot be combined with filters"),
        (("--min-reward", 1, "--max-reward", 0.5), "no reward is at least `1` and at most `0.5`"),
        (("--sample", 8), "there are 8 samples, but no row `8`"),
        (("--eval", "--sample", 99), "there are 8 samples, but no row `99`"),
        (("--eval-set", "hell"), "the evaluation has no set `hell`; it has held, held/greedy, held/sampled"),
        (("--step", 7), "step 7 of `{root}` has no rollouts; steps with rollouts: 1-3"),
        (
            ("--step", 0),
            "step 0 of `{root}` has no rollouts; steps with rollouts: 1-3; a run keeps older ones only by "
            "`checkpoint.keep_rollouts_every_steps`",
        ),
        (("--eval", "--step", 1), "step 1 of `{root}` has no evaluation; steps with an evaluation: 0, 2-3"),
        (("--best", "--min-reward", 9), "no sample matches"),
    ],
)
def test_invalid_show_options_are_refused(ask: RunCli, root: Path, words: tuple[object, ...], says: str) -> None:
    result = ask(*words)
    assert result.code == 2
    assert result.err.splitlines()[0] == f"error: {says.format(root=root)}"


def sample(row: int, prompt: str, score: float | None, **further: Any) -> SampleRow:
    defaults = {"step": 3, "set": "", "sample": row, "outcome": "ok", "tokens": row, "finish": "terminated"}
    return SampleRow(
        **{**defaults, "row": row, "prompt_id": prompt, "score": score, "advantage": None, "response": "r", **further}
    )


ROWS = [
    sample(0, "even", 1.0),
    sample(1, "even", 1.0),
    sample(2, "mixed", 0.0),
    sample(3, "also", 0.25),
    sample(4, "mixed", 1.0),
    sample(5, "also", 1.0),
    sample(6, "gone", None),
]


def rows_by(
    key: sample_query.SortKey, before: dict[sample_query.Question, Before] | None = None, **options: bool
) -> list[int]:
    return [row.row for row in ordered(ROWS, key, flips(ROWS, before or {}), **options)]


def test_sorting_puts_the_largest_value_first() -> None:
    assert rows_by("row") == [0, 1, 2, 3, 4, 5, 6]
    assert rows_by("row", reverse=True) == [6, 5, 4, 3, 2, 1, 0]
    assert rows_by("reward") == [0, 1, 4, 5, 3, 2, 6]
    assert rows_by("reward", reverse=True) == [2, 3, 0, 1, 4, 5, 6]
    assert rows_by("length") == [6, 5, 4, 3, 2, 1, 0]
    assert rows_by("advantage") == [0, 1, 2, 3, 4, 5, 6]


def test_flipped_sort_puts_mixed_and_changed_prompts_first() -> None:
    assert flips(ROWS, {}) == {("", "even"): 0.0, ("", "mixed"): 1.0, ("", "also"): 0.75}
    assert rows_by("flipped") == [2, 4, 3, 5, 0, 1, 6]
    changed = {("", "even"): Before(1, 0.1), ("", "also"): Before(2, 0.625)}
    assert flips(ROWS, changed)["", "even"] == pytest.approx(0.9)
    assert rows_by("flipped", changed) == [2, 4, 0, 1, 3, 5, 6]


def test_prompts_are_compared_with_the_nearest_earlier_step(root: Path, ask: RunCli) -> None:
    rows = listed(ask, "--eval", "--sort", "flipped")
    assert {row["before"]["step"] for row in rows} == {2}
    source = sample_query.Source(RecordedRun(RunPaths(root)), evaluations=True)
    question = (rows[0]["set"], rows[0]["prompt_id"])
    assert rows[0]["before"]["score"] == pytest.approx(sample_query.means(source.rows(2))[question])
    assert [row["flip"] for row in rows] == sorted((row["flip"] for row in rows), reverse=True)
    assert ask("--eval", "--sort", "flipped").out.splitlines()[0].split()[-3:] == ["flip", "before", "response"]


def test_reward_bounds_exclude_samples_without_a_reward() -> None:
    assert [row.row for row in ROWS if SampleFilter(min_reward=0.5).takes(row)] == [0, 1, 4, 5]
    assert [row.row for row in ROWS if SampleFilter(max_reward=0.25).takes(row)] == [2, 3]


def test_consecutive_numbers_are_printed_as_ranges() -> None:
    assert spans([1, 2, 3, 5, 8, 9]) == "1-3, 5, 8-9"
    assert spans([4]) == "4"


def test_narrow_list_drops_columns_and_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [sample(0, "train/000001-0123abcd", 1.0, response="\nsecond\n first\x1b line of a longer text\n")]
    known = sample_list._Flips({}, {})
    sample_list._print(rows, sample_list.Form(), known, 60)
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "row  prompt                 score  tokens  response",
        "  0  train/000001-0123abcd      1       0  first\\x1b line..",
    ]
    assert printed.err == "columns that do not fit: finish, outcome, sample\n"
    sample_list._print(rows, sample_list.Form(grep="sec"), known, None)
    assert capsys.readouterr().out.splitlines()[1].endswith("  second")


def test_list_shows_the_last_line_of_an_episode(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [sample(0, "even", 1.0, response="a call\n\n#### 7\n", turns=2, end="done")]
    sample_list._print(rows, sample_list.Form(), sample_list._Flips({}, {}), None)
    assert capsys.readouterr().out.splitlines()[1].endswith("  #### 7")


def test_text_is_truncated_to_terminal_cells() -> None:
    assert render.clipped("abcdef", 6) == "abcdef"
    assert render.clipped("abcdefg", 6) == "abcd.."
    assert render.clipped("\u4e2d\u6587\u5b57", 5) == "\u4e2d.."
    assert render.clipped("anything", None) == "anything"


def test_pager_receives_terminal_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    monkeypatch.setenv("PAGER", f"{sys.executable} -c \"import sys; open('{seen}', 'w').write(sys.stdin.read())\"")
    with pager.paged():
        render.line("off a terminal")  # which has none
    assert not seen.exists()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with pager.paged(wanted=False):
        render.line("not wanted")
    assert not seen.exists()
    with pager.paged():
        assert render.is_terminal()
        render.line("one")
    assert seen.read_text() == "one\n"
    monkeypatch.setenv("PAGER", "true")
    with pager.paged():  # it quits at once, which is not an error
        for _ in range(20_000):
            render.line("more than a pipe holds")
    monkeypatch.setenv("PAGER", str(tmp_path / "none"))
    with pager.paged():
        assert os.isatty(0) or sys.stdout.isatty()
