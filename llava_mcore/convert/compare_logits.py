"""Compares a checkpoint's fp32 logits, computed by several processes over gloo, with Hugging Face's on an image or
audio.

Hugging Face's model runs first, in this process, then the parallel model in its own processes. If logits differ, the
first module with a different output is reported.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoProcessor, PretrainedConfig, ProcessorMixin
from transformers.utils.logging import disable_progress_bar

from llava_mcore.checkpoint.layout import latest_checkpoint
from llava_mcore.compat.transformers import exact_attention, tower_names_in_files
from llava_mcore.convert.inputs import processed_media
from llava_mcore.convert.logits_worker import LogitsLayout, run_rank
from llava_mcore.data.processors.audio_files import audio_length, decode_audio, require_libraries
from llava_mcore.data.processors.images import decode_image
from llava_mcore.errors import ConversionError, DataError, problems, with_article
from llava_mcore.files.hf_folder import HfFolder
from llava_mcore.files.sizes import size_text
from llava_mcore.files.torch_files import why_not_loaded
from llava_mcore.media.batch_fields import FEATURE_POSITIONS, MEDIA_SEQLENS
from llava_mcore.media.clip_plan import AudioPlan, frames_kept
from llava_mcore.models.architectures.hf_config import load_hf_config, model_dims
from llava_mcore.models.architectures.registry import architecture_of, tower_config
from llava_mcore.models.model_table import detect_names
from llava_mcore.models.probes import watch_hf
from llava_mcore.models.recorder import Recorder
from llava_mcore.models.tied_weights import settle_ties
from llava_mcore.processes.local_world import run_world
from llava_mcore.weights.names import HfNames

TOLERANCE = 1e-4
"""Relative to the largest value of a module's output: fp32 sums in another order differ by less."""
_PROMPT, _AUDIO_PROMPT = "Describe this image.", "What is said?"
_PROCESS_BYTES = 1_000_000_000  # Python with torch, transformers and megatron-core, and activations


@dataclass(frozen=True)
class Agreement:
    """Result of a comparison. `difference` and `largest`: of logits, absolute; `not_compared`: modules on one side
    only."""

    difference: float
    largest: float
    num_tokens: int
    num_modules: int
    not_compared: tuple[str, ...] = ()


def check_logits(
    hf_dir: Path,
    megatron_dir: Path,
    example: Path,
    *,
    layout: LogitsLayout,
    base_dir: Path | None = None,
) -> str:
    """Compare fp32 logits on a real image or audio clip with Hugging Face's; return a summary.

    Args:
        base_dir: see `load_part`.

    Raises:
        CheckpointError, ConversionError: logits differ, or the comparison is not possible.
    """
    checkpoint, iteration = latest_checkpoint(megatron_dir)
    got = compare_logits(hf_dir, checkpoint, example, layout=layout, base_dir=base_dir)
    return (
        f"{megatron_dir}: iteration {iteration} computes the logits of {hf_dir} at {layout}: max abs difference "
        f"{got.difference:.2g}, largest logit {got.largest:.3g} ({got.num_tokens} tokens with {example.name}, outputs "
        f"of {got.num_modules} modules compared{_not_compared(got.not_compared)})"
    )


def _not_compared(names: Sequence[str]) -> str:
    if not names:
        return ""
    listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"; {len(names)} not, as transformers {version('transformers')} has no modules of these names: {listed}"


