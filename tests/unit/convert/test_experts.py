"""Import and export of experts: every form of the files, cut for any ranks, bit for bit."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5MoeForConditionalGeneration, Qwen3VLMoeForConditionalGeneration

from llava_mcore.checkpoint.layout import latest_checkpoint
from llava_mcore.checkpoint.torch_dist_metadata import StoredTensors
from llava_mcore.cli import import_hf as import_command
from llava_mcore.cli import inspect_folder
from llava_mcore.convert.check import check_checkpoint
from llava_mcore.convert.compare_logits import compare_logits
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.convert.logits_worker import LogitsLayout
from llava_mcore.errors import ConfigError, ConversionError
from llava_mcore.weights.slices import TensorSlice
from tests.helpers.photos import CHINA
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_qwen import make_hf_qwen

Weights = dict[str, Tensor]
FC1 = "language_model.decoder.layers.2.mlp.experts.linear_fc1.weight"


def transposed(weights: Weights) -> Weights:
    """As published files of Qwen3-VL have them."""
    return {name: x.transpose(1, 2).contiguous() if ".experts." in name else x for name, x in weights.items()}


def one_by_one(weights: Weights) -> Weights:
    """A matrix of each expert, as files of Qwen3-MoE have them."""
    found: Weights = {}
    for name, x in weights.items():
        head, _, last = name.partition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
        if parts is None:
            found[name] = x
            continue
        for i, matrix in enumerate(x):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                found[f"{head}.experts.{i}.{part}.weight"] = rows.clone()
    return found


FORMS: dict[str, Callable[[Weights], Weights]] = {
    "as saved by transformers": dict,
    "transposed": transposed,
    "one by one": one_by_one,
}
CUTS = {"as saved by transformers": (1, 1), "transposed": (2, 4), "one by one": (2, 8)}
"""tp and ep of the import."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in every form, and its checkpoint in `megatron` of each folder's parent."""
    root = tmp_path_factory.mktemp("experts")
    make_hf_qwen(root / "hf", "qwen3_vl_moe")
    weights = load_file(root / "hf" / "model.safetensors")
    found = {}
    for form, change in FORMS.items():
        folder = root / form / "hf"
        shutil.copytree(root / "hf", folder)
        save_file(change(weights), folder / "model.safetensors", metadata={"format": "pt"})
        tp, ep = CUTS[form]
        import_hf(folder, root / form / "megatron", tensor_parallel=tp, expert_parallel=ep, verify=True)
        found[form] = folder
    return found


@pytest.mark.parametrize("form", FORMS)
def test_round_trip_is_bitwise_and_keeps_the_form(folders: dict[str, Path], form: str, tmp_path: Path) -> None:
    export_hf(folders[form].parent / "megatron", tmp_path / "out", tensor_parallel=4, verify=True)
    before, after = (load_file(x / "model.safetensors") for x in (folders[form], tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], x) for name, x in after.items())


def test_a_checkpoint_does_not_depend_on_the_form(folders: dict[str, Path], tmp_path: Path) -> None:
    """Names and form of the files can come from another folder of the model."""
    source = folders["one by one"]
    for form, folder in folders.items():
        stored = StoredTensors.open(latest_checkpoint(folder.parent / "megatron")[0])
        assert stored.shape(FC1) == (8, 96, 64)
        chunks = stored.parameter(FC1, TensorSlice.full(stored.shape(FC1))).chunks
        assert len({place.start[0] for place, _ in chunks}) == CUTS[form][1], "one for each rank"
        export_hf(folder.parent / "megatron", tmp_path / form, hf_config=source)
        found = load_file(tmp_path / form / "model.safetensors")
        expected = load_file(source / "model.safetensors")
        assert found.keys() == expected.keys() and all(torch.equal(found[x], expected[x]) for x in expected)


