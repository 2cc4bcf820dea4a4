"""The building blocks of streaming: slices, mapped tensors, planned safetensors files."""

from __future__ import annotations

import errno
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from llava_mcore.checkpoint.torch_dist_metadata import Chunk
from llava_mcore.convert.io import streamed_save
from llava_mcore.errors import CheckpointError
from llava_mcore.files import tensor_bytes as raw
from llava_mcore.files.hf_folder import DTYPES, plan_file, read_offsets, write_tensors
from llava_mcore.files.tensor_bytes import Writer
from llava_mcore.weights.layouts import Concat, FuseQKV, PadColumns, PadParts, PadRows, Reshape
from llava_mcore.weights.slices import Scratch, TensorSlice, byte_ranges_of, read_slice, slices_of_range
from llava_mcore.weights.table import COLUMN, Entry

BLOCK = raw._BLOCK
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
NAMES = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda x: x != "__metadata__"
)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(0, 100, shape).to(dtype)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(list(DTYPES.values())), SHAPES), max_size=6))
def test_a_planned_file_is_the_file_that_safetensors_writes(
    tmp_path_factory: pytest.TempPathFactory, kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    folder = tmp_path_factory.mktemp("files")
    tensors = {name: random_tensor(*kind) for name, kind in kinds.items()}
    save_file(tensors, folder / "theirs", metadata={"format": "pt"})
    plan = plan_file(folder / "ours", kinds)
    write_tensors(plan, reversed(tensors.items()))
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()
    assert read_offsets(folder / "theirs") == {name: at.offset for name, at in plan.tensors.items()}


def test_mapped_tensors_are_the_files_and_writing_to_them_does_not_change_it(tmp_path: Path) -> None:
    tensors = {f"x{i}": torch.randn(3, i + 1).to(dtype) for i, dtype in enumerate([torch.bfloat16, torch.float32])}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    before = path.read_bytes()
    offsets = read_offsets(path)
    for name, x in tensors.items():
        mapped = raw.map_tensor(path, offsets[name], x.dtype, tuple(x.shape))
        assert torch.equal(mapped, x)
        assert raw.sha256(mapped) == raw.sha256(x.clone())
        mapped.zero_()
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="mmap length"):
        raw.map_tensor(path, 0, torch.float32, (1 << 20,))


def test_runs_are_hashed_window_by_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(123, 5)
    (tmp_path / "x").write_bytes(b"abc" + x.numpy().tobytes())
    at = raw.TensorAt(tmp_path / "x", 3, x.dtype, (123, 5))
    for window in (100, 615, 2460, 1 << 20):
        monkeypatch.setattr(raw, "_WINDOW", window)
        assert raw.sha256((at,)) == raw.sha256(x)
        assert raw.sha256((at, at)) == raw.sha256(torch.cat([x, x]))
    assert raw.sha256((replace(at, shape=(0, 5)),)) == raw.sha256(torch.empty(0))


@pytest.mark.parametrize("disk", ["any", "only the cache", "larger blocks", "less at a time"])
@settings(max_examples=40, deadline=None)
@given(
    position=st.integers(0, 3 * BLOCK), skip=st.integers(0, 2000), rows=st.lists(st.integers(0, 90), max_size=4),
    buffer=st.sampled_from([BLOCK, 3 * BLOCK]),
)  # fmt: skip
def test_what_is_written_lies_where_it_belongs_and_nothing_else_changes(
    tmp_path_factory: pytest.TempPathFactory, disk: str, position: int, skip: int, rows: list[int], buffer: int
) -> None:
    folder = tmp_path_factory.mktemp("writer")
    x = torch.randint(0, 256, (400, 129), dtype=torch.uint8)
    (folder / "x").write_bytes(bytes(skip) + x.numpy().tobytes())
    runs = tuple(raw.TensorAt(folder / "x", skip + 129 * first, x.dtype, (first, 129)) for first in rows)
    before = np.full(60 * BLOCK, 7, np.uint8)
    before.tofile(folder / "y")
    with pytest.MonkeyPatch.context() as patch, Writer() as out:
        patch.setattr(raw, "_BUFFER", buffer)
        patch.setattr(raw, "_DIRECT_FROM", 3000)
        patch.setattr(raw, "_WINDOW", 5000)
        patch.setattr(raw, "_ROWS", 1000)
        play(disk, patch)
        out.write(folder / "y", position, raw.as_bytes(runs))
        out.write(folder / "y", position + 20 * BLOCK, raw.as_bytes(x.mT))
        out.write(folder / "y", position + 40 * BLOCK, raw.as_bytes(x[:5].view(torch.int8)))
        assert out.paths == {folder / "y"}
    new = torch.cat([x[first : 2 * first] for first in (*rows, 0)])
    for start, tensor in ((0, new), (20 * BLOCK, x.mT), (40 * BLOCK, x[:5])):
        before[position + start :][: tensor.numel()] = tensor.flatten().numpy()
    assert (np.fromfile(folder / "y", np.uint8) == before).all()


