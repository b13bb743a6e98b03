"""Launches of kernels on records of arrays: shared memory, `vmap`, and inside `shard_map`."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir

from deltanet_jax import compat

__all__ = [
    "Index",
    "Ref",
    "at",
    "batched",
    "interpreter",
    "launch",
    "overwriting",
    "run_over",
    "shared_memory",
]

# Pallas has no public type of references. A field of a record is an array or its type before a
# launch, a reference to it in the kernel, and an array again in the result; or `None`.
Ref = Any
ALIGNMENT = 1024  # bytes, of every array in shared memory
BARRIER = 8  # bytes
REDUCTIONS = 2048  # bytes that the compiler adds for a kernel with sums over an axis
LARGEST = 227 * 1024  # bytes of shared memory of a thread block on Hopper
Index = jax.Array | int
Record = TypeVar("Record")
Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")
Held = TypeVar("Held")


def _named(name: str, body: Callable[..., None]) -> Callable[..., None]:
    """`body` under the name that profiles show for its kernel."""

    def kernel(*refs: object) -> None:
        body(*refs)

    kernel.__name__ = name
    return kernel


def interpreter(wanted: object) -> object:
    """Return the interpreter's parameters, of which True is the default, or `None`."""
    if wanted is True:
        return plgpu.InterpretGPUParams()  # not in the oldest JAX
    return wanted or None


def launch(
    name: str,
    body: Callable[..., None],
    inputs: Inputs,
    outputs: Outputs,
    *scratch: Any,
    programs: int,
    warpgroups: int | None = None,
    automatic_barriers: bool = False,
    approximate: bool = True,
    interpret: object,
) -> Outputs:
    """Run a kernel in some thread blocks, numbered along the axis `program`.

    Args:
        name: Name of the kernel in profiles.
        body: Work of every warpgroup: `body(inputs, outputs, *scratch)`, in the same records.
        inputs: Record of arrays.
        outputs: Record of the types of the results.
        *scratch: Records of shared memory, and barriers.
        programs: Number of thread blocks.
        warpgroups: Warpgroups of a thread block along the axis `role`; `None` for one without it.
        automatic_barriers: Whether the compiler orders the accesses to shared memory of a
            warpgroup; it puts a barrier around each.
        approximate: Whether exponentials and divisions may be approximations.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        The results, in the record of `outputs`.

    Raises:
        NotImplementedError: If the shared memory of a thread block does not suffice.
    """
    _check_size(name, scratch)

    def run(inputs: Inputs, outputs: Outputs, *laid: Any) -> None:
        body(inputs, outputs, *map(_restored, scratch, laid))

    kernel = plgpu.kernel(
        _named(name, run),
        out_type=(outputs,),
        scratch_types=tuple(map(_laid_out, scratch)),
        grid=(programs,),
        grid_names=("program",),
        num_threads=warpgroups,
        thread_name=None if warpgroups is None else "role",
        compiler_params=plgpu.CompilerParams(
            approx_math=approximate, unsafe_no_auto_barriers=not automatic_barriers
        ),
        interpret=interpret,
    )
    results: tuple[Outputs] = kernel(inputs)
    return results[0]


