"""Checks of a call, and its canonical form.

Every message names the argument, what came and what was wanted.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.core import checks
from deltanet_jax.core.numerics import accumulation_dtype, common_dtype
from deltanet_jax.core.problem import Problem, Tokens

__all__ = [
    "canonical_chunk_size",
    "canonical_offsets",
    "canonical_problem",
    "canonical_scale",
    "check_array",
    "check_decay",
]

DTYPES = ("bfloat16", "float16", "float32", "float64")


def check_array(
    name: str, x: object, axes: str, shape: tuple[int | None, ...] | None = None
) -> jax.Array:
    """`x` as a floating-point array whose axes are `axes`, with the sizes that `shape` fixes."""
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"`{name}` must be an array {axes}; got {type(x).__name__}")
    if str(x.dtype) not in DTYPES:
        raise ValueError(f"`{name}` must have a dtype of {', '.join(DTYPES)}; got {x.dtype}")
    checks.check_shape(name, x.shape, axes, shape)
    return jnp.asarray(x)


@jax.jit
def _extremes(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.min(x), jnp.max(x)


def _known_extremes(x: jax.Array) -> tuple[float, float] | None:
    """Return the least and the largest value, or `None` under `jit` and without values."""
    if isinstance(x, jax.core.Tracer) or x.size == 0:
        return None
    # A body that is being traced may close over known values.
    with jax.ensure_compile_time_eval():
        least, most = _extremes(x)
        return float(least), float(most)


def check_decay(name: str, g: jax.Array) -> None:
    """Refuse growth where the values are known; under `jit` they are not."""
    extremes = _known_extremes(g)
    if extremes is not None and extremes[1] > 0:
        raise ValueError(f"`{name}` is a log-decay and must be <= 0; got {extremes[1]}")


def check_strength(name: str, beta: jax.Array) -> None:
    """Refuse write strengths outside of [0, 2] where the values are known."""
    extremes = _known_extremes(beta)
    if extremes is not None and (extremes[0] < 0 or extremes[1] > 2):
        low, high = extremes
        raise ValueError(f"`{name}` must be in [0, 2]; got values from {low} to {high}")


def canonical_chunk_size(chunk_size: object) -> int | None:
    """Return a positive `int`, or `None`."""
    return checks.optional(checks.whole, "chunk_size", chunk_size, least=1)


def canonical_scale(scale: object, K: int) -> float:
    """Return a Python float; `K**-0.5` by default."""
    if scale is None:
        return 1 / math.sqrt(K)
    if isinstance(scale, jax.Array | np.ndarray) and not isinstance(scale, jax.core.Tracer):
        scale = scale.item() if scale.size == 1 else scale
    if isinstance(scale, jax.core.Tracer):
        raise ValueError(
            "`scale` must be a number known at trace time (multiply `q` by a traced one); "
            f"got {type(scale).__name__}"
        )
    return checks.number("scale", scale)


def _canonical_precision(precision: object, dtype: jnp.dtype) -> jax.lax.Precision | None:
    """HIGHEST unless given for 32- and 64-bit inputs; 16-bit inputs take the platform's default."""
    if precision is None:
        return None if dtype.itemsize == 2 else jax.lax.Precision.HIGHEST
    try:
        return jax.lax.Precision(precision)
    except ValueError:
        pass
    raise ValueError(
        f"`precision` must be a jax.lax.Precision, its name or None; got {precision!r}"
    )


def _canonical_gate(
    g: object, sizes: tuple[int, int, int, int], dtype: jnp.dtype
) -> jax.Array | None:
    if g is None:
        return None
    vector = getattr(g, "ndim", None) == 4
    axes, shape = ("[B, T, HV, K]", sizes) if vector else ("[B, T, HV]", sizes[:3])
    gate = check_array("g", g, axes, shape)
    check_decay("g", gate)
    return gate.astype(dtype)


