"""The weights of a Megatron checkpoint as the Hugging Face tensors they came from, file by file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlavaConfig

from llava_mcore.checkpoint import hf_files, layout
from llava_mcore.checkpoint.megatron import check_model, load_state, stored_tensors
from llava_mcore.checkpoint.weights import hf_tensors, joined, requests
from llava_mcore.conversion.mapping import Entry, MappingTable
from llava_mcore.errors import CheckpointError, ConversionError, problems
from llava_mcore.models.meta import meta_model
from llava_mcore.models.names import detect_names
from llava_mcore.models.table import mapping_table

EMBEDDING = "language_model.embedding.word_embeddings.weight"


class CheckpointWeights:
    """Reads a checkpoint at tp 1, pp 1 or in the pieces of `tp_size` ranks. Process groups of one must exist."""

    def __init__(self, hf: LlavaConfig, checkpoint: Path, infos: dict[str, hf_files.TensorInfo], tp_size: int) -> None:
        self.checkpoint, self.infos, self.tp_size = checkpoint, infos, tp_size
        self.stored = stored_tensors(checkpoint)
        if EMBEDDING not in self.stored:
            raise CheckpointError(f"{checkpoint}: holds no {EMBEDDING}; not a checkpoint of a LLaVA")
        rows = self.stored[EMBEDDING].global_shape[0]
        model = meta_model(hf, num_vocab_rows=rows)
        self.state: dict[str, Any] = model.sharded_state_dict()
        check_model(self.state, checkpoint)
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        names = detect_names(infos, source=str(checkpoint))
        self.table: MappingTable = mapping_table(hf, names, hf_tensors=infos, padded_vocab_size=rows)
        self._check_complete()
        self.pieces = self._load()

    def _check_complete(self) -> None:
        covered = self.table.hf_to_entry().keys() | self.table.unused.keys() | self.table.copies.keys()
        lost = sorted(self.infos.keys() - covered)
        if lost:
            raise ConversionError(problems(f"{self.checkpoint}: tensors that cannot be written back", lost))

    def _load(self) -> dict[str, list[Tensor]]:
        """Load every parameter in the pieces that `tp_size` ranks hold."""
        wanted: dict[str, Any] = {}
        for name, entry in self.table.entries.items():
            sharded = self.state[name]
            dtype = self.stored[sharded.key].dtype
            pieces = requests(entry, sharded, self.shapes[name], dtype, self.tp_size)
            wanted[name] = {str(i): piece for i, piece in enumerate(pieces)}
        loaded = load_state(wanted, self.checkpoint)
        return {name: [loaded[name][key] for key in pieces] for name, pieces in wanted.items()}

    def trained_names(self) -> set[str]:
        """Return the Hugging Face tensors that come from Megatron parameters."""
        return set(self.table.hf_to_entry())

    def files(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield each weight file's name and tensors, in the order of the original folder.

        Args:
            dtype: cast what comes from Megatron parameters; None keeps the checkpoint's.
        """
        by_file: dict[str, list[str]] = {}
        for name, info in self.infos.items():
            by_file.setdefault(info.file, []).append(name)
        by_hf = self.table.hf_to_entry()
        originals = {copy: by_hf[original] for copy, original in self.table.copies.items()}
        pending: dict[str, Tensor] = {}  # parts of an entry whose other parts went into an earlier file
        for file, names in by_file.items():
            for name in names:
                if name not in pending:
                    entry = by_hf.get(name) or originals.get(name)
                    pending |= self._unused(name) if entry is None else self._read(entry, dtype)
            yield file, {name: pending.pop(name) for name in names}

    def _read(self, entry: Entry, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return the Hugging Face tensors of one parameter, joined from its loaded pieces."""
        full = joined(entry, self.pieces.pop(entry.megatron), self.tp_size)
        tensors = hf_tensors(self.table, entry, full if dtype is None else full.to(dtype))
        # Copies: safetensors wants every tensor to own its memory.
        return {name: x.clone() for name, x in tensors.items() if name in self.infos}

    def _unused(self, name: str) -> dict[str, Tensor]:
        with safe_open(layout.hf_folder(self.checkpoint) / layout.UNUSED, framework="pt") as handle:
            return {name: handle.get_tensor(name)}
