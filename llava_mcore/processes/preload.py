"""Imported first by the server that forks prepare's processes: skips what libraries say, and import without use."""

from llava_mcore import log
from llava_mcore.compat.startup import find_distributions_lazily, skip_unused_imports

log.quiet_libraries()
find_distributions_lazily()
skip_unused_imports("wandb", "tensorboard")
