"""Images of any size and videos as packed patches (Qwen-VL): tokens, positions along three axes, the tower's fields.

Sizes, patch order, text and positions are asked of transformers' own functions, so no rounding of ours can disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    BaseImageProcessor,
    BaseVideoProcessor,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from transformers.video_utils import VideoMetadata

from llava_mcore.errors import ConversionError, DataError
from llava_mcore.media.batch_fields import FEATURE_POSITIONS, WINDOW_ORDER
from llava_mcore.media.media import DEFAULT_FPS, MediaPlan, MediaTokens, Processing, Size, VideoShape
from llava_mcore.models.vision.families.qwen import Grid, QwenTower
from llava_mcore.models.vision.features import patch_side

IMAGE, VIDEO = 1, 2
"""Values of transformers' mm_token_type_ids, in which text is 0."""
NUM_KNOWN = 512
"""Grids of which tokens are kept: images of a dataset often have the same size."""


class PatchPlan(MediaPlan):
    """Images are resized to whole squares of patches. A square is a token; in a video it has two frames."""

    num_axes = 3
    any_size = True

    def __init__(
        self, hf: PretrainedConfig, tower: QwenTower, model_class: type[PreTrainedModel], processing: Processing
    ) -> None:
        """Set up the plan.

        Args:
            model_class: Hugging Face class whose `get_rope_index` defines the position ids.

        Raises:
            ConversionError: an image or video processor whose patches are not those of the tower.
        """
        self._arguments = {"hf": hf, "tower": tower, "model_class": model_class, "processing": processing}
        self.hf, self.tower, self.model_class, self.fields = hf, tower, model_class, tower.fields
        self.image_token_id: int = hf.image_token_id
        self.video_token_id = hf.video_token_id
        self.merged = tower.merged(hf.vision_config)
        # The smallest image is one square of patches, which becomes one token.
        self.patches_per_tile = self.rows_per_tile = self.merged
        self.tokens_per_tile = 1
        self.frames_per_step = hf.vision_config.temporal_patch_size
        self.processing = processing
        _check_patches(processing.image_processor, hf)
        if processing.videos is not None:
            _check_patches(processing.videos, hf)
        self.of_grid = lru_cache(NUM_KNOWN)(self._image)
        self.of_video = lru_cache(NUM_KNOWN)(self._video)

    def __getstate__(self) -> dict[str, Any]:
        """The caches are not copied."""
        return self._arguments

    def __setstate__(self, state: dict[str, Any]) -> None:
        PatchPlan.__init__(self, **state)

    def tokens(self, sizes: Sequence[Size]) -> list[MediaTokens]:
        """Return the tokens of a conversation's images. DataError for proportions that the processor refuses."""
        return [self.of_grid(self.grid_of(*size)) for size in sizes]

    def video_tokens(self, videos: Sequence[VideoShape]) -> list[MediaTokens]:
        """Return the tokens of a conversation's videos. DataError like `tokens`."""
        return [self.of_video(video) for video in videos]

    def video_pixels(
        self, processor: BaseVideoProcessor, frames: Tensor, tokens: MediaTokens, **options: Any
    ) -> Tensor:
        """Return the patches [patches, f] of a video; no frame is left out."""
        return _processed(processor, frames, **options)["pixel_values_videos"]

    def chunk_pixels(self, processor: BaseVideoProcessor, frames: Tensor, video: VideoShape, **options: Any) -> Tensor:
        """Return the patches of some frames of a video, resized as all of it is."""
        _, rows, columns = self.video_grid(video)
        size = SizeDict(height=rows * processor.patch_size, width=columns * processor.patch_size)
        # The resizing of all video processors, of which Qwen's computes the size from the number of frames.
        resized = BaseVideoProcessor.resize(processor, image=frames, size=size, resample=processor.resample)
        return _processed(processor, resized, do_resize=False, **options)["pixel_values_videos"]

    def grid_of(self, height: int, width: int) -> Grid:
        """Return the patches of an image of this height and width. DataError like `tokens`."""
        images = self.processing.image_processor
        try:
            resized = smart_resize(
                height,
                width,
                factor=images.patch_size * images.merge_size,
                min_pixels=images.size["shortest_edge"],
                max_pixels=images.size["longest_edge"],
            )
        except ValueError as error:
            raise DataError(f"an image of {width} x {height} pixels: {error}") from error
        return 1, resized[0] // images.patch_size, resized[1] // images.patch_size

    def video_grid(self, video: VideoShape) -> Grid:
        """Return the patches of a video: its processor is asked, on frames without memory. DataError like `tokens`."""
        assert self.processing.videos is not None, "load_assets says why there is no video processor"
        frames = torch.empty(video.num_frames, 3, video.height, video.width, dtype=torch.uint8, device="meta")
        try:
            processed = _processed(self.processing.videos, frames, do_rescale=False, do_normalize=False)
        except ValueError as error:
            least = self.hf.vision_config.temporal_patch_size
            if video.num_frames < least and isinstance(self.processing.videos, Qwen3VLVideoProcessor):
                raise DataError(
                    f"a video has {video.num_frames} frame, but {self.model_class.__name__} needs {least}: prepare it "
                    "with a higher --video-fps, or list the frame twice"
                ) from error
            raise DataError(f"a video of {video.width} x {video.height} pixels: {error}") from error
        frames_, rows, columns = processed["video_grid_thw"][0].tolist()
        return frames_, rows, columns

    def _image(self, grid: Grid) -> MediaTokens:
        """Return the tokens of an image with this grid of patches."""
        ids = np.full(math.prod(grid) // self.merged, self.image_token_id, dtype=np.int64)
        return self._tokens(ids, self.image_token_id, grid, image_grid_thw=torch.tensor([grid]))

    def _video(self, video: VideoShape) -> MediaTokens:
        """Return the tokens of a video."""
        grid = self.video_grid(video)
        fps = DEFAULT_FPS if video.fps is None else video.fps
        seconds = torch.tensor([self.hf.vision_config.temporal_patch_size / fps])
        ids = self.video_ids(grid, video.num_frames, fps)
        token = self.hf.video_token_id
        return self._tokens(ids, token, grid, video_grid_thw=torch.tensor([grid]), second_per_grid_ts=seconds)

    def video_ids(self, grid: Grid, num_frames: int, fps: float) -> NDArray[np.int64]:
        """Return what the processor puts at the position of a video's placeholder."""
        return np.full(math.prod(grid) // self.merged, self.hf.video_token_id, dtype=np.int64)

    def _tokens(self, ids: NDArray[np.int64], token: int, grid: Grid, **grids: Tensor) -> MediaTokens:
        features, values = np.flatnonzero(ids == token), self.tower.values(self.hf.vision_config, grid)
        if WINDOW_ORDER in values:  # the order in which the tower has them, and the connector returns them
            features = features[values[WINDOW_ORDER]]
        positions, end = self._positions(ids, token, **grids)
        return MediaTokens(
            ids=ids,
            num_rows=math.prod(grid),
            num_patches=math.prod(grid),
            num_features=len(features),
            values={FEATURE_POSITIONS: features, **values},
            positions=positions,
            next_position=end,
        )

    def _positions(self, ids: NDArray[np.int64], token: int, **grids: Tensor) -> tuple[NDArray[np.int64], int]:
        """Return the positions [3, n] of tokens at the beginning of a text, and that of the token after them.

        Hugging Face's own method is asked, of a model without weights: it is where its versions differ.
        """
        model: Any = object.__new__(self.model_class)
        nn.Module.__init__(model)
        model.config = self.hf
        text = torch.tensor([[*ids.tolist(), 0]])
        kinds = torch.zeros_like(text)
        kinds[0, :-1][text[0, :-1] == token] = IMAGE if token == self.image_token_id else VIDEO
        positions, _ = model.get_rope_index(text, kinds, **grids)
        return positions[:, 0, :-1].numpy(), int(positions[0, 0, -1])


class TimedPlan(PatchPlan):
    """Qwen2.5-VL: positions along the axis of time count seconds."""

    timed = True


class TimestampPlan(TimedPlan):
    """Qwen3-VL: every step of time of a video has its seconds as text, and marks around its tokens."""

    def video_ids(self, grid: Grid, num_frames: int, fps: float) -> NDArray[np.int64]:
        """Return what the processor puts at the position of a video's placeholder, by its own method."""
        tokenizer = self.processing.tokenizer
        processor: Any = object.__new__(Qwen3VLProcessor)
        processor.video_processor = self.processing.videos
        processor.video_token = str(tokenizer.convert_ids_to_tokens(self.hf.video_token_id))
        processor.vision_start_token = str(tokenizer.convert_ids_to_tokens(self.hf.vision_start_token_id))
        processor.vision_end_token = str(tokenizer.convert_ids_to_tokens(self.hf.vision_end_token_id))
        about = VideoMetadata(total_num_frames=num_frames, fps=fps, frames_indices=list(range(num_frames)))
        video = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [about]}
        text = processor.replace_video_token(video, 0)
        encoder = tokenizer.backend_tokenizer
        encoder.no_truncation()
        encoder.no_padding()
        return np.asarray(encoder.encode(text, add_special_tokens=False).ids, dtype=np.int64)


def _processed(processor: BaseVideoProcessor, frames: Tensor, **options: Any) -> Any:
    """Return what a video processor makes of a video [frames, 3, height, width], all frames of which are kept."""
    return processor(videos=[frames], do_sample_frames=False, return_tensors="pt", **options)


def _check_patches(processor: BaseImageProcessor | BaseVideoProcessor, hf: PretrainedConfig) -> None:
    """Raise ConversionError for a processor whose patches are not those of the tower."""
    vision, values = hf.vision_config, processor.to_dict()
    expected = {
        "patch_size": patch_side(vision),
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "do_resize": True,
    }
    wrong = [f"{key} = {values.get(key)}" for key, value in expected.items() if values.get(key) != value]
    if wrong:
        raise ConversionError(
            f"{type(processor).__name__} has {', '.join(wrong)}, but the tower takes "
            f"{', '.join(f'{key} = {value}' for key, value in expected.items())}; correct the processor's settings"
        )
