"""Error of four ways to invert `I + L` in float32: the table of `docs/mathematics.md`.

Run `python docs/inverse_error.py`; NumPy only, a second.
"""

from collections.abc import Callable

import numpy as np

C, K = 64, 64


def keys(correlation: float, seed: int) -> np.ndarray:
    """Unit keys whose pairwise cosine is about `correlation`."""
    rng = np.random.default_rng(seed)
    common, own = rng.normal(size=(1, K)), rng.normal(size=(C, K))
    common, own = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (common, own))
    k = np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own
    return k / np.linalg.norm(k, axis=1, keepdims=True)


def doubling(L: np.ndarray) -> np.ndarray:
    """`(I - L)(I + L^2)(I + L^4)...`: exact in exact arithmetic, since `L^C = 0`."""
    identity = np.eye(len(L), dtype=L.dtype)
    X, power = identity - L, L
    for _ in range(int(np.log2(len(L))) - 1):
        power = power @ power
        X = X @ (identity + power)
    return X


def newton(L: np.ndarray) -> np.ndarray:
    """`X <- X (2I - (I + L) X)` from `X = I`; also exact after `log2 C` steps."""
    identity = np.eye(len(L), dtype=L.dtype)
    X = identity
    for _ in range(int(np.log2(len(L)))):
        X = X @ (2 * identity - (identity + L) @ X)
    return X


def substitution(L: np.ndarray) -> np.ndarray:
    """Row after row: `x_i = e_i - sum_{j<i} L_ij x_j`."""
    X = np.eye(len(L), dtype=L.dtype)
    for i in range(1, len(L)):
        X[i] -= L[i, :i] @ X[:i]
    return X


def blocked(L: np.ndarray, block: int = 16) -> np.ndarray:
    """Substitution on diagonal blocks, then merges `-X2 L21 X1` of neighbours."""
    X = np.zeros_like(L)
    for s in range(0, len(L), block):
        d = slice(s, s + block)
        X[d, d] = substitution(L[d, d])
    while block < len(L):
        for s in range(0, len(L), 2 * block):
            a, b = slice(s, s + block), slice(s + block, s + 2 * block)
            X[b, a] = -X[b, b] @ L[b, a] @ X[a, a]
        block *= 2
    return X


def ladder(L: np.ndarray) -> np.ndarray:
    """Merges from single rows up."""
    return blocked(L, block=1)


METHODS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "doubling": doubling,
    "newton": newton,
    "substitution": substitution,
    "blocked": blocked,
    "ladder": ladder,
}
CASES = [("random", 0.0, 1.0), ("random", 0.0, 2.0)]
CASES += [(f"cos {c}", c, beta) for c in (0.3, 0.6, 0.9) for beta in (0.5, 1.0, 2.0)]
CASES += [("identical", 1.0, beta) for beta in (0.5, 0.99, 1.0, 2.0)]


def errors(correlation: float, beta: float, seed: int = 0) -> dict[str, float]:
    """Largest absolute error over the largest entry of the float64 inverse."""
    k = keys(correlation, seed)
    L = np.tril(beta * k @ k.T, -1).astype(np.float32)
    exact = np.linalg.inv(np.eye(C) + L.astype(np.float64))
    with np.errstate(over="ignore", invalid="ignore"):
        found = {name: method(L).astype(np.float64) for name, method in METHODS.items()}
    return {name: np.abs(X - exact).max() / np.abs(exact).max() for name, X in found.items()}


def largest_power(correlation: float, beta: float, seed: int = 0) -> float:
    """The largest entry of any power of `L`, in float64."""
    k = keys(correlation, seed)
    L = np.tril(beta * k @ k.T, -1)
    power, largest = np.eye(C), 0.0
    for _ in range(C):
        power = power @ L
        largest = max(largest, np.abs(power).max())
    return largest


def main() -> None:
    print("| keys | beta | largest entry of a power | " + " | ".join(METHODS) + " |")
    print("| --- " * (len(METHODS) + 3) + "|")
    for name, correlation, beta in CASES:
        row = [f"{error:.0e}" for error in errors(correlation, beta).values()]
        power = f"{largest_power(correlation, beta):.0e}"
        print(f"| {name} | {beta:g} | {power} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
