"""Process groups, stages and batches; on a machine without CUDA, also what megatron-core needs to run there.

megatron-core binds torch functions when it is imported, so the CPU platform is installed by importing this
package; the packages that import megatron.core import this one first.
"""

from llava_mcore.compat.cpu import install

install()
