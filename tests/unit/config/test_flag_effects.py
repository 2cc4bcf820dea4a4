"""That flags reach what they are about: the optimizer, the layers, the tokenizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llava_mcore import parallel  # noqa: F401  before megatron.core
from llava_mcore.config.flags import parse_command_line
from llava_mcore.config.rules.all_rules import check_run
from llava_mcore.config.schema import RunConfig
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.errors import DataError
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.configs import ModelOptions, part_configs
from llava_mcore.training import setup
from llava_mcore.training.diagnostics import describe
from llava_mcore.training.optimization import optimizer
from tests.helpers.tiny_hf import make_hf_llava

DECAY_ALL = "optimizer.decay_norms_and_biases=true"


def run_of(*flags: str) -> RunConfig:
    return parse_command_line(["--train-iters", "1", "--precision", "fp16", *flags], "run.py").load()


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("effects") / "hf"
    make_hf_llava(folder)
    return folder


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ((), "adam_beta2", 0.999),
        (("--adam-beta2", "0.95"), "adam_beta2", 0.95),
        ((), "loss_scale", None),
        (("--loss-scale", "128"), "loss_scale", 128.0),
        (("--lr", "0.5"), "lr", 0.5),
        (("--dist-optim",), "use_distributed_optimizer", True),
        (("--precision", "bf16"), "bf16", True),
    ],
)
def test_optimizer(flags: tuple[str, ...], name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag's value reaches megatron-core's optimizer."""
    seen: list[Any] = []
    monkeypatch.setattr(optimizer, "get_megatron_optimizer", lambda config, chunks, **_: seen.append(config))
    chunk: Any = SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=False))
    optimizer.build_optimizer(run_of(*flags), [chunk])
    assert getattr(seen[0], name) == value


def test_norms_and_biases_decay_only_if_asked() -> None:
    settings: Any = SimpleNamespace(apply_wd_to_qk_layernorm=False, decoupled_lr=None)
    usual, all_decay = (optimizer.overrides(run, settings) for run in (run_of(), run_of(DECAY_ALL)))
    assert [override["wd_mult"] for override in usual.values()] == [0.0] and all_decay == {}


@pytest.mark.parametrize(("flag", "backend"), [(None, "auto"), ("--fused-attn", "fused"), ("--flash-attn", "flash")])
def test_attention_kernels(flag: str | None, backend: str, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag chooses the attention backend of both parts."""
    seen: list[ModelOptions] = []
    config = load_hf_config(hf)
    groups: Any = SimpleNamespace(tp_size=1, cp_size=1, pp_size=1, ep_size=1, etp_size=1, device=torch.device("cpu"))
    seen.append(setup.model_options(run_of(*([flag] if flag else [])), groups, config, initialize=False))
    for part in (part_configs(config, seen[0]).language, part_configs(config, seen[0]).vision):
        assert part.attention_backend.name == backend


def test_flags_that_would_do_nothing_here_are_refused() -> None:
    found = "\n".join(check_run(run_of("--flash-attn", "--loss-scale", "8", "--precision", "fp32"), None, 1, False))
    assert "--fused-attn and --flash-attn choose Transformer Engine's kernels" in found
    assert "--loss-scale has no effect without --precision fp16" in found


@pytest.mark.parametrize(
    ("has_gpus", "expected"), [(False, "--fp8 needs a GPU with FP8"), (True, "--fp8 needs half precision")]
)
def test_fp8_has_one_message(has_gpus: bool, expected: str) -> None:
    """On a machine without GPUs, fp32 is the default and not a mistake."""
    found = check_run(run_of("--fp8", "--precision", "fp32"), None, 1, has_gpus)
    (message,) = [text for text in found if text.startswith("--fp8")]
    assert message.startswith(expected)


def test_token_ids(hf: Path) -> None:
    """Given ids replace those of the folder; one that contradicts it is refused."""
    usual = load_assets(hf)
    assert (usual.pad_token_id, usual.plan.image_token_id) == (3, 4)
    assert load_assets(hf, pad_token_id=0).pad_token_id == 0
    with pytest.raises(DataError, match="--pad-token-id 9999: the tokenizer has tokens 0 to"):
        load_assets(hf, pad_token_id=9999)
    with pytest.raises(DataError, match=r"image_token_id is 4 in config.json, but <unk> is token 0"):
        load_assets(hf, image_token_id=0)
    assert load_assets(hf, image_token_id=4).plan.image_token_id == 4


def test_first_batch_in_words() -> None:
    """The first batch is described with its text and with which tokens are trained."""
    ids = torch.tensor([[5, 6, 7, 8]])
    batch: Any = SimpleNamespace(
        input_ids=ids,
        labels=torch.tensor([[6, 7, 9, 0]]),
        loss_mask=torch.tensor([[0.0, 1.0, 1.0, 0.0]]),
        media={"pixel_values": torch.zeros(1, 3, 2, 2), "feature_positions": torch.zeros(1, dtype=torch.int64)},
        cu_seqlens=torch.zeros(0, dtype=torch.int32),
    )
    text = describe(batch, lambda row, trained: f"{row.tolist()} {trained.tolist()}")
    assert "2 of 4 tokens trained, 1 misplaced labels" in text
    assert "[5, 6, 7, 8] [False, False, True, True]" in text
    assert "pixel_values      float32 [1, 3, 2, 2]" in text
