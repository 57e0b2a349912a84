"""A parent process for tests to kill: opens two episodes, prints the process ids of its children, then waits.

python environment_parent.py TEXT   takes a turn with this text in each episode; "idle": takes no turn; "leave": exits
"""

import sys
import time

from environments.episodes import opened, past, python_table, turn
from ppoctl.environments.environment_pool import EnvironmentPool

if __name__ == "__main__":
    pool = EnvironmentPool(python_table("Misbehaves", workers=2, seconds=600.0))
    starts = [opened(pool, past(key)) for key in "ab"]
    print(*pool.pids, flush=True)
    if sys.argv[1] == "leave":
        running = [pool.step(start, turn("hang-in-c")) for start in starts]
        while not all(call.running() for call in running):
            time.sleep(0.01)
        sys.exit(0)
    if sys.argv[1] != "idle":
        running = [pool.step(start, turn(sys.argv[1])) for start in starts]
    time.sleep(600)
