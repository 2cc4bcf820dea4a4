"""`check --logits`, and mutations of the mapping that only it, or the completeness check, can find."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from torch import Tensor

from llava_mcore.checkpoint import checksums, layout
from llava_mcore.cli import build, check, export_hf
from llava_mcore.cli import import_hf as import_command
from llava_mcore.config.flags import ALL_FLAGS
from llava_mcore.convert.check import check_folder, check_manifest
from llava_mcore.convert.compare_logits import compare_logits
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.convert.logits_worker import LogitsLayout
from llava_mcore.errors import CheckpointError, ConversionError
from llava_mcore.models.model_table import mapping_table
from llava_mcore.weights.table import ROW, Entry, MappingTable
from tests.helpers.photos import CHINA
from tests.helpers.tiny_classes import make_hf_internvl
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_qwen import make_hf_qwen

LAYER = "language_model.model.layers.1."
QKV = "language_model.decoder.layers.1.self_attention.linear_qkv.weight"
PROJECTOR = "vision_projection.encoder.linear_fc2.weight"


@pytest.fixture(scope="module")
def picture() -> Path:
    return CHINA


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many keys as queries: swapping them keeps all shapes."""
    folder = tmp_path_factory.mktemp("check") / "hf"
    make_hf_llava(folder, text="qwen3", text_overrides={"num_key_value_heads": 8}, dtype=torch.bfloat16)
    return folder


def mutate(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Entry]], None]) -> None:
    """Let every conversion use a wrong table."""

    def wrong(*args: object, **options: object) -> MappingTable:
        table = mapping_table(*args, **options)  # type: ignore[arg-type]
        entries = dict(table.entries)
        change(entries)
        return replace(table, entries=entries)

    monkeypatch.setattr("llava_mcore.convert.import_hf.mapping_table", wrong)
    monkeypatch.setattr("llava_mcore.convert.megatron_weights.mapping_table", wrong)


@dataclass(frozen=True)
class Transposed:
    """A layout that turns a square matrix."""

    def to_megatron(self, *hf: Tensor) -> Tensor:
        return hf[0].T.contiguous()

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        return (megatron.T.contiguous(),)


def swap_query_and_key(entries: dict[str, Entry]) -> None:
    query, key, value = entries[QKV].hf_names
    entries[QKV] = replace(entries[QKV], hf=(key, query, value))


def drop_entry(entries: dict[str, Entry]) -> None:
    del entries[QKV]


def cut_rows(entries: dict[str, Entry]) -> None:
    entries[QKV] = replace(entries[QKV], shard=ROW)


def transpose_projector(entries: dict[str, Entry]) -> None:
    entries[PROJECTOR] = replace(entries[PROJECTOR], layout=Transposed())


def test_logits_agree_at_a_layout_and_bf16_weights_are_compared_in_fp32(
    hf: Path, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--hf-dir", str(hf), "--megatron-dir", str(tmp_path / "m"), "--tp", "2", "--pp", "2"]
    assert import_command.main([*flags, "--workers", "1", "--verify", "--logits", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "every tensor read back and equal" in said and "at tp 2 x pp 2: max abs difference" in said
    # embedding, patches, positions, CLIP's norm, projector, final norm; 3 layers of the tower, 4 of Qwen3
    num_modules = 7 + 3 * 9 + 4 * 12
    assert f"outputs of {num_modules} modules compared)" in said

    def renamed(outputs: dict[str, Tensor], prefix: str, tower: str) -> dict[str, Tensor]:
        return {name.replace("v_proj", "value") if prefix in name else name: x for name, x in outputs.items()}

    monkeypatch.setattr("llava_mcore.convert.compare_logits.tower_names_in_files", renamed)
    assert check.main(["--hf-dir", str(hf), "--megatron-dir", str(tmp_path / "m"), "--logits", str(picture)]) == 0
    line = capsys.readouterr().out
    first = "vision_tower.encoder.layers.0.self_attn.v_proj, "
    assert f"{num_modules - 3} modules compared; 3 not, as transformers {transformers.__version__} has" in line
    assert f"no modules of these names: {first}" in line and ", …" not in line
    largest_difference, largest = re.findall(r"(?:difference|logit) ([0-9.e-]+)", line)
    assert float(largest_difference) <= 1e-5 < float(largest)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (swap_query_and_key, f"first difference: {LAYER}self_attn.q_proj.weight: max abs difference"),
        (
            transpose_projector,
            "first difference: multi_modal_projector.linear_2.bias, multi_modal_projector.linear_2.w",
        ),
    ],
)
def test_tensors_that_are_wrong_in_both_directions_are_named(
    hf: Path,
    picture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Entry]], None],
    expected: str,
) -> None:
    mutate(monkeypatch, change)
    import_hf(hf, tmp_path / "m", verify=True)  # hashes agree: both directions are wrong in the same way
    flags = ["--hf-dir", str(hf), "--megatron-dir", str(tmp_path / "m")]
    assert check.main(flags) == 0
    assert check.main([*flags, "--logits", str(picture)]) == 2
    said = capsys.readouterr().err
    assert "computes other values than" in said and expected in said and "logits: max abs difference" in said


