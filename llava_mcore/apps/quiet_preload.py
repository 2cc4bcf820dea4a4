"""Imported first by the server that processes are forked from: libraries warn while they are imported."""

from llava_mcore import log
from llava_mcore.slim import leave_out_unused

log.quiet_libraries()
leave_out_unused("wandb")
