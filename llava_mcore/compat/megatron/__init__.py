"""Patches and private names of megatron-core 0.19. Import `llava_mcore.parallel` first, as for megatron.core itself."""
