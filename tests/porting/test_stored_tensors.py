"""Stored tensors are read one after the other, the next one meanwhile where both are small."""

import threading

import numpy as np
import pytest

from jaxformer.porting.formats import tensors as t
from jaxformer.porting.formats.tensors import StoredTensor, read_each


def stored(name, begin):
    """Returns a tensor of four bytes that says when it is read."""

    def read():
        begin(name)
        return np.full(4, ord(name), np.uint8)

    return name, StoredTensor((4,), np.dtype(np.uint8), read)


def test_the_next_array_is_read_while_others_work_on_the_last():
    is_read = {name: threading.Event() for name in "abc"}

    def wait_for_next(array):
        following = chr(array[0] + 1)
        assert following not in is_read or is_read[following].wait(60)
        return chr(array[0])

    tensors = [stored(name, lambda name: is_read[name].set()) for name in "abc"]
    found = list(read_each(tensors, t.digest, wait_for_next))
    expected = [t.digest(np.full(4, ord(name), np.uint8)) for name in "abc"]
    assert found == [(name, [d, name]) for name, d in zip("abc", expected, strict=True)]


def test_of_large_arrays_one_is_in_memory(monkeypatch):
    monkeypatch.setattr(t, "AHEAD_BYTES", 7)
    events = []
    tensors = [stored(name, lambda name: events.append(f"read {name}")) for name in "ab"]
    found = list(read_each(tensors, lambda array: events.append(f"work on {chr(array[0])}")))
    assert events == ["read a", "work on a", "read b", "work on b"]
    assert found == [("a", [None]), ("b", [None])]


def test_what_a_work_raises_arrives():
    def fail(array):
        raise OSError("full")

    reads = []
    with pytest.raises(OSError, match="full"):
        list(read_each([stored(name, reads.append) for name in "abc"], fail))
    assert reads == ["a", "b"]
