"""What the processes of most test worlds need; importing it starts no threads and looks for no GPU."""

import gc

import matplotlib.backends.backend_agg
import matplotlib.figure
import transformers.models.llava.modeling_llava

import llava_mcore.checkpoint.dist
import llava_mcore.launch.worker
import llava_mcore.models.architectures.llava
import llava_mcore.training.assembly
import llava_mcore.training.loop
import tests.helpers.class_checks
import tests.helpers.shards
import tests.parallel.answer_checks
import tests.parallel.expert_checks

__all__ = ["llava_mcore", "matplotlib", "tests", "transformers"]

# A collection in a process that was forked would copy all of this.
gc.collect()
gc.freeze()