def test_logits_of_published_files_are_those_of_transformers(folders: dict[str, Path]) -> None:
    folder = folders["transposed"]
    checkpoint = latest_checkpoint(folder.parent / "megatron")[0]
    assert "bit for bit" in check_checkpoint(folder, folder.parent / "megatron", tp=1)
    got = compare_logits(folder, checkpoint, CHINA, layout=LogitsLayout(tp=2, cp=2, ep=2))
    assert got.difference <= 1e-5 and not got.not_compared
    with pytest.raises(ConversionError, match=r"does not find the experts of Qwen3VLMoe.*it expects model\.language"):
        compare_logits(folders["one by one"], checkpoint, CHINA, layout=LogitsLayout())
    with pytest.raises(ConversionError, match="--ep 3 does not divide the number of experts, which is 8"):
        compare_logits(folder, checkpoint, CHINA, layout=LogitsLayout(ep=3))


def test_a_language_model_of_another_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LLaVA with Qwen3-MoE, in files as transformers saves them; what an import says of a wrong size."""
    make_hf_llava(tmp_path / "hf", text="qwen3_moe")
    flags = ["--hf-dir", str(tmp_path / "hf"), "--megatron-dir", str(tmp_path / "m"), "--workers", "1"]
    assert import_command.main([*flags, "--ep", "3"]) == 2
    assert "--ep 3 does not divide the number of experts, which is 8" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="this model can use 1, 2, 4, 8"):
        import_hf(tmp_path / "hf", tmp_path / "m", expert_parallel=5)
    assert import_command.main([*flags, "--ep", "2", "--verify"]) == 0
    export_hf(tmp_path / "m", tmp_path / "out", verify=True)
    assert inspect_folder.main([str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "experts: 8 of width 24 in 3 of 4 layers, 3 of them for each token" in said
    assert "layers.{0,2-3}.mlp.experts.{0-7}.down_proj.weight" in said


def test_experts_beside_one_that_all_tokens_share(tmp_path: Path) -> None:
    """Qwen3.5, fused as it is published, and one by one as transformers saves it; with layers that it does not know."""
    make_hf_qwen(tmp_path / "hf", "qwen3_5_moe")
    saved = load_file(tmp_path / "hf" / "model.safetensors") | {"mtp.fc.weight": torch.randn(4, 8)}
    first = "model.language_model.layers.0.mlp.experts."
    assert f"{first}0.gate_proj.weight" in saved
    model = Qwen3_5MoeForConditionalGeneration.from_pretrained(tmp_path / "hf")
    published = {name: x.clone() for name, x in model.state_dict().items()} | {"mtp.fc.weight": saved["mtp.fc.weight"]}
    assert published[f"{first}gate_up_proj"].shape == (8, 96, 64)
    digests = []
    for number, weights in enumerate((saved, published)):
        save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
        import_hf(tmp_path / "hf", tmp_path / f"m{number}", tensor_parallel=2, expert_parallel=4, verify=True)
        export_hf(tmp_path / f"m{number}", tmp_path / f"out{number}", verify=True)
        found = load_file(tmp_path / f"out{number}" / "model.safetensors")
        assert found.keys() == weights.keys() and all(torch.equal(found[x], weights[x]) for x in weights)
        stored = sorted((tmp_path / f"m{number}" / "iter_0000000").glob("*.distcp"))
        digests.append([hashlib.sha256(x.read_bytes()).hexdigest() for x in stored])
    assert digests[0] == digests[1], "the same checkpoint"


def test_a_square_tensor_of_experts_is_told_by_the_other_one(tmp_path: Path) -> None:
    """With hidden size 64 = 2 x 32, gate_up_proj has the same shape whichever way it is stored."""
    make_hf_qwen(tmp_path / "hf", "qwen3_vl_moe", text_overrides={"moe_intermediate_size": 32})
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    digests = []
    for number, form in enumerate((weights, one_by_one(model.state_dict()))):
        save_file(form, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
        import_hf(tmp_path / "hf", tmp_path / f"m{number}", verify=True)
        export_hf(tmp_path / f"m{number}", tmp_path / f"out{number}", verify=True)
        found = load_file(tmp_path / f"out{number}" / "model.safetensors")
        assert found.keys() == form.keys() and all(torch.equal(found[x], form[x]) for x in form)
        stored = sorted((tmp_path / f"m{number}" / "iter_0000000").glob("*.distcp"))
        digests.append([hashlib.sha256(x.read_bytes()).hexdigest() for x in stored])
    assert digests[0] == digests[1], "the same checkpoint"
