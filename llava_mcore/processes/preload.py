"""Imported first by the server that forks the loader processes, to silence warnings of libraries at import."""

from llava_mcore import log

log.quiet_libraries()
