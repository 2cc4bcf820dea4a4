"""Loops that hold JPEGs in memory and do only what cannot be left out: decode, resize (bicubic, antialiased), crop."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import functional as F

CROPPED = 336


@dataclass(frozen=True)
class Speed:
    """What one stretch of work did; cpu is the seconds of all processes together."""

    samples: int
    tokens: int
    seconds: float
    cpu: float

    @property
    def per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def cpu_per_sample(self) -> float:
        return self.cpu / self.samples


def pillow(data: bytes) -> Tensor:
    """Decode as Hugging Face's processors have it: uint8 [3, h, w]."""
    return F.pil_to_tensor(Image.open(io.BytesIO(data)).convert("RGB"))


def torchvision(data: bytes) -> Tensor:
    """Decode with what torchvision brings: uint8 [3, h, w]."""
    return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)


def bare_loop(pictures: Sequence[bytes], seconds: float, decode: Callable[[bytes], Tensor]) -> Speed:
    """Decode and resize images for so long, and nothing else."""
    begin, cpu, number = time.perf_counter(), time.process_time(), 0
    for data in itertools.cycle(pictures):
        image = F.resize(decode(data), [CROPPED], interpolation=F.InterpolationMode.BICUBIC, antialias=True)
        F.center_crop(image, [CROPPED, CROPPED])
        number += 1
        if time.perf_counter() - begin >= seconds:
            break
    return Speed(number, 0, time.perf_counter() - begin, time.process_time() - cpu)


class BareProcesses:
    """Processes that run the bare loop on request; without any, this process runs it."""

    def __init__(self, pictures: Sequence[bytes], processes: int) -> None:
        self._pictures, self._pool = pictures, None
        if processes:
            self._pool = multiprocessing.get_context("fork").Pool(processes, torch.set_num_threads, (1,))
        self._processes = processes

    def run(self, seconds: float, decode: Callable[[bytes], Tensor]) -> Speed:
        """Run all of them at once."""
        if self._pool is None:
            return bare_loop(self._pictures, seconds, decode)
        found = self._pool.starmap(bare_loop, [(self._pictures, seconds, decode)] * self._processes, chunksize=1)
        return Speed(sum(f.samples for f in found), 0, max(f.seconds for f in found), sum(f.cpu for f in found))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.terminate()
