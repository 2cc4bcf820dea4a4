"""The mapping table of a whole LLaVA: vision + projection + language, each under its prefix."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import LlavaConfig

from llava_mcore.mapping.table import MappingTable
from llava_mcore.models.architectures.llava_names import HfNames, TextNames
from llava_mcore.models.connectors import mlp
from llava_mcore.models.language.dense import end_entries
from llava_mcore.models.parts import language_part, vision_part
from llava_mcore.models.vision.features import feature_choice


def mapping_table(
    hf: LlavaConfig, names: HfNames, *, hf_tensors: Iterable[str], padded_vocab_size: int
) -> MappingTable:
    """Build the table of one HF folder.

    Args:
        hf_tensors: names in the folder; tensors that only some files carry (unused parts, buffers, a copy of
            tied weights) are in the table when they are here.
    """
    present = set(hf_tensors)
    text, vision = hf.text_config, hf.vision_config
    num_layers = feature_choice(hf).num_layers
    tower = vision_part(hf)
    text_names = TextNames("language_model.", names.text, names.lm_head)
    tied = hf.tie_word_embeddings
    entries = [
        *tower.weight_entries(vision, megatron="vision_model.", prefix=names.vision, num_layers=num_layers),
        *mlp.weight_entries(hf, megatron="vision_projection.", prefix=names.projection),
        *end_entries(text, text_names, padded_vocab_size=padded_vocab_size, tied=tied),
        *language_part(hf).weight_entries(text, text_names),
    ]
    unused = tower.unused(vision, prefix=names.vision, num_layers=num_layers)
    copies = {names.lm_head: f"{names.text}embed_tokens.weight"} if tied else {}
    return MappingTable.of(
        entries,
        unused={name: reason for name, reason in unused.items() if name in present},
        copies={name: original for name, original in copies.items() if name in present},
    )
