"""What the processes of a test world need; importing it starts no threads and looks for no GPU."""

import transformers.models.llava.modeling_llava

import llava_mcore.checkpoint.dist
import llava_mcore.models.architectures.llava
import llava_mcore.training.loop

__all__ = ["llava_mcore", "transformers"]
