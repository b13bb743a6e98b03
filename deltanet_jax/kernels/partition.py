"""Kernels over the devices of a mesh.

XLA cannot split a kernel, so a call whose arrays live on several devices is split here, by
`shard_map`: every device runs the kernel on its share of the batch and of the heads, which are
independent. `custom_partitioning`, which would let XLA choose the split, has no effect on TPUs
(jax-ml/jax issue 38196).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from deltanet_jax.core.problem import Problem

__all__ = ["mesh_of", "over_devices"]

Result = tuple[jax.Array, jax.Array]
Axes = tuple[str, ...]


def mesh_of(x: jax.Array) -> AbstractMesh:
    """The mesh that `x` is known to live on, or the one that is set; empty if there is none."""
    mesh: AbstractMesh = jax.typeof(x).sharding.mesh
    return jax.sharding.get_abstract_mesh() if mesh.empty else mesh


def over_devices(run: Callable[[Problem], Result], problem: Problem) -> Result:
    """`run(problem)`, each device of the mesh on its shard.

    Explicit mesh axes split what they split in `v`. Automatic ones do not say what they split:
    the last of several axes is taken for the heads and the others for the batch, as far as they
    divide them. If the arrays lie otherwise, XLA moves them; the result is the same.
    """
    mesh = mesh_of(problem.v)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    free = {name for name, kind in kinds.items() if kind != AxisType.Manual}
    alone = math.prod(mesh.shape[name] for name in free) == 1
    # Where some axes are per device already, a kernel asks for all, those of one device as well.
    if not free or (alone and len(free) == len(kinds)):
        return run(problem)
    if AxisType.Explicit in kinds.values():
        batch, heads = _named_axes(problem)
    else:
        batch, heads = _likely_axes(
            problem, {n: mesh.shape[n] for n in mesh.axis_names if n in free}
        )
    if problem.q.shape[2] % math.prod(mesh.shape[name] for name in heads):
        problem = problem.with_repeated_keys()
    specs, results = _specs(problem, batch, heads)
    if AxisType.Explicit in kinds.values():
        to = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        problem = jax.sharding.reshard(problem, to)  # type: ignore[no-untyped-call]
    split = functools.partial(jax.shard_map, mesh=mesh, axis_names=free)
    if len(free) < len(kinds):
        return _inside_another(run, split, problem, specs, results)
    result: Result = split(run, in_specs=(specs,), out_specs=results)(problem)
    return result


def _inside_another(
    run: Callable[[Problem], Result], split: Any, problem: Problem, specs: Problem, results: Any
) -> Result:
    """Run inside another `shard_map`, with a backward that runs the forward again.

    JAX (0.10.2 to 0.11.2) stacks what the derivative of an inner `shard_map` keeps over the
    axes of the outer one as well, and fails; so nothing is kept but the problem.
    """

    @jax.custom_vjp
    def call(arrays: Problem, reset: jax.Array | None) -> Result:
        together = split(
            lambda x, reset: run(replace(x, reset=reset)),
            in_specs=(replace(specs, reset=None), specs.reset),
            out_specs=results,
        )
        result: Result = together(arrays, reset)
        return result

    def forward(arrays: Problem, reset: jax.Array | None) -> tuple[Result, Any]:
        return call(arrays, reset), (arrays, reset)

    def backward(kept: tuple[Problem, jax.Array | None], cotangents: Result) -> Any:
        def pull(x: Problem, reset: jax.Array | None, cotangents: Result) -> Problem:
            pullback = jax.vjp(lambda x: run(replace(x, reset=reset)), x)[1]
            gradient: Problem = pullback(cotangents)[0]
            return gradient

        arrays = replace(specs, reset=None)
        pulled = split(pull, in_specs=(arrays, specs.reset, results), out_specs=arrays)
        return pulled(*kept, cotangents), None

    call.defvjp(forward, backward)
    result: Result = call(replace(problem, reset=None), problem.reset)
    return result


def _named_axes(problem: Problem) -> tuple[Axes, Axes]:
    parts = jax.typeof(problem.v).sharding.spec
    batch, heads = (p if isinstance(p, tuple) else () if p is None else (p,) for p in parts[:3:2])
    return batch, heads


def _likely_axes(problem: Problem, sizes: dict[str, int]) -> tuple[Axes, Axes]:
    batch: Axes = ()
    heads: Axes = ()
    B, _, HV, _ = problem.v.shape
    for number, (name, ways) in enumerate(sizes.items(), 1):
        fits_batch, fits_heads = B % ways == 0, HV % ways == 0
        if fits_heads and (not fits_batch or number == len(sizes) > 1):
            heads, HV = (*heads, name), HV // ways
        elif fits_batch:
            batch, B = (*batch, name), B // ways
    return batch, heads


def _specs(problem: Problem, batch: Axes, heads: Axes) -> tuple[Problem, tuple[P, P]]:
    """Return the axes that split each array of the problem, and outputs and final state."""
    tokens: P = P(batch, None, heads)  # type: ignore[no-untyped-call]
    state: P = P(batch, heads)  # type: ignore[no-untyped-call]
    rows: P = P(batch)  # type: ignore[no-untyped-call]
    given: dict[str, Any] = {
        name: axes
        for name, axes in (("initial_state", state), ("reset", rows))
        if getattr(problem, name) is not None
    }
    return replace(problem.map_tokens(lambda _: tokens), **given), (tokens, state)
