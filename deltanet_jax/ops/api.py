"""The public functions: one per variant, over one table of implementations."""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from deltanet_jax.core.numerics import accumulation_dtype
from deltanet_jax.core.problem import start_state
from deltanet_jax.ops import canonical, dispatch, ragged
from deltanet_jax.ops.arguments import CallOptions, Choice, Gate, Options, Result, Segments
from deltanet_jax.ops.dispatch import Implementation
from deltanet_jax.ops.signature import checked_call, gate_of_rank, required

__all__ = [
    "Choice",
    "delta_rule",
    "gated_delta_rule",
    "gated_linear_attention",
    "kimi_delta_attention",
    "linear_attention",
    "normalized_linear_attention",
    "step",
    "why_not",
]

PER_CALL_ARRAYS = ("initial_state", "segment_ids", "cu_seqlens")


@checked_call
def linear_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    *,
    g: Gate | None = None,
    beta: Float[Array, "B T HV"] | None = None,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Segments | None = None,
    cu_seqlens: Int[Array, " N+1"] | None = None,
    chunk_size: int | None = None,
    implementation: Choice = None,
    precision: jax.lax.PrecisionLike = None,
) -> Result:
    """Compute any variant; the other operators are this function with fewer choices.

    ::

        S_t = (I - beta_t k_t^T k_t) Diag(exp(g_t)) S_{t-1} + beta_t k_t^T v_t    with `beta`
        S_t = Diag(exp(g_t)) S_{t-1} + k_t^T v_t                                  without
        o_t = scale * q_t S_t

    ============  =====================  ============================  =================
    .             `g=None`               `g [B, T, HV]`                `g [B, T, HV, K]`
    ============  =====================  ============================  =================
    `beta=None`   linear attention       scalar-gated GLA (RetNet)     GLA
    `beta` given  DeltaNet               Gated DeltaNet                KDA
    ============  =====================  ============================  =================

    Args:
        q: Queries, `[B, T, H, K]`.
        k: Keys, `[B, T, H, K]`. With `beta`, unit L2 norm keeps the state bounded.
        v: Values, `[B, T, HV, V]`; `HV` is a multiple of `H`, and value head `h` reads key
            head `h // (HV // H)`.
        g: Log-decay in nats, `<= 0`, per head or per head and key channel. `-inf` forgets
            everything. Growth (`g > 0`) is refused where the values are known; under `jit`
            they are not, and the result is then undefined.
        beta: Write strength, dimensionless, in `[0, 2]`; above 1 the eigenvalue `1 - beta`
            along a unit `k` is negative.
        scale: Factor on `q`; `K**-0.5` by default. A Python number.
        initial_state: `S_0`, `[B, HV, K, V]` in any float dtype; zeros by default.
        segment_ids: Integers `[B, T]`. The state restarts from zero wherever the id changes;
            the first run starts from `initial_state`, and `final_state` belongs to the last.
        cu_seqlens: Integers `[N+1]` for one row of `N` sequences (`B = 1`): sequence `n` holds
            the tokens from `cu_seqlens[n]` up to `cu_seqlens[n+1]`, the first entry is 0, the
            last `T`. `initial_state` and `final_state` are then `[N, HV, K, V]`, one per
            sequence, and a sequence without tokens returns its own. Every batch of the same
            `T` and `N` is one compilation; under `jit` the entries themselves cannot be
            checked, and results for wrong ones are undefined.
        chunk_size: Tokens per chunk; each implementation has its default.
        implementation: `"recurrent"`, `"associative"`, `"chunkwise"` (WY form),
            `"chunkwise_solve"`, `"pallas"`, a callable `(problem, chunk_size) -> (o, state)`,
            or a sequence of these in order of preference. `None` takes the best that works
            for this call on this platform. One explicit name never falls back.
        precision: Precision of products of 32-bit operands: HIGHEST by default for 32-bit
            inputs, the platform's own for 16-bit inputs.

    Returns:
        Outputs `[B, T, HV, V]` in the dtype of `v`, and the final state `[B, HV, K, V]` in
        float32 (float64 for float64 inputs).

    Raises:
        ValueError: If an argument has the wrong type, shape or range; the message names it.
        NotImplementedError: If the implementation that was asked for cannot run this call.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 1, 1))  # one head, one channel, one key written twice
        >>> o, state = linear_attention(q, k, v)
        >>> state.item()
        2.0

    References:
        Katharopoulos et al., 2020, arXiv:2006.16236 (linear attention). Schlag et al., 2021,
        arXiv:2102.11174, and Yang et al., 2024, arXiv:2406.06484 (DeltaNet). Yang et al.,
        2023, arXiv:2312.06635 (GLA). Yang et al., 2024, arXiv:2412.06464 (Gated DeltaNet).
        Kimi Team, 2025, arXiv:2510.26692 (KDA).
    """
    problem = canonical.canonical_problem(
        q,
        k,
        v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        precision=precision,
    )
    size = canonical.canonical_chunk_size(chunk_size)
    algorithm = dispatch.choose(implementation, problem, size)
    if cu_seqlens is not None:
        offsets = canonical.canonical_offsets(cu_seqlens, None)
        o, states = ragged.run_ragged(problem, offsets, algorithm=algorithm, chunk_size=size)
        return o.astype(jnp.result_type(v)), states
    if problem.q.shape[1] == 0:
        return problem.v.astype(jnp.result_type(v)), start_state(problem)
    o, final_state = dispatch.run(problem, algorithm=algorithm, chunk_size=size)
    return o.astype(jnp.result_type(v)), final_state