def play(disk: str, patch: pytest.MonkeyPatch) -> None:
    """Let the system's calls answer as on other file systems."""
    really_open, really_write, direct = os.open, os.pwrite, set()

    def open_file(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT and disk == "only the cache":
            raise OSError(errno.EINVAL, "as NFS servers do")
        file = really_open(path, flags & ~os.O_DIRECT)
        if flags & os.O_DIRECT:
            direct.add(file)
        return file

    def write(file: int, part: memoryview, position: int) -> int:
        if file not in direct:
            return really_write(file, part, position)
        address = np.frombuffer(part, np.uint8).ctypes.data
        assert position % BLOCK == len(part) % BLOCK == address % BLOCK == 0
        if disk == "larger blocks":
            raise OSError(errno.EINVAL, "as on disks with blocks of 64 KiB")
        return really_write(file, part[:1000] if disk == "less at a time" else part, position)

    patch.setattr(os, "open", open_file)
    patch.setattr(os, "pwrite", write)


def test_large_tensors_pass_by_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "y").touch()
    calls = []
    really = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda f, part, at: calls.append((len(part), at)) or really(f, part, at))
    x = torch.randn(3 << 18)
    with Writer() as out:
        out.write(tmp_path / "y", 100, raw.as_bytes(x))
    assert calls == [(3996, 100), ((2 << 20) - 4096, 4096), (1 << 20, 2 << 20), (100, 3 << 20)]
    assert (tmp_path / "y").read_bytes() == bytes(100) + x.numpy().tobytes()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_runs_of_a_box_are_its_numbers_in_order(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    x, slices = torch.arange(TensorSlice.full(shape).numel).view(shape), grid(data, shape)
    folder = tmp_path_factory.mktemp("runs")
    parts = []
    for i, tensor_slice in enumerate(data.draw(st.permutations(slices))):
        (folder / str(i)).write_bytes(b"ab" + tensor_slice.cut(x).numpy().tobytes())
        parts.append((tensor_slice, raw.TensorAt(folder / str(i), 2, x.dtype, tensor_slice.size)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    wanted = TensorSlice(start, tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True)))
    runs = byte_ranges_of(wanted, parts, lambda at: at)
    if runs is not None:
        assert torch.equal(torch.cat([run.map().flatten() for run in runs]), wanted.cut(x).flatten())
        assert byte_ranges_of(TensorSlice.full(shape), parts[1:], lambda at: at) is None
    rows_only = all(tensor_slice.size[1:] == shape[1:] for tensor_slice in slices) and wanted.size[1:] == shape[1:]
    assert runs is not None or not rows_only


def grid(data: st.DataObject, shape: tuple[int, ...]) -> list[TensorSlice]:
    """A tensor cut at some places in every dim."""
    edges = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    cells = itertools.product(*(itertools.pairwise(x) for x in edges))
    return [TensorSlice(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]


def test_pieces_are_what_torch_saves(tmp_path: Path) -> None:
    x = torch.randn(40, 30)
    (tmp_path / "x").write_bytes(x.numpy().tobytes())
    run = raw.TensorAt(tmp_path / "x", 10 * 30 * 4, x.dtype, (5, 30))
    for data, tensor in (((run,), x[10:15]), (x[:, 2:5], x[:, 2:5]), (x > 0, x > 0), (x[:0], x[:0])):
        ours = b"".join(x.numpy().tobytes() for x in streamed_save.as_saved(data, tuple(tensor.shape), tensor.dtype))
        with (tmp_path / "theirs").open("wb") as file, streamed_save.without_checksums():
            torch.save(tensor.clone(memory_format=torch.contiguous_format), file)
        assert ours == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("shift", range(5))
def test_chunks_are_found_inside_files_wherever_they_begin(tmp_path: Path, shift: int) -> None:
    tensors = [torch.randn(5, 7), torch.randn(64, 2).bfloat16(), torch.randn(4, 6)[:, 1:4]]
    with (tmp_path / "f").open("wb") as file:
        file.write(b"x" * shift)
        places = []
        for x in tensors[:2]:
            start = file.tell()
            torch.save(x, file)
            places.append((start, file.tell() - start))
        start = file.tell()
        torch.save(tensors[2], file)
        strided = Chunk(tmp_path / "f", start, file.tell() - start)
    for x, (start, length) in zip(tensors, places, strict=False):
        assert torch.equal(Chunk(tmp_path / "f", start, length).locate().map(), x)
    with pytest.raises(CheckpointError, match="not contiguous"):
        strided.locate()
    with pytest.raises(CheckpointError, match="at byte"):
        Chunk(tmp_path / "f", places[0][0] + 9, places[0][1]).locate()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_box_is_put_together_from_any_grid(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    x = torch.arange(TensorSlice.full(shape).numel).view(shape)
    slices = grid(data, shape)
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    wanted = TensorSlice(start, tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True)))
    scratch = Scratch()
    parts = [(tensor_slice, tensor_slice.cut(x).clone()) for tensor_slice in slices]
    found, held = read_slice(wanted, parts, lambda part: part, x.dtype, scratch)
    assert torch.equal(found, wanted.cut(x)) and held == wanted.numel
    gap = data.draw(st.sampled_from(slices))
    missing = [(tensor_slice, part) for tensor_slice, part in parts if tensor_slice != gap]
    found, held = read_slice(wanted, missing, lambda part: part, x.dtype, scratch)
    common = wanted.overlap(gap)
    assert held == wanted.numel - (common.numel if common else 0)
    expected = x.clone()
    gap.cut(expected).zero_()
    assert torch.equal(found, wanted.cut(expected))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_range_of_a_flattened_tensor_is_a_few_slices(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    x = torch.arange(TensorSlice.full(shape).numel).view(shape)
    start = data.draw(st.integers(0, x.numel()))
    stop = data.draw(st.integers(0, x.numel()))
    slices = slices_of_range(shape, start, stop)
    assert [value for tensor_slice in slices for value in tensor_slice.cut(x).flatten().tolist()] == list(
        range(start, stop)
    )
    assert all(tensor_slice.cut(x).is_contiguous() for tensor_slice in slices) and len(slices) <= 2 * len(shape) - 1


def test_only_layouts_that_stack_rows_have_slices() -> None:
    def slices(layout: object, names: int, shape: tuple[int, ...]) -> object:
        return Entry("m", tuple("abc"[:names]), COLUMN, layout).hf_slices(shape)  # type: ignore[arg-type]

    assert slices(Concat(2), 2, (8, 3)) == (TensorSlice((0, 0), (4, 3)), TensorSlice((4, 0), (4, 3)))
    assert slices(PadParts(2, 3, 4), 2, (8, 3)) == (TensorSlice((0, 0), (3, 3)), TensorSlice((4, 0), (3, 3)))
    assert slices(PadColumns(2, 3), 1, (8, 3)) is None
    assert slices(PadRows(5, 8), 1, (8, 3)) == (TensorSlice((0, 0), (5, 3)),)
    assert Entry("m", "a", COLUMN).hf_slices((4,)) == (TensorSlice((0,), (4,)),)
    assert slices(FuseQKV(4, 2), 3, (16, 3)) is None
    assert slices(Reshape((4,), (1, 1, 4)), 1, (1, 1, 4)) == (TensorSlice((0, 0, 0), (1, 1, 4)),)


def test_planned_headers_are_read_by_safetensors(tmp_path: Path) -> None:
    plan = plan_file(tmp_path / "x.safetensors", {"a": (torch.int64, (2,)), "b": (torch.bfloat16, (3, 1))})
    assert len(plan.header) % 8 == 0 and json.loads(plan.header[8:])["b"]["shape"] == [3, 1]
    plan.create()
    assert {name: x.shape for name, x in load_file(plan.path).items()} == {"a": (2,), "b": (3, 1)}
