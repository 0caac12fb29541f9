"""Order between the streams on which arrays are made and the one on which a kernel runs.

Arrays of the framework that owns the cache are used on that framework's current stream, where
nothing has to be ordered. Everything else is waited for by event, and kept until it was used.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from cupy_mla._arrays import ArrayRef

from .device import Device

#: What a DLPack exporter or an array interface calls the legacy default stream.
_LEGACY_DEFAULT = 1


class Keeper:
    """Keeps foreign arrays alive until the work that uses them is done.

    Parameters
    ----------
    device : Device
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._pending: deque[tuple[Any, list[Any]]] = deque()

    def keep(self, owners: list[Any], stream: int) -> None:
        """Keep objects until what was launched on a stream so far is done."""
        event = self._device.record_event(stream)
        with self._lock:
            while self._pending and self._device.event_is_done(self._pending[0][0]):
                self._pending.popleft()
            self._pending.append((event, owners))


def wait_for_producers(device: Device, arrays: Iterable[ArrayRef], stream: int) -> list[ArrayRef]:
    """Make a stream wait for whatever fills these arrays; return those made elsewhere.

    While the stream is captured, nothing is waited for: a graph holds no order with work outside.
    """
    foreign: list[ArrayRef] = []
    waited: set[int] = set()
    capturing: bool | None = None
    for ref in arrays:
        producer = producer_stream(device, ref)
        if producer == stream:
            continue
        foreign.append(ref)
        if capturing is None:
            capturing = device.is_capturing(stream)
        if capturing:
            continue
        if producer is None:
            # An exporter that knows where its array is made orders the stream behind that.
            export_to(ref.owner, stream)
        elif producer not in waited:
            waited.add(producer)
            device.wait_stream(stream, producer)
    return [] if capturing else foreign


def hand_over(device: Device, made: Iterable[ArrayRef], stream: int) -> None:
    """Make the current streams of new arrays' frameworks wait for the stream that fills them.

    Not while one of these is captured: a graph holds no order with work outside.
    """
    for consumer in {device.current_stream(ref.framework) for ref in made} - {stream}:
        if not (device.is_capturing(stream) or device.is_capturing(consumer)):
            device.wait_stream(consumer, stream)


def producer_stream(device: Device, ref: ArrayRef) -> int | None:
    """Return the stream on which an array is made; None where only its exporter knows."""
    if ref.framework in ("cupy", "torch"):
        return device.current_stream(ref.framework)
    if ref.framework in ("jax", "dlpack"):
        return None
    interface = getattr(ref.owner, "__cuda_array_interface__", None) or {}
    stream = interface.get("stream")
    return 0 if stream is None or stream == _LEGACY_DEFAULT else int(stream)


def export_to(owner: Any, stream: int) -> None:
    """Ask a DLPack exporter to make its array ready for a stream; the capsule is dropped."""
    exporter = owner[0] if isinstance(owner, tuple) else owner
    exporter.__dlpack__(stream=stream or _LEGACY_DEFAULT)


def hold(
    device: Device, keeper: Keeper, foreign: list[ArrayRef], stream: object, pointer: int
) -> None:
    """See to it that arrays made elsewhere outlive their use on a stream.

    torch's allocator may only be told of torch's own streams, which live as long as the process:
    it records an event on the stream when the tensor goes, and a stream that is gone by then ends
    the program. All other arrays, and tensors on other streams, are kept here.
    """
    owners = []
    for ref in foreign:
        if not (ref.framework == "torch" and device.record_torch_stream(ref.owner, stream)):
            owners.append(ref.owner)
    if owners:
        keeper.keep(owners, pointer)
