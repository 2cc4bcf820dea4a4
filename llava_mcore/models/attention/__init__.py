"""Core attention in place of megatron-core's: by torch, over context-parallel ranks, and by FlashAttention 4."""
