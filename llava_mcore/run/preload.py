"""Imported first by the server that processes are forked from: libraries warn while they are imported."""

from llava_mcore import log

log.quiet_libraries()
