"""Work and waits of the parties of a step, with numbers worked out by hand. Each journal begins at second 1000."""

from typing import Any

import pytest

from ppoctl.show.report.waiting_bars import LEGEND, bar, legend, longer_side, rows, summary, table_rows
from ppoctl.show.report.who_waited import StepWaits, newest_steps, step_waits
from ppoctl.store.outline import Outline, OutlineEntry, Outlines

Line = dict[str, Any]


def line(stage: str, start: float, end: float, *, attempt: int = 1, step: int = 2, **clocked: float) -> Line:
    """Return the journal line of a stage in these seconds of a step, or of a later time with a further attempt."""
    named = {f"time/{name}": seconds for name, seconds in clocked.items()}
    if "generation_s" in clocked:
        named["throughput/generated_tokens_per_s"] = 100.0
    return {"step": step, "stage": stage, "at": 1000 + end, "seconds": end - start, "attempt": attempt,
            "figures": {}, "clocked": named}  # fmt: skip


def next_rollout(
    began: float, waited: tuple[float, float], transfer_s: float, generation_s: float, **where: int
) -> Line:
    """Return the line of the generation of a later step. Its seconds are those for which a step waited."""
    times = {"transfer_s": transfer_s, "generation_s": generation_s}
    found = line("next_rollout", waited[0] - transfer_s, waited[1], **times, **where)
    return {**found, "began_at": 1000 + began}


def waits_of(*lines: Line) -> StepWaits:
    found = step_waits(lines, 2)
    assert found is not None
    return found


def spans(waits: StepWaits, party: str) -> list[tuple[float, float, str]]:
    return [(span.start_s, span.end_s, span.state) for span in waits.spans[party]]


TRAINER_LONGER = (
    line("reward", 1.0, 2.0),
    line("values", 2.0, 5.0),
    line("actor_update", 6.0, 10.0),
    next_rollout(1.0, (10.0, 10.0), 1.0, 4.0),
)
"""The transfer takes second 0 to 1, the generation 1 to 5. A state is saved from 5 to 6."""
GENERATOR_LONGER = (
    line("reward", 1.0, 2.0),
    line("values", 2.0, 5.0),
    line("actor_update", 5.0, 6.0),
    next_rollout(1.0, (6.0, 10.0), 1.0, 9.0),
)
"""The generation takes second 1 to 10, and the step waits from 6 to 10."""
IN_TURN = (
    line("rollout", 0.0, 4.0, transfer_s=1.0, generation_s=3.0),
    line("reward", 4.0, 5.0),
    line("values", 5.0, 7.0),
    line("actor_update", 7.0, 10.0),
)


def test_generator_waits_for_a_longer_trainer() -> None:
    waits = waits_of(*TRAINER_LONGER)
    assert (waits.step, waits.seconds, waits.is_parallel, waits.resumed_at_s) == (2, 10.0, True, ())
    assert spans(waits, "generator") == [(0, 1, "transfer"), (1, 5, "works"), (6, 10, "trainer")]
    assert spans(waits, "trainer") == [(0, 1, "transfer"), (1, 2, "reward"), (2, 5, "works"), (6, 10, "works")]
    assert spans(waits, "reward") == [(1, 2, "works"), (2, 5, "trainer"), (6, 10, "trainer")]
    assert (waits.worked_s("generator"), waits.waited_s("generator")) == (4.0, {"trainer": 4.0})
    assert (waits.worked_s("trainer"), waits.waited_s("trainer")) == (7.0, {"reward": 1.0})


def test_trainer_waits_for_a_longer_generator() -> None:
    waits = waits_of(*GENERATOR_LONGER)
    assert spans(waits, "generator") == [(0, 1, "transfer"), (1, 10, "works")]
    assert spans(waits, "trainer") == [
        (0, 1, "transfer"), (1, 2, "reward"), (2, 6, "works"), (6, 10, "generator"),
    ]  # fmt: skip
    assert waits.waited_s("trainer") == {"generator": 4.0, "reward": 1.0}


