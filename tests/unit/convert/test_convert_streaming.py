"""Streamed conversions: megatron-core's own checkpoint, the same files for any number of workers, bounded memory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from llava_mcore.checkpoint import layout
from llava_mcore.checkpoint.dist import load_weights, save_state
from llava_mcore.checkpoint.torch_dist_metadata import Chunk
from llava_mcore.convert import jobs as conversion
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.convert.io import export_jobs, streamed_save
from llava_mcore.errors import ConversionError
from llava_mcore.files.hf_folder import HfFolder
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.configs import ModelOptions
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.groups import single_process
from tests.helpers.conversions import convert, peak_growth
from tests.helpers.tiny_hf import make_hf_llava


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streaming") / "hf"
    make_hf_llava(folder, dtype=torch.bfloat16)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def stored(checkpoint: Path) -> tuple[Any, dict[Any, Any]]:
    """What a checkpoint's metadata says, and every tensor it stores, under key and offset."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    tensors = {}
    for index, info in metadata.storage_data.items():
        if index.offset is not None:
            tensors[index.fqn, tuple(index.offset)] = (
                Chunk(checkpoint / info.relative_path, info.offset, info.length).locate().map()
            )
    return metadata.state_dict_metadata, tensors


def test_the_checkpoint_is_the_one_megatron_core_would_write(hf: Path, tmp_path: Path) -> None:
    ours = import_hf(hf, tmp_path / "m")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    with single_process():
        model = VisionLanguageModel(load_hf_config(hf), ModelOptions(initialize=False, on_cpu=True)).bfloat16()
        load_weights([model], ours)
        save_state({"iteration": 0, "model": model.sharded_state_dict()}, theirs)
    assert json.loads((ours / "metadata.json").read_text()) == json.loads((theirs / "metadata.json").read_text())
    (described, tensors), (described_theirs, tensors_theirs) = stored(ours), stored(theirs)
    assert described == described_theirs
    assert tensors.keys() == tensors_theirs.keys()
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip_by_key(tensors, tensors_theirs))


def zip_by_key(a: dict[Any, Any], b: dict[Any, Any]) -> list[tuple[Any, Any]]:
    return [(a[key], b[key]) for key in a]


def test_any_number_of_workers_writes_the_same_files(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_save, "FILE_BYTES", 60_000)
    monkeypatch.setattr(export_jobs, "JOB_BYTES", 60_000)
    written = {}
    for workers in (1, 3):
        checkpoint = import_hf(hf, tmp_path / f"m{workers}", tensor_parallel=2, workers=workers, verify=True)
        export_hf(tmp_path / f"m{workers}", tmp_path / f"out{workers}", workers=workers, verify=True)
        metadata = FileSystemReader(checkpoint).read_metadata()
        described = list(metadata.storage_data.items()), metadata.state_dict_metadata
        files = contents(tmp_path / f"m{workers}")
        del files["iter_0000000/.metadata"]  # has a name of its own for every save
        checksums = json.loads(files.pop("iter_0000000/checksums.json"))["files"]
        del checksums[".metadata"]
        files["checksums"] = repr(checksums).encode()
        written[workers] = files, described, contents(tmp_path / f"out{workers}")
    assert len([x for x in written[1][0] if x.endswith(".distcp")]) > 5
    assert written[1] == written[3]
    assert written[1][2] == contents(hf)


@pytest.mark.parametrize("dtype", [None, "fp16", "fp32"])
def test_the_manifest_holds_the_hash_of_every_tensor_as_imported(hf: Path, tmp_path: Path, dtype: str | None) -> None:
    cast = None if dtype is None else conversion.DTYPES[dtype]
    checkpoint = import_hf(hf, tmp_path / "m", tensor_parallel=2, pipeline_parallel=2, dtype=cast, verify=True)
    manifest = layout.read_manifest(layout.hf_folder(checkpoint))
    assert manifest is not None
    folder = HfFolder.open(hf)
    unused = json.loads((layout.hf_folder(checkpoint) / layout.RECORD).read_text())["unused"]
    expected = {}
    for name in folder.tensors:
        x = folder.get(name)
        x = x if cast is None or name in unused else x.to(cast)
        expected[name] = hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    assert manifest.digests == expected
    assert manifest.config == hashlib.sha256((hf / "config.json").read_bytes()).hexdigest()
    assert (manifest.source, manifest.tp, manifest.pp) == (str(hf), 2, 2)
    assert manifest.dtype == (None if cast is None else str(cast).removeprefix("torch."))
    assert manifest.versions.keys() == {"llava_mcore", "torch", "megatron-core", "transformers", "safetensors"}
    export_hf(tmp_path / "m", tmp_path / "out", verify=True)  # gives back what the manifest says
    assert layout.MANIFEST not in {p.name for p in (tmp_path / "out").iterdir()}


def test_files_of_a_given_size(hf: Path, tmp_path: Path) -> None:
    """An export is divided into files of at most the given size, with an index."""
    import_hf(hf, tmp_path / "m")
    export_hf(tmp_path / "m", tmp_path / "out", max_shard_size="100KB", verify=True)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    before = load_file(hf / "model.safetensors")
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    after: dict[str, torch.Tensor] = {}
    for file in files:
        held = load_file(tmp_path / "out" / file)
        assert sum(x.nbytes for x in held.values()) <= 100_000
        assert all(index["weight_map"][name] == file for name in held)
        after |= held
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in before.values())
    whole = tmp_path / "whole"
    export_hf(tmp_path / "m", whole, max_shard_size="1GB")
    assert (whole / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()
    with pytest.raises(ConversionError, match=r"--max-shard-size '12': expected a number and KB, MB, GB or TB"):
        export_hf(tmp_path / "m", tmp_path / "no", max_shard_size="12")


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    sizes, growths = {}, {}
    options = {"tensor_parallel": 2}
    for layers in (2, 14):
        hf, megatron = tmp_path / f"hf{layers}", tmp_path / f"m{layers}"
        make_hf_llava(hf, text_overrides=wide | {"num_hidden_layers": layers}, strategy="default")
        sizes[layers] = (hf / "model.safetensors").stat().st_size
        growths["import", layers] = peak_growth(convert, "import", hf, megatron, options)
        growths["export", layers] = peak_growth(convert, "export", megatron, tmp_path / f"o{layers}", options)
    grown = sizes[14] - sizes[2]
    assert grown > 150e6
    for step in ("import", "export"):
        assert growths[step, 14] - growths[step, 2] < 0.15 * grown, growths
