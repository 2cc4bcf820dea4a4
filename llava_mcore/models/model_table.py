"""The mapping table of a whole model: vision + projection + language, each under its prefix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from transformers import PretrainedConfig

from llava_mcore.models.architectures.registry import architecture_of, ties_embeddings, tower_config
from llava_mcore.models.language.families.dense import end_entries
from llava_mcore.models.language.families.registry import embedding_rows, language_family
from llava_mcore.models.vision.families.registry import vision_family
from llava_mcore.weights.names import HasShape, HfNames, TextNames
from llava_mcore.weights.table import REPLICATED, Entry, MappingTable

CARRIED = "transformers' model has no such module; written back by an export as it came"
"""The reason why a tensor of `KnownNames.carried` is not used."""


def mapping_table(
    hf: PretrainedConfig, names: HfNames, *, hf_tensors: Mapping[str, HasShape], padded_vocab_size: int
) -> MappingTable:
    """Build the table of one HF folder.

    Args:
        hf_tensors: the tensors of the folder; those that only some files have (unused parts, buffers, a copy of
            tied weights) are in the table if the folder has them. Empty for the class's common files.
    """
    # The parts, as config.json describes them.
    present = set(hf_tensors)
    text, vision, architecture = hf.text_config, tower_config(hf), architecture_of(hf)
    num_layers = architecture.features(hf).num_layers
    tower, connector = vision_family(vision), architecture.connector(hf)
    tied = ties_embeddings(hf)
    # Files may have a tied matrix under either name, or under both.
    only_head = tied and names.embedding not in present and names.lm_head in present
    text_names = TextNames(
        "language_model.",
        names.text,
        names.lm_head if only_head else names.embedding,
        names.lm_head,
        hf_tensors,
    )
    entries = [
        *tower.weight_entries(vision, megatron="vision_model.", prefix=names.vision, num_layers=num_layers),
        *connector.weight_entries(hf, megatron="vision_projection.", prefix=names.projection),
        *([Entry("vision_projection.image_newline", names.newline, REPLICATED)] if names.newline else []),
        *end_entries(text, text_names, padded_vocab_size=padded_vocab_size, tied=tied, rows=embedding_rows(hf)),
        *language_family(text).weight_entries(text, text_names),
    ]
    # Tensors that only some files have.
    unused = tower.unused(vision, prefix=names.vision, num_layers=num_layers)
    unused |= {name: CARRIED for name in sorted(present) if name.startswith(architecture.names.carried)}
    copies = {names.lm_head: names.embedding} if tied and not only_head else {}
    return MappingTable.of(
        entries,
        unused={name: reason for name, reason in unused.items() if name in present},
        copies={name: original for name, original in copies.items() if name in present},
    )


def usual_names(hf: PretrainedConfig) -> HfNames:
    """Return the names of the common files of the config's class."""
    return architecture_of(hf).names.usual(wrapped=vision_family(tower_config(hf)).wrapped)


def detect_names(hf: PretrainedConfig, hf_tensors: Iterable[str], *, source: str) -> HfNames:
    """Find the names that a folder's tensors have. Raises ConversionError if a part is missing."""
    return architecture_of(hf).names.detect(hf_tensors, source=source)
