#!/bin/bash
# @{title}
@{options}

# USR1: the time limit is near, or a job of higher priority takes these nodes. TERM: Slurm ends the job. Both are
# forwarded to the command, which finishes or abandons its stage, saves, and exits.
signal= child= interrupted=
forward() {
    [ "$signal" = TERM ] || signal=$1
    interrupted=yes
    case $1 in TERM) set -- @{term} ;; esac
    [ -z "$child" ] || kill -s "$1" "$child" 2>/dev/null
}
trap 'forward USR1' USR1
trap 'forward TERM' TERM

unset SLURM_EXPORT_ENV  # srun steps inherit this environment, not only the variables named above
ulimit -c 0             # a killed Ray would leave a core file
cd -- @{folder} || exit 8

restart=${SLURM_RESTART_COUNT:-0}
exec 3<> <(:)  # a pipe
(
    echo begun >&3  # from now on, signals reach this subshell, then the command
    exec 3>&-
    set -e
    export PPOCTL_JOB=$SLURM_JOB_ID  # marks the run's own job
@{setup}
    exec @{command}
) &
subshell=$!
until read -r -t 1 _ <&3 || ! kill -0 "$subshell" 2>/dev/null; do :; done
child=$subshell
[ -z "$signal" ] || forward "$signal"
while interrupted=; wait "$child"; code=$?; [ "$interrupted" ]; do :; done

# A command that received a signal before it installed its handlers died and has started nothing. 130: `ppoctl stop`.
[ -z "$signal" ] || [ "$code" -le 128 ] || [ "$code" -eq 130 ] || code=75
# RESTART CODE TIME SIGNAL: `ppoctl status` reads this line if Slurm has forgotten the job
printf '%s %s %s %s\n' "$restart" "$code" "$(date +%s)" "${signal:--}" >>@{record}

job_field() { squeue --noheader --job "$SLURM_JOB_ID" --Format "$1" | tr -d ' '; }
case $code in @{resumable}) again=yes ;; *) again= ;; esac
[ "$restart" -lt @{requeues} ] || again=
# A failure before the run begins may be caused by this node; three in a row end the job.
begun=$(tail -n 1 "jobs/$SLURM_JOB_ID.started" 2>/dev/null | cut -d' ' -f1)
tries=$(awk -v begun="${begun:--1}" '$4 == "-" && $1 > begun' "jobs/$SLURM_JOB_ID.ended" 2>/dev/null | wc -l)
[ "$signal" ] || [ "$tries" -lt 3 ] || again=
# Slurm ends a job at its limit, on scancel, and on preemption; after a preemption Slurm itself requeues it.
[ "$signal" != TERM ] || [ "$again" = "" ] || [ "$(job_field Reason)" = TimeLimit ] || again=
if [ "$again" ]; then
    echo "ppoctl: exit code $code, the job is requeued"
    trap '' TERM  # Slurm sends TERM when it requeues the job
    # A restarting controller refuses for a while. A job that already runs again elsewhere is left alone.
    for _ in {1..30}; do
        case $(job_field RestartCnt) in
            "$restart") scontrol requeue "$SLURM_JOB_ID" && break ;;
            "") ;;
            *) break ;;
        esac
        sleep 10
    done
fi
exit "$code"