def test_a_dropped_entry_and_a_wrong_cut_are_found_from_headers(
    hf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        mutate(patch, drop_entry)
        assert check.main(["--hf-dir", str(hf)]) == 2
        said = capsys.readouterr().err
        assert f"Megatron parameter without an entry: {QKV}" in said
        assert f"tensor without an entry (unknown to this model): {LAYER}self_attn.k_proj.weight" in said
    mutate(monkeypatch, cut_rows)
    assert check.main(["--hf-dir", str(hf)]) == 2
    assert (
        f"{QKV}: the table says Shard(dim=1, blocks=1, sections=(), experts=False), the model Shard(dim=0"
        in capsys.readouterr().err
    )


def test_tables_that_are_wrong_in_one_direction_are_found_by_hashes(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for i, (change, name) in enumerate(
        [
            (swap_query_and_key, LAYER + "self_attn.k_proj.weight"),
            (transpose_projector, "multi_modal_projector.linear_2.weight"),
        ]
    ):
        megatron = tmp_path / f"m{i}"
        with monkeypatch.context() as patch:
            mutate(patch, change)
            import_hf(hf, megatron)
        assert check.main(["--hf-dir", str(hf), "--megatron-dir", str(megatron)]) == 2
        assert f"{name}: largest difference" in capsys.readouterr().err
        assert check.main(["--megatron-dir", str(megatron)]) == 2
        assert f"{name}: SHA-256" in capsys.readouterr().err


def test_an_import_alone_is_checked_against_its_manifest(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = import_hf(hf, tmp_path / "m", tensor_parallel=2, dtype=torch.float16)
    assert check.main(["--megatron-dir", str(tmp_path / "m")]) == 0
    assert f"tensors match the SHA-256 of their import from {hf}" in capsys.readouterr().out
    assert check.main(["--hf-dir", str(hf), "--megatron-dir", str(tmp_path / "m")]) == 0
    assert "bit for bit after a cast to torch.float16" in capsys.readouterr().out
    (layout.hf_folder(checkpoint) / layout.MANIFEST).unlink()
    checksums.write_checksums(checkpoint, {})
    assert "files match their checksums" in check_manifest(tmp_path / "m", tp=1, workers=1)
    (checkpoint / checksums.FILE).unlink()
    with pytest.raises(CheckpointError, match="nothing to compare with"):
        check_manifest(tmp_path / "m", tp=1, workers=1)


def test_what_cannot_be_compared_says_so(
    hf: Path, picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConversionError, match="needs an image and a processor"):
        compare_logits(hf, tmp_path, tmp_path / "none.jpg", layout=LogitsLayout())
    available = replace_available(2_000_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    with pytest.raises(ConversionError, match=r"needs about 5.00 GB of memory .* 2.00 GB are available"):
        compare_logits(hf, tmp_path, picture, layout=LogitsLayout(2, 2))
    assert check.main(["--hf-dir", str(hf), "--logits", str(picture)]) == 2
    assert "--logits compares two models" in capsys.readouterr().err


def replace_available(num_bytes: int) -> object:
    """Return what psutil would say of a machine with little memory."""
    return psutil.virtual_memory()._replace(available=num_bytes)


def test_the_page_names_only_flags_that_there_are() -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs" / "convert.md").read_text(encoding="utf-8")
    parsers = [import_command.parser(), export_hf.parser(), check.parser(), build.parser()]
    known = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    training = {name for flag in ALL_FLAGS for name in flag.names}
    benchmarks = [root / "benchmarks" / name for name in ("convert.py", "convert_kills.py")]
    benchmark = {flag for file in benchmarks for flag in re.findall(r'add_argument\("(--[a-z-]+)"', file.read_text())}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page))
    assert named - known - training - benchmark == set()
    assert {"--logits", "--hf-config", "--max-shard-size", "--verify"} <= named


def test_a_summary_says_what_a_layout_needs(tmp_path: Path) -> None:
    """Training refuses equal stages of which the first has too few layers for the tower's inner features."""
    vision = {"depth": 4, "deepstack_visual_indexes": [0, 1, 2]}
    make_hf_qwen(tmp_path / "hf", "qwen3_vl", text_overrides={"num_hidden_layers": 4}, vision_overrides=vision)
    assert check_folder(tmp_path / "hf", tp=1, pp=2).endswith("pp 2 with 3 decoder layers on the first stage or more")
    assert check_folder(tmp_path / "hf", tp=1, pp=1).endswith("fits tp 1 x pp 1")


def test_towers_of_internvl_without_positions_are_refused(tmp_path: Path) -> None:
    make_hf_internvl(tmp_path / "hf", vision_overrides={"use_absolute_position_embeddings": False})
    with pytest.raises(ConversionError, match="use_absolute_position_embeddings = False is not supported; it must be"):
        check_folder(tmp_path / "hf", tp=1, pp=1)
