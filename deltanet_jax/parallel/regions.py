"""Regions in which code is per device along a mesh axis, and how to enter one."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

__all__ = ["along_context", "check_axis"]


def check_axis(name: str, axis_name: object) -> None:
    """Raise `ValueError` unless code is per device along this mesh axis here."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if axis_name not in manual:
        raise ValueError(
            f"`{name}` must be a manual axis of a surrounding `shard_map`; got {axis_name!r}, "
            f"and the manual axes here are {list(manual)}"
        )


def along_context(
    function: Callable[..., Any],
    axis_name: str,
    *arrays: Any,
    shared: Any = None,
) -> Any:
    """`function(*arrays, shared)` per device along a mesh axis that shards axis 1 of `arrays`.

    Where that axis is manual already, `function` is called as it is, and the arrays are this
    device's. Elsewhere they are whole; the mesh is the current one (`jax.set_mesh`), and its
    other axes stay as they are.

    Args:
        function: Returns a pair: arrays sharded as `arrays` are, and what is the same on every
            device.
        axis_name: The mesh axis.
        *arrays: Pytrees of arrays `[B, T, ...]`.
        shared: A pytree of arrays that are the same on every device.

    Raises:
        ValueError: If the current mesh has no such axis, or it does not divide `T`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis_name in mesh.manual_axes:
        return function(*arrays, shared)
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"`context_axis` must be an axis of the mesh set by `jax.set_mesh`; got {axis_name!r}, "
            f"and its axes are {list(mesh.axis_names)}"
        )
    devices = mesh.shape[axis_name]
    for x in jax.tree.leaves(arrays):
        if x.shape[1] % devices:
            raise ValueError(
                f"`context_axis` {axis_name!r} has {devices} devices, which must divide the "
                f"number of tokens; got {x.shape[1]}"
            )
    spec: Callable[..., PartitionSpec] = PartitionSpec
    sharded, same = spec(None, axis_name), spec()
    run = jax.shard_map(
        function,
        in_specs=(*(sharded for _ in arrays), same),
        out_specs=(sharded, same),
        axis_names={axis_name},
    )
    return run(*arrays, shared)
