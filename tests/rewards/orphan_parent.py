"""A parent process for tests to kill: starts a pool, prints the process ids of its children, then waits.

python orphan_parent.py TRUTH   scores one sample with this ground truth (a hang never returns). "idle": stays idle;
                                "leave": exits; "leave-work": exits with running and queued samples
"""

import sys
import threading
import time

from asking import request, scores

from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.scorer_pool import ScorerPool

if __name__ == "__main__":
    pool = ScorerPool(ScorerSpec("drill_scorers:score"), workers=2, timeout_s=600)
    scores(pool, [request("", "sleep 0.1")] * 4)  # both children are running
    print(*pool.pids, flush=True)
    if sys.argv[1] == "idle":
        time.sleep(600)
    if sys.argv[1] == "leave-work":
        started = [pool.submit(request("", "hang-in-c")) for _ in range(8)]
        while not started[1].running():
            time.sleep(0.01)
    if sys.argv[1].startswith("leave"):
        sys.exit(0)
    threading.Timer(0.3, lambda: print("busy", flush=True)).start()
    scores(pool, [request("", sys.argv[1])] * 2)