def test_generation_of_the_next_step_ends_with_its_stage_if_another_stage_began_late() -> None:
    """The scorer starts from second 1 to 3, outside of the seconds of its stage."""
    waits = waits_of(line("reward", 3.0, 4.0), line("values", 4.0, 6.0), next_rollout(1.0, (6.0, 10.0), 1.0, 9.0))
    assert spans(waits, "generator") == [(0, 1, "transfer"), (1, 10, "works")]
    assert spans(waits, "trainer") == [
        (0, 1, "transfer"), (3, 4, "reward"), (4, 6, "works"), (6, 10, "generator"),
    ]  # fmt: skip


def test_first_step_ahead_generates_for_two_steps() -> None:
    rollout = line("rollout", 0.0, 4.0, transfer_s=1.0, generation_s=3.0)
    waits = waits_of(
        rollout, line("reward", 5.0, 6.0), line("values", 6.0, 9.0), next_rollout(5.0, (9.0, 9.0), 0.5, 2.0)
    )
    assert spans(waits, "generator") == [
        (0, 1, "transfer"), (1, 4, "works"), (4.5, 5, "transfer"), (5, 7, "works"), (7, 9, "trainer"),
    ]  # fmt: skip
    assert spans(waits, "trainer")[:3] == [(0, 1, "transfer"), (1, 4, "generator"), (4.5, 5, "transfer")]


def test_generation_two_steps_ahead_may_end_in_the_next_step() -> None:
    """The generation of step 1 ends at second 3, that of step 2 begins at 5 and ends at 12. Step 2 takes second 0 to
    9, and step 3 waits from 11 to 12."""
    waits = waits_of(
        {**next_rollout(-4.0, (-9.0, -9.0), 0.0, 3.0, step=0)},
        next_rollout(-3.0, (4.0, 4.0), 1.0, 6.0, step=1),
        line("reward", 0.0, 1.0),
        line("values", 1.0, 4.0),
        line("actor_update", 5.0, 9.0),
        line("reward", 9.0, 11.0, step=3),
        next_rollout(5.0, (11.0, 12.0), 1.0, 7.0),
        line("actor_update", 12.0, 14.0, step=3),
    )
    assert (waits.seconds, waits.is_parallel) == (9.0, True)
    assert spans(waits, "generator") == [(0, 3, "works"), (3, 4, "trainer"), (4, 5, "transfer"), (5, 9, "works")]
    assert spans(waits, "trainer") == [(0, 1, "reward"), (1, 4, "works"), (4, 5, "transfer"), (5, 9, "works")]


def test_parties_take_turns_without_ahead() -> None:
    waits = waits_of(*IN_TURN)
    assert not waits.is_parallel
    assert spans(waits, "generator") == [(0, 1, "transfer"), (1, 4, "works"), (4, 5, "reward"), (5, 10, "trainer")]
    assert spans(waits, "trainer") == [(0, 1, "transfer"), (1, 4, "generator"), (4, 5, "reward"), (5, 10, "works")]
    assert spans(waits, "reward") == [(0, 4, "generator"), (4, 5, "works"), (5, 10, "trainer")]
    assert list(waits.waited_s("reward").items()) == [("trainer", 5.0), ("generator", 4.0)], "the longest wait first"


def test_rounds_of_dynamic_sampling_are_added() -> None:
    """Lines of later rounds that an earlier run of the step had are left out."""
    old = [line("rollout.2", -90.0, -80.0, generation_s=10.0), line("rollout.3", -80.0, -70.0, generation_s=10.0)]
    waits = waits_of(
        *old,
        line("rollout", 0.0, 4.0, transfer_s=1.0, generation_s=3.0),
        line("reward", 4.0, 5.0),
        line("keep_groups", 5.0, 5.5),
        line("rollout.2", 5.5, 7.5, transfer_s=0.0, generation_s=2.0),
        line("reward.2", 7.5, 8.0),
        line("actor_update", 8.0, 10.0),
    )
    assert waits.seconds == 10.0
    assert waits.worked_s("generator") == 5.0
    assert waits.worked_s("reward") == 1.5
    assert waits.waited_s("generator") == {"trainer": 2.5, "reward": 1.5}


