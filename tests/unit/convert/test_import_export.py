"""Import and export in one process: bitwise, complete, and clear about what does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from llava_mcore.checkpoint.checksums import write_checksums
from llava_mcore.checkpoint.dist import check_model, stored_tensors
from llava_mcore.checkpoint.layout import hf_folder, iteration_folder, latest_checkpoint, write_tracker
from llava_mcore.cli import check
from llava_mcore.cli import export_hf as export_command
from llava_mcore.cli import import_hf as import_command
from llava_mcore.convert import jobs as conversion
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.errors import CheckpointError, ConfigError, ConversionError
from tests.helpers.tiny_hf import make_hf_llava, make_tokenizer

Weights = dict[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[Weights], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    make_hf_llava(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize("tp_in", [1, 2, 4])
@pytest.mark.parametrize("tp_out", [1, 4])
def test_round_trip_is_bitwise_at_any_cut(hf: Path, tmp_path: Path, tp_in: int, tp_out: int) -> None:
    import_hf(hf, tmp_path / "m", tensor_parallel=tp_in, pipeline_parallel=2)
    export_hf(tmp_path / "m", tmp_path / "out", tensor_parallel=tp_out)
    before, after = load_file(hf / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_layers_that_lack_a_part_of_the_checkpoint_are_refused(hf: Path, tmp_path: Path) -> None:
    """Such a model computes something else, and every tensor that it asks for is there."""
    import_hf(hf, tmp_path / "m")
    folder = latest_checkpoint(tmp_path / "m")[0]
    stored = stored_tensors(folder)
    norm = "vision_model.decoder.layers.mlp.linear_fc1.layer_norm_weight"
    check_model({"model0": stored}, folder)
    assert stored.pop(norm)
    with pytest.raises(CheckpointError, match=rf"not in the model: {norm}"):
        check_model({"model0": stored}, folder)


def test_mixed_dtypes_sharded_files_and_older_names_survive(tmp_path: Path) -> None:
    model = make_hf_llava(tmp_path / "hf", dtype=torch.bfloat16, vision="siglip")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    old = {  # names as on the hub, with a buffer that old versions saved, and float32 norms
        k.replace("vision_tower.", "vision_tower.vision_model."): x.float() if "norm" in k else x
        for k, x in weights.items()
    }
    old["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(16)[None]
    (tmp_path / "hf" / "model.safetensors").unlink()
    names = sorted(old)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({k: old[k].contiguous() for k in members}, tmp_path / "hf" / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {k: file for file, members in files.items() for k in members}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    import_hf(tmp_path / "hf", tmp_path / "m", tensor_parallel=2)
    export_hf(tmp_path / "m", tmp_path / "out", tensor_parallel=2)
    for file, members in files.items():
        after = load_file(tmp_path / "out" / file)
        assert sorted(after) == sorted(members)
        assert all(after[k].dtype == old[k].dtype and torch.equal(after[k], old[k]) for k in members)
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert written["weight_map"] == index["weight_map"]
    reloaded = type(model).from_pretrained(tmp_path / "out")
    assert reloaded is not None


def test_cast_on_request_and_say_so_in_the_config(hf: Path, tmp_path: Path) -> None:
    import_hf(hf, tmp_path / "m", dtype=torch.bfloat16)
    export_hf(tmp_path / "m", tmp_path / "out")
    before, after = load_file(hf / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    used = "language_model.model.layers.0.mlp.down_proj.weight"
    assert torch.equal(after[used], before[used].bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_an_explicit_dtype_is_that_of_every_trained_tensor(hf: Path, tmp_path: Path, name: str) -> None:
    """Imported as one dtype, exported as another; what training does not use keeps its own."""
    back = {"bf16": "fp32", "fp16": "bf16", "fp32": "fp16"}[name]
    flags = ["--hf-dir", str(hf), "--megatron-dir", str(tmp_path / "m"), "--dtype", name, "--verify"]
    assert import_command.main(flags) == 0
    flags = ["--megatron-dir", str(tmp_path / "m"), "--hf-dir", str(tmp_path / "out"), "--dtype", back, "--verify"]
    assert export_command.main(flags) == 0
    first, second = (conversion.DTYPES[x] for x in (name, back))
    before, after = load_file(hf / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    kept = [key for key in before if "post_layernorm" in key or "vision_tower.encoder.layers.3." in key]
    assert before.keys() == after.keys() and kept
    for key, x in before.items():
        expected = x if key in kept else x.to(first).to(second)
        assert after[key].dtype == expected.dtype and torch.equal(after[key], expected), key
    written = json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
    assert written == str(second).removeprefix("torch.")


def test_every_misfit_is_listed_before_anything_is_written(hf: Path, tmp_path: Path) -> None:
    def change(w: Weights) -> None:
        del w["language_model.model.layers.1.self_attn.k_proj.weight"]
        w["language_model.model.layers.0.mlp.extra_proj.weight"] = torch.zeros(2)
        w["multi_modal_projector.linear_1.bias"] = torch.zeros(7)

    rewrite(hf, change)
    with pytest.raises(ConversionError) as caught:
        import_hf(hf, tmp_path / "m")
    text = str(caught.value)
    assert "layers.1.self_attn.k_proj.weight" in text
    assert "extra_proj" in text
    assert "linear_1.bias (7,)" in text
    assert "(3 problems)" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_tied_copy_that_differs_is_a_matrix_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers 5, and the export's config.json says so to other programs."""
    make_hf_llava(tmp_path / "hf", tie=True)
    head = "language_model.lm_head.weight"
    embedding = "language_model.model.embed_tokens.weight"
    rewrite(tmp_path / "hf", lambda w: w.update({head: w[embedding].clone()}))
    import_hf(tmp_path / "hf", tmp_path / "m")
    export_hf(tmp_path / "m", tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(after[head], after[embedding])
    rewrite(tmp_path / "hf", lambda w: w.update({head: w[embedding] + 1}))
    import_hf(tmp_path / "hf", tmp_path / "m2")
    assert f"config.json ties {head} to {embedding}" in caplog.text
    export_hf(tmp_path / "m2", tmp_path / "out2")
    after = load_file(tmp_path / "out2" / "model.safetensors")
    assert torch.equal(after[head], after[embedding] + 1)
    config = json.loads((tmp_path / "out2" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]) == (False, False)


@pytest.mark.parametrize(
    ("tp", "pp", "part"),
    [(3, 1, "--tp 3 does not divide the attention heads"), (1, 3, "--pp 3 does not divide the number of layers")],
)
def test_layouts_that_do_not_fit(hf: Path, tmp_path: Path, tp: int, pp: int, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        import_hf(hf, tmp_path / "m", tensor_parallel=tp, pipeline_parallel=pp)


def test_command_line_errors_are_one_message_and_exit_code_2(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(main: Callable[[list[str]], int], *argv: str) -> str:
        assert main(list(argv)) == 2
        return capsys.readouterr().err

    here = str(tmp_path)
    nothing = failing(import_command.main, "--hf-dir", f"{here}/no", "--megatron-dir", f"{here}/m")
    assert "no config.json" in nothing and "Traceback" not in nothing and "hf download" not in nothing
    hub = failing(import_command.main, "--hf-dir", "llava-hf/llava-1.5-7b-hf", "--megatron-dir", f"{here}/m")
    assert "hf download llava-hf/llava-1.5-7b-hf --local-dir llava-1.5-7b-hf" in hub
    full = failing(import_command.main, "--hf-dir", str(hf), "--megatron-dir", here)
    assert "never overwrites" in full
    untracked = failing(export_command.main, "--megatron-dir", here, "--hf-dir", f"{here}/out")
    assert "latest_checkpointed_iteration.txt" in untracked
    config = json.loads((hf / "config.json").read_text())
    config["text_config"]["model_type"] = "gemma"
    (hf / "config.json").write_text(json.dumps(config))
    family = failing(import_command.main, "--hf-dir", str(hf), "--megatron-dir", f"{here}/m")
    assert "'gemma' is not supported; known: gemma2, gemma3_text, llama, mistral, phi3, qwen2, qwen3" in family


def test_a_damaged_file_and_a_damaged_checkpoint(hf: Path, tmp_path: Path) -> None:
    """Both are refused with a message that names them."""
    import_hf(hf, tmp_path / "m")
    checkpoint, _ = latest_checkpoint(tmp_path / "m")
    (checkpoint / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        export_hf(tmp_path / "m", tmp_path / "out")
    write_tracker(tmp_path / "m", 7)
    with pytest.raises(CheckpointError, match=str(iteration_folder(tmp_path / "m", 7))):
        export_hf(tmp_path / "m", tmp_path / "out")
    weights = hf / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConversionError, match=r"model\.safetensors"):
        import_hf(hf, tmp_path / "m2")


def test_check_names_what_differs(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_hf(hf, tmp_path / "m", tensor_parallel=2)
    argv = ["--hf-dir", str(hf), "--megatron-dir", str(tmp_path / "m"), "--tp", "4", "--pp", "2"]
    assert check.main(argv) == 0
    assert "bit for bit" in capsys.readouterr().out
    name = "language_model.model.layers.2.self_attn.v_proj.weight"

    def change(w: Weights) -> None:
        w[name][3, 3] += 1e-6

    rewrite(hf, change)
    assert check.main(argv) == 2
    text = capsys.readouterr().err
    assert name in text and "(1 problem)" in text


def test_another_tokenizer_replaces_all_of_the_first(hf: Path, tmp_path: Path) -> None:
    """Its template is in tokenizer_config.json, and the checkpoint's, in a file of its own, would win."""
    import_hf(hf, tmp_path / "megatron")
    carried = hf_folder(iteration_folder(tmp_path / "megatron", 0))
    (carried / "chat_template.jinja").write_text("old")
    (carried / "added_tokens.json").write_text("{}")
    write_checksums(carried.parent, {})
    other = tmp_path / "other"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(other)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    export_hf(tmp_path / "megatron", tmp_path / "kept", tokenizer_dir=other)
    assert (tmp_path / "kept" / "chat_template.jinja").read_text() == "old", "the new folder has none"
    (other / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "new"}))
    export_hf(tmp_path / "megatron", tmp_path / "replaced", tokenizer_dir=other)
    assert AutoTokenizer.from_pretrained(tmp_path / "replaced").chat_template == "new"
    assert not (tmp_path / "replaced" / "added_tokens.json").exists()
    (other / "tokenizer.json").unlink()
    export_hf(tmp_path / "megatron", tmp_path / "settings", tokenizer_dir=other)
    assert (tmp_path / "settings" / "tokenizer.json").is_file(), "the new folder has no vocabulary"
    (other / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConversionError, match=r"--tokenizer-dir .* no tokenizer_config"):
        export_hf(tmp_path / "megatron", tmp_path / "none", tokenizer_dir=other)


def test_damaged_json_and_folders_that_cannot_be_made(hf: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(hf, broken)
    (broken / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ConversionError, match=r"index\.json: not an index of weight files, copy it again"):
        import_hf(broken, tmp_path / "megatron")
    (broken / "model.safetensors.index.json").unlink()
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"vision_feature_select_strategy": "patch"}))
    with pytest.raises(ConversionError, match=r"config\.json: transformers cannot read it .*patch"):
        import_hf(broken, tmp_path / "megatron")
    (tmp_path / "file").touch()
    with pytest.raises(ConversionError, match=r"the import cannot be written to .*(Not a directory|File exists)"):
        import_hf(hf, tmp_path / "file" / "megatron")
