"""Answers of a Hugging Face folder's model, by transformers."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoProcessor,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.utils.logging import disable_progress_bar
from transformers.video_utils import VideoMetadata

from llava_mcore.compat.transformers import exact_attention
from llava_mcore.convert.jobs import DTYPES
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.encode import check_length, check_media, expanded
from llava_mcore.data.processors.audio_files import decode_audio
from llava_mcore.data.processors.image_processor import ImagePreprocessor
from llava_mcore.data.processors.images import decode_frames, decode_image
from llava_mcore.data.processors.load import LOAD_ERRORS
from llava_mcore.data.samples import IMAGE_MARK, VIDEO_MARK, Conversation, Video
from llava_mcore.errors import ConfigError, ConversionError
from llava_mcore.files.torch_files import why_not_loaded
from llava_mcore.inference.answering.job import Dtype, ReadOptions
from llava_mcore.inference.generation.settings import Settings
from llava_mcore.media.media import DEFAULT_FPS
from llava_mcore.media.tiled_plan import attended_tiles
from llava_mcore.models.architectures.registry import architecture_of
from llava_mcore.models.whole_folder import open_whole_folder

Quantization = Literal["4bit", "8bit"]
NO_BITSANDBYTES = "needs the packages bitsandbytes and accelerate: pip install 'llava-mcore[qlora]' accelerate"
READING = ReadOptions()
IMAGE, VIDEO = 1, 2
"""Values in transformers' mm_token_type_ids, in which text is 0."""


