"""Imported first by the server that forks processes: it ends with the command, even while it imports the rest."""

import signal

from llava_mcore.processes.parent import die_with_parent

die_with_parent(signal.SIGKILL)
