"""A parent to be killed: starts a pool, prints its children's process ids, then waits as told.

python orphan_parent.py TRUTH   scores one sample with this truth (a hang never returns), or stays idle for "idle"
"""

import sys
import threading
import time

from ppoctl.rewards.pool import ScorerPool
from ppoctl.rewards.worker import Question, ScorerSpec

if __name__ == "__main__":
    pool = ScorerPool(ScorerSpec("drill_scorers:score"), workers=2, timeout_s=600)
    pool.score([Question("", "sleep 0.1")] * 4)  # both children are up
    print(*pool.pids, flush=True)
    if sys.argv[1] == "idle":
        time.sleep(600)
    if sys.argv[1] == "leave":
        sys.exit(0)
    threading.Timer(0.3, lambda: print("busy", flush=True)).start()
    pool.score([Question("", sys.argv[1])] * 2)
