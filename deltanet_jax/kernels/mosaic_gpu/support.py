"""What the Hopper kernels cover; looks at shapes, dtypes and versions only."""

import jax

from deltanet_jax.core.recurrence import Problem

__all__ = ["CHUNK", "MULTIPROCESSORS", "why_not"]

CHUNK = 64
MULTIPROCESSORS = 132  # of an H100 or H200
HEAD_DIMS = (64, 128, 256)
LARGEST_BESIDE_CHANNELS = 128  # beside a gate per key channel
OLDEST_JAX = (0, 11, 2)


def why_not(problem: Problem, chunk_size: int | None = None) -> str | None:
    """Why these kernels cannot run the problem, or `None`."""
    q, v = problem.q, problem.v
    K, V = q.shape[-1], v.shape[-1]
    dtypes = {str(x.dtype) for x in (q, problem.k, v)}
    if len(dtypes) != 1 or not dtypes & {"bfloat16", "float16"}:
        got = ", ".join(sorted(dtypes))
        return f"the Hopper kernels take bfloat16 or float16 inputs of one dtype; got {got}"
    if K not in HEAD_DIMS or V not in HEAD_DIMS:
        return f"the Hopper kernels need head sizes in {HEAD_DIMS}; got K={K}, V={V}"
    if problem.g is not None and problem.g.ndim == 4 and max(K, V) > LARGEST_BESIDE_CHANNELS:
        return (
            "with a gate per key channel the Hopper kernels need head sizes up to "
            f"{LARGEST_BESIDE_CHANNELS}; got K={K}, V={V}"
        )
    if chunk_size not in (None, CHUNK):
        return f"the Hopper kernels work in chunks of {CHUNK} tokens; got {chunk_size}"
    if jax.__version_info__ < OLDEST_JAX:
        wanted = ".".join(map(str, OLDEST_JAX))
        return f"the Hopper kernels need jax {wanted} or newer; this is {jax.__version__}"
    return _why_not_this_gpu()


def _why_not_this_gpu() -> str | None:
    """Another GPU than Hopper in this process; where there is none, the interpreter may run."""
    if jax.default_backend() != "gpu":
        return None
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability is not None and not str(capability).startswith("9."):
        return f"the Hopper kernels need compute capability 9.0; this GPU has {capability}"
    return None
