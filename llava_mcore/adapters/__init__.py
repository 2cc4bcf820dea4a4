"""Adapters on megatron-core's linear layers: LoRA and its variants as the library PEFT defines them."""

import llava_mcore.parallel  # noqa: F401  (prepares a machine without CUDA, before megatron.core)
