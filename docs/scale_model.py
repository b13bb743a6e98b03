"""Model the cost of context parallelism for `scale.md`, and check it on a small case.

Run `python docs/scale_model.py`. The check compiles one DeltaNet operator for eight devices of
the CPU and counts what XLA's program computes and sends, so it does not depend on the load.
"""

import math
import os
import re
from functools import partial
from typing import NamedTuple

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from deltanet_jax import parallel

ITEM = 4  # bytes: maps and states are float32
COLLECTIVE = re.compile(r"= \(?f32\[([\d,]+)\].* (?:collective-permute|all-reduce)(?:-start)?\(")


class Case(NamedTuple):
    """DeltaNet in form 2, `heads` of `K x V` in chunks of `C`."""

    devices: int
    tokens: int  # in all
    heads: int
    K: int
    V: int
    C: int = 64

    @property
    def rounds(self) -> int:
        return math.ceil(math.log2(self.devices))

    @property
    def chunks(self) -> float:
        """Per device."""
        return self.tokens / self.devices / self.C

    def map_products(self) -> float:
        """Multiply-adds per device that reduce its tokens to one map."""
        C, K, V = self.C, self.K, self.V
        chunk = C * C * K + C * C * (K + V) / 2 + 2 * C * K * (K + V)
        return self.heads * self.chunks * chunk

    def run_products(self) -> float:
        """Multiply-adds per device that run its tokens from their state."""
        C, K, V = self.C, self.K, self.V
        chunk = 2 * C * C * K + C * C * (K + V) / 2 + C * C * V + 3 * C * K * V
        return self.heads * self.chunks * chunk

    def exchange_products(self) -> float:
        K, V = self.K, self.V
        return self.heads * (self.rounds * K * K * (K + V) + K * K * V)

    def sent(self) -> int:
        """Bytes that a device sends in the forward pass; the backward sends as many."""
        K, V = self.K, self.V
        return ITEM * self.heads * (self.rounds * K * (K + V) + 2 * K * V)


def check(case: Case) -> None:
    """Count products and bytes of the compiled program, forward, and with its gradient."""
    shape = (1, case.tokens, case.heads)
    q, v = jnp.ones((*shape, case.K)), jnp.ones((*shape, case.V))
    beta, state = jnp.ones(shape), jnp.ones((1, case.heads, case.K, case.V))
    mesh = jax.make_mesh((case.devices,), ("context",), axis_types=(AxisType.Auto,))
    time = P(None, "context")
    call = partial(parallel.linear_attention, axis_name="context", implementation="chunkwise")
    run = jax.shard_map(
        lambda q, k, v, beta, state: call(q, k, v, beta=beta, initial_state=state),
        mesh=mesh,
        in_specs=(time, time, time, time, P()),
        out_specs=(time, P()),
    )

    def loss(*args: jax.Array) -> jax.Array:
        o, state = run(*args)
        return jnp.sum(o**2) + jnp.sum(state**2)

    args = (q, q, v, beta, state)
    forward = jax.jit(run).lower(*args).compile()
    both = jax.jit(jax.grad(loss, argnums=range(5))).lower(*args).compile()
    found = forward.cost_analysis()["flops"] / 2
    model = case.map_products() + case.run_products() + case.exchange_products()
    print(f"multiply-adds, forward: model {model:.4g}, XLA {found:.4g}, ratio {found / model:.3f}")
    for name, program, wanted in (("forward", forward, 1), ("with gradient", both, 2)):
        sent = sum(
            ITEM * math.prod(int(n) for n in dims.split(","))
            for dims in COLLECTIVE.findall(program.as_text())
            if dims.count(",") == 3
        )
        print(f"bytes sent, {name}: model {wanted * case.sent()}, XLA {sent}")


def table(rate: float, link: float, latency: float) -> None:
    """One layer's forward over ten million tokens."""
    print("| devices | tokens each | map, ms | run, ms | sent, MB | exchange, ms | efficiency |")
    print("| --- " * 7 + "|")
    alone = 2 * Case(1, 10 * 2**20, 16, 128, 128).run_products() / rate
    for devices in (8, 64, 256, 1024):
        case = Case(devices, 10 * 2**20, 16, 128, 128)
        reduce, run = (2 * n / rate for n in (case.map_products(), case.run_products()))
        steps = case.rounds + 2
        exchange = 2 * case.exchange_products() / rate + case.sent() / link + steps * latency
        cells = (
            f"{devices}",
            f"{case.tokens // devices}",
            f"{1e3 * reduce:.3g}",
            f"{1e3 * run:.3g}",
            f"{case.sent() / 1e6:.3g}",
            f"{1e3 * exchange:.3g}",
            f"{alone / devices / (reduce + run + exchange):.2f}",
        )
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    # One chunk per device: XLA counts the body of a loop once, whatever its number of turns.
    check(Case(devices=8, tokens=512, heads=2, K=32, V=48))
    table(rate=100e12, link=50e9, latency=10e-6)
