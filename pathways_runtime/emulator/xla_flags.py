"""XLA's flags of this process, for programs whose options come from a client.

A client sends all of XLA's debug options with each program, as its own flags have them. As in Pathways, what was given
to the proxy server wins.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any

from pathways_runtime import _compat
from pathways_runtime.emulator import wire


def apply_own(compile_options: Any) -> None:
    """Sets in an `xla.CompileOptionsProto` what this process's XLA_FLAGS name, and nothing else."""
    build = compile_options.executable_build_options
    if not build.HasField("debug_options"):  # then jaxlib takes its flags by itself
        return
    own = _own_debug_options()
    if own is None:
        return
    for name in _named_flags():
        if name in build.debug_options.DESCRIPTOR.fields_by_name:
            build.debug_options.ClearField(name)
    build.debug_options.MergeFrom(own)


@functools.cache
def _own_debug_options() -> Any:
    """The debug options that this process's flags set, all others unset. None where no flag was given."""
    named = _named_flags()
    if not named:
        return None
    options = type(wire.CompileOptions().compile_options).FromString(_compat.default_compile_options())
    own = options.executable_build_options.debug_options
    for field, _ in own.ListFields():
        if field.name not in named:
            own.ClearField(field.name)
    return own


@functools.cache
def _named_flags() -> frozenset[str]:
    return frozenset(re.findall(r"--(xla_\w+)", os.environ.get("XLA_FLAGS", "")))
