"""Adapters that PEFT has created for tiny models, and how Hugging Face trains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict
from transformers import BitsAndBytesConfig

from llava_mcore.adapters.linear_layers import model_layers
from llava_mcore.adapters.peft_tensors import BASE_LAYER, PREFIX
from llava_mcore.adapters.quantized import PART
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import architecture_of
from tests.helpers.batches import FakeLoader
from tests.helpers.fixed_dropout import fix_peft

TOWER, PROJECTOR, TEXT = "model.vision_tower", "model.multi_modal_projector", "model.language_model"


def open_hf(folder: Path) -> Any:
    """Return transformers' model of a folder, fp32."""
    return architecture_of(load_hf_config(folder)).model_class.from_pretrained(folder, dtype=torch.float32)


def open_hf_in_4_bits(folder: Path) -> Any:
    """Return transformers' model of a folder with the language model's layers in NF4, computing in fp32.

    Its products are ours in training mode only: else bitsandbytes multiplies in bf16 on some CPUs.
    """
    hf = load_hf_config(folder)
    kind, members = architecture_of(hf).model_class, model_layers(hf).members
    with torch.device("meta"):
        linears = [name for name, x in kind._from_config(hf).named_modules() if isinstance(x, torch.nn.Linear)]
    in_4_bits = {name for name, member in members.items() if member.part == PART}
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=[name for name in linears if name not in in_4_bits],
    )
    model = kind.from_pretrained(folder, quantization_config=config, dtype=torch.float32, device_map="cpu")
    assert {name for name, x in model.named_modules() if isinstance(x, Linear4bit)} == in_4_bits
    return model.train()


def make_peft_folder(hf: Path, folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """Write an adapter none of whose matrices is zero, and whose modules are not the model's. options: LoraConfig's."""
    torch.manual_seed(seed)
    model = get_peft_model(open_hf(hf), LoraConfig(**options))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
            elif "modules_to_save" in name:
                p.add_(0.05 * torch.randn_like(p))
            elif "magnitude" in name:
                p.mul_(1 + 0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    return folder


def open_peft(hf: Path, folders: Mapping[str, Path]) -> Any:
    """Return transformers' model with adapters that all work; every key must be found, none be left over."""
    model: Any = open_hf(hf)
    unused = model_layers(load_hf_config(hf)).unused
    for name, folder in folders.items():
        if isinstance(model, PeftModel):
            model.load_adapter(folder, name)
        else:
            model = PeftModel.from_pretrained(model, folder, adapter_name=name)
        result = set_peft_model_state_dict(model, load_peft_weights(str(folder)), adapter_name=name)
        own = [key for key in result.missing_keys if f".{name}." in key or key.endswith(f".{name}")]
        end = {"none": "no key", "lora_only": ".base_layer.bias", "all": ".bias"}[model.peft_config[name].bias]
        biases = {key: key.removeprefix(PREFIX).replace(BASE_LAYER, ".") for key in result.missing_keys}
        own += [key for key, x in biases.items() if key.endswith(end) and x not in unused]
        assert (own, result.unexpected_keys) == ([], [])
    model.base_model.set_adapter(list(folders), inference_mode=True)
    return model.eval()


def used_linears(hf: Path, parts: Sequence[str]) -> list[str]:
    """Return the linear layers of some parts of the model that take part in its outputs."""
    model, vision_layers = open_hf(hf), 3  # of 4: the last one is after the feature layer
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n.startswith(tuple(parts))]
    return [n for n in names if not (n.startswith(TOWER) and f"layers.{vision_layers}." in n)]


def train_peft(
    hf: Path, folder: Path, rates: Sequence[float], *, decay: float, text_only: set[int], in_4_bits: bool = False
) -> Any:
    """Train an adapter with torch's AdamW; return losses and gradient norms.

    rates: learning rate of every step. If the adapter has dropout, its masks are those of `fixed_dropout`.
    """
    opened = open_hf_in_4_bits(hf) if in_4_bits else open_hf(hf)
    model = PeftModel.from_pretrained(opened, folder, is_trainable=True).train()
    if model.peft_config["default"].lora_dropout:
        fix_peft(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    loader = FakeLoader(load_hf_config(hf), micro_batch_size=8, dp_rank=0, dp_size=1, text_only=text_only)
    losses, norms = [], []
    for lr in rates:
        batch = next(loader)
        pixels = batch.media["pixel_values"]
        logits = model(input_ids=batch.input_ids, **({"pixel_values": pixels} if len(pixels) else {})).logits
        token_loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        loss = (token_loss * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"loss": losses, "grad_norm": norms}