def shared_memory(*scratch: Any) -> int:
    """Return the bytes that records of shared memory and barriers take, but for `REDUCTIONS`."""
    total = 0
    for x in jax.tree.leaves(tuple(map(_laid_out, scratch))):
        if isinstance(x, plgpu.Barrier):
            total += BARRIER * int(np.prod(x.num_barriers))  # a number, or a shape in newer JAX
        else:
            size = math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
            total += -(-size // ALIGNMENT) * ALIGNMENT
    return total


def _check_size(name: str, scratch: tuple[Any, ...]) -> None:
    """Refuse, in the interpreter too, what no thread block can hold."""
    size = shared_memory(*scratch)
    if size > LARGEST:
        raise NotImplementedError(
            f"`{name}` needs {size} bytes of shared memory; a thread block has {LARGEST}"
        )


def _laid_out(scratch: Any) -> Any:
    """The fields of a record of shared memory by name, which is their order in memory."""
    if not hasattr(scratch, "_asdict"):
        return scratch
    return {name: _laid_out(x) for name, x in scratch._asdict().items() if x is not None}


def _restored(scratch: Any, laid: Any) -> Any:
    """Inverse of `_laid_out`, from references in the place of the types of `scratch`."""
    if not hasattr(scratch, "_asdict"):
        return laid
    fields = {name: _restored(getattr(scratch, name), x) for name, x in laid.items()}
    return scratch._replace(**fields)


def at(record: Record, index: Callable[[], Any]) -> Record:
    """The parts of the references of a record at `index()`, which is called for each of them."""
    parts = jax.tree.map(lambda ref: ref.at[index()], _laid_out(record))
    whole: Record = _restored(record, parts)
    return whole


def batched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, for which `vmap` is a larger batch: the first axis of every array."""

    @jax.custom_batching.custom_vmap
    def call(*arrays: Any) -> Any:
        given = jax.tree.leaves(arrays)
        # Index arithmetic inside the kernels is in 32 bits.
        with compat.enable_x64(False):
            out = kernel(*jax.tree.map(_local.bind, arrays))
        return jax.tree.map(lambda x: compat.vary_like(x, *given), out)

    @call.def_vmap
    def rule(size: int, is_batched: Any, *arrays: Any) -> Any:
        def merge(x: jax.Array, is_batched: bool) -> jax.Array:
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        out = call(*jax.tree.map(merge, arrays, tuple(is_batched)))
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return call


def overwriting(
    name: str,
    body: Callable[..., None],
    outputs: Outputs,
    *scratch: Any,
    programs: int,
    warpgroups: int | None = None,
    automatic_barriers: bool = False,
    interpret: object,
) -> Callable[[Any, Any], Outputs]:
    """Return a kernel that may write over its second argument, where `run_over` calls it.

    Args:
        name: Name of the kernel in profiles.
        body: Work of every warpgroup: `body(inputs, held, outputs, *scratch)`.
        outputs: Record of the types of the results.
        *scratch: As in `launch`, with the following arguments.
        programs: Number of thread blocks.
        warpgroups: Warpgroups of a thread block.
        automatic_barriers: Whether the compiler orders accesses to shared memory.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        The kernel, a function of `inputs` and `held`.
    """
    _check_size(name, scratch)
    threads: Any = {}
    if warpgroups is not None:
        threads = {"num_threads": warpgroups, "thread_name": "role"}

    def run(*refs: Any) -> None:
        def scoped(*laid: Any) -> None:
            body(*refs, *map(_restored, scratch, laid))

        axes = "role" if warpgroups else ()
        pl.run_scoped(scoped, *map(_laid_out, scratch), collective_axes=axes)

    kernel = pl.kernel(
        _named(name, run if scratch else body),
        out_type=(outputs,),
        mesh=plgpu.Mesh(grid=(programs,), grid_names=("program",), **threads),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=not automatic_barriers
        ),
        interpret=interpret,
    )
    return lambda inputs, held: kernel(inputs, held)[0]


def run_over(
    kernel: Callable[[Any, Any], Outputs], inputs: Any, held: Held, outputs: Outputs
) -> tuple[Held, Outputs]:
    """Run a kernel of `overwriting`, which may write over the arrays of `held` where they lie.

    Returns:
        `held` afterwards, and the kernel's outputs, whose types are `outputs`.
    """

    def run(refs: Any) -> None:
        held, results = refs
        out = kernel(inputs, held)
        for ref, x in zip(jax.tree.leaves(results), jax.tree.leaves(out), strict=True):
            ref[...] = x

    # What is overwritten entirely is never filled with these zeros.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outputs)
    return pl.run_state(run)((held, zeros))


# An array without the type that `shard_map` gives it. Pallas (jax 0.11.2) keeps that type on what
# a kernel loads but not on what it computes, so that the carries of its loops would not match.
_local = Primitive("local")
_local.def_impl(lambda x: x)
_local.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
mlir.register_lowering(_local, lambda _, x: [x])
