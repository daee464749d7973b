"""Requests about arrays: from and to the host, between devices, cut and put together, deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pathways_runtime import _compat
from pathways_runtime.emulator import wire
from pathways_runtime.emulator.arrays import Array, assemble, put
from pathways_runtime.emulator.handlers import Later, handles
from pathways_runtime.emulator.host_buffers import as_array, as_bytes
from pathways_runtime.emulator.status import CODES, StatusError

if TYPE_CHECKING:
    from pathways_runtime.emulator.engine import Engine
    from pathways_runtime.emulator.session import Session

_DONATE: Final = 3
_SEMANTICS: Final = {1: _compat.ALWAYS_COPY, 2: _compat.REUSE_INPUT, _DONATE: _compat.DONATE_INPUT}


@handles("make_array_from_host_buffer", results=("array_handle",), awaited=False)
def _make_array(session: Session, request: Any, reply: Any) -> None:
    data = session.host_buffers.take(request.host_buffer_handle)
    dtype, shape = wire.read_dtype(request.dtype), wire.read_shape(request.shape)
    placement = session.engine.placement(wire.read_sharding(request.sharding), shape)
    epoch = session.engine.health.epoch
    stamp = session.engine.health.stamp(placement.slices)
    whole = _read_host(data, dtype, shape, wire.read_strides(request))
    array = put([whole] * len(placement.devices), dtype, shape, placement, stamp)
    reply.array_handle = request.array_handle or session.new_handle()
    session.arrays.add([reply.array_handle], [array], epoch)


@handles("make_arrays_from_host_buffer_shards", results=("array_handles",), awaited=False)
def _make_arrays(session: Session, request: Any, reply: Any) -> None:
    epoch = session.engine.health.epoch
    # All are taken before any is used, so that an error leaves none behind.
    taken = [[session.host_buffers.take(b.host_buffer_handle) for b in s.host_buffers] for s in request.specs]
    arrays = [_array_of_shards(session, spec, data) for spec, data in zip(request.specs, taken, strict=True)]
    reply.array_handles.extend(session.handles_for(request.array_handles, len(arrays)))
    session.arrays.add(reply.array_handles, arrays, epoch)


def _array_of_shards(session: Session, spec: Any, taken: list[Any]) -> Array:
    dtype, shape = wire.read_dtype(spec.array_spec.dtype), wire.read_shape(spec.array_spec.shape)
    placement = session.engine.placement(wire.read_sharding(spec.array_spec.sharding), shape)
    stamp = session.engine.health.stamp(placement.slices)
    shards: list[Any] = [None] * len(placement.devices)
    for indices, buffer, data in zip(spec.addressable_shard_indices, spec.host_buffers, taken, strict=True):
        shard_dtype, shard_shape = wire.read_dtype(buffer.dtype), wire.read_shape(buffer.shape)
        shard = _read_host(data, shard_dtype, shard_shape, wire.read_strides(buffer))
        for index in indices.indices:
            shards[_checked_index(index, len(shards))] = shard
    if any(shard is None for shard in shards):
        raise StatusError("INVALID_ARGUMENT", f"a device of {placement.devices} got no shard")
    return put(shards, dtype, shape, placement, stamp)


def _read_host(data: Any, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Any:
    return wire.read_strings(data) if dtype is wire.STRING else as_array(data, dtype, shape, strides)


@handles("make_error_arrays", results=("array_handles",), awaited=False)
def _make_error_arrays(session: Session, request: Any, reply: Any) -> None:
    handles_ = session.handles_for(request.array_handles, len(request.array_specs))
    session.arrays.poison(handles_, StatusError.of_number(request.error.code, request.error.message))
    reply.array_handles.extend(handles_)


@handles("copy_to_host_buffer")
def _copy_to_host_buffer(session: Session, request: Any, reply: Any) -> Later | None:
    array, strides, handle = (
        session.arrays[request.array_handle],
        wire.read_strides(request),
        request.host_buffer_handle,
    )
    value = array.check()

    def copy(reply: Any) -> None:
        if array.dtype is wire.STRING:
            value.block_until_ready()
            session.host_buffers.store(handle, memoryview(wire.write_strings(value.shards[0])))
        else:
            session.host_buffers.store(handle, as_bytes(np.asarray(value), strides))
        # A slice that was lost meanwhile took the value along; a later deletion did not.
        if array.error is not None and array.error.code == CODES["DATA_LOSS"]:
            raise array.error.again()

    if array.is_ready():
        copy(reply)
        return None
    return copy


@handles("disassemble_into_single_device_arrays", results=("result_handles",), awaited=False)
def _disassemble(session: Session, request: Any, reply: Any) -> None:
    epoch = session.engine.health.epoch
    array = session.arrays[request.array_handle]
    array.check()  # one that never was is on no devices
    values = array.parts(range(len(array.placement.devices)))
    parts = [_part(session, array, index, value) for index, value in enumerate(values)]
    reply.array_handles.extend(session.handles_for(request.result_handles, len(parts)))
    session.arrays.add(reply.array_handles, parts, epoch)


@handles("fully_replicated_shard", results=("result_handle",), awaited=False)
def _fully_replicated_shard(session: Session, request: Any, reply: Any) -> None:
    epoch = session.engine.health.epoch
    array = session.arrays[request.array_handle]
    part = _part(session, array, 0, *array.parts([0]))
    reply.array_handle = request.result_handle or session.new_handle()
    session.arrays.add([reply.array_handle], [part], epoch)


def _part(session: Session, array: Array, index: int, value: Any) -> Array:
    source = array.placement.source
    sharding = wire.Sharding((source.devices[index],), source.memory_kind)
    shape = array.shape if array.dtype is wire.STRING else value.shape
    placement = session.engine.placement(sharding, shape)
    stamp = tuple(mark for mark in array.stamp if mark[0] in placement.slices)
    return Array(value, array.dtype, shape, placement, stamp)


@handles("assemble_array_from_single_device_arrays", results=("result_handle",), awaited=False)
def _assemble(session: Session, request: Any, reply: Any) -> None:
    epoch = session.engine.health.epoch
    parts = [session.arrays[handle] for handle in request.single_device_array_handles]
    shards = [shard for part in parts for shard in part.shards()]
    shape = wire.read_shape(request.shape)
    placement = session.engine.placement(wire.read_sharding(request.sharding), shape)
    stamp = tuple(sorted({mark for part in parts for mark in part.stamp}))
    array = assemble(shards, parts[0].dtype, shape, placement, stamp)
    reply.array_handle = request.result_handle or session.new_handle()
    session.arrays.add([reply.array_handle], [array], epoch)


@handles("copy_arrays", results=("result_handles",), awaited=False)
def _copy_arrays(session: Session, request: Any, reply: Any) -> None:
    epoch = session.engine.health.epoch
    semantics = _semantics(request.copy_semantics)
    arrays = [session.arrays[handle] for handle in request.array_handles]
    copies = [_copy(session, array, request, semantics) for array in arrays]
    reply.array_handles.extend(session.handles_for(request.result_handles, len(copies)))
    session.arrays.add(reply.array_handles, copies, epoch)


def _copy(session: Session, array: Array, request: Any, semantics: Any) -> Array:
    value, source = array.check(), array.placement.source
    devices = tuple(request.device_ids) or source.devices
    memory_kind = request.memory_kind or (source.memory_kind if not request.device_ids else None)
    sharding = wire.Sharding(devices, memory_kind, source.op_sharding, source.shard_shape)
    placement = session.engine.placement(sharding, array.shape)
    stamp = session.engine.health.stamp(placement.slices)
    if array.dtype is not wire.STRING:
        [value] = _compat.copy_arrays([value], [placement.sharding], semantics)
    return Array(value, array.dtype, array.shape, placement, stamp)


def _semantics(number: int) -> Any:
    if number not in _SEMANTICS:
        raise StatusError("INVALID_ARGUMENT", f"copy semantics {number} are none of {sorted(_SEMANTICS)}")
    return _SEMANTICS[number]


@handles("reshard_arrays", results=("result_handles",), awaited=False)
def _reshard_arrays(session: Session, request: Any, reply: Any) -> None:
    epoch = session.engine.health.epoch
    arrays = [session.arrays[handle] for handle in request.array_handles]
    shardings = [wire.read_sharding(spec.sharding) for spec in request.array_specs]
    results = [reshard(session.engine, array, to) for array, to in zip(arrays, shardings, strict=True)]
    if request.copy_semantics == _DONATE:
        session.arrays.delete(request.array_handles)
    reply.array_handles.extend(session.handles_for(request.result_handles, len(results)))
    session.arrays.add(reply.array_handles, results, epoch)


def reshard(engine: Engine, array: Array, sharding: wire.Sharding) -> Array:
    """The array cut anew. By the host, in whose memory it is anyway: no program runs that could wait for devices."""
    placement = engine.placement(sharding, array.shape)
    stamp = engine.health.stamp(placement.slices)
    if array.dtype is wire.STRING:
        return assemble([array.shards()[0]] * len(placement.devices), array.dtype, array.shape, placement, stamp)
    whole = np.asarray(array.check())
    shards = [whole[index] for index in placement.indices(array.shape)]
    return put(shards, array.dtype, array.shape, placement, stamp)


@handles("remap_arrays", results=("result_handles",), awaited=False)
def _remap_arrays(session: Session, request: Any, reply: Any) -> None:
    epoch = session.engine.health.epoch
    arrays = [session.arrays[handle] for handle in request.array_handles]
    sources = [array.shards() for array in arrays]
    results = [_remap(session, request.plan, index, arrays, sources) for index in range(len(request.plan.output_specs))]
    reply.array_handles.extend(session.handles_for(request.result_handles, len(results)))
    session.arrays.add(reply.array_handles, results, epoch)


def _remap(session: Session, plan: Any, index: int, arrays: list[Array], sources: list[list[Any]]) -> Array:
    spec = plan.output_specs[index]
    dtype, shape = wire.read_dtype(spec.dtype), wire.read_shape(spec.shape)
    placement = session.engine.placement(wire.read_sharding(spec.sharding), shape)
    shards: list[Any] = [None] * len(placement.devices)
    stamps: set[tuple[int, int]] = set()
    for mapping in plan.mappings:
        if mapping.out_array == index:
            in_array = _checked_index(mapping.in_array, len(arrays))
            stamps.update(arrays[in_array].stamp)
            for source, target in _intervals(mapping, len(sources[in_array]), len(shards)):
                shards[target] = sources[in_array][source]
    if any(shard is None for shard in shards):
        raise StatusError("INVALID_ARGUMENT", f"the plan gives no shard to a device of output {index}")
    stamp = tuple(sorted(mark for mark in stamps if mark[0] in placement.slices))
    return assemble(shards, dtype, shape, placement, stamp)


def _intervals(mapping: Any, num_sources: int, num_targets: int) -> list[tuple[int, int]]:
    """(index of the shard in the source, in the target) for each shard that a mapping moves."""
    pairs: list[tuple[int, int]] = []
    fields = (
        mapping.from_start,
        mapping.from_end,
        mapping.from_step,
        mapping.to_start,
        mapping.to_end,
        mapping.to_step,
    )
    for from_start, from_end, from_step, to_start, to_end, to_step in zip(*fields, strict=True):
        taken = _interval(from_start, from_end, from_step, num_sources)
        pairs += zip(taken, _interval(to_start, to_end, to_step, num_targets), strict=True)
    return pairs


def _interval(start: int, end: int, step: int, count: int) -> range:
    indices = range(start, end, step) if step > 0 else range(0)
    if not indices or start < 0 or indices[-1] >= count:
        raise StatusError("INVALID_ARGUMENT", f"interval {start}:{end}:{step} leads out of {count} shards")
    return indices


def _checked_index(index: int, count: int) -> int:
    if not 0 <= index < count:
        raise StatusError("INVALID_ARGUMENT", f"index {index} is none of 0 to {count - 1}")
    return index


# The future of a deletion. It is ready at once, so nothing is kept for it.
DELETION: Final = 1 << 63


@handles("delete_array", numbered=False, awaited=False)
def _delete_array(session: Session, request: Any, reply: Any) -> None:
    session.arrays.delete(request.array_handle)
    reply.deletion_future_handle = DELETION | session.new_handle()


@handles("is_array_deleted")
def _is_array_deleted(session: Session, request: Any, reply: Any) -> None:
    reply.deleted = session.arrays[request.array_handle].is_deleted()


@handles("destruct_array", numbered=False, awaited=False)
def _destruct_array(session: Session, request: Any, reply: Any) -> None:
    unknown = session.arrays.forget(request.array_handle)
    if unknown:
        raise StatusError("NOT_FOUND", f"there are no arrays {unknown}")


@handles("get_default_layout")
def _get_default_layout(session: Session, request: Any, reply: Any) -> None:
    [device] = session.engine.jax_devices([request.device_id])
    dtype = wire.read_dtype(request.dtype)
    reply.serialized_pjrt_layout = _compat.default_layout(session.engine.client, dtype, request.dims, device)
