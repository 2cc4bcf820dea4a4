"""Checkpoints that others wrote: megatron-core's own, and Megatron-LM's older mp_rank_XX folders."""

from __future__ import annotations

import argparse
import enum
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlavaForConditionalGeneration

import llava_mcore.parallel  # noqa: F401  isort: skip
from megatron.core import dist_checkpointing

from llava_mcore.checkpoint.dist import load_weights
from llava_mcore.checkpoint.layout import TRACKER, iteration_folder
from llava_mcore.cli import check
from llava_mcore.cli import export_hf as export_command
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.configs import ModelOptions
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.groups import single_process
from llava_mcore.weights.names import FUSED_NORMS
from llava_mcore.weights.table import Shard
from tests.helpers.tiny_hf import make_hf_llava


class AttnBackend(enum.Enum):
    """Megatron-LM's arguments hold such things; whoever reads a checkpoint has other versions of them, or none."""

    auto = 1


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interop") / "hf"
    make_hf_llava(folder, text="qwen2", dtype=torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interop") / "tied"
    make_hf_llava(folder, tie=True)
    return folder


def load_model(hf: Path, imported: Path) -> VisionLanguageModel:
    """Return the model of one process with the folder's weights. Process groups of one must exist."""
    config = load_hf_config(hf)
    model = VisionLanguageModel(config, ModelOptions(initialize=False, on_cpu=True)).to(config.dtype)
    load_weights([model], iteration_folder(imported, 0))
    return model


def test_what_megatron_core_saved_is_exported_with_a_folder_that_describes_it(hf: Path, tmp_path: Path) -> None:
    import_hf(hf, tmp_path / "ours")
    theirs = iteration_folder(tmp_path / "theirs", 7)
    theirs.mkdir(parents=True)
    with single_process():
        model = load_model(hf, tmp_path / "ours")
        with torch.no_grad():
            model.vision_projection.encoder.linear_fc1.weight[0, 0] = 3.0
        dist_checkpointing.save({"model": model.sharded_state_dict(), "iteration": 7}, str(theirs))
    (theirs.parent / TRACKER).write_text("7")
    with pytest.raises(Exception, match="export it with --hf-config"):
        export_hf(theirs.parent, tmp_path / "out")
    flags = ["--megatron-dir", str(theirs.parent), "--hf-dir", str(tmp_path / "out"), "--hf-config", str(hf)]
    assert export_command.main([*flags, "--verify"]) == 0
    before, after = (LlavaForConditionalGeneration.from_pretrained(x, dtype="auto") for x in (hf, tmp_path / "out"))
    name = "model.multi_modal_projector.linear_1.weight"
    changed = [key for key, x in before.state_dict().items() if not torch.equal(x, after.state_dict()[key])]
    assert changed == [name] and after.state_dict()[name][0, 0] == 3.0


def legacy_folder(hf: Path, root: Path, *, tp: int, pp: int, fused: bool) -> Path:
    """Write what Megatron-LM's `--ckpt-format torch` does: each rank's state_dict beside its arguments."""
    import_hf(hf, root / "import")
    folder = iteration_folder(root / "legacy", 12)
    with single_process():
        model = load_model(hf, root / "import")
    rules = {}
    for name, p in model.named_parameters():
        marks = vars(p)
        cut = marks.get("tensor_model_parallel", False)
        rules[name] = Shard(marks["partition_dim"], marks["partition_stride"]) if cut else Shard(None)
    per_stage = 4 // pp
    for rank in range(tp):
        for stage in range(pp):
            state: dict[str, Any] = {}
            for name, x in model.named_parameters():
                local = stage_name(name, stage, pp, per_stage)
                if local is not None:
                    state[fuse(local) if fused else local] = rules[name].split(x.detach(), tp)[rank].clone()
            if stage == pp - 1 and pp > 1 and model.share_embeddings_and_output_weights:
                state["language_model.output_layer.weight"] = torch.zeros(4, 64)
            state["language_model.decoder.layers.0.mlp.linear_fc1._extra_state"] = None
            args = argparse.Namespace(
                tensor_model_parallel_size=tp, attention_backend=AttnBackend.auto, dtype=torch.half
            )
            target = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            target.mkdir(parents=True)
            content = {"model": state, "args": args, "checkpoint_version": 3.0, "iteration": 12}
            torch.save(content, target / "model_optim_rng.pt")
    (folder.parent / TRACKER).write_text("12")
    return folder.parent


def stage_name(name: str, stage: int, pp: int, per_stage: int) -> str | None:
    """Return a parameter's name on a pipeline stage: layers are counted from 0 on each."""
    _, mark, after = name.partition("language_model.decoder.layers.")
    if mark:
        number, _, rest = after.partition(".")
        local = int(number) - stage * per_stage
        return f"{mark}{local}.{rest}" if 0 <= local < per_stage else None
    last = ("language_model.decoder.final_layernorm", "language_model.output_layer")
    return name if stage == (pp - 1 if name.startswith(last) else 0) else None


def fuse(name: str) -> str:
    for ours, theirs in FUSED_NORMS.items():
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize(("tp", "pp", "fused"), [(1, 1, False), (2, 2, True), (4, 1, True)])
def test_an_older_checkpoint_is_exported_bit_for_bit(hf: Path, tmp_path: Path, tp: int, pp: int, fused: bool) -> None:
    megatron = legacy_folder(hf, tmp_path, tp=tp, pp=pp, fused=fused)
    assert export_hf(megatron, tmp_path / "out", hf_config=hf, workers=2, verify=True) == 12
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()


def test_a_config_alone_describes_a_checkpoint(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors are the source's under llava-hf's names; what the checkpoint lacks is what LLaVA does not use."""
    megatron = legacy_folder(hf, tmp_path, tp=2, pp=1, fused=True)
    (tmp_path / "config").mkdir()
    shutil.copyfile(hf / "config.json", tmp_path / "config" / "config.json")
    flags = ["--megatron-dir", str(megatron), "--hf-dir", str(tmp_path / "out")]
    assert export_command.main([*flags, "--hf-config", str(tmp_path / "config"), "--verify"]) == 0
    before, after = (load_file(x / "model.safetensors") for x in (hf, tmp_path / "out"))
    before = {key.replace("vision_tower.", "vision_tower.vision_model."): x for key, x in before.items()}
    assert all(torch.equal(before[key], x) and before[key].dtype == x.dtype for key, x in after.items())
    lost = before.keys() - after.keys()
    assert lost and all("encoder.layers.3." in key or "post_layernorm" in key for key in lost)
    _, info = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["unexpected_keys"] and len(info["missing_keys"]) == len(lost)
    # The folder itself, and the checkpoint that others wrote, are compared as an import would be.
    capsys.readouterr()
    assert check.main(["--hf-dir", str(hf), "--megatron-dir", str(megatron)]) == 0
    assert f"equals {hf} bit for bit" in capsys.readouterr().out
    path = iteration_folder(megatron, 12) / "mp_rank_01" / "model_optim_rng.pt"
    whole = torch.load(path, weights_only=False)
    whole["model"]["language_model.decoder.layers.1.self_attention.linear_proj.weight"] += 1
    torch.save(whole, path)
    assert check.main(["--hf-dir", str(hf), "--megatron-dir", str(megatron)]) == 2
    assert "layers.1.self_attn.o_proj.weight: largest difference" in capsys.readouterr().err


def test_tied_embeddings_on_two_stages(tied: Path, tmp_path: Path) -> None:
    """The matrix that both stages hold is exported once, bit for bit."""
    megatron = legacy_folder(tied, tmp_path, tp=2, pp=2, fused=False)
    export_hf(megatron, tmp_path / "out", hf_config=tied)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tied / "model.safetensors").read_bytes()


def test_older_checkpoints_that_do_not_fit_are_refused(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron = legacy_folder(hf, tmp_path, tp=2, pp=1, fused=False)
    path = iteration_folder(megatron, 12) / "mp_rank_01" / "model_optim_rng.pt"
    whole = torch.load(path, weights_only=False)
    flags = ["--megatron-dir", str(megatron), "--hf-dir", str(tmp_path / "out"), "--hf-config", str(hf)]

    def said(model: dict[str, Tensor] | None) -> str:
        torch.save({**whole, "model": model} if model is not None else {"model0": {}}, path)
        assert export_command.main(flags) == 2
        return capsys.readouterr().err

    name = "language_model.decoder.layers.1.mlp.linear_fc1.weight"
    assert f"{name}: a slice is (3, 3)" in said(whole["model"] | {name: torch.ones(3, 3)})
    extra = "vision_model.ln_post.weight"
    refused = f"do not exist in the model of the config (1 problem):\n{extra}"
    assert refused in said(whole["model"] | {extra: torch.ones(3)}).replace("  - ", "")
    assert "has no 'model'" in said(None)
    path.unlink()
    assert export_command.main(flags) == 2
    assert "is not complete" in capsys.readouterr().err
    assert check.main(["--megatron-dir", str(megatron)]) == 2


def test_nothing_that_a_checkpoint_names_is_run(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    megatron = legacy_folder(hf, tmp_path, tp=1, pp=1, fused=False)
    path = iteration_folder(megatron, 12) / "mp_rank_00" / "model_optim_rng.pt"
    whole = torch.load(path, weights_only=False)
    torch.save({**whole, "args": Touch(tmp_path / "touched")}, path)
    export_hf(megatron, tmp_path / "out", hf_config=hf)
    assert not (tmp_path / "touched").exists()


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_an_export_generates_what_the_source_does(hf: Path, tmp_path: Path) -> None:
    import_hf(hf, tmp_path / "m", tensor_parallel=2)
    export_hf(tmp_path / "m", tmp_path / "out", max_shard_size="100KB")
    made = []
    for folder in (hf, tmp_path / "out"):
        model, info = LlavaForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        generator = torch.Generator().manual_seed(0)
        n, size = model.config.image_seq_length, model.config.vision_config.image_size
        ids = torch.randint(5, 300, (1, 8), generator=generator)
        ids = torch.cat([torch.full((1, n), model.config.image_token_id), ids], dim=1)
        pixels = torch.randn(1, 3, size, size, generator=generator)
        made.append(model.generate(input_ids=ids, pixel_values=pixels, max_new_tokens=12, do_sample=False))
    assert torch.equal(made[0], made[1]) and made[0].shape[1] > 8
