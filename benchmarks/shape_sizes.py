"""Sizes of published towers and decoders, as fields of their configs in transformers."""

from __future__ import annotations

CLIP_L = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
QWEN_VIT = {"hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "num_heads": 16}
WHISPER_LARGE = {"d_model": 1280, "encoder_ffn_dim": 5120, "encoder_layers": 32, "encoder_attention_heads": 20}
LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_13B = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}
LLM_JP_1_8B = {
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "vocab_size": 99584,
}
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 16, "num_attention_heads": 16}
QWEN_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN3_5_VIT = {"hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16}
QWEN3_5_9B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248320,
}
QWEN3_VL_VIT = {**QWEN3_5_VIT, "deepstack_visual_indexes": [8, 16, 24]}
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
}
QWEN1_7B = {**LLAMA_7B, "vocab_size": 156032}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY_QWEN = {**TINY, "num_key_value_heads": 2}
TINY_QWEN_VIT = {"hidden_size": 64, "intermediate_size": 96, "depth": 2, "num_heads": 4, "fullatt_block_indexes": [1]}
TINY_QWEN3_5_VIT = {"hidden_size": 64, "intermediate_size": 96, "depth": 2, "num_heads": 4}
TINY_QWEN3_5 = {
    **{**TINY_QWEN, "num_hidden_layers": 4, "head_dim": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
TINY_QWEN3_VL_VIT = {**TINY_QWEN3_5_VIT, "deepstack_visual_indexes": [0]}
TINY_QWEN3_MOE = {**TINY_QWEN, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
TINY_WHISPER = {"d_model": 64, "encoder_ffn_dim": 128, "encoder_layers": 2, "encoder_attention_heads": 4}