@checked_call
def delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    beta: Float[Array, "B T HV"],
    **options: Unpack[Options],
) -> Result:
    """DeltaNet: linear attention whose writes correct what the state holds.

    ::

        S_t = (I - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t
        o_t = scale * q_t S_t

    One step is one step of gradient descent on `1/2 |k S - v|^2` with learning rate `beta`.
    Arguments, results and errors are those of `linear_attention`.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 1, 1))  # the second write finds nothing to correct
        >>> o, state = delta_rule(q, k, v, beta=jnp.ones((1, 2, 1)))
        >>> state.item()
        1.0

    References:
        Schlag et al., 2021, arXiv:2102.11174; Yang et al., 2024, arXiv:2406.06484.
    """
    return linear_attention(q, k, v, beta=required("beta", beta), **options)


@checked_call
def gated_delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    **options: Unpack[Options],
) -> Result:
    """Gated DeltaNet: the state decays, then the error is read, then it is corrected.

    ::

        S_t = (I - beta_t k_t^T k_t) exp(g_t) S_{t-1} + beta_t k_t^T v_t
        o_t = scale * q_t S_t

    `g` is one log-decay per head, `[B, T, HV]`; with one per key channel the rule is
    `kimi_delta_attention`.
    Arguments, results and errors are those of `linear_attention`.

    Example:
        >>> x, ones = jnp.ones((1, 50, 2, 8)), jnp.ones((1, 50, 2))
        >>> o, state = gated_delta_rule(x, x, x, g=-0.1 * ones, beta=0.5 * ones)
        >>> o.shape, state.shape
        ((1, 50, 2, 8), (1, 2, 8, 8))

    References:
        Yang et al., 2024, arXiv:2412.06464.
    """
    gate = gate_of_rank(3, g, "[B, T, HV]", "`kimi_delta_attention` takes a gate per key channel")
    return linear_attention(q, k, v, g=gate, beta=required("beta", beta), **options)


@checked_call
def gated_linear_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Gate,
    **options: Unpack[Options],
) -> Result:
    """Gated linear attention: the state decays and accumulates.

    ::

        S_t = Diag(exp(g_t)) S_{t-1} + k_t^T v_t
        o_t = scale * q_t S_t

    `g` is one log-decay per key channel, `[B, T, HV, K]`, or one per head, `[B, T, HV]`
    (RetNet and Mamba-2's form). Arguments, results and errors are those of
    `linear_attention`.

    Example:
        >>> x = jnp.ones((1, 3, 1, 1))
        >>> o, _ = gated_linear_attention(x, x, x, g=jnp.full((1, 3, 1), jnp.log(0.5)))
        >>> print(np.asarray(o).ravel().round(3))
        [1.   1.5  1.75]

    References:
        Yang et al., 2023, arXiv:2312.06635.
    """
    return linear_attention(q, k, v, g=required("g", g), **options)


@checked_call
def kimi_delta_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    **options: Unpack[Options],
) -> Result:
    """KDA: the delta rule with one decay per key channel.

    ::

        S_t = (I - beta_t k_t^T k_t) Diag(exp(g_t)) S_{t-1} + beta_t k_t^T v_t
        o_t = scale * q_t S_t

    Arguments, results and errors are those of `linear_attention`; `g` is `[B, T, HV, K]`.

    Example:
        >>> x, start = jnp.ones((1, 2, 1, 2)), jnp.ones((1, 1, 2, 2))
        >>> g = jnp.broadcast_to(jnp.asarray([0.0, -jnp.inf]), x.shape)  # one channel forgets
        >>> _, state = kimi_delta_attention(x, x, x, g, 0 * x[..., 0], initial_state=start)
        >>> state[0, 0].tolist()
        [[1.0, 1.0], [0.0, 0.0]]

    References:
        Kimi Team, 2025, arXiv:2510.26692.
    """
    gate = gate_of_rank(4, g, "[B, T, HV, K]", "`gated_delta_rule` takes a gate per head")
    return linear_attention(q, k, v, g=gate, beta=required("beta", beta), **options)


