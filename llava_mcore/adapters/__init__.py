"""Adapters on megatron-core's linear layers: LoRA and its variants as the library PEFT defines them."""
