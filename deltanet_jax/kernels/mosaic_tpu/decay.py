"""Decay inside one chunk: the only place where the kinds of gate differ.

`b_i` is the sum of the chunk's log-decays through token i. Every factor is the exponential of
a sum over a range of tokens, at most 1, and is 0 where the range holds a reset.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from deltanet_jax.kernels.mosaic_tpu import ladder, tile

__all__ = ["Carried", "Decay", "Scores", "read_decay"]

Rows = Callable[[jax.Array], jax.Array]

# Added to exponents that a mask excludes: exp gives exactly 0, and nothing overflows before.
MASKED = -1e30


class Scores(NamedTuple):
    """The decayed products of a chunk, `P(x, y)_ij = x_i Diag(exp(b_i - b_j)) y_j^T`."""

    A: jax.Array  # tril(P(q, k)), [G, C, C]
    M: jax.Array | None  # stril(P(k, k)), [G, C, C], for the delta rule


class Carried(NamedTuple):
    """Products of the factors that multiply states with the gradients of these factors."""

    from_start: jax.Array  # [G, C, K]
    to_end: jax.Array  # [G, C, K]
    total: jax.Array  # [G, K, 1], before the multiplication by `total`


class Decay(Protocol):
    """The decay of a chunk, for one kind of gate.

    Factors are `None` where they are 1, have one channel for a gate per head, and `K` for a gate
    per channel.
    """

    @property
    def from_start(self) -> jax.Array | None:
        """`exp(b_i)`, `[G, C, 1]` or `[G, C, K]`."""

    @property
    def to_end(self) -> jax.Array | None:
        """`exp(b_C - b_i)`, `[G, C, 1]` or `[G, C, K]`."""

    @property
    def total(self) -> jax.Array | None:
        """`exp(b_C)`, to scale a state: `[G, 1, 1]` or `[G, K, 1]`."""

    def scores(
        self, q: jax.Array, k: jax.Array, heads: int, precision: tile.Precision, *, delta: bool
    ) -> Scores:
        """The scores of `heads` value heads; q and k have one entry for each key head."""

    def pull(
        self,
        scores: Scores,
        gradient: Scores,
        q: jax.Array,
        k: jax.Array,
        carried: Carried,
        precision: tile.Precision,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Gradients of q and k through the scores, and of what the gate's input holds.

        Args:
            scores: The result of `scores`.
            gradient: Its gradient; entries that the scores have not are ignored.
            q: Queries of the value heads, `[G, C, K]`.
            k: Keys of the value heads, `[G, C, K]`.
            carried: Products that the other factors pass on.
            precision: Precision of the call's products.
        """


class RowDecay(NamedTuple):
    """No gate or a scalar gate: one decay for each pair of tokens."""

    pairs: jax.Array  # exp(b_i - b_j) for j <= i, else 0: [G, C, C], or [1, C, C] without a gate
    earlier: jax.Array  # the same for j < i
    from_start: jax.Array | None
    to_end: jax.Array | None
    total: jax.Array | None

    def scores(
        self, q: jax.Array, k: jax.Array, heads: int, precision: tile.Precision, *, delta: bool
    ) -> Scores:
        qk = tile.per_value_head(tile.mm_nt(q, k, precision), heads)
        if not delta:
            return Scores(qk * self.pairs, None)
        kk = tile.per_value_head(tile.mm_nt(k, k, precision), heads)
        return Scores(qk * self.pairs, kk * self.earlier)

    def pull(
        self,
        scores: Scores,
        gradient: Scores,
        q: jax.Array,
        k: jax.Array,
        carried: Carried,
        precision: tile.Precision,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        low = (gradient.A * self.pairs).astype(k.dtype)
        dq, dk = tile.mm(low, k, precision), tile.mm_tn(low, q, precision)
        products = gradient.A * scores.A
        if gradient.M is not None and scores.M is not None:
            low = (gradient.M * self.earlier).astype(k.dtype)
            dk += tile.mm(low, k, precision) + tile.mm_tn(low, k, precision)
            products += gradient.M * scores.M
        if self.total is None:
            return dq, dk, None
        i, j = tile.positions(products.shape[-1])
        products = jnp.where(i > j, products, 0.0)  # the diagonal cancels; its rounding would not
        ends = tile.row_sum(carried.to_end)
        last = self.total * jnp.sum(carried.total, axis=1, keepdims=True)
        last += jnp.sum(ends, axis=1, keepdims=True)
        rows = tile.row_sum(carried.from_start) - ends + tile.row_sum(products)
        at_end = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1) == rows.shape[1] - 1
        db = tile.to_rows(rows + jnp.where(at_end, last, 0.0)) - jnp.sum(products, axis=1)
        return dq, dk, db


