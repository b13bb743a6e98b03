"""The cache that a layer carries from piece to piece of a sequence, and its batch slots."""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

__all__ = ["DeltaNetCache", "copy_slots", "put_slots", "reset_slots", "select_slots"]

Tree = TypeVar("Tree")


class DeltaNetCache(NamedTuple):
    """State and last inputs of a layer; a pytree of constant size.

    Attributes:
        state: The state of every value head, `[B, HV, K, V]`, float32.
        q_inputs: The last inputs of the queries' convolution, `[B, conv_size - 1, H K]`; `None`
            without convolutions.
        k_inputs: The same for the keys.
        v_inputs: The same for the values, `[B, conv_size - 1, HV V]`.
    """

    state: Float[Array, "B HV K V"]  # float32
    q_inputs: Float[Array, "B W-1 HD"] | None = None
    k_inputs: Float[Array, "B W-1 HD"] | None = None
    v_inputs: Float[Array, "B W-1 HVV"] | None = None


def reset_slots(cache: Tree, slots: Bool[Array, " B"]) -> Tree:
    """The cache before the first token in these slots, whatever they hold, NaN included.

    Args:
        cache: Cache of a layer or of a model: any pytree of arrays `[B, ...]`, a slot per row.
        slots: True for the slots to reset.

    Raises:
        ValueError: If `slots` is not a boolean array of one entry per slot.

    Example:
        >>> reset_slots(jnp.asarray([[1.0], [2.0]]), jnp.asarray([True, False])).tolist()
        [[0.0], [2.0]]
    """
    zeros: Tree = jax.tree.map(jnp.zeros_like, cache)
    return select_slots(slots, zeros, cache)


def select_slots(slots: Bool[Array, " B"], chosen: Tree, other: Tree) -> Tree:
    """`chosen` in these slots and `other` elsewhere.

    A cache from before tokens were drafted is `chosen` to roll those slots back. Its size does
    not depend on the number of tokens that were read.

    Raises:
        ValueError: If `slots` is not a boolean array of one entry per slot, or the caches are
            not of one shape.

    Example:
        >>> before, after = jnp.asarray([[1.0], [2.0]]), jnp.asarray([[5.0], [6.0]])
        >>> select_slots(jnp.asarray([True, False]), before, after).tolist()
        [[1.0], [6.0]]
    """
    _check_same(chosen, other)
    _check_slots("slots", slots, np.bool_, _slot_count(other))

    def select(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(slots.reshape(slots.shape + (1,) * (x.ndim - 1)), x, y)

    selected: Tree = jax.tree.map(select, chosen, other)
    return selected


def copy_slots(cache: Tree, source: Int[Array, " B"]) -> Tree:
    """Slot `i` becomes what slot `source[i]` was: a prefix that was read once, for many.

    Args:
        cache: Any pytree of arrays `[B, ...]`.
        source: In `[0, B)`; `jnp.arange(B)` changes nothing.

    Raises:
        ValueError: If `source` is not an integer array of one entry per slot, or names a slot
            that does not exist where its values are known.

    Example:
        >>> copy_slots(jnp.asarray([[1.0], [2.0]]), jnp.asarray([0, 0])).tolist()
        [[1.0], [1.0]]
    """
    B = _slot_count(cache)
    _check_slots("source", source, np.integer, B)
    if not isinstance(source, jax.core.Tracer) and not np.all((source >= 0) & (source < B)):
        raise ValueError(f"`source` must name slots in [0, {B}); got {np.asarray(source)}")
    copied: Tree = jax.tree.map(lambda x: x[jnp.asarray(source)], cache)
    return copied


def put_slots(cache: Tree, slots: Int[Array, " N"], rows: Tree) -> Tree:
    """Row `i` of another cache goes into slot `slots[i]`; a slot out of range takes nothing.

    Raises:
        ValueError: If the caches differ in more than their number of rows, or `slots` has not
            one entry per row.

    Example:
        >>> put_slots(jnp.zeros((3, 1)), jnp.asarray([2]), rows=jnp.ones((1, 1))).tolist()
        [[0.0], [0.0], [1.0]]
    """
    _check_same(rows, cache, rows_too=False)
    _check_slots("slots", slots, np.integer, _slot_count(rows))
    put: Tree = jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), cache, rows)
    return put


def _slot_count(cache: object) -> int:
    return int(jax.tree.leaves(cache)[0].shape[0])


def _check_slots(name: str, x: object, kind: type, count: int) -> None:
    wanted = "a boolean" if kind is np.bool_ else "an integer"
    found = f"{getattr(x, 'dtype', type(x).__name__)} {getattr(x, 'shape', '')}".strip()
    if not isinstance(x, jax.Array | np.ndarray) or not jnp.issubdtype(x.dtype, kind):
        raise ValueError(f"`{name}` must be {wanted} array [{count}]; got {found}")
    if x.shape != (count,):
        raise ValueError(f"`{name}` must be {wanted} array [{count}]; got {found}")


def _check_same(first: object, second: object, *, rows_too: bool = True) -> None:
    """Two caches of one configuration."""
    start = 0 if rows_too else 1
    kinds = [
        (jax.tree.structure(cache), [(x.shape[start:], x.dtype) for x in jax.tree.leaves(cache)])
        for cache in (first, second)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"the caches must be of one configuration; got {kinds[0][1]} and {kinds[1][1]}"
        )
