"""The three programs of a start, each of which starts the next, and command lines of SLURM and containers.

`start.py`, where the command was typed: checks (`preflight.py`), locks the run's folders, and starts
torchrun or submits a job. `torchrun.py`: starts the ranks of one node and ends them. `worker.py`: one rank; it calls
`training/assembly.py`.
"""
