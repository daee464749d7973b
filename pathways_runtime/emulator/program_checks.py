"""What a program must not say, since XLA would end the process or wait for ever instead of refusing it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any, Final

from pathways_runtime._compat import mlir
from pathways_runtime.emulator.status import StatusError

# XLA computes sizes in 64 bits, and aborts when one overflows. No machine has memory for such a tensor.
_MAX_ELEMENTS: Final = 1 << 43
# They wait for a host that feeds them, which nobody does here.
_FED_BY_HOST: Final = frozenset({"stablehlo.infeed", "stablehlo.outfeed"})


def check_program(module: Any) -> None:
    """StatusError for a module with a tensor that cannot be, with calls in a circle, or that waits for the host."""
    types: set[Any] = set()
    kinds: set[str] = set()
    calls: dict[str, set[str]] = {}
    for function in module.body.operations:
        attributes = function.attributes
        if "function_type" in attributes:
            types.update(mlir.FunctionType(mlir.TypeAttr(attributes["function_type"]).value).inputs)
            calls[str(mlir.StringAttr(attributes["sym_name"]).value)] = _survey(function, types, kinds)
    for kind in kinds & _FED_BY_HOST:
        raise StatusError("UNIMPLEMENTED", f"a program with {kind} is not supported: nothing feeds it")
    for type_ in types:
        _check_type(type_)
    _check_calls(calls)


def _survey(function: Any, types: set[Any], kinds: set[str]) -> set[str]:
    """Adds the types and kinds of its operations; returns the functions that it calls."""
    callees: set[str] = set()

    def visit(operation: Any) -> Any:
        kinds.add(operation.name)
        types.update(result.type for result in operation.results)
        if operation.name == "func.call":
            callees.add(mlir.FlatSymbolRefAttr(operation.attributes["callee"]).value)
        return mlir.WalkResult.ADVANCE

    function.operation.walk(visit)
    return callees


def _check_type(type_: Any) -> None:
    try:
        shape = mlir.RankedTensorType(type_).shape
    except ValueError:  # a token or a tuple
        return
    if any(side < 0 for side in shape):  # XLA refuses only the number that stands for "not known"
        raise StatusError("INVALID_ARGUMENT", f"{type_} has a dimension without a size")
    if math.prod(max(side, 1) for side in shape) > _MAX_ELEMENTS:
        raise StatusError("INVALID_ARGUMENT", f"{type_} is too large: {_MAX_ELEMENTS} elements are the most")


def _check_calls(calls: Mapping[str, Set[str]]) -> None:
    """Takes away functions that call nothing any more, until none is left."""
    left = {name: set(callees) & calls.keys() for name, callees in calls.items()}
    while left:
        done = {name for name, callees in left.items() if not callees}
        if not done:
            raise StatusError(
                "INVALID_ARGUMENT", f"functions that call each other in a circle: {', '.join(sorted(left))}"
            )
        left = {name: callees - done for name, callees in left.items() if name not in done}
