"""Qwen2-Audio: tokens, encoder input, logits and gradients are Hugging Face's, by the real processor and data path."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

from llava_mcore.adapters.linear_layers import model_layers
from llava_mcore.checkpoint.layout import iteration_folder
from llava_mcore.cli import check, inspect_folder
from llava_mcore.cli import import_hf as import_command
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.encode.encode import tokenize
from llava_mcore.data.loader.collate import collate
from llava_mcore.data.samples import Audio, Batch, Conversation, EncodedSample, Turn
from llava_mcore.errors import ConversionError, DataError
from llava_mcore.media.batch_fields import PIXEL_VALUES, media_work
from llava_mcore.media.clip_plan import AudioPlan, ClipLengths
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.flops import TrainedParts, Workload, model_flops
from llava_mcore.models.model_table import detect_names, mapping_table
from llava_mcore.parallel.batch import MicroBatch, longest, longest_media
from llava_mcore.parallel.groups import single_process
from tests.helpers.tiny_audio import RATE, conversation, encoded, make_hf_audio, wave
from tests.parallel.checks import load_model

CLIP = "<|audio_bos|><|AUDIO|><|audio_eos|>\n"
NUM_LENGTHS = 5000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audio") / "hf"
    make_hf_audio(path)
    return path


@pytest.fixture(scope="module")
def assets(folder: Path) -> Assets:
    return load_assets(folder)


CONVERSATIONS = [
    conversation("<audio>\nWhat? <audio> <audio>", 0.3, 30.0, 7.777),
    conversation("Is it even?"),
    conversation("<audio>\nWhich <audio>", 2.0001, 1.005),
    conversation("<audio>", 29.99),
]


def batch_of(assets: Assets, conversations: list[Conversation], *, packed: bool) -> Batch:
    """Return what the loader makes of conversations."""
    samples = []
    for number, each in enumerate(conversations):
        tokens = tokenize(each, assets, str(number))
        rows = assets.images.tiles(tokens.media)
        samples.append(
            EncodedSample(__key__=str(number), __restore_key__=(), conversations=[tokens], pixel_values=rows)
        )
    return collate(samples, seq_length=4096, pad_token_id=3, packed=packed, fields=assets.plan.fields)


def theirs_of(folder: Path, each: Conversation) -> Any:
    """Return what the folder's own processor makes of a conversation."""
    processor = AutoProcessor.from_pretrained(folder)
    (asked, answered) = each.turns
    text = asked.text.replace("<audio>\n", CLIP).replace("<audio>", CLIP)
    waves = [wave_of(audio) for audio in each.audios]
    given = {"audio": waves, "sampling_rate": RATE} if waves else {}
    said = f"USER: {text} ASSISTANT: {answered.text}</s>"
    return processor(text=said, add_special_tokens=False, return_tensors="pt", **given)


def wave_of(sound: Audio) -> np.ndarray:
    return soundfile.read(io.BytesIO(sound.data), dtype="float32")[0]


def test_tokens_and_rows_are_the_processors(folder: Path, assets: Assets) -> None:
    plan = assets.plan
    assert isinstance(plan, AudioPlan)
    for each in CONVERSATIONS:
        batch, theirs = batch_of(assets, [each], packed=True), theirs_of(folder, each)
        n = theirs["input_ids"].shape[1]
        assert batch.input_ids[0, :n].tolist() == theirs["input_ids"][0].tolist()
        found, items = batch.media[PIXEL_VALUES], [x.tokens for x in tokenize(each, assets, "k").media]
        if items:
            padded = zip(theirs["input_features"], items, strict=True)
            expected = torch.cat([plan.rows_of(features, item) for features, item in padded])
            assert (found - expected).abs().max() <= 1e-6  # torch.stft on fewer frames
        assert not (batch.loss_mask.bool() & (batch.labels == plan.audio_token_id)).any()


