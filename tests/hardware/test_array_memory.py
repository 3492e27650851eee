"""Parameters lie one after the other, and XLA uses them there."""

import gc
import mmap
import weakref

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxformer import from_torch
from jaxformer.hardware import array_memory
from jaxformer.hardware.array_memory import ALIGNMENT, PAGE_BYTES, ArrayMemory, is_worth_pages

SHAPES = [((3, 1000), np.float32), ((), np.float64), ((7,), ml_dtypes.bfloat16), ((0, 4), np.int8)]


def test_arrays_begin_where_xla_wants_them_and_do_not_overlap():
    memory = ArrayMemory()
    arrays = [memory.empty(shape, dtype) for shape, dtype in SHAPES * 3]
    for number, (array, (shape, dtype)) in enumerate(zip(arrays, SHAPES * 3, strict=True)):
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.ctypes.data % ALIGNMENT == 0 or not array.size
        array[...] = number
    for number, array in enumerate(arrays):
        assert np.all(array == number)


def test_an_array_larger_than_a_part_begins_a_page(monkeypatch):
    monkeypatch.setattr(array_memory, "MAPPED_BYTES", PAGE_BYTES)
    memory = ArrayMemory()
    memory.empty((100,), np.float32)
    large = memory.empty((PAGE_BYTES + 1,), np.int8)
    assert large.ctypes.data % PAGE_BYTES == 0
    large[-1] = 1


def test_memory_is_given_back_with_its_last_array(monkeypatch):
    parts = []

    class Mapped(mmap.mmap):
        def __init__(self, *_, **__):
            parts.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Mapped)
    memory = ArrayMemory()
    first, second = memory.empty((5,), np.float32), memory.empty((5,), np.float32)
    del memory, first
    gc.collect()
    assert parts[0]() is not None
    del second
    gc.collect()
    assert parts[0]() is None


def test_xla_uses_an_array_as_it_lies_and_never_writes_there():
    array = ArrayMemory().empty((300, 300), np.float32)
    array[...] = 1
    placed = jax.device_put(array, may_alias=True)
    assert placed.unsafe_buffer_pointer() == array.ctypes.data
    added = jax.jit(lambda x: x + 1, donate_argnums=0)(placed)
    assert np.all(array == 1)
    assert np.all(added == 2)


def test_where_large_pages_are_not_known_arrays_are_made_all_the_same(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert ArrayMemory().empty((5,), np.float32).shape == (5,)


def test_a_size_that_no_machine_has_is_a_memory_error():
    with pytest.raises(MemoryError, match=f"no memory for arrays of {2**60} bytes"):
        ArrayMemory().empty((2**60,), np.int8)


def test_only_large_arrays_of_a_cpu_are_worth_it(monkeypatch):
    assert is_worth_pages(2**20)
    assert not is_worth_pages(2**10)
    with jax.default_device(jax.devices()[1]):
        assert is_worth_pages(2**20)
    with jax.default_device("cpu"):
        assert is_worth_pages(2**20)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not is_worth_pages(2**20)


def test_large_kernels_of_a_ported_module_lie_so_and_have_its_numbers(monkeypatch):
    torch = pytest.importorskip("torch")
    made, empty = [], ArrayMemory.empty

    def note(memory, shape, dtype):
        made.append(empty(memory, shape, dtype))
        return made[-1]

    monkeypatch.setattr(ArrayMemory, "empty", note)
    reference = torch.nn.MultiheadAttention(120, 4)
    candidate = from_torch(reference)
    layers = candidate.q_proj, candidate.k_proj, candidate.v_proj, candidate.o_proj
    kernels = [layer.kernel[...] for layer in layers]
    lie = {array.ctypes.data for array in made}
    assert len(lie) == len(layers)
    assert {kernel.unsafe_buffer_pointer() for kernel in kernels} == lie
    expected = (*reference.in_proj_weight.chunk(3), reference.out_proj.weight)
    for kernel, weight in zip(kernels, expected, strict=True):
        np.testing.assert_array_equal(kernel, weight.detach().numpy().T)
