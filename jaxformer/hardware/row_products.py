"""Makes products of few rows with large matrices known to XLA, as custom calls.

A C compiler builds them for this processor (``few_row_products.c``).
"""

import functools

from jaxformer.hardware import custom_calls

# With a matrix; with one whose rows are outputs, in float32 and in narrower dtypes; with the matrix
# of each row's group; and of pairs of matrices, the second as it is or with its rows as outputs.
PRODUCT, BY_TRANSPOSED = "jaxformer_few_rows", "jaxformer_few_rows_bt"
BY_TRANSPOSED_BFLOAT16, BY_TRANSPOSED_INT8 = f"{BY_TRANSPOSED}_bfloat16", f"{BY_TRANSPOSED}_int8"
GROUPED = "jaxformer_few_rows_grouped"
PAIRS, PAIRS_BY_TRANSPOSED = "jaxformer_few_rows_pairs", "jaxformer_few_rows_pairs_bt"
TARGETS = (
    PRODUCT, BY_TRANSPOSED, BY_TRANSPOSED_BFLOAT16, BY_TRANSPOSED_INT8, GROUPED,
    PAIRS, PAIRS_BY_TRANSPOSED,
)  # fmt: skip


@functools.cache
def are_known() -> bool:
    """Returns whether the custom calls of ``TARGETS`` can be used, and makes them known to XLA."""
    return custom_calls.register_own("few_row_products", TARGETS)
