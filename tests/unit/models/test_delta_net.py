"""Qwen3.5's files, and what a layer with a gated delta net cannot do or needs."""

from __future__ import annotations

from pathlib import Path

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
from megatron.core.ssm.gated_delta_net import common
from safetensors.torch import load_file, save_file

from llava_mcore.cli import inspect_folder
from llava_mcore.compat.delta_rule import building_without_kernels, torch_rule, torch_step, triton_without_gradients
from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_layout, check_run
from llava_mcore.config.rules.delta_nets import check_kernels
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.errors import ConversionError
from llava_mcore.models.architectures.hf_config import load_hf_config, model_dims
from llava_mcore.models.language.delta_net import DeltaRule, sequence_bounds
from llava_mcore.parallel.batch import PackedSamples
from tests.helpers.class_checks import assert_logits_and_gradients, edited
from tests.helpers.tiny_qwen import make_hf_qwen
from tests.unit.models.test_qwen import CONVERSATIONS, theirs_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As on the hub: in bf16, with decay and gated norm in fp32, and layers for multi-token prediction."""
    root = tmp_path_factory.mktemp("qwen3_5") / "hf"
    make_hf_qwen(root, "qwen3_5")
    file = root / "model.safetensors"
    tensors = {
        name: x if name.endswith(("A_log", "linear_attn.norm.weight")) else x.bfloat16()
        for name, x in load_file(file).items()
    }
    tensors |= {
        "mtp.fc.weight": torch.randn(64, 128).bfloat16(),
        "mtp.layers.0.self_attn.q_norm.weight": torch.randn(16),
    }
    save_file(tensors, file, {"format": "pt"})
    return root


def test_every_tensor_comes_back_and_mtp_is_carried(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    import_hf(folder, tmp_path / "m", tensor_parallel=2, verify=True)
    export_hf(tmp_path / "m", tmp_path / "back", tensor_parallel=2, verify=True)
    before, after = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(x.dtype == after[name].dtype and torch.equal(x, after[name]) for name, x in before.items())
    assert inspect_folder.main([str(folder)]) == 0
    assert "transformers' model has no such module" in capsys.readouterr().out


def test_logits_and_gradients_with_the_published_epsilon(tmp_path: Path) -> None:
    """Within twice what transformers' own in fp32 differ from those in fp64, for each sample alone."""
    make_hf_qwen(tmp_path / "hf", "qwen3_5", seed=1, text_overrides={"rms_norm_eps": 1e-6})
    assert_logits_and_gradients(tmp_path / "hf", CONVERSATIONS, theirs_of, tmp_path / "m", noisy=True)


def test_packed_samples_are_read_one_by_one_without_waiting_for_the_device() -> None:
    """Where the host knows the bounds. Those on the device have no values here."""
    generator = torch.Generator().manual_seed(0)
    rule = DeltaRule(2, 8, 8, deterministic=True)
    mixed, weight = (torch.randn(x, generator=generator) for x in ((1, 24, 2 * 16 + 32), (64, 4)))
    decay, beta = (torch.rand(1, 24, 4, generator=generator) for _ in range(2))
    bounds = [0, 10, 10, 24]
    unknown = torch.tensor(bounds, dtype=torch.int32, device="meta")
    packed = rule(mixed, weight, -decay, beta, unknown, bounds)
    apart = [rule(mixed[:, x], weight, -decay[:, x], beta[:, x], None) for x in (slice(0, 10), slice(10, 24))]
    assert torch.equal(packed, torch.cat(apart, dim=1))
    params = PackedSamples(qkv_format="thd", cu_seqlens_q=unknown, cu_seqlens_kv=unknown, bounds=bounds)
    assert sequence_bounds(params) == (unknown, bounds)


