"""The weights of a Megatron checkpoint as Hugging Face tensors, one in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llava_mcore.checkpoint import layout
from llava_mcore.checkpoint.dist import check_model
from llava_mcore.checkpoint.torch_dist_metadata import Chunk, StoredParameter, StoredTensors
from llava_mcore.convert.io.export_jobs import EntryRead, export_all, hash_files, hf_tensors
from llava_mcore.convert.io.megatron_lm import LegacyTensors, is_legacy
from llava_mcore.convert.io.parameters import check_shard_rules, meta_model, parameter_shapes, stored_slices
from llava_mcore.errors import CheckpointError, ConversionError, problems
from llava_mcore.files.hf_files import SINGLE, has_weights, require_own_files
from llava_mcore.files.hf_folder import HfFolder, TensorInfo, infos_from_record
from llava_mcore.files.tensor_bytes import TensorAt
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.language.families.registry import embedding_rows
from llava_mcore.models.model_table import detect_names, mapping_table, usual_names
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.tied_weights import settle_ties
from llava_mcore.parallel.groups import single_process
from llava_mcore.weights.slices import Scratch, Shape, TensorSlice
from llava_mcore.weights.table import MappingTable

EMBEDDING = "language_model.embedding.word_embeddings.weight"
OUTPUT = "language_model.output_layer.weight"
PARTS = ("language_model.", "vision_model.", "vision_projection.")


@dataclass(frozen=True)
class HfSide:
    """The Hugging Face side of a checkpoint: the model's config, and every tensor's file, dtype and shape.

    `unused` has the data of tensors that training does not use; `files` is the folder with config, tokenizer,
    processor.
    """

    hf: PretrainedConfig
    infos: dict[str, TensorInfo]
    unused: HfFolder
    files: Path

    @classmethod
    def carried(cls, checkpoint: Path) -> HfSide:
        """Read it from a checkpoint of llava_mcore.

        Raises:
            CheckpointError, ConversionError: the files are missing or damaged.
        """
        folder = layout.hf_folder(checkpoint)
        require_own_files(folder)
        infos = infos_from_record(layout.read_record(checkpoint)["tensors"], folder / layout.RECORD)
        unused = HfFolder.of_file(folder / layout.UNUSED)
        return cls(load_hf_config(folder), infos, unused, folder)

    @classmethod
    def of_folder(cls, folder: Path) -> HfSide:
        """Read it from a Hugging Face folder, for a checkpoint without these files.

        Without weights in the folder, names are llava-hf's, and there are no unused tensors.

        Raises:
            ConversionError: the config is missing, or the weights cannot be read.
        """
        hf = load_hf_config(folder)
        if has_weights(folder):
            weights = HfFolder.open(folder)
            settle_ties(hf, weights)
            return cls(hf, weights.tensors, weights, folder)
        return cls(hf, tensors_of_config(hf), HfFolder(folder, {}), folder)

    @classmethod
    def of_checkpoint(cls, checkpoint: Path, otherwise: Path) -> HfSide:
        """Read it from a checkpoint of llava_mcore, or else from a Hugging Face folder."""
        if (layout.hf_folder(checkpoint) / layout.RECORD).is_file():
            return cls.carried(checkpoint)
        return cls.of_folder(otherwise)


def tensors_of_config(hf: PretrainedConfig) -> dict[str, TensorInfo]:
    """Return the tensors of a model's parameters, under llava-hf's names, in one file."""
    rows = embedding_rows(hf)
    table = mapping_table(hf, usual_names(hf), hf_tensors={}, padded_vocab_size=rows)
    with single_process():
        shapes = parameter_shapes(meta_model(hf, num_vocab_rows=rows))
    infos = {}
    for name, entry in table.entries.items():
        for hf_name, x in entry.to_hf(torch.empty(shapes[name], device="meta")).items():
            infos[hf_name] = TensorInfo(SINGLE, "F32", tuple(x.shape))
    return infos


class CheckpointWeights:
    """One iteration's weights, from its metadata; data is read when a tensor is requested.

    Process groups of one must exist. `tp_size`: only checked, every parameter but the tower's must be divisible.

    Raises:
        CheckpointError: not a readable checkpoint of this model.
        ConversionError: lists every tensor that could not be written back.
    """

    def __init__(self, side: HfSide, checkpoint: Path, tp_size: int) -> None:
        self.checkpoint, self.infos, self.unused = checkpoint, side.infos, side.unused
        stored = LegacyTensors.open(checkpoint) if is_legacy(checkpoint) else StoredTensors.open(checkpoint)
        if EMBEDDING not in stored:
            raise CheckpointError(f"{checkpoint}: has no {EMBEDDING}; not a checkpoint of a vision-language model")
        rows = stored.num_rows(EMBEDDING)
        model = meta_model(side.hf, num_vocab_rows=rows)
        self.shapes = parameter_shapes(model)
        names = detect_names(side.hf, side.infos, source=str(checkpoint))
        self.table: MappingTable = mapping_table(side.hf, names, hf_tensors=side.infos, padded_vocab_size=rows)
        check_shard_rules(self.table, model)
        self._check_complete(tp_size)
        if isinstance(stored, LegacyTensors):
            self.parameters = legacy_parameters(stored, self.table, self.shapes)
        else:
            self.parameters = parameters(stored, model, self.shapes)

    def _check_complete(self, tp_size: int) -> None:
        covered = self.table.hf_to_entry().keys() | self.table.unused.keys() | self.table.copies.keys()
        lost = sorted(self.infos.keys() - covered)
        if lost:
            raise ConversionError(problems(f"{self.checkpoint}: tensors that cannot be written back", lost))
        for name, entry in self.table.entries.items():
            if not name.startswith("vision_model.") and not entry.shard.experts:  # every rank may have all of these
                entry.shard.split(torch.empty(self.shapes[name], device="meta"), tp_size)

    def trained_names(self) -> set[str]:
        """Return the Hugging Face tensors that come from Megatron parameters."""
        return set(self.table.hf_to_entry())

    def dtypes(self, dtype: torch.dtype | None = None) -> dict[str, torch.dtype]:
        """Return the dtype of every tensor of `infos`; those of Megatron parameters are cast to `dtype`."""
        stored = {
            name: dtype or self.parameters[entry.megatron].dtype for name, entry in self.table.hf_to_entry().items()
        }
        copies = {copy: stored[original] for copy, original in self.table.copies.items()}
        unused = {name: self.unused.where(name).dtype for name in self.table.unused}
        return {name: x for name, x in (stored | copies | unused).items() if name in self.infos}

    def reads(self, dtype: torch.dtype | None = None, targets: Mapping[str, TensorAt] | None = None) -> list[EntryRead]:
        """Return how to read each entry, in the table's order.

        Args:
            dtype: cast to this; None keeps the checkpoint's.
            targets: where to write each Hugging Face tensor.
        """
        reads = []
        for name, entry in self.table.entries.items():
            stored = self.parameters[name]
            goals = tuple(self._goals(x, targets) for x in entry.hf_names) if targets else ()
            read = EntryRead(
                entry, self.shapes[name], stored.tensor_slice, stored.chunks, stored.dtype, dtype or stored.dtype, goals
            )
            reads.append(read)
        return reads

    def _goals(self, name: str, targets: Mapping[str, TensorAt]) -> tuple[TensorAt, ...]:
        """Return all targets of a tensor: its own and those of its tied copies."""
        return tuple(targets[x] for x in (name, *self.copies_of(name)) if x in targets)

    def copies_of(self, name: str) -> Sequence[str]:
        """Return the tied copies of a tensor."""
        return [copy for copy, original in self.table.copies.items() if original == name]

    def digests(self, title: str, *, workers: int) -> dict[str, str]:
        """Read every tensor of `infos` and return its SHA-256. `title`: title of the progress bar."""
        digests = export_all(title, self.reads(), hashed=True, workers=workers)
        digests |= {copy: digests[original] for copy, original in self.table.copies.items()}
        return digests | hash_files(title, {name: self.unused.where(name) for name in self.table.unused}, workers=1)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and data of every tensor of `infos`, each valid until the next one."""
        scratch = Scratch()
        for read in self.reads():
            for name, x in hf_tensors(read, scratch):
                yield from ((same, x) for same in (name, *self.copies_of(name)) if same in self.infos)
        for name in self.table.unused:
            yield name, self.unused.get(name)


