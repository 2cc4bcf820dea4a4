#!/usr/bin/env bash
# Run a command once on every node of this SLURM job and end with its exit code: exec on_each_node.sh COMMAND…
# SIGUSR1, which --signal=B:USR1@SECONDS sends before the time limit, is handed to the command; when that has ended
# before its end (code 75 of a run that saved), the job goes back into the queue, and the same command resumes the run.
set -u

# srun does not take this over from sbatch by itself.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

limit=no
srun --ntasks-per-node=1 --kill-on-bad-exit=1 "$@" &
command=$!
trap 'limit=yes; kill -USR1 "$command"' USR1
trap 'kill -TERM "$command"' TERM

wait "$command"
while kill -0 "$command" 2>/dev/null; do wait "$command"; done # a signal ends the wait, not the command
wait "$command" # its exit code, also if it had ended before the first wait
code=$?
if [ "$limit" = yes ] && [ "$code" != 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
