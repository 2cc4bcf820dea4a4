"""All patches of third-party packages, and differences between their versions. Each file names its versions.

One file per package or part of one; `megatron/` and `energon/` are folders.
"""