def test_round_that_overlaps_scores_is_generated_while_they_are_computed() -> None:
    """Round 2 is generated from second 4 to 7, and round 3 from 9.2 to 11.2, when the step has its groups."""
    waits = waits_of(
        line("rollout", 0.0, 4.0, transfer_s=1.0, generation_s=3.0),
        line("reward", 4.0, 9.0),
        line("keep_groups", 9.0, 9.1, cancelled_s=0.0),
        {**line("rollout.2", 9.1, 9.2, transfer_s=0.0, generation_s=3.0), "began_at": 1004.0},
        line("reward.2", 9.2, 11.0),
        line("keep_groups.2", 11.0, 11.2, cancelled_s=2.0),
        line("actor_update", 11.2, 12.2),
    )
    assert spans(waits, "generator") == [
        (0, 1, "transfer"), (1, 7, "works"), (7, 9, "reward"), (9, 9.1, "trainer"), (9.2, 11.2, "works"),
        (11.2, 12.2, "trainer"),
    ]  # fmt: skip
    assert waits.worked_s("generator") == 8.0
    assert waits.worked_s("reward") == 6.8
    assert not waits.is_parallel


def test_step_waits_for_a_round_that_takes_longer_than_the_scores() -> None:
    waits = waits_of(
        line("rollout", 0.0, 4.0, transfer_s=1.0, generation_s=3.0),
        line("reward", 4.0, 5.0),
        line("keep_groups", 5.0, 5.5),
        line("rollout.2", 5.5, 8.0, transfer_s=0.0, generation_s=4.0),
        line("reward.2", 8.0, 9.0),
    )
    assert spans(waits, "generator") == [(0, 1, "transfer"), (1, 8, "works"), (8, 9, "reward")]
    assert waits.waited_s("reward") == {"generator": 6.5, "trainer": 0.5}


def test_greedy_responses_are_work_of_the_generator() -> None:
    waits = waits_of(*IN_TURN[:2], line("greedy_rollout", 5.0, 6.0), line("greedy_reward", 6.0, 6.5))
    assert (waits.worked_s("generator"), waits.worked_s("reward")) == (4.0, 1.5)


def test_evaluation_and_saves_are_not_a_part_of_the_step() -> None:
    saved = {"event": "saved", "step": 2, "role": "critic", "at": 1030.0, "seconds": 9.0, "waited_s": 1.0}
    assert waits_of(*IN_TURN, line("eval", 10.0, 25.0), {**saved, "attempt": 1}) == waits_of(*IN_TURN)


HOUR = 3600.0


def test_time_between_two_attempts_is_cut_and_not_a_wait() -> None:
    later = [line(each["stage"], HOUR + start, HOUR + end, attempt=2)
             for each, start, end in zip(IN_TURN[2:], (5.0, 7.0), (7.0, 10.0), strict=True)]  # fmt: skip
    waits = waits_of(*IN_TURN[:2], *later)
    assert (waits.seconds, waits.resumed_at_s) == (10.0, (5.0,))
    assert spans(waits, "generator") == spans(waits_of(*IN_TURN), "generator")


def test_generation_that_a_kill_ended_is_not_a_wait() -> None:
    """Attempt 1 was killed after the values, and its generation left no line. Attempt 2 generated the rest in 2 s."""
    waits = waits_of(
        *TRAINER_LONGER[:2],
        line("actor_update", HOUR, HOUR + 4.0, attempt=2),
        next_rollout(HOUR, (HOUR + 4.0, HOUR + 4.0), 0.5, 2.0, attempt=2),
    )
    assert waits.resumed_at_s == (4.0,)
    assert spans(waits, "generator") == [(4, 4.5, "transfer"), (4.5, 6.5, "works"), (6.5, 8.5, "trainer")]
    assert spans(waits, "trainer") == [
        (0, 1, "reward"), (1, 4, "works"), (4, 4.5, "transfer"), (4.5, 8.5, "works"),
    ]  # fmt: skip