def _canonical_reset(segment_ids: object, B: int, T: int) -> jax.Array | None:
    """True where a token's segment differs from that of the token before it."""
    if segment_ids is None:
        return None
    ids = checks.integers("segment_ids", segment_ids, "[B, T]", (B, T))
    return jnp.pad(ids[:, 1:] != ids[:, :-1], [(0, 0), (1, 0)])[:, :T]


def _check_cu_seqlens(cu_seqlens: object, segment_ids: object, B: int, T: int) -> int | None:
    """Return the number of sequences of a ragged row; check values where they are known."""
    if cu_seqlens is None:
        return None
    if segment_ids is not None:
        raise ValueError("`cu_seqlens` and `segment_ids` exclude each other; got both")
    offsets = canonical_offsets(cu_seqlens, T)
    if B != 1:
        raise ValueError(f"`cu_seqlens` describes one row; wanted `q` with B = 1, got B = {B}")
    return offsets.shape[0] - 1


def canonical_offsets(cu_seqlens: object, T: int | None) -> jax.Array:
    """Return integers `[N+1]`, in int32 or wider, that rise from 0 to `T`, if it is given."""
    offsets = checks.integers("cu_seqlens", cu_seqlens, "[N+1]")
    if offsets.shape[0] < 2:
        raise ValueError(
            f"`cu_seqlens` must be an integer array [N+1] with N >= 1; got shape {offsets.shape}"
        )
    if isinstance(offsets, jax.core.Tracer):
        return offsets
    values = np.asarray(offsets)
    if values[0] != 0:
        raise ValueError(f"`cu_seqlens` must start with 0; got {values[0]}")
    falls = np.flatnonzero(np.diff(values) < 0)
    if falls.size:
        n = int(falls[0])
        raise ValueError(
            f"`cu_seqlens` must not fall; got {values[n]} and then {values[n + 1]} at {n + 1}"
        )
    if T is not None and values[-1] != T:
        raise ValueError(f"`cu_seqlens` must end with T = {T}; got {values[-1]}")
    return offsets


def canonical_problem(
    q: object,
    k: object,
    v: object,
    *,
    g: object,
    beta: object,
    scale: object,
    initial_state: object,
    segment_ids: object,
    precision: object,
    cu_seqlens: object = None,
) -> Problem:
    """Check everything and resolve every default.

    With `cu_seqlens` the initial state is one per sequence, `[N, HV, K, V]`.

    Raises:
        ValueError: If an argument has the wrong type, rank, size or range.
    """
    q = check_array("q", q, "[B, T, H, K]")
    B, T, H, K = q.shape
    if K == 0:
        raise ValueError(f"`q` must have K >= 1 in shape [B, T, H, K]; got {q.shape}")
    k = check_array("k", k, "[B, T, H, K]", (B, T, H, K))
    v = check_array("v", v, "[B, T, HV, V]", (B, T, None, None))
    HV, V = v.shape[2:]
    if H == 0 or HV % H:
        raise ValueError(f"the heads of `v` must be a multiple of those of `q`; got {HV} and {H}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.check_whole_time(name, x)
    dtype = common_dtype(q, k, v)
    acc = accumulation_dtype(q, k, v)
    if beta is not None:
        beta = check_array("beta", beta, "[B, T, HV]", (B, T, HV)).astype(acc)
        check_strength("beta", beta)
    sequences = _check_cu_seqlens(cu_seqlens, segment_ids, B, T)
    if initial_state is not None:
        axes = "[B, HV, K, V]" if sequences is None else "[N, HV, K, V]"
        states = (B if sequences is None else sequences, HV, K, V)
        initial_state = check_array("initial_state", initial_state, axes, states).astype(acc)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    return Problem(
        tokens=Tokens(q, k, v, _canonical_gate(g, (B, T, HV, K), acc), beta),
        initial_state=initial_state,
        reset=_canonical_reset(segment_ids, B, T),
        scale=canonical_scale(scale, K),
        precision=_canonical_precision(precision, dtype),
    )
