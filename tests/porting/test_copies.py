"""Copies in C order hold the same numbers, however they are made."""

import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxformer.config import TransformerLMConfig
from jaxformer.parameters import get_parameters
from jaxformer.porting.dialects import find_dialect
from jaxformer.porting.formats.arrays import to_stored_tensors
from jaxformer.porting.mapping.plans import plan_export
from jaxformer.porting.mapping.rules import TILE, contiguous, copy_into
from jaxformer.transformer_lm import TransformerLM


def numbers(*shape, dtype=np.float32):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape).astype(dtype)


ARRAYS = {
    "transposed, tile by tile": numbers(TILE + 3, 2 * TILE + 1).T,
    "transposed bfloat16": numbers(2 * TILE, TILE + 1, dtype=ml_dtypes.bfloat16).T,
    "transposed, of one tile": numbers(3, 5).T,
    "every other column": numbers(TILE + 1, 2 * TILE)[:, ::2],
    "three axes": numbers(3, 4, 5).transpose(2, 0, 1),
    "in C order": numbers(7, 9),
    "of no axis": numbers()[()],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_copy_has_the_numbers_of_its_array(name):
    array = np.asarray(ARRAYS[name])
    expected = array.tolist()
    target = np.empty(array.shape, array.dtype)
    copy_into(target, array)
    copied = contiguous(array)
    assert target.tolist() == copied.tolist() == expected
    assert copied.flags.c_contiguous
    assert (copied is array) == array.flags.c_contiguous


@pytest.mark.parametrize(("shape", "dtype"), [((1, 4), np.float32), ((3, 4), np.float64)])
def test_nothing_is_cast_or_repeated_by_a_copy(shape, dtype):
    with pytest.raises(ValueError, match="the array must have shape and dtype"):
        copy_into(np.empty((3, 4), np.float32), np.ones(shape, dtype))


@pytest.mark.parametrize("dialect", ["torch_ref", "jaxformer"])
def test_what_is_read_may_be_written_to(dialect):
    """Conversions see views of what is in memory; whoever reads an array owns it."""
    model = TransformerLM(
        TransformerLMConfig(vocab_size=5, context_length=4, d_model=8, num_layers=1, num_heads=2),
        rngs=nnx.Rngs(0),
    )
    arrays = {name: np.array(array) for name, array in get_parameters(model).items()}
    kept = {name: array.copy() for name, array in arrays.items()}
    plan = plan_export(model, to_stored_tensors(arrays), find_dialect(dialect))
    for name in arrays.keys() & plan.tensors.keys():
        assert not np.shares_memory(plan.tensors[name].read(), arrays[name])
    for tensor in plan.tensors.values():
        tensor.read()[...] = 7
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, kept[name])
