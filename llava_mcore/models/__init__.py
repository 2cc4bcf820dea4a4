"""The vision-language model on megatron-core parts, with one file per vision tower, projection and language model."""

import llava_mcore.parallel  # noqa: F401  (prepares a machine without CUDA before megatron.core is imported)
