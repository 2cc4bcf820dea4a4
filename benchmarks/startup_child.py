"""Runs a command in this process for `benchmarks.startup`, and prints how long it took and what it had imported.

    python -m benchmarks.startup_child BEGAN WATCHED -m llava_mcore COMMAND …
    python -m benchmarks.startup_child BEGAN WATCHED SCRIPT …

BEGAN is the time at which the process was started. With a folder WATCHED, the process ends when it first opens a file
in there; without ("") it runs to its end. Imports little, so that the command's own imports are what counts.
"""

import json
import os
import resource
import runpy
import sys
import time

RESULT = "startup: "


def report(began: float) -> None:
    """Print seconds since `began`, CPU seconds of this process, and the top-level modules."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    modules = sorted({name.partition(".")[0] for name, module in sys.modules.items() if module is not None})
    result = {"wall": time.time() - began, "cpu": used.ru_utime + used.ru_stime, "modules": modules}
    print(f"\n{RESULT}{json.dumps(result)}", flush=True)


def main(began: float, watched: str, command: list[str]) -> None:
    """Run the command."""

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(watched):
            report(began)
            os._exit(0)

    if watched:
        sys.addaudithook(audit)
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit:
        pass
    report(began)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3:])