def compare_logits(
    hf_dir: Path,
    checkpoint: Path,
    example: Path,
    *,
    layout: LogitsLayout,
    base_dir: Path | None = None,
) -> Agreement:
    """Run both models on a question about an image, or an audio clip for a class that takes those.

    Args:
        checkpoint: folder of one iteration.
        base_dir: see `load_part`.

    Raises:
        ConversionError: logits differ, the example or the folder's processor cannot be used, memory is too small, or
            ranks cannot divide every layer.
        CheckpointError: the parallel model could not run.
    """
    # Refuse what cannot be compared before seconds are spent: memory, layout, length.
    folder = HfFolder.open(hf_dir)
    require_memory(sum(math.prod(x) for x in folder.shapes.values()), num_processes=layout.num_processes)
    hf = load_hf_config(hf_dir)
    settle_ties(hf, folder)
    dims = model_dims(hf)
    layout.require(dims, hf_dir)
    names = detect_names(hf, folder.tensors, source=str(hf_dir))
    prompt = _prompt(hf, hf_dir, example)
    length = prompt.megatron_inputs["input_ids"].shape[1]
    if dims.sliding_window is not None and length > dims.sliding_window:
        raise ConversionError(
            f"{example.name} and its question take {length} tokens, more than the sliding attention window of "
            f"{dims.sliding_window} of {hf_dir}, which is not supported yet: compare with a smaller one"
        )
    # Hugging Face's model runs here, then Megatron's in processes of their own.
    with tempfile.TemporaryDirectory(prefix="llava_mcore-") as name:
        job = Path(name)
        expected, modules = _hugging_face(hf, hf_dir, prompt, names)
        model = {"checkpoint": str(checkpoint), "base_dir": None if base_dir is None else str(base_dir)}
        torch.save(model | {"layout": layout, "inputs": prompt.megatron_inputs, "names": names}, job / "job.pt")
        run_world(run_rank, layout.num_processes, job)
        stages: list[dict[str, Any]] = [torch.load(job / f"stage{i}.pt", weights_only=True) for i in range(layout.pp)]
    # Outputs of the modules, which say where a difference begins, and the logits.
    megatron_modules = {key: x for stage in stages for key, x in stage["modules"].items()}
    shared = [key for key in megatron_modules if key in modules]
    wrong = _differences(shared, megatron_modules, modules)
    difference = (stages[-1]["logits"] - expected).abs().max().item()
    largest = expected.abs().max().item()
    if not difference <= TOLERANCE * largest or wrong:
        raise ConversionError(_report(difference, largest, wrong, folder, checkpoint, hf_dir))
    not_compared = tuple(key for key in megatron_modules if key not in modules)
    return Agreement(difference, largest, expected.shape[1], len(shared), not_compared)


def require_memory(num_numbers: int, *, num_processes: int) -> None:
    """Refuse a model that does not fit into memory: one fp32 model at a time, and the processes.

    Raises:
        ConversionError: with the needed and the available memory.
    """
    needed = 4 * num_numbers + (1 + num_processes) * _PROCESS_BYTES
    available = psutil.virtual_memory().available
    if available < needed:
        raise ConversionError(
            f"comparing logits needs about {size_text(needed)} of memory (the model in fp32 and {num_processes} "
            f"processes), {size_text(available)} are available: omit --logits, or run it on a larger machine"
        )


@dataclass(frozen=True)
class _ComparedPrompt:
    """A question as inputs of Hugging Face's model and of ours, both with input_ids [1, s].

    `num_kept`: of how many tokens of Hugging Face's tower how many are not padding.
    """

    hf_inputs: dict[str, Tensor]
    megatron_inputs: dict[str, Tensor]
    num_kept: Mapping[int, int]