class HfModel:
    """A folder's model, its processor, and the assets with which training reads conversations."""

    def __init__(self, model: PreTrainedModel, processor: ProcessorMixin, assets: Assets) -> None:
        self.model, self.processor, self.assets = model, processor, assets
        if isinstance(assets.images, ImagePreprocessor):
            # The kind of image processor that training uses.
            processor.image_processor = assets.images.processor

    @classmethod
    def load(
        cls,
        hf_dir: Path,
        reading: ReadOptions = READING,
        *,
        dtype: Dtype | None = None,
        quantization: Quantization | None = None,
    ) -> HfModel:
        """Load a folder, on the GPU if there is one.

        Args:
            dtype: of the weights in memory; None: that of the folder.

        Raises:
            ConversionError, DataError: it is incomplete or not of a supported class.
            ConfigError: packages for the quantization are missing.
        """
        hf, _ = open_whole_folder(hf_dir)
        assets = reading.assets(hf_dir)
        return cls(_load_model(hf_dir, hf, dtype, quantization), _load_processor(hf_dir), assets)

    def inputs(self, conversation: Conversation) -> dict[str, Tensor]:
        """Return what `generate` takes for a conversation that ends with a question.

        Ids are those of training: transformers' processor reads special tokens in a question as tokens.

        Raises:
            DataError: an image cannot be read, a limit is exceeded, or the template cannot render the turns.
        """
        assets = self.assets
        check_length(conversation.turns, assets.limits)
        check_media(conversation, assets)
        asked = assets.chat.prompt_tokens(conversation.turns, conversation.num_media, conversation.tools)
        tokens = expanded(asked, conversation, assets, "prompt")
        most_pixels = assets.limits.image_pixels
        media: dict[str, Any] = {}
        if conversation.images:
            media["images"] = [[decode_image(data, most_pixels, assets.to_rgb) for data in conversation.images]]
        videos = conversation.videos
        if videos:
            clips = [decode_frames(video.frames, most_pixels, assets.to_rgb) for video in videos]
            media |= {"videos": [clips], "do_sample_frames": False, "video_metadata": [list(map(_about, videos))]}
        if conversation.audios:
            rate = assets.plan.sampling_rate
            media |= {"audio": [decode_audio(x.data, rate) for x in conversation.audios], "sampling_rate": rate}
        text = assets.chat.prompt_text(conversation.turns, conversation.tools)
        processed = dict(self.processor(text=[text], return_tensors="pt", **media))
        return {name: x.to(self.model.device) for name, x in self._with_ids(processed, tokens.input_ids).items()}

    def _with_ids(self, processed: dict[str, Any], array: Any) -> dict[str, Tensor]:
        ids = torch.from_numpy(array)[None]
        processed |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "mm_token_type_ids" in processed:
            kinds, kind_of = torch.zeros_like(ids, dtype=torch.int32), {IMAGE_MARK: IMAGE, VIDEO_MARK: VIDEO}
            for mark, token_id in self.assets.chat.media_ids.items():
                kinds[ids == token_id] = kind_of[mark]
            processed["mm_token_type_ids"] = kinds
        if "cross_attention_mask" in processed:
            own_tiles, image = processed["aspect_ratio_mask"], self.model.config.image_token_id
            processed["cross_attention_mask"] = attended_tiles(array.tolist(), own_tiles, image)
        floats = {name: x.to(self.model.dtype) for name, x in processed.items() if x.is_floating_point()}
        return processed | floats

    def answer(self, conversation: Conversation, settings: Settings) -> list[int]:
        """Return the tokens of the answer. DataError like `inputs`."""
        inputs = self.inputs(conversation)
        config = _limited(settings, inputs)
        with torch.no_grad():
            # The tokenizer is for a folder's stop_strings.
            out = self.model.generate(**inputs, generation_config=config, tokenizer=self.assets.tokenizer)
        return list(out[0, inputs["input_ids"].shape[1] :].tolist())

    def stream(self, conversation: Conversation, settings: Settings) -> Iterator[str]:
        """Yield the text of the answer while it is computed. DataError like `inputs`."""
        inputs = self.inputs(conversation)
        config = _limited(settings, inputs)
        options = {"skip_prompt": True, "skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        streamer = TextIteratorStreamer(self.assets.tokenizer, **options)
        stop = _Stop()
        arguments = {"generation_config": config, "stopping_criteria": StoppingCriteriaList([stop])}
        arguments["tokenizer"] = self.assets.tokenizer
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(torch.no_grad()(self.model.generate), **inputs, **arguments, streamer=streamer)
            answer.add_done_callback(lambda _: streamer.end())  # even after an error
            try:
                yield from streamer
            finally:  # even if nobody reads the rest
                stop.asked = True
            answer.result()


def _limited(settings: Settings, inputs: dict[str, Tensor]) -> GenerationConfig:
    """Return transformers' settings, with the length that an answer to these inputs may have. DataError if none."""
    config = copy.copy(settings.config)
    config.max_new_tokens = settings.longest_answer(inputs["input_ids"].shape[1])
    return config


class _Stop(StoppingCriteria):
    """Ends an answer that is no longer wanted."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self.asked, dtype=torch.bool, device=input_ids.device)


def _about(video: Video) -> VideoMetadata:
    """Return timestamps of frames, which the processors of some classes write into the text."""
    num_frames = len(video.frames)
    return VideoMetadata(
        total_num_frames=num_frames, fps=video.fps or DEFAULT_FPS, frames_indices=list(range(num_frames))
    )


def _load_model(
    hf_dir: Path, hf: PretrainedConfig, dtype: Dtype | None, quantization: Quantization | None
) -> PreTrainedModel:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = {
        "config": hf,
        "dtype": "auto" if dtype is None else DTYPES[dtype],
        "local_files_only": True,
    }
    options["attn_implementation"] = exact_attention(hf.text_config)
    if quantization is not None:
        if any(importlib.util.find_spec(name) is None for name in ("bitsandbytes", "accelerate")):
            raise ConfigError(f"--load-in-{quantization} {NO_BITSANDBYTES}")
        # What the Hugging Face documentation recommends for inference; products are in bfloat16.
        in_4_bits = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        config = BitsAndBytesConfig(load_in_8bit=True) if quantization == "8bit" else None
        options["quantization_config"] = config or BitsAndBytesConfig(load_in_4bit=True, **in_4_bits)
        options["device_map"] = {"": device}
    disable_progress_bar()
    try:
        model = architecture_of(hf).model_class.from_pretrained(hf_dir, **options)
    except (*LOAD_ERRORS, SafetensorError) as error:
        raise ConversionError(f"the model in {hf_dir} cannot be loaded: {why_not_loaded(error)}") from error
    # transformers would fill what `Settings` leaves out, such as min_p, from the folder's file.
    model.generation_config = GenerationConfig()
    return (model if quantization is not None else model.to(device)).eval()


def _load_processor(hf_dir: Path) -> ProcessorMixin:
    try:
        return AutoProcessor.from_pretrained(hf_dir, local_files_only=True, trust_remote_code=False)
    except LOAD_ERRORS as error:
        raise ConversionError(f"the processor in {hf_dir} cannot be loaded: {why_not_loaded(error)}") from error
