"""The contents of a report: metrics, times, events, samples, and truncation; numbers computed by hand."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ppoctl
from fakes.components import fake_recipe
from ppoctl.algorithms.ppo_table import algorithm_name
from ppoctl.core.batch.sealed_json import seal, sealed_line, unseal
from ppoctl.run import new_run
from ppoctl.show.report import events, report_curves, report_samples, report_time
from ppoctl.show.report.contents import contents, fit
from ppoctl.show.report.expectations import history
from ppoctl.show.report.overview import contract, head
from ppoctl.show.report.recipe_keys import differences, side_by_side
from ppoctl.show.report.render_page import html, marked
from ppoctl.show.report.run_reader import ReportedRun, read_runs
from ppoctl.show.report.shown_sample import ShownSample
from ppoctl.store.outline import Outline, OutlineEntry, Outlines
from ppoctl.store.run_paths import RunPaths

STORY = Outlines(
    {1: Outline("two", (OutlineEntry("rollout", ("actor",)), OutlineEntry("actor_update", ("actor",), "actor")))}
)
RECIPE: dict[str, Any] = {"health": {"kl": {"max": 0.1}}, "lr": 1.0, "expect": {"policy/approx_kl": {"max": 0.15}}}


def line(seq: int, step: int, stage: str, seconds: float, attempt: int = 1, **figures: float) -> dict[str, Any]:
    body = {"seq": seq, "step": step, "stage": stage, "seconds": seconds, "attempt": attempt, "at": 100.0 + seq}
    return {**body, "figures": {name.replace("__", "/"): value for name, value in figures.items()}, "clocked": {}}


LINES: list[dict[str, Any]] = [
    {"seq": 1, "event": "attempt_started", "attempt": 1, "at": 100.0, "host": "h", "pid": 1},
    line(2, 1, "rollout", 2.0),
    line(3, 1, "actor_update", 3.0, policy__approx_kl=0.05),
    line(4, 2, "rollout", 4.0),
    # Killed in step 2; the second attempt generates step 2 again and replays an update.
    {"seq": 5, "event": "attempt_started", "attempt": 2, "at": 200.0, "host": "h", "pid": 2, "gpus": 2},
    {**line(6, 2, "rollout", 5.0, 2), "at": 230.0},
    {**line(7, 2, "actor_update", 6.0, 2, policy__approx_kl=0.2), "at": 236.0},
    {
        "seq": 8, "event": "attempt_ended", "attempt": 2, "at": 240.0, "status": "stopped", "exit_code": 5,
        "starting_s": 10.0, "replayed_s": 1.0, "abandoned_s": 2.0,
    },
]  # fmt: skip
ATTEMPTS: list[dict[str, Any]] = [
    {"attempt": 1, "status": "killed", "host": "h", "at": 100.0},
    {"attempt": 2, "status": "stopped", "host": "h", "at": 200.0, "exit_code": 5},
]


def with_parts(**parts: Any) -> ReportedRun:
    """Return a run that has these parts in memory, and no directory."""
    run = ReportedRun(RunPaths(Path("hand")), "hand")
    vars(run).update({"outlines": STORY, "series": history(parts["lines"]), **parts})
    return run


def by_hand() -> ReportedRun:
    recipes = {1: RECIPE, 2: {**RECIPE, "lr": 0.5}}
    return with_parts(facts={"name": "hand"}, recipes=recipes, lines=LINES)


# --- curves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ([(1, 0.31), (40, 0.86)], "rises from 0.31 at step 1 to 0.86 at step 40."),
        ([(1, 0.5), (2, 0.1), (3, 0.9), (4, 0.4)], "falls from 0.5 at step 1 to 0.4 at step 4; "
         "lowest 0.1 at step 2; highest 0.9 at step 3."),
        ([(1, 0.25), (9, 0.25000001)], "stays at 0.25 from step 1 to step 9."),
        ([(0, 0.0), (3, 0.05), (4, 0.0)], "is 0 at step 0 and at step 4; highest 0.05 at step 3."),
        ([(1, 0.5), (3, float("nan")), (4, 0.5)], "is 0.5 at step 1 and at step 4; not finite at step 3."),
        ([(3, 0.5)], "0.5 at step 3."),
    ],
)  # fmt: skip
def test_curve_summary_is_a_sentence(points: list[tuple[int, float]], says: str) -> None:
    assert report_curves.summary(points) == says


def test_thinned_history_keeps_its_extremes_and_ends() -> None:
    points = [(step, 0.0) for step in range(1, 5001)]
    points[3210] = (3211, 9.0)
    points[1234] = (1235, -9.0)
    shown = report_curves.thinned(points, 100)
    assert 2 < len(shown) <= 100
    assert (shown[0], shown[-1]) == (points[0], points[-1])
    assert {(3211, 9.0), (1235, -9.0)} <= set(shown)
    assert report_curves.thinned(points[:100], 100) == points[:100]


def test_band_is_one_standard_deviation_around_the_mean() -> None:
    run = by_hand()
    lines = [line(1, step, "reward", 1.0, reward__score_mean=0.5, reward__score_std=0.2) for step in (1, 2)]
    run = with_parts(facts=run.facts, recipes=run.recipes, lines=lines)
    chart = report_curves.chart("reward/score_mean", [run], steps := report_curves.Steps())
    [series] = chart["data"]["series"]
    assert series == {"run": 0, "steps": 0, "values": [0.5, 0.5], "low": [0.3, 0.3], "high": [0.7, 0.7]}
    assert steps.lists == [[1, 2]]
    assert chart["band"] == "shaded: mean \u00b1 standard deviation of the scores"
    assert (chart["healthy"], chart["unit"]) == ("rising", "score")


def test_values_with_a_small_range_keep_their_differences() -> None:
    run = by_hand()
    name, values = "throughput/generated_tokens_per_s", [100000.0, 100000.3, float("nan"), 100000.12345678]
    lines = [line(1, step, "rollout", 1.0, **{name: value}) for step, value in enumerate(values, start=1)]
    run = with_parts(facts=run.facts, recipes=run.recipes, lines=lines)
    chart = report_curves.chart(name, [run], report_curves.Steps())["data"]
    assert chart["series"][0]["values"] == [100000.0, 100000.3, None, 100000.1235]
    assert (chart["axis"]["low"], chart["axis"]["high"]) == (100000.0, 100000.3)


def test_backticks_become_code_and_markup_is_escaped() -> None:
    assert marked("no `[expect]` & <b>") == "no <code>[expect]</code> &amp; &lt;b&gt;"
    assert marked("a ` alone") == "a ` alone"


def test_attempt_ends_in_the_stage_that_ran() -> None:
    run = by_hand()
    end = {"seq": 9, "event": "attempt_ended", "attempt": 2, "at": 240.0, "status": "interrupted", "exit_code": 130}
    lines = [*LINES[:-1], {**end, "during": [3, "rollout"]}]
    run = with_parts(facts=run.facts, recipes=run.recipes, lines=lines)
    found = [event.text for event in events.events(run, ATTEMPTS) if event.kind == "stop"]
    assert found[-1].startswith("attempt 2 ends in `rollout` of step 3")


@pytest.mark.parametrize(
    ("ppo", "name"),
    [
        ({}, "PPO"),
        ({"advantages": {"kind": "grpo"}}, "GRPO"),
        ({"advantages": {"kind": "python", "function": "own.py:estimate"}}, "PPO"),
        ({"advantages": {"kind": "reinforce_plus_plus"}}, "REINFORCE++"),
        ({"advantages": {"kind": "gae"}, "resample": {"kind": "pow"}}, "PF-PPO"),
    ],
)
def test_algorithm_is_named_as_the_recipe_says(ppo: dict[str, Any], name: str) -> None:
    assert algorithm_name(ppo) == name


# --- time and events -----------------------------------------------------------------------------------------------


def test_time_shares_add_up_to_the_total() -> None:
    """Attempts of 40 s and 4 s. Kept: 2 + 3 of step 1, 5 + 6 of step 2; the rollout of 4 s was repeated; starting 10,
    replayed 1, abandoned 2; the rest of 44 s: 11."""
    use = report_time.shares(by_hand())
    took = {row["name"]: row["took"] for row in use["rows"]}
    assert use["whole"] == "44s"
    assert took == {
        "rollout": "7.0s", "actor_update": "9.0s", "starting": "10s", "replayed": "1.0s", "abandoned": "2.0s",
        "repeated": "4.0s", "saving, and between stages": "11s",
    }  # fmt: skip
    assert next(row["share"] for row in use["rows"] if row["name"] == "rollout") == "15.9 %"
    assert use["gpu_hours"] == "0.00611 GPU-hours kept, 0.00167 lost"


def test_timeline_has_the_seconds_of_each_stage_and_step() -> None:
    assert report_time.timeline(by_hand(), 0) == {
        "run": 0, "stages": ["rollout", "actor_update"],
        "bars": [[1, 1], [2, 2]], "seconds": [[2.0, 5.0], [3.0, 6.0]],
        "axis": {"low": 0.0, "high": 11.0, "ticks": ((0.0, "0"), (5.0, "5"), (10.0, "10"))},
        "ticks": ((1.0, "1"), (2.0, "2")),
    }  # fmt: skip


def test_stage_table_has_medians_over_the_steps() -> None:
    """Rollouts take 1, 3 and 8 s, of which transfers 0.5, 0.25 and 2; MFU is not finite in a step."""
    lines: list[dict[str, Any]] = [
        {"seq": 40, "event": "saved", "step": 2, "role": "actor", "at": 1.0, "seconds": 9.0, "waited_s": 0.04567}
    ]
    for step, seconds, sent_s, mfu in ((1, 1.0, 0.5, 0.25), (2, 3.0, 0.25, float("nan")), (3, 8.0, 2.0, 0.5)):
        of_rollout = {"time/transfer_s": sent_s, "memory/rollout_gib": 1.5}
        of_update = {"throughput/actor_update_tokens_per_s": 1234.5, "throughput/actor_update_mfu": mfu}
        lines.append({**line(10 * step, step, "rollout", seconds), "clocked": of_rollout})
        update = line(10 * step + 1, step, "actor_update", 12345.6)
        lines.append({**update, "clocked": {**of_update, "time/actor_update_wait_s": 0.0}})
    found = report_time.median_stages(with_parts(recipes={1: RECIPE}, lines=lines))
    assert found == {
        "headers": ["seconds", "tokens/s", "MFU", "peak GiB"],
        "rows": [
            ["rollout", "3", "", "", "1.5"],
            ["rollout: weight transfer", "0.5", "", "", ""],
            ["actor_update", "12346", "1234", "0.375", ""],
            ["save of the actor", "0.0457", "", "", ""],
        ],
        "steps": 3,
    }  # fmt: skip
    assert report_time.median_stages(by_hand())["headers"] == ["seconds"]


def test_many_steps_are_averaged_into_fewer_bars() -> None:
    run = by_hand()
    lines = [line(step, step, "rollout", float(step)) for step in range(1, 301)]
    timeline = report_time.timeline(with_parts(recipes=run.recipes, lines=lines), 0)
    assert (len(timeline["bars"]), timeline["bars"][0], timeline["bars"][-1]) == (100, [1, 3], [298, 300])
    assert timeline["seconds"][0][:2] == [2.0, 5.0]


def test_charts_mark_resumes_stops_alarms_and_changed_keys() -> None:
    run = by_hand()
    assert [(event.at, event.kind, event.text) for event in events.events(run, ATTEMPTS)] == [
        (1.5, "change", "from step 2: lr 1.0 -> 0.5"),
        (1.5, "resume", "attempt 2 continues with step 2"),
        (2, "health", "step 2: policy/approx_kl is 0.2, above 0.1 (`health.kl.max`), warn"),
        (2.5, "stop", "attempt 1 ends in step 2: killed"),
        (2.5, "stop", "attempt 2 ends after step 2: stopped"),
    ]
    rows = events.attempt_rows(run, ATTEMPTS)
    assert [row[2:] for row in rows] == [
        ("1 to 2", "killed", "4.0s", "5.0s", "0.0s", "0.0s", "4.0s"),
        ("2", "stopped (5)", "40s", "11s", "10s", "1.0s", "3.0s"),
    ]


def test_consecutive_alarms_of_a_bound_are_one_mark() -> None:
    run = by_hand()
    kls = [0.05, 0.2, 0.3, 0.2, 0.05, 0.4]
    lines = [line(at, at, "actor_update", 1.0, policy__approx_kl=kl) for at, kl in enumerate(kls, start=1)]
    run = with_parts(recipes={1: RECIPE, 4: {**RECIPE, "lr": 0.5}}, lines=lines)
    assert [(event.at, event.text) for event in events.events(run, []) if event.kind == "health"] == [
        (2, "step 2: policy/approx_kl is 0.2, above 0.1 (`health.kl.max`), warn; until step 4"),
        (6, "step 6: policy/approx_kl is 0.4, above 0.1 (`health.kl.max`), warn"),
    ]


def test_expectations_are_met_unmet_or_not_yet_met() -> None:
    assert contract(by_hand(), is_done=True)["rows"] == [("policy/approx_kl", "0.2", "at most 0.15", "unmet", False)]
    assert contract(by_hand(), is_done=False)["rows"][0][3] == "not yet met"


def test_recipes_are_compared_key_by_key() -> None:
    left, right = {"name": "a", "x": {"y": 1, "z": None}}, {"name": "b", "x": {"y": 2, "z": None}}
    assert differences(left["x"], right["x"]) == [("y", 1, 2)]
    assert side_by_side([left, right, left]) == [("x.y", "1", "2", "1")]
    secret = {"name": "a", "uri": "sqlite://me:hunter2@host"}
    assert "hunter2" not in str(side_by_side([secret, {"name": "b"}]))


# --- samples -------------------------------------------------------------------------------------------------------


def shown(row: int, prompt: str, score: float | None, tokens: int) -> ShownSample:
    numbers = [0.5] * tokens
    return ShownSample(
        1, row, prompt, 0, "actor@0", "q", "r", "a", "terminated", "ok", score, [1] * tokens, ["t"] * tokens, numbers,
        numbers, numbers,
    )  # fmt: skip


def test_best_worst_longest_and_disagreeing_samples_are_chosen() -> None:
    items = [shown(0, "p", 1.0, 3), shown(1, "p", 0.0, 3), shown(2, "q", 0.5, 9), shown(3, "q", 0.5, 2)]
    items += [shown(4, "r", None, 1), *(shown(5 + n, f"s{n}", 0.5, 2) for n in range(10))]
    chosen = report_samples._chosen(items)
    kinds = {row: names for row, (_, names) in chosen.items()}
    assert kinds == {
        0: ["best", "longest", "disagree"],
        1: ["worst", "longest", "disagree"],
        2: ["best", "longest"],
        3: ["best", "longest"],
        4: ["no score"],
        5: ["best"],
        12: ["worst"],
        13: ["worst"],
        14: ["worst"],
    }
    assert {row for row, (rank, _) in chosen.items() if rank == 0} == {0, 1, 2, 4}, "the first of each kind"


def test_first_items_of_every_kind_are_included_before_the_second() -> None:
    def item(rank: int, size: int) -> dict[str, Any]:
        return {"rank": rank, "text": "x" * size}

    sets = [{"items": [item(0, 100), item(1, 100)]}, {"items": [item(0, 100), item(1, 10)]}]
    assert fit(sets, room=280) == 1
    assert [[len(item["text"]) for item in sample_set["items"]] for sample_set in sets] == [[100], [100, 10]]
    assert all("rank" not in item for sample_set in sets for item in sample_set["items"])


# --- a run on fakes ------------------------------------------------------------------------------------------------


def test_report_has_the_metrics_and_samples_of_the_run(runs: tuple[Path, Path]) -> None:
    report = contents(read_runs(runs), steps=2, room=1_000_000)
    first = ppoctl.Run(runs[0])
    [reward] = [chart for chart in report.data["charts"] if chart["name"] == "reward/score_mean"]
    assert [series["run"] for series in reward["series"]] == [0, 1]
    assert reward["series"][0]["values"] == pytest.approx(
        first.metrics()["reward/score_mean"].to_pylist()[1:], rel=1e-4
    )
    assert [report.data["steps"][series["steps"]] for series in reward["series"]] == [[1, 2, 3], [1, 2]]
    titles = [sample_set["title"] for sample_set in report.data["sets"]]
    assert titles[:2] == ["step 1, rollouts", "step 3, rollouts"]
    assert titles[2:4] == ["evaluation after step 3, held greedy", "evaluation after step 3, held sampled"]
    by_title = {f"{row['prompt_id']} #{row['sample']}": row for row in first.samples(3).to_pylist()}
    for item in report.data["sets"][1]["items"]:
        row = by_title[item["title"]]
        assert item["advantage"] == pytest.approx(row["advantages"], rel=1e-4)
        assert item["kl"] == pytest.approx(row["kl"], rel=1e-4, abs=1e-8)
        assert len(item["tokens"]) == len(item["value"]) == len(row["tokens"])
    marks = {(mark["run"], mark["at"], mark["kind"]) for mark in report.data["marks"]}
    assert {(0, 2.5, "resume"), (0, 2.5, "change")} <= marks
    assert {run for run, _, kind in marks if kind == "health"} <= {0, 1}


def test_report_shows_who_waited_in_each_run_that_measured_it(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """The first of the runs is by a version that did not measure how long the engines generate."""
    old = tmp_path / "old"
    shutil.copytree(runs[1], old)
    journal = old / "journal.jsonl"
    lines = [unseal(line) for line in journal.read_text("ascii").splitlines()]
    for line in lines:
        if "time/generation_s" in line.get("clocked", {}):
            del line["clocked"]["time/generation_s"]
    journal.write_bytes(b"".join(map(sealed_line, lines)))
    report = contents(read_runs([old, runs[0], runs[1]]), steps=0, room=1_000_000)
    listed = [[row[0] for row in waits["rows"]] for waits in report.words["waits"]]
    assert listed == [[], ["1", "2", "3"], ["1", "2"]]
    assert [[step["step"] for step in waits["steps"]] for waits in report.data["waits"]] == [[], [1, 2, 3], [1, 2]]
    assert report.words["waits"][1]["says"].endswith(
        "`rollout.ahead = 1` generates while the step trains, if the recipe allows it."
    )
    page = html({**report.words, "left_out": ()}, report.data)
    assert re.findall(r'data-waits="(\d)"', page) == ["1", "2"]
    assert re.findall(r"<h3>(.+?): who waited for whom in the newest (\d) steps", page) == [
        ("first", "3"),
        ("second (3)", "2"),
    ]
    assert 'class="waits"' in page
    none = contents(read_runs([old]), steps=0, room=1_000_000)
    without = html({**none.words, "left_out": ()}, none.data)
    assert 'class="waits"' not in without
    assert ("weights are transferred" in page, "weights are transferred" in without) == (True, False)


def test_overview_names_model_data_reward_and_state(runs: tuple[Path, Path]) -> None:
    overview = head(read_runs(runs)[0])
    rows = dict(overview["rows"])
    assert rows["state"] == "finished: all steps are done"
    assert (rows["steps"], rows["seed"]) == ("3 of 3", "5")
    assert overview["sentence"].startswith("quickstart/model, trained with PPO on quickstart/train.jsonl, rewarded")
    assert overview["sentence"].endswith("rewarded by gsm8k: 4 prompts x 2 responses per step, of at most 6 tokens.")
    assert "held/pass_at_1" in rows


def test_report_of_a_run_without_its_model_omits_step_samples(runs: tuple[Path, Path], tmp_path: Path) -> None:
    gone = tmp_path / "first"
    shutil.copytree(runs[0], gone)
    for file in (gone / "recipes").iterdir():
        record = unseal(file.read_text())
        file.write_text(seal({**record, "model": {**record["model"], "path": "/gone"}}))
    report = contents(read_runs([gone]), steps=2, room=1_000_000)
    assert [sample_set["title"] for sample_set in report.data["sets"]] == [
        "evaluation after step 3, held greedy",
        "evaluation after step 3, held sampled",
    ]
    assert report.left_out[0].startswith("samples of the steps of first: `model.path` is `/gone`")


def test_report_of_a_run_that_has_not_begun(tmp_path: Path) -> None:
    new_run.create(RunPaths(tmp_path / "new"), fake_recipe(), {"model": "a" * 64}, command="train")
    report = contents(read_runs([tmp_path / "new"]), steps=2, room=1_000_000)
    assert dict(report.words["heads"][0]["rows"])["state"] == "created: the run has not started"
    assert (report.data["charts"], report.data["sets"], report.left_out) == ([], [], ())
    page = html({**report.words, "left_out": ()}, report.data)
    assert "No stage is done yet" in page
    fills = re.findall(r'<pattern id="fill-\d+"(.*?)</pattern>', page, re.DOTALL)
    colours = [re.findall(r'class="(s\d)"', fill)[0] for fill in fills]
    assert len(set(fills)) == len(fills) == 16
    assert len(set(colours[:8])) == 8, "a step of PPO has eight stages"


def test_runs_with_equal_names_are_numbered(runs: tuple[Path, Path]) -> None:
    assert [run.label for run in read_runs([runs[0], runs[1], runs[0]])] == ["first (1)", "second", "first (3)"]


def test_report_without_samples_imports_no_heavy_library(runs: tuple[Path, Path], tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ppoctl.show.report.report_file import write_report; "
        f"write_report([Path({str(runs[0])!r})], Path({str(tmp_path / 'r.html')!r}), steps=0); "
        "print([name for name in ('torch', 'transformers', 'pyarrow', 'numpy', 'mlflow') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