def test_resume_with_only_the_generation_left_waits_for_the_generator() -> None:
    """The seconds of its stage include the transfer, in which the reward does not wait for the generator."""
    waits = waits_of(*TRAINER_LONGER[:3], next_rollout(HOUR + 1.0, (HOUR + 1.0, HOUR + 4.0), 1.0, 3.0, attempt=2))
    assert (waits.seconds, waits.resumed_at_s) == (13.0, (9.0,))
    assert spans(waits, "generator") == [(9, 10, "transfer"), (10, 13, "works")]
    assert spans(waits, "reward")[-1] == (10, 13, "generator")


def test_generation_that_was_loaded_after_a_resume_took_no_time() -> None:
    waits = waits_of(line("rollout", 0.0, 0.5), *IN_TURN[1:])
    assert waits.worked_s("generator") == 0.0
    assert bar(waits, "generator", 10).count("#") == 0


def test_steps_without_measured_generation_have_no_waits() -> None:
    old = {**IN_TURN[0], "clocked": {"throughput/generated_tokens_per_s": 100.0, "time/transfer_s": 1.0}}
    assert step_waits([old, *IN_TURN[1:]], 2) is None
    assert step_waits([{key: value for key, value in old.items() if key != "clocked"}], 2) is not None, (
        "nothing generated"
    )
    without_start = {key: value for key, value in TRAINER_LONGER[-1].items() if key != "began_at"}
    assert step_waits([*TRAINER_LONGER[:-1], without_start], 2) is None
    assert step_waits(IN_TURN[1:], 2) is None
    assert step_waits([], 2) is None


def test_json_keeps_all_numbers() -> None:
    waits = waits_of(*GENERATOR_LONGER)
    found = waits.as_json()
    assert StepWaits.from_json(found) == waits
    assert found["parties"][1] == {
        "name": "trainer", "worked_s": 4.0, "waited_s": {"generator": 4.0, "reward": 1.0},
        "spans": [[0.0, 1.0, "transfer"], [1.0, 2.0, "reward"], [2.0, 6.0, "works"], [6.0, 10.0, "generator"]],
    }  # fmt: skip


def test_newest_complete_steps_are_found() -> None:
    names = ("rollout", "reward", "values", "actor_update")
    outlines = Outlines({1: Outline("ppo", tuple(OutlineEntry(name, ()) for name in names))})
    steps = [{**each, "step": step} for step in (1, 2, 3) for each in IN_TURN]
    lines = [{"event": "attempt_started", "attempt": 1, "at": 1.0}, *steps, {**IN_TURN[0], "step": 4}]
    assert [waits.step for waits in newest_steps(lines, outlines, at_most=2)] == [2, 3]
    assert newest_steps(lines[-1:], outlines, at_most=2) == []


# --- text ----------------------------------------------------------------------------------------------------------


def test_bars_show_work_transfers_and_waits() -> None:
    waits = waits_of(*TRAINER_LONGER)
    assert [bar(waits, party, 10) for party in ("generator", "trainer", "reward")] == [
        "=#### ....",
        "=.### ####",
        " #... ....",
    ]


def test_cell_has_the_state_of_most_of_its_time_and_short_work_is_visible() -> None:
    waits = waits_of(line("rollout", 0.0, 5.3, transfer_s=0.0, generation_s=5.3), line("reward", 5.3, 5.4),
                     line("values", 5.4, 10.0))  # fmt: skip
    assert bar(waits, "generator", 10) == "#####....."
    assert bar(waits, "trainer", 10) == ".....#####"
    assert bar(waits, "reward", 10) == ".....#....", "0.1 s of the second from 5 to 6"


