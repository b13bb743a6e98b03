"""Exchanges between neighbours on a mesh axis, inside `shard_map`.

Devices are in the order of the sequence. Nothing here is as large as a shard of tokens: maps
of `K x (K + V)` numbers per head, states, and the few tokens that a convolution looks back.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from deltanet_jax.core.affine import AffineMap, apply, compose
from deltanet_jax.ops.maps import EXACT

__all__ = ["from_last", "halo", "incoming_state", "prefix", "shift"]


def shift(x: Shaped[Array, "*S"], axis_name: str, by: int = 1) -> Shaped[Array, "*S"]:
    """Receive the value of the device `by` places earlier; zeros where there is none."""
    devices = jax.lax.axis_size(axis_name)
    pairs = [(i, i + by) for i in range(devices - by)]
    shifted: jax.Array = jax.lax.ppermute(x, axis_name, pairs)  # type: ignore[no-untyped-call]
    return shifted


def from_last(x: Shaped[Array, "*S"], axis_name: str) -> Shaped[Array, "*S"]:
    """Broadcast the value of the last device to every device."""
    last = jax.lax.axis_index(axis_name) == jax.lax.axis_size(axis_name) - 1
    only = jnp.where(last, x, jnp.zeros_like(x))
    everywhere: jax.Array = jax.lax.psum(only, axis_name)  # type: ignore[no-untyped-call]
    return everywhere


def prefix(map_: AffineMap, axis_name: str) -> AffineMap:
    """The map of everything up to and with this device's part, in `log2(devices)` exchanges.

    Hillis and Steele's scan: after round `r` a device holds the map of the last `2^r` parts,
    and composes it with that of the `2^r` parts before.
    """
    index, reach = jax.lax.axis_index(axis_name), 1
    while reach < jax.lax.axis_size(axis_name):
        earlier = jax.tree.map(lambda x, by=reach: shift(x, axis_name, by), map_)
        longer = compose(earlier, map_, EXACT)
        take = index >= reach
        map_ = AffineMap(*(jnp.where(take, x, y) for x, y in zip(longer, map_, strict=True)))
        reach *= 2
    return map_


def incoming_state(
    map_: AffineMap, start: Float[Array, "*B K V"], axis_name: str
) -> Float[Array, "*B K V"]:
    """The state that enters this device's part, if `start` enters the first."""
    after = apply(prefix(map_, axis_name), start, EXACT)
    return jnp.where(jax.lax.axis_index(axis_name) == 0, start, shift(after, axis_name))


def halo(
    x: Shaped[Array, "B T *D"],
    width: int,
    axis_name: str,
    first: Shaped[Array, "B W *D"] | None = None,
) -> Shaped[Array, "B W *D"]:
    """The last `width` tokens of the device before; on the first, `first`, or zeros.

    Raises:
        ValueError: If a device holds fewer tokens than that.
    """
    if x.shape[1] < width:
        raise ValueError(
            f"every device must hold at least the {width} tokens that a convolution looks back; "
            f"got {x.shape[1]} per device along `{axis_name}`"
        )
    before = shift(x[:, x.shape[1] - width :], axis_name)
    if first is None:
        return before
    return jnp.where(jax.lax.axis_index(axis_name) == 0, first.astype(x.dtype), before)
