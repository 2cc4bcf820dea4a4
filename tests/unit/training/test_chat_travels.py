"""The template that is trained with is the template that is exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor, AutoTokenizer

from llava_mcore.checkpoint.choose_start import StartPoint, start_point
from llava_mcore.checkpoint.layout import hf_folder
from llava_mcore.config.load import load_run_config
from llava_mcore.config.schema import RunConfig
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import load_assets, require_same_tokenizer
from llava_mcore.data.encode.chat_template import require_same_template, write_chat_template
from llava_mcore.data.processors.load import PROCESSOR_FILES
from llava_mcore.errors import CheckpointError
from llava_mcore.parallel.groups import single_process
from llava_mcore.parallel.random import seed_everything
from llava_mcore.templates.named import NAMES
from llava_mcore.training.saving.hf_files import write_carried_folder, write_stop_token
from llava_mcore.training.saving.save import save_checkpoint
from llava_mcore.training.saving.state import TrainingProgress
from llava_mcore.training.setup import build_trainer
from tests.helpers.chat_cases import messages
from tests.helpers.tiny_hf import CHAT_TEMPLATE, make_hf_llava
from tests.unit.data.test_chat_templates import CONVERSATIONS


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("travels")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "megatron")
    return root


def run_config(root: Path, name: str, *, init: bool) -> RunConfig:
    start = {"checkpoint.init": True} if init else {"checkpoint.load": root / "megatron"}
    values = {
        "name": name,
        "checkpoint.hf_dir": root / "hf",
        "checkpoint.save_dir": root / "runs",
        "training.precision": "fp32",
        "training.train_iters": 1,
        "training.global_batch_size": 1,
        "data.chat_template": "llm-jp",
    }
    return load_run_config(None, [], values | start)


def save(run: RunConfig, start: StartPoint) -> Path:
    """Save what a run of one process saves after its first step, as the worker does."""
    assert run.checkpoint.hf_dir is not None
    assets = load_assets(
        run.checkpoint.hf_dir, checkpoint_hf_dir=start.hf_dir, chat_template=run.data.chat_template, lang=run.data.lang
    )
    with single_process() as groups:
        seed_everything(run.training.seed)
        trainer = build_trainer(run, groups, start)
        carried = write_carried_folder(start, run.run_dir / "hf", seed=1, chat_template=assets.chat.template)
        return save_checkpoint(trainer, TrainingProgress(1, 1), carried, None)


@pytest.mark.parametrize("init", [False, True], ids=["from a checkpoint", "from random weights"])
def test_export_renders_what_was_trained(root: Path, init: bool) -> None:
    run = run_config(root, f"run-{init}", init=init)
    checkpoint = save(run, start_point(run))
    out = root / f"exported-{init}"
    export_hf(run.run_dir, out)

    trained = load_assets(root / "hf", chat_template="llm-jp").chat
    processor, tokenizer = AutoProcessor.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert processor.chat_template == tokenizer.chat_template == trained.template != CHAT_TEMPLATE
    for turns in CONVERSATIONS.values():
        for as_parts in (False, True):
            assert processor.apply_chat_template(messages(turns, as_parts=as_parts)) == trained.render(turns)
            prompt = processor.apply_chat_template(
                messages(turns[:-1], as_parts=as_parts), tokenize=False, add_generation_prompt=True
            )
            assert trained.render(turns).startswith(prompt)
    # What is exported is what a next run trains with, unless it is told otherwise.
    assert load_assets(out).chat.template == trained.template
    require_same_template(hf_folder(checkpoint), trained.template)


def test_tokenizer_and_processor_of_training_are_exported(root: Path, tmp_path: Path) -> None:
    """Of --tokenizer-load-dir, not of the import; a resume with another tokenizer is refused."""
    other = tmp_path / "other"
    shutil.copytree(root / "hf", other)
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocabulary["added_tokens"][-1]["lstrip"] = not vocabulary["added_tokens"][-1]["lstrip"]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    (file,) = (other / name for name in PROCESSOR_FILES if (other / name).is_file())
    file.write_text(file.read_text().replace('"image_mean": [', '"image_mean": [\n 0.125,', 1))
    start = start_point(run_config(root, "run-other", init=False))
    arguments: dict[str, Any] = {"seed": 1, "chat_template": CHAT_TEMPLATE, "tokenizer_dir": other}
    carried = write_carried_folder(start, tmp_path / "carried", **arguments)
    assert (carried / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()
    assert "0.125" in (carried / file.name).read_text()
    assert (carried / "config.json").read_bytes() == (start.hf_dir / "config.json").read_bytes()
    require_same_tokenizer(carried, other)
    stops = carried / "generation_config.json"
    for given, expected in (
        (None, [7]),
        ({"eos_token_id": 7}, 7),
        ({"eos_token_id": [3, 7], "top_k": 5}, [3, 7]),
        ({}, 7),
    ):
        stops.unlink(missing_ok=True)
        if given is not None:
            stops.write_text(json.dumps(given))
        write_stop_token(carried, 7)
        written = json.loads(stops.read_text())["eos_token_id"]
        assert written == expected if given is not None else written[:1] == expected
    write_stop_token(carried, 9)
    assert json.loads(stops.read_text()) == {"eos_token_id": [9, 7]}
    with pytest.raises(CheckpointError, match="cannot be resumed with the tokenizer of"):
        require_same_tokenizer(carried, root / "hf")


def test_the_imported_checkpoint_stays_as_it_was(root: Path) -> None:
    files = hf_folder(root / "megatron" / "iter_0000000")
    assert (files / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_another_template_is_no_resume(root: Path, tmp_path: Path) -> None:
    files = tmp_path / "iter_0000001" / "hf"
    files.mkdir(parents=True)
    write_chat_template(files, load_assets(root / "hf", chat_template="vicuna").chat.template)
    require_same_template(files, load_assets(root / "hf", chat_template="vicuna").chat.template)
    for name in set(NAMES) - {"vicuna"}:
        with pytest.raises(CheckpointError) as raised:
            require_same_template(files, load_assets(root / "hf", chat_template=name).chat.template)
        assert "iter_0000001 cannot be resumed with another chat template" in str(raised.value)
        assert "--chat-template" in str(raised.value) and "another --name" in str(raised.value)


def test_older_copies_do_not_win(tmp_path: Path) -> None:
    """Readers of Hugging Face folders look at several places; one template is left."""
    make_hf_llava(tmp_path)
    for name in ("tokenizer_config.json", "processor_config.json"):
        config = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps(config | {"chat_template": "old"}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    template = load_assets(tmp_path, chat_template="vicuna").chat.template
    write_chat_template(tmp_path, template)
    assert AutoProcessor.from_pretrained(tmp_path).chat_template == template
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == template
    assert load_assets(tmp_path).chat.template == template
