"""Temporary memory and error of each implementation: the tables of the how-to pages.

Run `python docs/implementation_memory.py`; compiling the gradients of the associative
scans takes minutes on a CPU.
Memory is XLA's own count for the compiled program, so it does not depend on the load.
"""

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax import linear_attention
from deltanet_jax.core.reference import recurrence

B, T, H, K, V = 1, 1024, 2, 64, 64
CHOICES = [("recurrent", None), ("associative", None), ("associative", 64)]
CHOICES += [("chunkwise", None), ("chunkwise_solve", None)]


def inputs(seed: int = 0) -> list[np.ndarray]:
    """Layer-like: unit keys and queries, beta after a sigmoid, a gate of about a tenth."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, B, T, H, K))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(B, T, H, V))
    g = -0.1 * rng.random((B, T, H))
    beta = 1 / (1 + np.exp(-rng.normal(size=(B, T, H))))
    return [q, k, v, g, beta]


def relative(x: jax.Array, want: np.ndarray) -> float:
    x = np.asarray(x, np.float64)
    return float(np.sqrt(np.mean((x - want) ** 2) / np.mean(want**2)))


def temporary(function, *args: jax.Array) -> float:
    """MB of temporaries of the compiled program."""
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes / 1e6


def main() -> None:
    print("| implementation | forward, MB | gradient, MB | o, float32 | state | o, bf16 | state |")
    print("| --- " * 7 + "|")
    exact = inputs()
    for name, size in CHOICES:

        def run(q, k, v, g, beta, name=name, size=size):
            return linear_attention(q, k, v, g=g, beta=beta, chunk_size=size, implementation=name)

        def loss(*args, run=run):
            o, state = run(*args)
            return jnp.sum(o**2) + jnp.sum(state**2)

        wide = [jnp.asarray(x, jnp.float32) for x in exact]
        cells = [temporary(run, *wide), temporary(jax.grad(loss, argnums=range(5)), *wide)]
        row = [f"{c:.1f}" for c in cells]
        for dtype in (jnp.float32, jnp.bfloat16):
            args = [jnp.asarray(x, dtype) for x in exact[:3]] + wide[3:]
            q, k, v, g, beta = (np.asarray(x, np.float64) for x in args)
            want = recurrence(q, k, v, g=g, beta=beta)
            row += [f"{relative(x, w):.1e}" for x, w in zip(run(*args), want, strict=True)]
        label = name if size is None else f"{name}, chunk_size={size}"
        print(f"| {label} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
