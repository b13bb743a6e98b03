"""The oracle: the recurrence with explicit matrices, in NumPy float64.

Slow and obvious on purpose; it shares no code with the rest of the package.
"""

import numpy as np

__all__ = ["recurrence"]


def recurrence(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    g: np.ndarray | None = None,
    beta: np.ndarray | None = None,
    scale: float | None = None,
    initial_state: np.ndarray | None = None,
    segment_ids: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Run the family's recurrence, one matrix product after another.

    ::

        S_t = (I - beta_t k_t^T k_t) Diag(exp(g_t)) S_{t-1} + beta_t k_t^T v_t
        o_t = scale q_t S_t

    Without `beta` the erasing factor is the identity and the write is `k_t^T v_t`. Shapes are
    those of `deltanet_jax.linear_attention`; everything is converted to float64.

    Returns:
        Outputs `[B, T, HV, V]` and the final state `[B, HV, K, V]`.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    final = np.zeros((B, HV, K, V))
    if initial_state is not None:
        final += np.asarray(initial_state, np.float64)
    o = np.zeros((B, T, HV, V))
    for b in range(B):
        for h in range(HV):
            head = h // (HV // H)
            S = final[b, h].copy()
            for t in range(T):
                if segment_ids is not None and t > 0 and segment_ids[b, t] != segment_ids[b, t - 1]:
                    S = np.zeros((K, V))
                q_t, k_t, v_t = q[b, t, head][None], k[b, t, head][None], v[b, t, h][None]
                decay = np.ones(K) if g is None else np.exp(np.asarray(g[b, t, h], np.float64))
                A = np.diag(np.broadcast_to(decay, (K,)))
                write = k_t.T @ v_t
                if beta is not None:
                    strength = float(beta[b, t, h])
                    A = (np.eye(K) - strength * k_t.T @ k_t) @ A
                    write = strength * write
                S = A @ S + write
                o[b, t, h] = scale * (q_t @ S)[0]
            final[b, h] = S
    return o, final