@checked_call
def normalized_linear_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    *,
    eps: float = 1e-6,
    g: Gate | None = None,
    beta: Float[Array, "B T HV"] | None = None,
    **options: Unpack[Options],
) -> Result:
    """Linear attention over its normaliser, for feature maps that are positive.

    ::

        S_t = S_{t-1} + k_t^T v_t        z_t = z_{t-1} + k_t
        o_t = (q_t S_t) / (q_t . z_t + eps)

    The normaliser is one more value column that holds ones, so the state is
    `[B, HV, K, V+1]`, and `g`, `beta`, segments and initial state act on it as on any other
    column. `scale` cancels up to `eps`. Other arguments are those of `linear_attention`.

    Example:
        >>> q = k = jnp.ones((1, 3, 1, 1))  # equal weights: the mean of all values so far
        >>> v = jnp.asarray([3.0, 5.0, 1.0]).reshape(1, 3, 1, 1)
        >>> o, _ = normalized_linear_attention(q, k, v)
        >>> print(np.asarray(o).ravel().round(3))
        [3. 4. 3.]

    References:
        Katharopoulos et al., 2020, arXiv:2006.16236.
    """
    v = canonical.check_array("v", v, "[B, T, HV, V]")
    with_ones = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
    acc = accumulation_dtype(v)
    o, final_state = linear_attention(q, k, with_ones.astype(acc), g=g, beta=beta, **options)
    return (o[..., :-1] / (o[..., -1:] + eps)).astype(v.dtype), final_state


@checked_call
def step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    state: Float[Array, "B HV K V"],
    *,
    g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
    beta: Float[Array, "B HV"] | None = None,
    scale: float | None = None,
) -> tuple[Float[Array, "B HV V"], Float[Array, "B HV K V"]]:
    """Compute one token of any variant, for a decoder.

    On an H100 or H200 a kernel reads the state once and writes it once. Under `jit`, donate the
    state or make it the carry of a scan: it is then overwritten where it lies.

    Args:
        q: Query, `[B, H, K]`.
        k: Key, `[B, H, K]`.
        v: Value, `[B, HV, V]`.
        state: The state before this token, `[B, HV, K, V]`.
        g: Log-decay in nats, `<= 0`, `[B, HV]` or `[B, HV, K]`.
        beta: Write strength, `[B, HV]`; `None`: no delta rule.
        scale: Factor on `q`; `K**-0.5` by default.

    Returns:
        The output `[B, HV, V]` in the dtype of `v`, and the state after this token in float32
        (float64 for float64 inputs).

    Raises:
        ValueError: If an argument has the wrong type, shape or range; the message names it.

    Example:
        >>> x, state = jnp.ones((1, 1, 1)), jnp.zeros((1, 1, 1, 1))
        >>> o, state = step(x, x, 3 * x, state, beta=jnp.ones((1, 1)))
        >>> state.item()
        3.0
    """
    q = canonical.check_array("q", q, "[B, H, K]")
    k, v = canonical.check_array("k", k, "[B, H, K]"), canonical.check_array("v", v, "[B, HV, V]")
    token = {"q": q, "k": k, "v": v}
    tokens = {name: x[:, None] for name, x in token.items()}
    problem = canonical.canonical_problem(
        **tokens,
        g=_with_time("g", g),
        beta=_with_time("beta", beta),
        scale=scale,
        initial_state=required("state", state),
        segment_ids=None,
        precision=None,
    )
    algorithm = dispatch.choose_for_one_token(problem)
    o, new_state = dispatch.run(problem, algorithm=algorithm, chunk_size=1)
    return o[:, 0].astype(v.dtype), new_state


def _with_time(name: str, x: object) -> object:
    """A gate of one token with a time axis of one, so that one set of checks serves."""
    if isinstance(x, jax.Array | np.ndarray) and x.ndim >= 1:
        return x[:, None]
    return x


def why_not(
    implementation: Implementation,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    *,
    g: Gate | None = None,
    beta: Float[Array, "B T HV"] | None = None,
    **options: Unpack[CallOptions],
) -> str | None:
    """Why this implementation cannot run this call, or `None` if it can.

    Takes the arguments of `linear_attention`, as arrays or `jax.ShapeDtypeStruct` objects;
    nothing is computed.

    Raises:
        ValueError: If the call itself is wrong.

    Example:
        >>> x = jax.ShapeDtypeStruct((1, 50, 2, 8), jnp.bfloat16)
        >>> why_not("chunkwise", x, x, x) is None
        True
    """
    size = canonical.canonical_chunk_size(options.get("chunk_size"))
    arrays: dict[str, object] = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    arrays |= {name: options.get(name) for name in PER_CALL_ARRAYS}
    static = {name: options.get(name) for name in ("scale", "precision")}
    reasons = []

    def ask(arrays: dict[str, object]) -> None:
        problem = canonical.canonical_problem(**arrays, **static)
        reasons.append(dispatch.reason_against(implementation, problem, size))

    jax.eval_shape(ask, arrays)
    return reasons[0]