def parameters(
    stored: StoredTensors, model: VisionLanguageModel, shapes: Mapping[str, Shape]
) -> dict[str, StoredParameter]:
    """Return where a torch_dist checkpoint stores each parameter of a model.

    Raises:
        CheckpointError: lists everything that is missing, has another shape, or is unknown to the model.
    """
    state = model.sharded_state_dict()
    check_model(state, stored.folder)
    slices = stored_slices(state, shapes)
    _refuse_extra(set(stored) - {at.key for parts in slices.values() for at in parts}, stored.folder)
    return {
        name: _joined([(at.first, stored.parameter(at.key, at.tensor_slice)) for at in x]) for name, x in slices.items()
    }


def _joined(parts: Sequence[tuple[int, StoredParameter]]) -> StoredParameter:
    """Return a parameter whose rows are divided over parts, in the coordinates of the parameter."""
    if len(parts) == 1:
        return parts[0][1]
    chunks: list[tuple[TensorSlice, Chunk | TensorAt]] = []
    for first, part in parts:
        start = part.tensor_slice.start
        origin = (start[0] - first, *start[1:])
        chunks += [(tensor_slice.seen_from(origin), at) for tensor_slice, at in part.chunks]
    last = parts[-1][1].tensor_slice.size
    shape = (parts[-1][0] + last[0], *last[1:])
    return StoredParameter(TensorSlice.full(shape), tuple(chunks), parts[0][1].dtype)


def legacy_parameters(
    stored: LegacyTensors, table: MappingTable, shapes: Mapping[str, Shape]
) -> dict[str, StoredParameter]:
    """Return where an mp_rank_XX checkpoint stores each parameter of a model.

    Raises:
        CheckpointError: something is missing, has another shape, or is unknown to the model.
    """
    extra = set(stored) - {stored.stored_name(name) for name in table.entries}
    extra -= {OUTPUT}  # tied: the last stage has a copy of the embedding
    _refuse_extra(extra, stored.folder)
    return {name: stored.parameter(name, shapes[name], entry.shard) for name, entry in table.entries.items()}


def _refuse_extra(keys: set[str], folder: Path) -> None:
    lost = sorted(key for key in keys if key.startswith(PARTS))
    if lost:
        raise CheckpointError(problems(f"{folder} has weights that do not exist in the model of the config", lost))