def test_what_cannot_be_computed_is_named(folder: Path, tmp_path: Path) -> None:
    dims = model_dims(load_hf_config(folder))
    assert (dims.delta_key_heads, dims.delta_value_heads, dims.delta_width) == (4, 8, 2 * (32 + 128 + 8))
    (said,) = [x for x in check_layout(dims, 8, 1, "hf") if "delta nets" in x]
    assert (
        "--tp 8 does not divide the key heads of the delta nets, which is 4 in hf: this model can use 1, 2 or 4" in said
    )
    given = [f"checkpoint.save_dir={tmp_path}", f"checkpoint.load={tmp_path}", "training.train_iters=1"]
    fp8 = load_run_config(None, [*given, "model.cuda_graphs=true", "training.fp8=true", "training.precision=bf16"])
    problems = check_run(fp8, dims, 1, device_available=True)
    assert any("--cuda-graphs cannot capture the delta nets" in x for x in problems)
    assert not any("first matrix" in x for x in problems)
    fp8 = load_run_config(None, [*given, "training.fp8=true", "parallel.tensor_model_parallel_size=2"])
    assert any("which is 336 in the model, is not a multiple of 32" in x for x in check_run(fp8, dims, 2, True))


def test_kernels_are_asked_for_where_they_are_needed(folder: Path) -> None:
    dims = model_dims(load_hf_config(folder))
    (said,) = check_kernels(dims, deterministic=False, has_gpus=True, has_kernels=False)
    assert "need flash-linear-attention on GPUs: pip install 'llava-mcore[delta]'" in said
    (said,) = check_kernels(dims, deterministic=False, has_gpus=True, has_kernels=True, wrong_triton="3.6.0")
    assert "no gradients with Triton 3.6.0 on Hopper GPUs" in said and "Triton 3.7.1 or newer" in said
    for given in ((True, True, False), (False, False, False), (False, True, True)):
        deterministic, has_gpus, has_kernels = given
        assert not check_kernels(dims, deterministic=deterministic, has_gpus=has_gpus, has_kernels=has_kernels)


@pytest.mark.parametrize(
    ("version", "capability", "wrong"),
    [("3.3.1", 9, False), ("3.6.0", 9, True), ("3.7.0", 9, True), ("3.7.1", 9, False), ("3.6.0", 10, False)],
)
def test_wrong_versions_of_triton(
    monkeypatch: pytest.MonkeyPatch, version: str, capability: int, wrong: bool
) -> None:  # fmt: skip
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert triton_without_gradients([(capability, 0)]) == (version if wrong else None)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("layer_types", ["linear_attention", "sliding_attention"] * 2, "layer_types: sliding_attention; known: linear"),
        ("hidden_act", "gelu", "hidden_act = 'gelu': gated delta nets are computed with silu"),
        ("linear_num_value_heads", 6, "linear_num_value_heads = 6 is not a multiple of linear_num_key_heads = 4"),
    ],
)
def test_other_configs_are_refused(folder: Path, tmp_path: Path, key: str, value: object, expected: str) -> None:
    changed = edited(folder, tmp_path / "hf", "config.json", lambda c: c["text_config"].update({key: value}))
    with pytest.raises(ConversionError, match=expected):
        import_hf(changed, tmp_path / "m")


def test_both_forms_of_the_rule_agree_and_nothing_stays_replaced() -> None:
    """Token by token as while text is generated, and in chunks as in training."""
    before = common.HAVE_FLA, torch.cuda.current_device
    with building_without_kernels(on_cpu=True):
        assert common.HAVE_FLA
    assert (common.HAVE_FLA, torch.cuda.current_device) == before
    query, key, value = torch.randn(2, 70, 3, 8), torch.randn(2, 70, 3, 8), torch.randn(2, 70, 3, 5)
    gates = {"g": -torch.rand(2, 70, 3), "beta": torch.rand(2, 70, 3)}
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    (out, state), (expected, last) = (f(query, key, value, **gates, **options) for f in (torch_rule(), torch_step()))
    assert torch.allclose(out, expected, atol=1e-5) and torch.allclose(state, last, atol=1e-5)
