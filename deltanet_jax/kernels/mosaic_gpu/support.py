"""Support of the Hopper kernels, from shapes, dtypes and versions only."""

import jax

from deltanet_jax.core.problem import Problem
from deltanet_jax.kernels.mosaic_gpu import sizes
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK

__all__ = ["LOWEST_GATE", "why_not", "why_not_compile_one_token", "why_not_one_token"]

LOWEST_GATE = -104.0  # a gate whose exponential is 0 in float32, and sums of some keep their digits
FIELDS = ("q", "k", "v", "g", "beta")  # per-token arrays that the kernels take
OLDEST_JAX = (0, 11, 2)
# From here on Mosaic GPU refuses the decoding kernel's loads of parts of a cache line.
DECODE_BEFORE_JAX = (0, 12)


def why_not(problem: Problem, chunk_size: int | None = None) -> str | None:
    """Return why these kernels cannot run the problem, or `None`."""
    if others := problem.fields_beside(FIELDS):
        return f"the Hopper kernels do not take `{others[0]}`"
    dtypes = {str(x.dtype) for x in (problem.q, problem.k, problem.v)}
    if len(dtypes) != 1 or not dtypes & {"bfloat16", "float16"}:
        got = ", ".join(sorted(dtypes))
        return f"the Hopper kernels take bfloat16 or float16 inputs of one dtype; got {got}"
    K, delta = problem.q.shape[-1], problem.beta is not None
    if reason := sizes.why_not(K, problem.gate, delta=delta):
        return reason
    if chunk_size not in (None, CHUNK):
        return f"the Hopper kernels work in chunks of {CHUNK} tokens; got {chunk_size}"
    return _why_not_here()


def why_not_one_token(problem: Problem) -> str | None:
    """Return why the decoding kernel cannot run the problem, or `None`."""
    if others := problem.fields_beside(FIELDS):
        return f"the decoding kernel does not take `{others[0]}`"
    q, v = problem.q, problem.v
    (_, T, _, K), V = q.shape, v.shape[-1]
    if T != 1:
        return f"the decoding kernel takes one token; got {T}"
    if {str(x.dtype) for x in (q, problem.k, v)} & {"float64"}:
        return "the decoding kernel keeps its state in float32; got float64 inputs"
    if K not in sizes.HEAD_DIMS or V not in sizes.HEAD_DIMS:
        return f"the decoding kernel needs head sizes in {sizes.HEAD_DIMS}; got K={K}, V={V}"
    return _why_not_here()


def why_not_compile_one_token() -> str | None:
    """Return why the compiler refuses the decoding kernel, or `None`; the interpreter runs it."""
    if jax.__version_info__ < DECODE_BEFORE_JAX:
        return None
    wanted = ".".join(map(str, DECODE_BEFORE_JAX))
    return f"the decoding kernel compiles before jax {wanted}; this is {jax.__version__}"


def _why_not_here() -> str | None:
    """Return a reason in the version of JAX or in the GPU; without one the interpreter may run."""
    if jax.__version_info__ < OLDEST_JAX:
        wanted = ".".join(map(str, OLDEST_JAX))
        return f"the Hopper kernels need jax {wanted} or newer; this is {jax.__version__}"
    if jax.default_backend() != "gpu":
        return None
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability is not None and not str(capability).startswith("9."):
        return f"the Hopper kernels need compute capability 9.0; this GPU has {capability}"
    return None
