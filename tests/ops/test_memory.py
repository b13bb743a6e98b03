"""Temporary memory, as XLA plans it: what each form must not keep."""

import jax
import jax.numpy as jnp
import pytest

import deltanet_jax as d
from tests.cases import PORTABLE

B, T, H, K, V = 1, 4096, 4, 128, 128
STATE = 4 * B * H * K * V  # bytes of one state


def temporaries(implementation, T):
    """Bytes of the compiled forward and backward pass beside inputs and outputs."""

    def loss_and_gradient(q, k, v, beta, do):
        o, pull = jax.vjp(
            lambda *x: d.delta_rule(*x, implementation=implementation)[0], q, k, v, beta
        )
        return o, pull(do)

    tokens, gate = jax.ShapeDtypeStruct((B, T, H, K), jnp.float32), (B, T, H)
    beta = jax.ShapeDtypeStruct(gate, jnp.float32)
    compiled = jax.jit(loss_and_gradient).lower(tokens, tokens, tokens, beta, tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes


BOUNDS = {"recurrent": 100e6, "chunkwise_solve": 80e6, "chunkwise": 90e6}


# The scan over token maps is the one that keeps them.
@pytest.mark.parametrize("implementation", [name for name in PORTABLE if name != "associative"])
def test_no_state_is_kept_per_token(implementation):
    """A scan that keeps them all would take `T * STATE`, 1 GB here, and a plain one twice that."""
    used = temporaries(implementation, T)
    assert used < BOUNDS.get(implementation, 100e6)
    assert used < T * STATE / 10


def test_the_scan_over_token_maps_keeps_what_the_ablation_says():
    """Its price, stated: a K x K and a K x V matrix per token at least."""
    tokens = 256
    assert temporaries("associative", tokens) > 2 * tokens * STATE