def test_thousands_of_lengths_have_the_processors_tokens(folder: Path, assets: Assets) -> None:
    """The attention mask of the extractor, the processor's formula, and the number of features of the model."""
    processor, plan = AutoProcessor.from_pretrained(folder), assets.plan
    assert isinstance(plan, AudioPlan)
    choose = random.Random(0)
    encoder = Qwen2AudioForConditionalGeneration.from_pretrained(folder).model.audio_tower
    for _ in range(NUM_LENGTHS):
        num_samples = choose.choice((choose.randint(321, 480_000), round(321 * (480_000 / 321) ** choose.random())))
        (tokens,) = plan.audio_tokens([num_samples])
        # What the extractor's mask says of such a clip: it is padded, then every 160th sample counts.
        mask = torch.zeros(480_000, dtype=torch.int32)
        mask[:num_samples] = 1
        frames = mask[:: processor.feature_extractor.hop_length].sum()
        hidden, features = encoder._get_feat_extract_output_lengths(frames)
        said = processor.replace_audio_token({"num_audio_tokens": [(((int(frames) - 1) // 2 + 1) - 2) // 2 + 1]}, 0)
        assert len(tokens) == tokens.num_features == int(features) == said.count(processor.audio_token), num_samples
        assert tokens.num_patches == int(hidden) and tokens.num_rows == 2 * int(hidden) + 2


@pytest.mark.parametrize("num_samples", [321, 480, 799, 4_800, 16_001, 250_000, 479_999, 480_000])
def test_the_whole_processor_agrees(folder: Path, assets: Assets, num_samples: int) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    made = processor(text=CLIP, audio=[np.zeros(num_samples, np.float32)], sampling_rate=RATE, return_tensors="pt")
    (tokens,) = assets.plan.audio_tokens([num_samples])
    assert int((made["input_ids"] == assets.plan.audio_token_id).sum()) == len(tokens)
    assert int(made["feature_attention_mask"].sum()) == -(-num_samples // 160)


@pytest.mark.parametrize("kind", ["tones", "silence", "loud at the end", "only noise"])
@pytest.mark.parametrize("seconds", [0.02007, 0.3, 1.0, 29.95, 29.99, 30.0])
def test_only_what_a_clip_needs_is_computed(assets: Assets, seconds: float, kind: str) -> None:
    """The extractor normalizes by the loudest of 30 seconds of frames; a few after the clip decide that too."""
    plan, extractor = assets.plan, assets.images.extractor
    n = round(seconds * RATE)
    sound = {
        "tones": wave(seconds)[:n],
        "silence": np.zeros(n, np.float32),
        "loud at the end": np.concatenate([np.zeros(n - 60), np.ones(60)]).astype(np.float32),
        "only noise": np.random.default_rng(0).standard_normal(n).astype(np.float32) * 1e-3,
    }[kind]
    (tokens,) = plan.audio_tokens([n])
    padded = extractor(sound, sampling_rate=RATE, return_tensors="pt")["input_features"][0]
    assert padded.shape == (16, 3000)
    assert (plan.audio_rows(extractor, sound, tokens) - plan.rows_of(padded, tokens)).abs().max() <= 1e-6


@pytest.fixture(scope="module")
def imported(folder: Path) -> Path:
    import_hf(folder, folder.parent / "megatron")
    return iteration_folder(folder.parent / "megatron", 0)


def test_logits_and_gradients_are_hugging_faces(folder: Path, assets: Assets, imported: Path) -> None:
    """Clips of 0.3 to 30 seconds and text in one pack: each conversation's logits are transformers' for it alone."""
    packed, padded = (batch_of(assets, CONVERSATIONS, packed=x) for x in (True, False))
    model = Qwen2AudioForConditionalGeneration.from_pretrained(folder)
    expected, total = [], torch.zeros(())
    for row, each in enumerate(CONVERSATIONS):
        logits = model(**theirs_of(folder, each)).logits[0]
        expected.append(logits.detach())
        mask, labels = padded.loss_mask[row, : len(logits)], padded.labels[row, : len(logits)]
        total = total + (F.cross_entropy(logits, labels, reduction="none") * mask).sum()
    total.backward()
    # transformers means to freeze the sinusoids, but loading a model undoes that.
    trained = {x: p for x, p in model.named_parameters() if not x.endswith("embed_positions.weight")}
    gradients = {x: p.grad for x, p in trained.items() if p.grad is not None}
    with single_process() as groups:
        ours = load_model(groups, imported)
        found = {}
        for kind, batch in (("packed", packed), ("padded", padded)):
            given = (batch.input_ids, batch.position_ids, batch.media)
            params = {"packed_seq_params": params_of(batch), "max_media_seqlen": longest_media(batch.media)}
            with torch.no_grad():
                out = ours(*given, **params)
            bounds = batch.cu_seqlens.tolist()
            rows = [out[0, a:b] for a, b in itertools.pairwise(bounds)] if kind == "packed" else list(out)
            found[kind] = [x[: len(y)] for x, y in zip(rows, expected, strict=False)]
            assert all((x - y).abs().max() <= 1e-5 for x, y in zip(found[kind], expected, strict=True)), kind
        assert all((x - y).abs().max() <= 3e-6 for x, y in zip(*found.values(), strict=True))
        ours(*given, labels=padded.labels, loss_mask=padded.loss_mask, **params).backward()
        names = detect_names(load_hf_config(folder), model.state_dict(), source="the model")
        num_rows = ours.language_model.embedding.word_embeddings.weight.shape[0]
        table = mapping_table(load_hf_config(folder), names, hf_tensors={}, padded_vocab_size=num_rows)
        compared = 0
        for key, p in ours.named_parameters():
            if key.endswith("position_embeddings.weight"):  # sinusoids
                assert p.grad is None and not p.requires_grad
                continue
            assert p.grad is not None, key
            assert torch.equal(table.entries[key].to_megatron(table.entries[key].to_hf(p.grad)), p.grad), key
            for hf_name, gradient in table.entries[key].to_hf(p.grad).items():
                largest = gradients[hf_name].abs().max()
                assert (gradient - gradients[hf_name]).abs().max() <= 1e-5 * largest + 1e-6, hf_name
                compared += 1
        assert compared == len(gradients)


def test_clips_do_not_see_each_other(assets: Assets, imported: Path) -> None:
    """The features of clips in one pack are those of each alone, up to the order of fp32 sums."""
    media = [batch_of(assets, [each], packed=True).media for each in CONVERSATIONS if each.audios]
    together = batch_of(assets, CONVERSATIONS, packed=True).media
    with single_process() as groups, torch.no_grad():
        ours = load_model(groups, imported)
        alone = torch.cat([ours.image_features(x, longest_media(x)) for x in media])
        packed = ours.image_features(together, longest_media(together))
    assert packed.shape == alone.shape and (packed - alone).abs().max() <= 1e-6


def params_of(batch: Batch) -> Any:
    """Return megatron-core's description of a pack; None for padded rows."""
    given = (batch.input_ids, batch.labels, batch.loss_mask, batch.position_ids, batch.media, batch.cu_seqlens)
    return MicroBatch(*given, longest(batch.cu_seqlens)).packed_seq_params


def test_torch_counts_the_same_flops_over_hugging_face(folder: Path, assets: Assets) -> None:
    """Of a clip of 30 seconds: transformers computes on as much whatever a clip's length."""
    each, hf = conversation("<audio>\nWhat?", 30.0), load_hf_config(folder)
    model = Qwen2AudioForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    batch, theirs = batch_of(assets, [each], packed=True), theirs_of(folder, each)
    n = theirs["input_ids"].shape[1]
    work = Workload(num_tokens=n, num_pairs=n * n, media=media_work(batch.media))
    with FlopCounterMode(display=False) as counter:
        model(**theirs, use_cache=False).logits.sum().backward()
    by_module = {key: sum(flops.values()) for key, flops in counter.get_flop_counts().items()}
    rotary = sum(x for key, x in by_module.items() if key.endswith(".rotary_emb"))
    assert counter.get_total_flops() - rotary == model_flops(hf, work, TrainedParts(True, True, True)).total


def test_check_compares_the_output_of_every_module(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = tmp_path / "clip.ogg"
    clip.write_bytes(encoded(1.23, kind="OGG", rate=44_100, channels=2))
    flags = ["--hf-dir", str(folder), "--megatron-dir", str(tmp_path / "m"), "--tp", "2", "--pp", "2"]
    assert import_command.main([*flags, "--workers", "1", "--verify", "--logits", str(clip)]) == 0
    # The convolutions, the norm after them and the projector; the ends of the decoder; the layers of both.
    assert f"outputs of {4 + 2 + 4 * 9 + 4 * 10} modules compared" in capsys.readouterr().out
    clip.write_text("not an audio clip")
    assert check.main([*flags, "--logits", str(clip)]) == 2
    assert "comparing logits needs an audio clip" in capsys.readouterr().err


def test_inspect_names_the_encoder(folder: Path, imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (folder, imported):
        assert inspect_folder.main([str(path)]) == 0
        said = capsys.readouterr().out
        assert "audio encoder: qwen2_audio_encoder, 4 layers of 32, clips of up to 3000 frames of 16 mel bins" in said
        assert "vision" not in said.replace("vision_model", "").replace("vision_projection", "")


def test_files_of_every_naming_are_read_and_written_back(folder: Path, tmp_path: Path) -> None:
    """As on the hub, as transformers' modules are called, and as transformers 5.17 writes them."""
    tensors = load_file(folder / "model.safetensors")
    hub = {name.replace("language_model.model.model.", "language_model.model."): x for name, x in tensors.items()}
    new = {_as_modules(name): x for name, x in hub.items()}
    assert len({*hub}) == len({*new}) == len(tensors)
    for number, named in enumerate((hub, new)):
        hf = tmp_path / f"hf{number}"
        shutil.copytree(folder, hf)
        save_file(named, hf / "model.safetensors", metadata={"format": "pt"})
        import_hf(hf, tmp_path / f"m{number}", tensor_parallel=2, verify=True)
        export_hf(tmp_path / f"m{number}", tmp_path / f"out{number}", tensor_parallel=2, verify=True)
        written = load_file(tmp_path / f"out{number}" / "model.safetensors")
        assert written.keys() == named.keys() and all(torch.equal(written[x], named[x]) for x in named)
        assert Qwen2AudioForConditionalGeneration.from_pretrained(tmp_path / f"out{number}") is not None


def _as_modules(name: str) -> str:
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    return "model." + name.replace("language_model.model.", "language_model.")


REFUSED: dict[str, tuple[str, Any, str]] = {
    "other mel bins": (
        "processor_config.json",
        lambda c: c["feature_extractor"].update(feature_size=80),
        "WhisperFeatureExtractor has feature_size = 80, not 16: correct the settings",
    ),
    "random noise": (
        "processor_config.json",
        lambda c: c["feature_extractor"].update(dither=0.1),
        "has dither = 0.1, not 0.0",
    ),
    "shorter clips": (
        "processor_config.json",
        lambda c: c["feature_extractor"].update(chunk_length=10),
        "has nb_max_frames = 1000, not 3000",
    ),
    "dropout": ("config.json", lambda c: c["audio_config"].update(dropout=0.1), "audio_config.dropout = 0.1 is not"),
    "dropped layers": (
        "config.json",
        lambda c: c["audio_config"].update(encoder_layerdrop=0.5),
        "audio_config.encoder_layerdrop = 0.5 is not supported; it must be 0.0",
    ),
    "no layers": ("config.json", lambda c: c["audio_config"].update(encoder_layers=0), "encoder_layers is 0, expected"),
    "another token": ("config.json", lambda c: c.update(audio_token_index=9), "audio_token_id is 9 in config.json"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(folder: Path, what: str, tmp_path: Path) -> None:
    file, change, expected = REFUSED[what]
    shutil.copytree(folder, tmp_path / "hf")
    values = json.loads((tmp_path / "hf" / file).read_text())
    change(values)
    (tmp_path / "hf" / file).write_text(json.dumps(values))
    data_reads_it = file != "config.json" or what == "another token"
    with pytest.raises((ConversionError, DataError), match=expected):
        load_assets(tmp_path / "hf") if data_reads_it else import_hf(tmp_path / "hf", tmp_path / "m")
    assert not iteration_folder(tmp_path / "m", 0).exists()


def test_the_classes_own_template(folder: Path, tmp_path: Path) -> None:
    """It numbers the clips, and writes no EOS of this tokenizer."""
    shutil.copytree(folder, tmp_path / "hf")
    processor = AutoProcessor.from_pretrained(folder)
    (tmp_path / "hf" / "chat_template.jinja").write_text(processor.default_chat_template)
    own = load_assets(tmp_path / "hf")
    tokens = tokenize(CONVERSATIONS[2], own, "k")
    said = own.tokenizer.decode(tokens.input_ids).replace("<|AUDIO|>" * len(tokens.media[0].tokens), "<|AUDIO|>")
    assert "Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>" in said and "Audio 2: <|audio_bos|>" in said
    assert own.chat.adds_eos and own.chat.content_format["user"] == "list"


def test_adapters_find_the_layers_of_the_encoder(folder: Path) -> None:
    """Queries, keys and values apart, and only linear layers."""
    layers = model_layers(load_hf_config(folder))
    assert not layers.is_tied
    encoder = [name for name in layers.members if "audio_tower" in name]
    assert len(encoder) == 4 * 6 and not any("conv" in name or "embed" in name for name in encoder)


def test_refusals(assets: Assets) -> None:
    """Clips of impossible lengths, and images, are refused with their reason."""
    for seconds, reason in ((31.0, "31.0 seconds long, but the model takes at most 30"), (0.015, "too short")):
        with pytest.raises(DataError, match=reason):
            tokenize(conversation("<audio>", seconds), assets, "k")
    picture = Conversation((Turn("user", "<image>"), Turn("assistant", "no.")), (b"x",))
    with pytest.raises(DataError, match=r"it has an image, but Qwen2AudioFor.* does not support images"):
        tokenize(picture, assets, "k")


def test_the_plan_travels(assets: Assets) -> None:
    plan = pickle.loads(pickle.dumps(assets.plan))
    assert [len(x) for x in plan.audio_tokens([4800, 480_000])] == [7, 750]
    assert ClipLengths.of_mel(3000) == ClipLengths(3000, 1500, 750)
