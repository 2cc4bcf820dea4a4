"""Environment variables that training processes on GPUs get unless they are set."""

from __future__ import annotations

ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables for torch's memory allocators: the current and the older name."""
ALLOCATOR = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""The number of pictures, and so the size of tensors, differs from batch to batch: without expandable segments much of
a GPU's memory is lost to fragmentation. Eight threads pin the host memory for saves in the background: one takes more
than twice as long."""
LAUNCH_QUEUES = ("CUDA_SCALE_LAUNCH_QUEUES", "4x")
"""CUDA lets the host queue about a thousand kernels. The backward pass of a vision tower alone has as many short ones,
after which the host would be late with the next forward pass."""
GRAPH_REGISTER = ("NCCL_GRAPH_REGISTER", "0")
"""Otherwise NCCL registers the memory of messages that CUDA graphs capture. megatron-core 0.19.2 refuses graphs with
that and expandable segments, because of illegal memory accesses."""
