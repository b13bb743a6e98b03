"""The equations of `docs/mathematics.md` in NumPy, one function per displayed block.

One head, row-vector convention, float64. Nothing here is shared with the package.
"""

from typing import NamedTuple

import numpy as np


class Tokens(NamedTuple):
    """A chunk: `q`, `k` `[C, K]`, `v` `[C, V]`, `g` `[C, D]` (`D` 1 or `K`), `beta` `[C, 1]`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray | None


class Parts(NamedTuple):
    """Parts of the chunk equations."""

    q_in: np.ndarray  # q * exp(b)
    k_in: np.ndarray  # k * exp(b)
    k_out: np.ndarray  # k * exp(b_C - b)
    total: np.ndarray  # exp(b_C), [D, 1]
    A: np.ndarray  # tril(P(q, k))
    L: np.ndarray | None  # stril(beta P(k, k))
    T: np.ndarray | None  # (I + L)^-1


def token_loop(x: Tokens, S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decay, then read the error, then write; unscaled outputs and the last state."""
    o = []
    for t in range(len(x.k)):
        S = np.exp(x.g[t])[:, None] * S
        write = x.v[t] if x.beta is None else x.beta[t] * (x.v[t] - x.k[t] @ S)
        S = S + np.outer(x.k[t], write)
        o.append(x.q[t] @ S)
    return np.array(o), S


def pair_decay(g: np.ndarray) -> np.ndarray:
    """`exp(b_i - b_j)` for `j <= i` and 0 above, `[C, C, D]`, each a sum over a range."""
    C = len(g)
    exponent = np.full((C, C, g.shape[1]), -np.inf)
    for i in range(C):
        for j in range(i + 1):
            exponent[i, j] = g[j + 1 : i + 1].sum(axis=0)
    return np.exp(exponent)


def scores(x: np.ndarray, y: np.ndarray, g: np.ndarray) -> np.ndarray:
    """`P(x, y)_ij = x_i Diag(exp(b_i - b_j)) y_j^T` for `j <= i`, 0 above."""
    decay = np.broadcast_to(pair_decay(g), (len(x), len(x), x.shape[1]))
    return np.einsum("ik,jk,ijk->ij", x, y, decay)


def block_scores(x: np.ndarray, y: np.ndarray, g: np.ndarray, size: int) -> np.ndarray:
    """The same with both factors anchored at the first row of the later sub-block."""
    C = len(x)
    P = np.zeros((C, C))
    for r in range(0, C, size):
        rows = slice(r, r + size)
        P[rows, rows] = scores(x[rows], y[rows], g[rows])
        left = x[rows] * np.exp(np.cumsum(g[rows], axis=0))
        right = [y[j] * np.exp(g[j + 1 : r].sum(axis=0)) for j in range(r)]
        if right:
            P[rows, :r] = left @ np.array(right).T
    return P


def parts(x: Tokens) -> Parts:
    b = np.cumsum(x.g, axis=0)
    k_out = x.k * np.exp(b[-1] - b)
    A = scores(x.q, x.k, x.g)
    L = T = None
    if x.beta is not None:
        L = np.tril(x.beta * scores(x.k, x.k, x.g), -1)
        T = np.linalg.inv(np.eye(len(x.k)) + L)
    return Parts(x.q * np.exp(b), x.k * np.exp(b), k_out, np.exp(b[-1])[:, None], A, L, T)


def form_1(x: Tokens, S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Solve with the incoming state."""
    p = parts(x)
    writes = x.v if x.beta is None else p.T @ (x.beta * (x.v - p.k_in @ S))
    return p.q_in @ S + p.A @ writes, p.total * S + p.k_out.T @ writes


def form_2(x: Tokens, S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """WY factors first, the state afterwards."""
    p = parts(x)
    W, U = wy(x, p)
    writes = U - W @ S
    return p.q_in @ S + p.A @ writes, p.total * S + p.k_out.T @ writes


def wy(x: Tokens, p: Parts) -> tuple[np.ndarray, np.ndarray]:
    if x.beta is None:
        return np.zeros_like(x.k), x.v
    return p.T @ (x.beta * p.k_in), p.T @ (x.beta * x.v)


def chunk_map(x: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """`S' = M S + R`."""
    p = parts(x)
    W, U = wy(x, p)
    return p.total * np.eye(x.k.shape[1]) - p.k_out.T @ W, p.k_out.T @ U


class Gradients(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    state: np.ndarray


def backward(x: Tokens, S: np.ndarray, dO: np.ndarray, dS1: np.ndarray) -> Gradients:
    """The backward of one chunk with the delta rule; `dS1` belongs to `S'`."""
    p = parts(x)
    E = x.v - p.k_in @ S
    writes = p.T @ (x.beta * E)
    # Two products through the outputs and the state, one transposed solve.
    dwrites = p.A.T @ dO + p.k_out @ dS1
    Z = p.T.T @ dwrites
    dv = x.beta * Z
    dS = p.total * dS1 + p.q_in.T @ dO - p.k_in.T @ dv
    dA = np.tril(dO @ writes.T)
    dL = -np.tril(Z @ writes.T, -1)
    per_token = np.sum(Z * E, axis=1) + np.sum(dL * scores(x.k, x.k, x.g), axis=1)
    dbeta = per_token[:, None]
    # Each factor of exp(b) next to q or k, split by the sign of b in its exponent.
    C, K = x.k.shape
    decay = np.broadcast_to(pair_decay(x.g), (C, C, K))
    b = np.cumsum(x.g, axis=0)
    dP = x.beta * dL
    dq = np.exp(b) * (dO @ S.T) + np.einsum("ij,ijk,jk->ik", dA, decay, x.k)
    dk_plus = -np.exp(b) * (dv @ S.T) + np.einsum("ij,ijk,jk->ik", dP, decay, x.k)
    dk_out = np.exp(b[-1] - b) * (writes @ dS1.T)
    dk_minus = np.einsum("ij,ijk,ik->jk", dA, decay, x.q)
    dk_minus += np.einsum("ij,ijk,ik->jk", dP, decay, x.k) + dk_out
    db = x.q * dq + x.k * (dk_plus - dk_minus)
    db[-1] += np.sum(p.total * S * dS1, axis=1) + np.sum(x.k * dk_out, axis=0)
    dg = np.cumsum(db[::-1], axis=0)[::-1]
    if x.g.shape[1] == 1:
        dg = dg.sum(axis=1, keepdims=True)
    return Gradients(dq, dk_plus + dk_minus, dv, dg, dbeta, dS)
