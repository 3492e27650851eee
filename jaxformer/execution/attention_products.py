"""The two products of attention, q kᵀ and weights · v, in the layout that is fastest.

XLA has its products one after the other along a first dimension, so heads are brought there by
copies. Custom calls take the distance between the rows of a head, and copy nothing.
"""

import abc

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.execution import called_products, few_rows
from jaxformer.hardware.matrix_products import Library


class AttentionProducts(abc.ABC):
    """The products of all heads, a block of queries at a time.

    Query head n uses key/value head n // (N / K). Everything is in float32 or wider.
    """

    @abc.abstractmethod
    def scores(self, rows: slice, columns: slice) -> Float[Array, "B N t s"]:
        """Returns q · k of these queries and keys."""

    @abc.abstractmethod
    def outputs(self, weights_BNTS: Float[Array, "B N t s"], columns: slice) -> Array:
        """Returns Σ weights · v of a block of queries, for ``join``.

        Args:
            weights_BNTS: of the queries and these keys.
            columns: the keys.
        """

    @abc.abstractmethod
    def join(self, outputs: list[Array]) -> Float[Array, "B T N H"]:
        """Returns the outputs of all blocks, in order."""


def attention_products(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K _"],
) -> AttentionProducts:
    """Returns the products of queries, keys and values."""
    library = called_products.wanted_library(q_BTNH, k_BSKH, v_BSKH)
    if library is not None:
        return _HeadProducts(library, q_BTNH, k_BSKH, v_BSKH)
    if few_rows.fit_head_calls(q_BTNH, k_BSKH, v_BSKH):
        return _CalledProducts(q_BTNH, k_BSKH, v_BSKH)
    return _RowProducts(q_BTNH, k_BSKH, v_BSKH)


class _RowProducts(AttentionProducts):
    """Those of XLA, with one batch dimension: a row for each text and key/value head, R = B · K.

    In this order a cache is kept: with two batch dimensions, XLA on CPU copies the whole cache in
    every step of generation.
    """

    def __init__(self, q_BTNH: Array, k_BSKH: Array, v_BSKH: Array):
        self._q_BNTH = q_BTNH.transpose(0, 2, 1, 3)
        self._k_RSH, self._v_RSH = by_row(k_BSKH), by_row(v_BSKH)
        self._wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)

    def scores(self, rows: slice, columns: slice) -> Float[Array, "B N t s"]:
        q_BNTH, k_RSH = self._q_BNTH[:, :, rows], self._k_RSH[:, columns]
        q_RMH = q_BNTH.reshape(len(k_RSH), -1, q_BNTH.shape[3])
        scores_RMS = self._by_keys(q_RMH, k_RSH)
        return scores_RMS.reshape(*q_BNTH.shape[:3], -1)

    def outputs(self, weights_BNTS: Float[Array, "B N t s"], columns: slice) -> Array:
        # The product with the values is wide too: the gradient that comes back through it is a
        # small difference of large terms where the softmax saturates.
        v_RSH = self._v_RSH[:, columns].astype(self._wide)
        weights_RMS = weights_BNTS.reshape(len(v_RSH), -1, weights_BNTS.shape[3])
        out_RMH = self._by_values(weights_RMS, v_RSH)
        return out_RMH.reshape(*weights_BNTS.shape[:3], -1)

    def _by_keys(self, q_RMH: Array, k_RSH: Array) -> Float[Array, "R M S"]:
        return jnp.einsum("rmh,rsh->rms", q_RMH, k_RSH, preferred_element_type=self._wide)

    def _by_values(self, weights_RMS: Array, v_RSH: Array) -> Float[Array, "R M H"]:
        return jnp.einsum("rms,rsh->rmh", weights_RMS, v_RSH)

    def join(self, outputs: list[Array]) -> Float[Array, "B T N H"]:
        return join_queries(outputs).transpose(0, 2, 1, 3)


class _CalledProducts(_RowProducts):
    """The same by custom calls, on all cores: XLA multiplies few rows on one."""

    def _by_keys(self, q_RMH: Array, k_RSH: Array) -> Float[Array, "R M S"]:
        return few_rows.call_products_by_transposed(q_RMH, k_RSH)

    def _by_values(self, weights_RMS: Array, v_RSH: Array) -> Float[Array, "R M H"]:
        return few_rows.call_products(weights_RMS, v_RSH)


class _HeadProducts(AttentionProducts):
    """Those of a library's custom calls."""

    def __init__(self, library: Library, q_BTNH: Array, k_BSKH: Array, v_BSKH: Array):
        self._library: Library = library
        self._q_BTNH, self._k_BSKH, self._v_BSKH = q_BTNH, k_BSKH, v_BSKH

    def scores(self, rows: slice, columns: slice) -> Float[Array, "B N t s"]:
        k_BSKH = self._k_BSKH[:, columns.start :]
        keys = columns.stop - columns.start
        return called_products.scores(self._library, self._q_BTNH[:, rows], k_BSKH, keys)

    def outputs(self, weights_BNTS: Float[Array, "B N t s"], columns: slice) -> Array:
        return called_products.weighted(
            self._library, weights_BNTS, self._v_BSKH[:, columns.start :]
        )

    def join(self, outputs: list[Array]) -> Float[Array, "B T N H"]:
        return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def join_queries(blocks: list[Float[Array, "B N t _"]]) -> Float[Array, "B N T _"]:
    """Returns blocks of queries, one behind the other."""
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=2)


def by_row(x_BSKH: Float[Array, "B S K H"]) -> Float[Array, "R S H"]:
    """Returns keys or values with a row for each sequence and key/value head, R = B · K."""
    return x_BSKH.transpose(0, 2, 1, 3).reshape(-1, x_BSKH.shape[1], x_BSKH.shape[3])
