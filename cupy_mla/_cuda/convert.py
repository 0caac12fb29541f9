"""Preparing the conversion of a cache: a copy, a gather to slots, or a decoding and encoding."""

from __future__ import annotations

from cupy_mla._plan import ConvertPlan

from .device import Device
from .read_launch import PreparedRead, ReadLaunch, parts_of, pieces_of
from .target import CallTarget

# Places of a call's addresses.
_SOURCE, _SOURCE_SCALE, _DESTINATION, _DESTINATION_SCALE, _SLOTS = range(5)


def prepare_convert(
    device: Device, plan: ConvertPlan, source: CallTarget, destination: CallTarget
) -> PreparedRead:
    """Prepare a conversion.

    A call gives the addresses of the source, its scale, the destination, its scale, and the slots.
    """
    launch = ReadLaunch(device, plan.count)
    taken = pieces_of(plan.source) if plan.copies else parts_of(plan.source)
    put = pieces_of(plan.destination)
    launch.cache("source", source.entry, plan.source, taken, _SOURCE, _SOURCE_SCALE)
    launch.cache(
        "destination", destination.entry, plan.destination, put, _DESTINATION, _DESTINATION_SCALE
    )
    launch.arguments["to_slots"] = 1
    if plan.slot_dtype is None:
        launch.every_slot()
    else:
        launch.slots(plan.slot_stride, plan.slot_dtype, _SLOTS)
    if plan.copies:
        return launch.copy(put)
    if plan.destination.layout.is_fp8:
        return launch.encode(plan.source.layout, plan.destination.layout)
    return launch.decode(plan.source.layout, plan.destination.layout.storage_dtype)