def _row_decay(gate: tuple[jax.Array, ...], C: int) -> RowDecay:
    """The factors of a chunk whose cumulative log-decay is `b = coarse + fine`, `[G, C]` each.

    The coarse shares of `g` are multiples of a power of two, so that their sums and differences
    are exact: a sum over a short range after a huge gate keeps its digits.
    """
    rows, cols = tile.positions(C)
    if not gate:
        causal = jnp.where(rows >= cols, 1.0, 0.0)[None]
        return RowDecay(causal, jnp.where(rows > cols, 1.0, 0.0)[None], None, None, None)
    turned = [tile.columns(x) for x in gate]
    ends = [x[:, -1:, :] for x in turned]
    spans = [c - r[:, None, :] for c, r in zip(turned, gate, strict=True)]
    # The exponent is masked, not its exponential, which would be infinite above the diagonal.
    pairs = jnp.exp(jnp.where(rows >= cols, spans[0] + spans[1], MASKED))
    return RowDecay(
        pairs=pairs,
        earlier=jnp.where(rows > cols, pairs, 0.0),
        from_start=jnp.exp(turned[0] + turned[1]),
        to_end=jnp.exp((ends[0] - turned[0]) + (ends[1] - turned[1])),
        total=jnp.exp(ends[0] + ends[1]),
    )


class ChannelDecay(NamedTuple):
    """A vector gate: one decay per key channel.

    Tokens j < i differ first in one binary digit of their numbers, of value `size`; token i then
    is in a block of `size` tokens with an odd number and j in the even one before it. Between
    these blocks the decay of the pair factors into two that are at most 1. So the scores are
    one product of decayed queries and keys for each size, and every exponent is a plain sum of
    gates (`ladder`): nothing is subtracted, nothing overflows, and what underflows is 0.
    """

    factors: tuple[jax.Array, ...]  # of sizes 1, 2, 4, ..., C / 2, [G, C, K]
    from_start: jax.Array
    to_end: jax.Array
    total: jax.Array

    def scores(
        self, q: jax.Array, k: jax.Array, heads: int, precision: tile.Precision, *, delta: bool
    ) -> Scores:
        q, k = tile.per_value_head(q, heads), tile.per_value_head(k, heads)
        rows, cols = tile.positions(k.shape[1])
        A = jnp.where(rows == cols, tile.mm_nt(q, k, precision), 0.0)
        M = jnp.zeros_like(A) if delta else None
        for level, factor in enumerate(self.factors):
            rows_with, full = _rows_with_pairs(1 << level)
            inside, keys = ladder.pairs(rows, cols, 1 << level), factor * k
            low = keys.astype(k.dtype)
            queries = rows_with(factor * q).astype(k.dtype)
            A = jnp.where(inside, full(tile.mm_nt(queries, low, precision)), A)
            if M is not None:
                products = tile.accurate(tile.mm_nt, rows_with(keys), keys, precision)
                M = jnp.where(inside, full(products), M)
        return Scores(A, M)

    def pull(
        self,
        scores: Scores,
        gradient: Scores,
        q: jax.Array,
        k: jax.Array,
        carried: Carried,
        precision: tile.Precision,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        rows, cols = tile.positions(k.shape[1])
        low = jnp.where(rows == cols, gradient.A, 0.0).astype(k.dtype)
        dq, dk = tile.mm(low, k, precision), tile.mm_tn(low, q, precision)
        total = self.total * carried.total
        back = ladder.transposed_end(carried.from_start, carried.to_end, total)
        for level, factor in reversed(tuple(enumerate(self.factors))):
            rows_with, full = _rows_with_pairs(1 << level)
            inside, keys = ladder.pairs(rows, cols, 1 << level), factor * k
            low = rows_with(jnp.where(inside, gradient.A, 0.0)).astype(k.dtype)
            queries = rows_with(factor * q).astype(k.dtype)
            dq_level = factor * full(tile.mm(low, keys.astype(k.dtype), precision))
            dk_level = tile.mm_tn(low, queries, precision)
            if gradient.M is not None:
                low = rows_with(jnp.where(inside, gradient.M, 0.0)).astype(k.dtype)
                dk_level += full(tile.mm(low, keys.astype(k.dtype), precision))
                dk_level += tile.mm_tn(low, rows_with(keys).astype(k.dtype), precision)
            dk_level *= factor
            # Of a pair one token has the row and the other the column: each factor its product.
            back = ladder.transposed_step(back, 1 << level, q * dq_level + k * dk_level)
            dq, dk = dq + dq_level, dk + dk_level
        return dq, dk, back.g


def _rows_with_pairs(size: int) -> tuple[Rows, Rows]:
    """Return functions that take the rows of odd blocks, and put them back; all of small blocks."""
    if size < tile.ROWS:
        return (lambda x: x), (lambda x: x)
    return (lambda x: tile.odd_blocks(x, size)), (lambda x: tile.spread(x, size))


def _channel_decay(g: jax.Array) -> ChannelDecay:
    exponents, end = ladder.sums(g)
    return ChannelDecay(
        factors=tuple(jnp.exp(x) for x in exponents),
        from_start=jnp.exp(end.through),
        to_end=jnp.exp(end.after),
        total=tile.columns(jnp.exp(end.block[:, 0, :])),
    )


def read_decay(gate: tuple[jax.Array, ...], C: int) -> Decay:
    """The decay of a chunk of `C` tokens, from references to the gate's arrays."""
    arrays = tuple(x[...] for x in gate)
    if len(arrays) == 1:
        return _channel_decay(*arrays)
    return _row_decay(arrays, C)
