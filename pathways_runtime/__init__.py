"""What a training script imports to run on Pathways. Importing it imports no jax.

    import pathways_runtime

    pathways_runtime.initialize()  # before the first use of JAX's devices

JAX then has one process that sees every chip of every slice: `jax.process_index()` is 0, and `jax.local_devices()`
is `jax.devices()`.
"""

from pathways_runtime._initialize import PathwaysError as PathwaysError
from pathways_runtime._initialize import VersionMismatchError as VersionMismatchError
from pathways_runtime._initialize import initialize as initialize
from pathways_runtime._initialize import is_pathways as is_pathways
from pathways_runtime._version import __version__ as __version__

__all__ = ["PathwaysError", "VersionMismatchError", "__version__", "initialize", "is_pathways"]
