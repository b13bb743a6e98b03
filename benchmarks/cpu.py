"""DeltaNet on a CPU beside the chunked XLA operator of jax-linear-attention, in one process.

    python benchmarks/cpu.py                   # forward and forward+backward, default path
    python benchmarks/cpu.py --implementations chunkwise,recurrent --rounds 5

The baseline is optional (`pip install --no-deps jax-linear-attention==0.1.0` with its needs, on
Python 3.12 or newer); without it our rows stand alone. All programs are compiled first. Then they
are called in turn, A B A B, after a pause in which the system takes back freed memory. The table
has the median and the range of wall time, the temporary memory by XLA's account, and the ratio to
the baseline's median in the same run. `OPENBLAS_NUM_THREADS=1` gives the baseline its best case:
its triangular solves are batched.
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable

import jax

from deltanet_jax import delta_rule, l2_norm

B, T, H, D = 1, 4096, 4, 128
PAUSE = 0.05  # seconds before each call
Operator = Callable[..., jax.Array]


def inputs() -> tuple[jax.Array, ...]:
    """Draw layer-like `q, k, v, beta, do`: unit queries and keys, `beta` from a sigmoid."""
    keys = jax.random.split(jax.random.key(0), 5)
    tokens = [jax.random.normal(key, (B, T, H, D)) for key in keys[:4]]
    q, k = (l2_norm(x) for x in map(jax.nn.silu, tokens[:2]))
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], (B, T, H)))
    return q, k, tokens[2], beta, tokens[3]


def ours(implementation: str | None) -> Operator:
    def operator(q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array) -> jax.Array:
        return delta_rule(q, k, v, beta, implementation=implementation)[0]

    return operator


def baseline() -> Operator | None:
    try:
        ops = importlib.import_module("jla.ops")
    except ImportError as error:
        print(f"without the baseline: {error}")
        return None

    def operator(q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array) -> jax.Array:
        return ops.linear_attention(
            "deltanet", q, k, v, beta=beta, impl="chunked", output_final_state=False
        )[0]

    return operator


def forward_backward(operator: Operator) -> Callable[..., tuple]:
    def both(q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, do: jax.Array) -> tuple:
        o, pull = jax.vjp(operator, q, k, v, beta)
        return o, pull(do)

    return both


def measure(name: str, operators: dict[str, Operator], rounds: int) -> None:
    *arguments, do = inputs()
    programs, compile_seconds = {}, {}
    for label, operator in operators.items():
        function = forward_backward(operator) if name == "forward+backward" else operator
        given = (*arguments, do) if name == "forward+backward" else arguments
        start = time.perf_counter()
        programs[label] = (jax.jit(function).lower(*given).compile(), given)
        compile_seconds[label] = time.perf_counter() - start
        jax.block_until_ready(programs[label][0](*given))
    times: dict[str, list[float]] = {label: [] for label in programs}
    for _ in range(rounds):
        for label, (program, given) in programs.items():
            time.sleep(PAUSE)
            start = time.perf_counter()
            jax.block_until_ready(program(*given))
            times[label].append(1e3 * (time.perf_counter() - start))
    base = statistics.median(times["baseline"]) if "baseline" in times else None
    for label, (program, _) in programs.items():
        median = statistics.median(times[label])
        memory = program.memory_analysis().temp_size_in_bytes / 1e6
        ratio = f"{median / base:5.2f} of the baseline" if base else ""
        print(
            f"{name:17s} {label:16s} {median:8.1f} ms [{min(times[label]):.1f}-"
            f"{max(times[label]):.1f}]  {memory:6.0f} MB  compiled in "
            f"{compile_seconds[label]:4.1f} s  {ratio}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--implementations", default="default,recurrent")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    other = baseline()
    operators = {} if other is None else {"baseline": other}
    for name in options.implementations.split(","):
        operators[name] = ours(None if name == "default" else name)
    print(f"jax {jax.__version__}, B={B} T={T} H={H} K=V={D}, float32")
    for mode in ("forward", "forward+backward"):
        measure(mode, operators, options.rounds)


if __name__ == "__main__":
    main()
