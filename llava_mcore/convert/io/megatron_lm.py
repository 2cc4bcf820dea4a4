"""Megatron-LM's older checkpoints (`--ckpt-format torch`): one mp_rank_TT[_PPP]/model_optim_rng.pt per model rank.

They are only read, for an export. Files are memory-mapped, and nothing that their pickles name is imported or executed:
besides tensors they contain Megatron-LM's arguments, whose classes do not exist here.
"""

from __future__ import annotations

import collections
import pickle
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llava_mcore.checkpoint.torch_dist_metadata import StoredParameter
from llava_mcore.compat.torch import file_offset, rebuild_tensor
from llava_mcore.errors import CheckpointError, problems
from llava_mcore.files.regular import require_regular
from llava_mcore.files.tensor_bytes import TensorAt
from llava_mcore.files.torch_files import LOAD_ERRORS, why_refused
from llava_mcore.weights.names import FUSED_NORMS
from llava_mcore.weights.slices import Shape, TensorSlice
from llava_mcore.weights.table import Shard

FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_LAYER = re.compile(r"(.*\.layers\.)(\d+)(\..*)")
_ALLOWED = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor(),
    ("torch._utils", "_rebuild_parameter"): lambda data, requires_grad, hooks: data,
}


def is_legacy(folder: Path) -> bool:
    """Return whether an iteration's folder has this format."""
    return any(_FOLDER.fullmatch(path.name) for path in folder.iterdir())


class LegacyTensors:
    """Where the tensor-parallel slices of each parameter are: by Megatron's name, in rank order."""

    def __init__(self, folder: Path, slices: Mapping[str, Sequence[TensorAt]]) -> None:
        self.folder, self._slices = folder, slices

    @classmethod
    def open(cls, folder: Path) -> LegacyTensors:
        """Read the files' descriptions of their tensors.

        Raises:
            CheckpointError: ranks are missing, or a file is damaged or has another format.
        """
        ranks = _ranks(folder)
        slices: dict[str, list[TensorAt]] = {}
        before: collections.Counter[str] = collections.Counter()  # layers of earlier stages, for each block of layers
        for stage in ranks:
            num_layers: collections.Counter[str] = collections.Counter()
            for path in stage:
                for name, at in _read(path).items():
                    layer = _LAYER.fullmatch(name)
                    if layer is not None:
                        block, index = layer[1], int(layer[2])
                        num_layers[block] = max(num_layers[block], index + 1)
                        name = f"{block}{before[block] + index}{layer[3]}"
                    slices.setdefault(name, []).append(at)
            before += num_layers
        return cls(folder, slices)

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __contains__(self, name: str) -> bool:
        return name in self._slices

    def num_rows(self, name: str) -> int:
        """Return the number of rows of a parameter that is split along dim 0."""
        return sum(at.shape[0] for at in self._slices[name])

    def stored_name(self, name: str) -> str:
        """Return the name of a parameter in the file, which depends on the layer implementation that wrote it."""
        for separate, fused in FUSED_NORMS.items():
            if name not in self._slices:
                name = name.replace(separate, fused)
        return name

    def parameter(self, name: str, shape: Shape, shard: Shard) -> StoredParameter:
        """Return where the parts of one parameter are. `shape`: shape of the whole parameter.

        Raises:
            CheckpointError: it is missing, or a slice has another shape.
        """
        if shard.sections or shard.experts:
            layers = "mixtures of experts" if shard.experts else "delta nets"
            raise CheckpointError(f"{self.folder}: {name}: {layers} are not read from this older format")
        slices = self._slices.get(self.stored_name(name), ())
        size = len(slices)
        if not size:
            raise CheckpointError(f"{self.folder}: missing: {name} {shape}")
        expected = tuple(n // size if dim == shard.dim else n for dim, n in enumerate(shape))
        wrong = [at.shape for at in slices if at.shape != (shape if shard.dim is None else expected)]
        if wrong:
            raise CheckpointError(f"{self.folder}: {name}: a slice is {wrong[0]}, expected {expected} of {shape}")
        chunks = [(TensorSlice.full(shape), slices[0])]
        if shard.dim is not None:
            chunks = [part for rank, at in enumerate(slices) for part in _parts(at, shape, shard, rank)]
        return StoredParameter(TensorSlice.full(shape), tuple(chunks), slices[0].dtype)


def _parts(at: TensorAt, shape: Shape, shard: Shard, rank: int) -> Iterator[tuple[TensorSlice, TensorAt]]:
    """Yield the slices of the whole parameter that one rank has: a part of each block."""
    assert shard.dim is not None and (shard.blocks == 1 or shard.dim == 0), "blocks are rows"
    size = at.shape[shard.dim] // shard.blocks
    part = tuple(size if dim == shard.dim else n for dim, n in enumerate(at.shape))
    num_bytes = at.num_bytes // shard.blocks
    for block in range(shard.blocks):
        start = block * shape[shard.dim] // shard.blocks + rank * size
        tensor_slice = TensorSlice(tuple(start if dim == shard.dim else 0 for dim in range(len(shape))), part)
        yield tensor_slice, TensorAt(at.path, at.offset + block * num_bytes, at.dtype, part)


def _ranks(folder: Path) -> list[list[Path]]:
    """Return the files of each pipeline stage, in the order of the tensor-parallel ranks."""
    files: dict[tuple[int, int], Path] = {}
    for path in folder.iterdir():
        match = _FOLDER.fullmatch(path.name)
        if match is not None:
            files[int(match[2] or 0), int(match[1])] = path / FILE
        elif path.name.startswith("mp_rank_"):
            raise CheckpointError(f"{path}: expert parallelism is not supported")
    num_stages, size = (max(x) + 1 for x in zip(*files, strict=True))
    expected = [(stage, rank) for stage in range(num_stages) for rank in range(size)]
    missing = [f"tensor rank {rank}, stage {stage}" for stage, rank in expected if (stage, rank) not in files]
    missing += [str(path) for path in files.values() if not path.is_file()]
    if missing:
        raise CheckpointError(problems(f"{folder} is not complete", missing))
    return [[files[stage, rank] for rank in range(size)] for stage in range(num_stages)]


def _read(path: Path) -> dict[str, TensorAt]:
    """Return where the weights of one rank are."""
    try:
        require_regular(path)
        content = torch.load(path, map_location="meta", weights_only=False, pickle_module=_PICKLE)
    except LOAD_ERRORS as error:
        raise CheckpointError(f"{path}: {why_refused(error)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise CheckpointError(f"{path}: has no 'model' (an interleaved pipeline's model0, model1, … are not supported)")
    return {name: _tensor_at(path, x) for name, x in content["model"].items() if isinstance(x, Tensor)}


def _tensor_at(path: Path, tensor: Tensor) -> TensorAt:
    if not tensor.is_contiguous():
        raise CheckpointError(f"{path}: a tensor of shape {tuple(tensor.shape)} is not contiguous")
    return TensorAt(path, file_offset(tensor), tensor.dtype, tuple(tensor.shape))


class _Unknown:
    """Replaces any object of a class that is not a tensor's; empty and without effects."""

    def __init__(self, *_args: object, **_options: object) -> None: ...

    def __setstate__(self, _state: object) -> None: ...


class _LegacyUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module in ("torch", "torch.storage") and (name.endswith("Storage") or name.endswith("DType")):
            return vars(torch.storage if module == "torch.storage" else torch)[name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        return _Unknown


_PICKLE = types.SimpleNamespace(Unpickler=_LegacyUnpickler, __name__="pickle")
