"""Requests about programs: compile, describe, execute."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from pathways_runtime.emulator import wire
from pathways_runtime.emulator.arrays import Array
from pathways_runtime.emulator.colocated import compile_colocated
from pathways_runtime.emulator.handlers import Later, handles
from pathways_runtime.emulator.plugin_programs import compile_plugin
from pathways_runtime.emulator.status import StatusError
from pathways_runtime.emulator.xla_programs import XlaProgram

if TYPE_CHECKING:
    from pathways_runtime.emulator.session import Session

_log: Final = logging.getLogger(__name__)


class Program(Protocol):
    """A compiled program of any kind, as `LoadedExecutable` requests see it."""

    name: str
    devices: tuple[int, ...]
    fingerprint: bytes | None

    @property
    def outputs(self) -> Sequence[Any]:
        """One `LoadedExecutableExecuteResponse.Output` for each output, without a handle."""

    def describe(self, reply: Any) -> None:
        """Fills a `LoadedExecutableMetadataResponse`."""

    def cost_analysis(self) -> dict[str, float]:
        """Figures by name. StatusError where this kind of program has none."""

    def text(self) -> str:
        """The program as people read it. StatusError where this kind of program has no text."""

    def launch(self, arguments: Sequence[Array], kept: Sequence[int], wants_token: bool) -> tuple[list[Array], Any]:
        """Starts it: (outputs, None or a token to wait for). `kept` are the arguments that must not be donated."""


# (session, serialized program, serialized compile options) -> program. Blocks.
Compiler = Callable[["Session", bytes, bytes], Program]
COMPILERS: Final[dict[str, Compiler]] = {
    "XlaProgram": lambda session, program, options: XlaProgram(session.engine, program, options),
    "PluginProgram": lambda session, program, options: compile_plugin(session.engine, program, options),
    "CustomCallProgram": compile_colocated,
}


@handles("compile")
def _compile(session: Session, request: Any, reply: Any) -> Later:
    kind = request.program.type_name.rpartition("::")[2]
    compiler = COMPILERS.get(kind)
    if compiler is None:
        raise StatusError("UNIMPLEMENTED", f"a program of type {request.program.type_name!r} is not supported")
    if request.host_callbacks:
        raise StatusError("UNIMPLEMENTED", "a program with callbacks into the client's process is not supported")

    def compile_(reply: Any) -> None:
        program = compiler(session, request.program.data, request.compile_options.data)
        handle = session.new_handle()
        session.programs[handle] = program
        reply.loaded_executable_handle = handle
        reply.name = program.name
        reply.num_devices = len(program.devices)
        reply.device_ids.extend(program.devices)
        reply.addressable_device_ids.extend(program.devices)
        if program.fingerprint:
            reply.fingerprint_value = program.fingerprint
        reply.ready_future_handle = session.new_handle()
        session.futures[reply.ready_future_handle] = None

    return compile_


def _program(session: Session, handle: int) -> Any:
    try:
        return session.programs[handle]
    except KeyError:
        raise StatusError("NOT_FOUND", f"there is no executable {handle}") from None


@handles("loaded_executable_metadata")
def _metadata(session: Session, request: Any, reply: Any) -> None:
    _program(session, request.loaded_executable_handle).describe(reply)


@handles("loaded_executable_cost_analysis")
def _cost_analysis(session: Session, request: Any, reply: Any) -> Later:
    program = _program(session, request.loaded_executable_handle)
    return lambda reply: wire.write_attributes(reply.attributes, program.cost_analysis())


@handles("loaded_executable_human_readable_program_text")
def _text(session: Session, request: Any, reply: Any) -> Later:
    program = _program(session, request.loaded_executable_handle)

    def write(reply: Any) -> None:
        reply.human_readable_program_text = program.text()

    return write


@handles("loaded_executable_execute", results=("result_array_handle",))
def _execute(session: Session, request: Any, reply: Any) -> None:
    program = _program(session, request.loaded_executable_handle)
    wants_status = request.execute_options.fill_status
    given = request.result_array_handle
    handles_ = session.handles_for(given, len(program.outputs))
    error: StatusError | None = None
    token = None
    try:
        epoch = session.engine.health.epoch
        session.stream = request.execute_options.execution_stream_id
        arguments = [session.arrays[handle] for handle in request.args_handles]
        outputs, token = program.launch(arguments, request.execute_options.non_donatable_input_indices, wants_status)
        session.arrays.add(handles_, outputs, epoch)
    except Exception as failure:
        # The client dispatches and goes on; it learns of an error when it uses an output.
        error = StatusError.of(failure)
        if not isinstance(failure, StatusError):
            _log.info("session %d: %s failed", session.id, program.name, exc_info=failure)
        session.arrays.poison(handles_, error)
    if wants_status:
        reply.status_handle = request.result_status_handle or session.new_handle()
        session.results[reply.status_handle] = (token, error)
    if not given:
        for handle, output in zip(handles_, program.outputs, strict=True):
            reply.outputs.add(array_handle=handle).MergeFrom(output)


@handles("loaded_executable_fetch_execute_result")
def _fetch_execute_result(session: Session, request: Any, reply: Any) -> Later | None:
    try:
        token, error = session.results.pop(request.result_status_handle)
    except KeyError:
        raise StatusError("NOT_FOUND", f"there is no result {request.result_status_handle}") from None
    if error is not None:
        raise error.again()
    return None if token is None else lambda reply: token.block_until_ready()


@handles("loaded_executable_delete")
def _delete(session: Session, request: Any, reply: Any) -> None:
    _program(session, request.loaded_executable_handle)
    reply.future_handle = session.new_handle()
    session.futures[reply.future_handle] = None


@handles("loaded_executable_is_deleted")
def _is_deleted(session: Session, request: Any, reply: Any) -> None:
    reply.is_deleted = request.loaded_executable_handle not in session.programs


@handles("loaded_executable_destruct", awaited=False)
def _destruct(session: Session, request: Any, reply: Any) -> None:
    _program(session, request.loaded_executable_handle)
    del session.programs[request.loaded_executable_handle]
