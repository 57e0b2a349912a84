"""A parent to be killed: starts a pool, prints its children's process ids, then waits as told.

python orphan_parent.py TRUTH   scores one sample with this truth (a hang never returns), or stays idle for "idle", or
                                leaves for "leave", with samples in hand and in the queue for "leave-work"
"""

import sys
import threading
import time

from asking import request, scores

from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.pool import ScorerPool

if __name__ == "__main__":
    pool = ScorerPool(ScorerSpec("drill_scorers:score"), workers=2, timeout_s=600)
    scores(pool, [request("", "sleep 0.1")] * 4)  # both children are up
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
