"""From the typed command to the processes that train: three programs, each of which starts the next.

1. `cli/base/entry.py: main` chooses the command. `cli/train.py: run` reads the configuration, where the command was
   typed.
2. `launch/start.py: prepare` checks it on this machine (`launch/preflight.py: preflight`). Nothing is written yet.
3. `launch/start.py: start` locks the run's folders, writes run.yaml, and starts torchrun as a child
   (`processes/control.py: run_child`).
4. `launch/torchrun.py: main` starts the ranks of this node. It passes signals on to them, and ends all when one fails.
5. `launch/worker.py: main` is one rank. It reads run.yaml, assembles the training loop and runs it; the walk continues
   in `training/__init__.py`.

With --submit, step 3 is another: `launch/jobs/slurm.py: batch_file` has the same command for a job. With --k8s or
--vertex it is `launch/jobs/job.py: prepare_cluster_job`; in the containers of that job, the walk begins again. With
--sif-path, step 1 runs the same command again inside an image (`launch/singularity.py: rerun_in_container`).
"""
