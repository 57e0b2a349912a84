"""The Ray drill reports that nothing of any attempt is left: this test checks that it would see a leftover
process."""

import subprocess

import psutil

from end_to_end.drill import in_a_process
from end_to_end.ray_drill import adopt, left_behind


def leave_a_process_behind() -> None:
    adopt()
    # In a separate session, with an empty environment, and without its parent.
    subprocess.run(["/bin/sh", "-c", "setsid sleep 100 &"], env={}, check=True)
    (left,) = left_behind(deadline_s=0.3)
    assert left.endswith("sleep 100")
    (sleeping,) = psutil.Process().children()
    sleeping.kill()
    assert left_behind(deadline_s=10.0) == []


def test_leftover_process_is_found_in_any_session_or_environment() -> None:
    assert in_a_process(leave_a_process_behind) == 0
