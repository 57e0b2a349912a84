#!/bin/bash
# @{title}
@{options}

# USR1: the time limit is near, or a job of higher priority wants these nodes. TERM: Slurm ends the job. Both are
# passed on to the command, which finishes or abandons what it is at, saves, and ends.
asked= child= heard=
pass() { asked=$1 heard=yes; [ -z "$child" ] || kill -s "$1" "$child" 2>/dev/null; }
trap 'pass USR1' USR1
trap 'pass TERM' TERM

unset SLURM_EXPORT_ENV  # steps get all of this environment, not only the variables named above
ulimit -c 0             # Ray leaves a core file where it is ended from outside
cd -- @{folder} || exit 8

(
    set -e
@{setup}
    exec @{command}
) &
child=$!
[ -z "$asked" ] || pass "$asked"
while heard=; wait "$child"; code=$?; [ "$heard" ]; do :; done

# A command that was told before it could listen died of it, and had begun nothing. 130: `ppoctl stop`.
[ -z "$asked" ] || [ "$code" -le 128 ] || [ "$code" -eq 130 ] || code=75
# RESTART CODE TIME SIGNAL: how `ppoctl status` knows of the end where Slurm has forgotten the job
printf '%s %s %s %s\n' "${SLURM_RESTART_COUNT:-0}" "$code" "$(date +%s)" "${asked:--}" >>@{record}

case $code in @{goes_on}) again=yes ;; *) again= ;; esac
# After TERM Slurm itself decides whether the job comes back.
if [ "$again" ] && [ "$asked" != TERM ] && [ "${SLURM_RESTART_COUNT:-0}" -lt @{requeues} ]; then
    echo "ppoctl: exit code $code, back into the queue"
    trap '' TERM  # by which Slurm takes the job back
    # A controller that restarts refuses for a while.
    for _ in {1..30}; do scontrol requeue "$SLURM_JOB_ID" && break || sleep 10; done
fi
exit "$code"