def _prompt(hf: PretrainedConfig, hf_dir: Path, example: Path) -> _ComparedPrompt:
    """Return a question about an image or audio clip, from the folder's own processor."""
    # The processor, and the image or audio clip.
    takes_audio = architecture_of(hf).takes_audios
    try:
        processor = AutoProcessor.from_pretrained(hf_dir, local_files_only=True, trust_remote_code=False)
        wave = _wave(hf, processor, example) if takes_audio else None
        image = None if takes_audio else decode_image(example.read_bytes())
    except (DataError, OSError, ValueError, KeyError, ImportError) as error:
        medium = "audio clip" if takes_audio else "image"
        raise ConversionError(
            f"comparing logits needs {with_article(medium)} and a processor in {hf_dir}: {why_not_loaded(error)}"
        ) from error
    # The question, through the chat template if there is one.
    kind, asked = ("audio", _AUDIO_PROMPT) if takes_audio else ("image", _PROMPT)
    text = f"{processor.audio_token if takes_audio else processor.image_token}\n{asked}"
    if processor.chat_template is not None:
        content = [{"type": kind}, {"type": "text", "text": asked}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    # Tokens and pixels as transformers makes them; a class that pads images gets no tiles.
    if architecture_of(hf).pads_images:
        processor.image_processor.do_image_splitting = False
    kwargs = (
        {"audio": wave, "sampling_rate": processor.feature_extractor.sampling_rate}
        if takes_audio
        else {"images": image}
    )
    processed = processor(text=text, return_tensors="pt", **kwargs)
    hf_inputs = {name: x for name, x in processed.items() if name != "attention_mask"}
    # The same as fields of our batches.
    num_kept: dict[int, int] = {}
    try:
        if wave is not None:
            media, positions = processed_media(hf, processor, hf_inputs, [[]], audios=[[len(wave)]])
            num_kept = frames_kept(hf, int(media[MEDIA_SEQLENS]), len(media[FEATURE_POSITIONS]))
        else:
            assert image is not None
            media, positions = processed_media(hf, processor, hf_inputs, [[(image.height, image.width)]])
    except (ConversionError, DataError) as error:
        raise ConversionError(f"{hf_dir}: {error}") from error
    return _ComparedPrompt(
        hf_inputs, {"input_ids": hf_inputs["input_ids"], "position_ids": positions, **media}, num_kept
    )


def _wave(hf: PretrainedConfig, processor: ProcessorMixin, file: Path) -> NDArray[np.float32]:
    """Return an audio file as training decodes it, [samples]. DataError if it cannot be used."""
    require_libraries()
    data, plan = file.read_bytes(), AudioPlan(hf, processor.feature_extractor)
    plan.audio_tokens([audio_length(data, plan.sampling_rate)])
    return decode_audio(data, plan.sampling_rate)


def _hugging_face(
    hf: PretrainedConfig, hf_dir: Path, prompt: _ComparedPrompt, shown_as: HfNames
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits [1, s, vocabulary] and the modules' outputs; the model is freed."""
    disable_progress_bar()
    model, loading = architecture_of(hf).model_class.from_pretrained(
        hf_dir,
        config=hf,
        dtype=torch.float32,
        attn_implementation=exact_attention(hf.text_config),
        output_loading_info=True,
    )
    _require_experts(hf_dir, type(model).__name__, [x for x in loading["missing_keys"] if ".experts." in x])
    recorder = Recorder()
    names = detect_names(hf, model.state_dict(), source=str(hf_dir))
    watch_hf(recorder, model.eval(), names, shown_as, prompt.num_kept)
    with torch.no_grad():
        logits = model(**prompt.hf_inputs).logits.float()
    modules = tower_names_in_files(recorder.outputs, shown_as.vision, tower_config(model.config).model_type)
    return logits, modules


def _require_experts(hf_dir: Path, kind: str, missing: Sequence[str]) -> None:
    """Raise ConversionError if transformers has filled experts with random numbers: it reads one form of each class."""
    if missing:
        raise ConversionError(
            f"{hf_dir}: transformers {version('transformers')} does not find the experts of {kind} in these files, so "
            f"there is nothing to compare with: it expects {missing[0]} and the like"
        )


def _differences(
    keys: Iterable[str], actual: dict[str, Tensor], expected: dict[str, Tensor]
) -> list[tuple[str, float]]:
    """Return the modules that differ, in the order of execution, and by how much."""
    pairs = [(key, (actual[key] - expected[key]).abs().max().item(), expected[key].abs().max().item()) for key in keys]
    return [(key, difference) for key, difference, largest in pairs if not difference <= TOLERANCE * largest]


def _report(
    difference: float,
    largest: float,
    wrong: list[tuple[str, float]],
    folder: HfFolder,
    checkpoint: Path,
    hf_dir: Path,
) -> str:
    """Name the first module that differs and its tensors, then the next few."""
    lines = [f"logits: max abs difference {difference:.3g} (the largest logit is {largest:.3g})"]
    for i, (key, x) in enumerate(wrong[:6]):
        tensors = ", ".join(name for name in folder.tensors if name.rpartition(".")[0] == key) or key
        lines.append(f"{'first difference' if i == 0 else 'then'}: {tensors}: max abs difference {x:.3g}")
    return problems(f"{checkpoint} computes other values than {hf_dir}", lines)
