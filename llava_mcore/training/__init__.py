"""From a resolved run configuration to trained checkpoints."""

import llava_mcore.parallel  # noqa: F401  (prepares a machine without CUDA before megatron.core is imported)
