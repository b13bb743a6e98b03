"""Building blocks shared by the Hopper kernels: tiles, vectors, products and masks.

Imported lazily by the wrappers, because Pallas Mosaic GPU is not needed to import the package.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import lanes
from deltanet_jax.kernels.mosaic_gpu.support import CHUNK

__all__ = [
    "CHUNK",
    "accumulate",
    "column",
    "decayed",
    "load_f32",
    "load_f32_transposed",
    "load_transposed",
    "matrix",
    "named",
    "of_halves",
    "over_columns",
    "over_rows",
    "overlaps",
    "pair_decay",
    "product",
    "products",
    "row",
    "scores",
    "store_f32_transposed",
    "store_transposed",
    "tile",
    "transposed",
    "zeros",
]

MATRIX = plgpu.Layout.WGMMA


def named(name: str, body: Callable[..., None]) -> Callable[..., None]:
    """`body` under the name that profiles show for its kernel."""

    def kernel(*refs: object) -> None:
        body(*refs)

    kernel.__name__ = name
    return kernel


def tile(*shape: int, dtype, swizzle: int = 128):
    """A shared-memory tile that wgmma and the copy engine both read.

    All operands of one product need the same swizzle, so it is named by the caller and only
    narrowed where a row is shorter.
    """
    width = jnp.dtype(dtype).itemsize
    swizzle = min(swizzle, shape[-1] * width)
    transforms = (plgpu.TilingTransform((8, swizzle // width)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def transposed(ref):
    """The transpose of a tile, as an operand: the tensor cores read 16-bit tiles either way."""
    return ref.transpose((1, 0))


def load_f32(ref) -> jax.Array:
    """A block of a float32 array in device memory, in registers."""
    return plgpu.load(ref, layout=MATRIX, optimized=False)


def load_f32_transposed(ref, *, interpret) -> jax.Array:
    """The transpose of a block of a float32 array in device memory, in registers."""
    if interpret:
        return ref[...].T
    x = plgpu.load(transposed(ref), layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
    return plgpu.layout_cast(x, MATRIX)


def store_f32_transposed(ref, x: jax.Array, *, interpret) -> None:
    """The other way."""
    if interpret:
        ref[...] = x.T
    else:
        transposed(ref)[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def zeros(shape: tuple[int, int]) -> jax.Array:
    """In float32 registers."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), MATRIX)


def matrix(ref) -> jax.Array:
    """A 16-bit tile as float32 registers."""
    return plgpu.load(ref, layout=MATRIX).astype(jnp.float32)


def row(ref) -> jax.Array:
    """A vector over the rows of a product, in registers."""
    return plgpu.load(ref, layout=MATRIX.reduce(1), optimized=False)


def column(ref) -> jax.Array:
    """A vector over the columns of a product, in registers."""
    return plgpu.load(ref, layout=MATRIX.reduce(0), optimized=False)


def over_rows(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """`vector[i]` at every `[i, j]`."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, shape, [0]), MATRIX)


def over_columns(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """`vector[j]` at every `[i, j]`."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, shape, [1]), MATRIX)


def load_transposed(ref, *, interpret) -> jax.Array:
    """The transpose of a 16-bit tile, as float32 registers."""
    if interpret:
        return ref[...].T.astype(jnp.float32)
    return matrix(transposed(ref))


def store_transposed(ref, x: jax.Array, *, interpret) -> None:
    """Stores the transpose of 16-bit registers."""
    if interpret:
        ref[...] = x.T
    else:
        transposed(ref)[...] = x


def _start(acc, pairs) -> None:
    for lhs, rhs in pairs:
        plgpu.wgmma(acc, lhs, rhs)


def _emulated(shape, pairs) -> jax.Array:
    """The interpreter has no products whose left operand is in registers."""
    total = jnp.zeros(shape, jnp.float32)
    for lhs, rhs in pairs:
        total += jnp.dot(lhs[...], rhs[...], preferred_element_type=jnp.float32)
    return total


def product(shape: tuple[int, int], *pairs, init=None, interpret=None) -> jax.Array:
    """`init` plus the sum of `lhs @ rhs` over pairs of tiles, in float32 registers."""
    if init is not None:
        return accumulate((init, pairs), interpret=interpret)[0]
    return products((shape, pairs), interpret=interpret)[0]


def products(*operands, meanwhile=None, interpret=None) -> list[jax.Array]:
    """One product for each `(shape, pairs)`, none waiting for another.

    `meanwhile` is called when all of them have been started.
    """

    def body(*accs):
        for acc, (_, pairs) in zip(accs, operands, strict=True):
            _start(acc, pairs)
        if meanwhile is not None:
            meanwhile()
        return [acc[...] for acc in accs]

    if interpret:
        if meanwhile is not None:
            meanwhile()
        return [_emulated(*x) for x in operands]
    accs = [plgpu.ACC(shape, jnp.float32) for shape, _ in operands]
    # Without the barrier the compiler moves arithmetic on the result before the wait.
    return jax.lax.optimization_barrier(pl.run_scoped(body, *accs))


def of_halves(x, y) -> tuple:
    """The products that make `x y` of two 16-bit pairs; that of the two low halves is left out."""
    return (x[0], y[0]), (x[0], y[1]), (x[1], y[0])


def accumulate(*operands, interpret) -> list[jax.Array]:
    """`init` plus the sum of products for each `(init, pairs)`, none waiting for another."""

    def body(accs):
        for acc, (_, pairs) in zip(accs, operands, strict=True):
            _start(acc, pairs)

    if interpret:
        return [init + _emulated(init.shape, pairs) for init, pairs in operands]
    # Accumulating in place keeps one accumulator live, not two.
    accs = tuple(plgpu.ACC.init(init) for init, _ in operands)
    return list(jax.lax.optimization_barrier(pl.run_state(body)(accs)))


def pair_decay(tile) -> jax.Array:
    """`D_ij = exp(b_i - b_j)` of the pairs of a chunk; above the diagonal it may overflow."""
    shape = (CHUNK, CHUNK)
    gap = over_rows(row(tile["b"]), shape) - over_columns(column(tile["b_column"]), shape)
    return jnp.exp(gap)


def decayed(plan, tile, x: jax.Array) -> jax.Array:
    """`D * x` of the pairs of a chunk; above the diagonal anything, not even finite."""
    return x * pair_decay(tile) if plan.gated else x


def overlaps(tile, name: str, meanwhile=None) -> jax.Array:
    """`x k^T` of a chunk, `x` by name; `meanwhile` is called when it has been started."""
    pair = tile[name], transposed(tile["k"])
    return products(((CHUNK, CHUNK), (pair,)), meanwhile=meanwhile)[0]


def scores(plan, tile) -> jax.Array:
    """`tril(D * (q k^T))` of a chunk."""
    return lanes.masked(decayed(plan, tile, overlaps(tile, "q")), interpret=plan.interpret)
