"""A token mixer as an Equinox module: one sequence at a time, batched by `jax.vmap`."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from deltanet_jax import gated_delta_rule, l2_norm

__all__ = ["Mixer"]


class Mixer(eqx.Module):
    """Gated DeltaNet without a convolution."""

    qkv: eqx.nn.Linear
    gates: eqx.nn.Linear
    out: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)

    def __init__(self, width: int, num_heads: int, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key, 3)
        self.qkv = eqx.nn.Linear(width, 3 * width, use_bias=False, key=keys[0])
        self.gates = eqx.nn.Linear(width, 2 * num_heads, key=keys[1])
        self.out = eqx.nn.Linear(width, width, use_bias=False, key=keys[2])
        self.num_heads = num_heads

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        q, k, v = jnp.split(jax.vmap(self.qkv)(x), 3, axis=-1)
        q, k, v = (u.reshape(1, len(x), self.num_heads, -1) for u in (q, k, v))
        decay, strength = jnp.split(jax.vmap(self.gates)(x)[None], 2, axis=-1)
        g, beta = -jax.nn.softplus(decay), jax.nn.sigmoid(strength)
        o, _ = gated_delta_rule(l2_norm(q), l2_norm(k), v, g, beta)
        return jax.vmap(self.out)(o[0].reshape(x.shape))


def main() -> None:
    """Mix a batch of sequences, and differentiate with respect to the parameters."""
    mixer = Mixer(32, num_heads=2, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 20, 32))
    print("outputs:", jax.vmap(mixer)(x).shape)
    gradient = eqx.filter_grad(lambda mixer: jnp.sum(jax.vmap(mixer)(x) ** 2))(mixer)
    for name in ("qkv", "gates", "out"):
        print(f"gradient norm of {name}: {jnp.linalg.norm(getattr(gradient, name).weight):.4f}")


if __name__ == "__main__":
    main()