def test_table_of_bars_fits_the_width() -> None:
    table, headers = rows(waits_of(*GENERATOR_LONGER), 80)
    assert headers == ("step 2 in 10s", "", "worked", "waited for")
    assert [(name, *text) for name, _, *text in table] == [
        ("generator", "9.0s", "-"),
        ("trainer", "4.0s", "generator 4.0s, reward 1.0s"),
        ("reward", "1.0s", "generator 4.0s, trainer 4.0s"),
    ]
    assert {len(cells) for _, cells, *_ in table} == {80 - len("step 2 in 10s") - 6 - 28 - 3 * 2}
    assert len(rows(waits_of(*GENERATOR_LONGER), 400)[0][0][1]) == 60
    assert len(rows(waits_of(*GENERATOR_LONGER), 20)[0][0][1]) == 12


def test_waits_below_one_percent_are_not_in_the_table() -> None:
    """The trainer waits 0.08 s for the reward in a step of 10 s."""
    short = waits_of(line("reward", 1.0, 1.08), line("values", 1.08, 10.0), next_rollout(1.0, (10.0, 10.0), 1.0, 5.0))
    assert short.waited_s("trainer") == {"reward": 0.08}
    assert [waited for *_, waited in rows(short, 80)[0]] == ["trainer 4.0s", "-", "trainer 8.9s"]


def test_resume_is_marked_in_all_bars() -> None:
    later = [{**each, "at": each["at"] + HOUR, "attempt": 2} for each in IN_TURN[2:]]
    waits = waits_of(*IN_TURN[:2], *later)
    assert [bar(waits, party, 10) for party in waits.spans] == ["=###.|....", "=....|####", "....#|...."]
    assert legend(waits) == LEGEND + "  | resumed"
    assert legend(waits_of(*IN_TURN)) == LEGEND
    assert summary(waits).endswith("; the step was resumed")
    assert table_rows([waits]) == [("2 (resumed)", "10s", "3.0s", "6.0s", "5.0s", "4.0s", "1.0s")]


def test_summary_has_the_seconds_of_each_party() -> None:
    assert summary(waits_of(*TRAINER_LONGER)) == (
        "step 2 in 10s: generator worked 4.0s, waited for trainer 4.0s; trainer worked 7.0s, waited for reward 1.0s; "
        "reward worked 1.0s, waited for trainer 7.0s"
    )


REWARD_LONGER = (line("reward", 1.0, 8.0), line("values", 8.0, 10.0), next_rollout(1.0, (10.0, 10.0), 1.0, 6.0))
BALANCED = (line("reward", 1.0, 1.1), line("values", 1.1, 10.0), next_rollout(1.0, (10.0, 10.0), 1.0, 8.9))


WAITS = "The {} is the longer side: the {} waits for it {} % of the time. To change this, {}"


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([TRAINER_LONGER], WAITS.format("trainer", "generator", 40, "use larger microbatches (`actor.batching.")),
        ([GENERATOR_LONGER], WAITS.format("generator", "trainer", 40, "give it more engines (`generator.engines`")),
        ([REWARD_LONGER], WAITS.format("reward", "trainer", 70, "score faster, for example with more processes")),
        ([BALANCED], "Both sides take equally long: neither waits for more than 5 % of the time."),
        (
            [IN_TURN],
            "The trainer is the longer side: it works 50 % of the time, and the others wait for it. To change",
        ),
        (
            [IN_TURN, TRAINER_LONGER, GENERATOR_LONGER, GENERATOR_LONGER],
            WAITS.format("generator", "trainer", 27, "give it"),
        ),
    ],
)
def test_longer_side_is_named_with_what_to_change(steps: list[tuple[Line, ...]], says: str) -> None:
    """Only steps like the newest are compared: with, or without the generation of the next step."""
    assert longer_side([waits_of(*lines) for lines in steps]).startswith(says)


def test_longer_side_is_unknown_if_all_steps_were_resumed() -> None:
    later = [{**each, "attempt": 2} for each in IN_TURN[2:]]
    assert longer_side([waits_of(*IN_TURN[:2], *later)]) == ""
    assert longer_side([]) == ""
