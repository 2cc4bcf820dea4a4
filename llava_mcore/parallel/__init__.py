"""Process groups, stages and batches; on a machine without CUDA, also the patches that megatron-core needs there.

megatron-core binds torch functions when it is imported, so importing this package installs the CPU patches; packages
that import megatron.core import this one first.
"""

from llava_mcore.compat.cpu import install

install()
