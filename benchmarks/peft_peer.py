"""Hugging Face with PEFT, which `adapters.py` compares llava_mcore's adapters with: one process, one GPU.

transformers' class in bf16 with Liger's kernels and its fused linear cross-entropy, attention within the samples of a
pack, and PEFT's LoRA on the decoder's linear layers, in bf16 too, as PEFT's own casts to fp32 cost time. With --nf4 the
decoder is loaded in 4 bits by bitsandbytes. The same shards, loader and packs as ours.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

from benchmarks.hf_peer import add_flags, run_steps
from benchmarks.peer_attention import NAME, register
from benchmarks.peer_classes import CLASSES
from benchmarks.peer_model import Peer, Stack

NOT_QUANTIZED = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]


def main() -> None:
    """Train for some steps and write what each took."""
    args = parse()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")  # torchrun's, of one process
    stack = Stack(recompute=args.recompute)
    peer = build(args, stack, device)
    steps = run_steps(args, peer, stack, device)
    dist.destroy_process_group()
    liger = "Liger's layers and loss" if stack.uses_liger(device) else "transformers' layers, loss in chunks"
    described = f"PEFT; {'NF4 by bitsandbytes' if args.nf4 else 'bf16'}; {liger}"
    described += "; decoder layers recomputed" if args.recompute else ""
    args.out.write_text("".join(json.dumps({"stack": described} | x) + "\n" for x in steps), encoding="utf-8")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--lora-r", type=int, required=True)
    parser.add_argument("--nf4", action="store_true")
    parser.add_argument("--dora", action="store_true")
    return parser.parse_args()


def build(args: argparse.Namespace, stack: Stack, device: torch.device) -> Peer:
    """Return the model with adapters on every linear layer of the decoder; all else is frozen."""
    register()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=NOT_QUANTIZED,
    )
    model: Any = AutoModelForImageTextToText.from_pretrained(
        args.hf,
        dtype=dtype,
        attn_implementation="sdpa",
        device_map={"": device},
        quantization_config=quantization if args.nf4 else None,
    )
    model.requires_grad_(False)
    model.model.language_model.config._attn_implementation = NAME
    liger = stack.uses_liger(device)
    if liger:
        CLASSES[model.config.model_type].use_liger(model)
    if args.recompute:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    lora = LoraConfig(
        r=args.lora_r, lora_alpha=2 * args.lora_r, use_dora=args.dora, target_modules=r".*language_model.*\.\w+_proj"
    )
    inject_adapter_in_model(lora, model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return Peer(model, liger=liger).train()


if __name__ == "__main__":
    main()
