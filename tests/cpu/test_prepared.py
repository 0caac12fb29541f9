"""Launches that are kept ready: found again, and not without end."""

from __future__ import annotations

import gc
import weakref

from cupy_mla._cuda.prepared import Known


def test_what_was_made_for_a_key_is_found_again():
    known = Known()
    made = [known.get(key, object) for key in ("a", "b", "a")]
    assert made[0] is made[2]
    assert made[0] is not made[1]


class Launch:
    """Something that can be counted as long as it lives."""


def test_a_service_of_ever_new_shapes_does_not_fill_the_memory():
    """A step of another number of tokens is another plan."""
    known = Known()
    alive = [weakref.ref(known.get(tokens, Launch)) for tokens in range(3000)]
    gc.collect()
    assert 0 < sum(ref() is not None for ref in alive) <= 512
