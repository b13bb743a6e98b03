"""Estimate the cycles of the TPU kernels on a machine without a TPU (needs libtpu).

    python benchmarks/tpu_cycles.py --chips v6e,tpu7x --shape 2,4096,8,128 --gate vector

Each kernel of a training step with the delta rule in bfloat16 is compiled alone for the described
chip, in a process of its own, with the flag that makes libtpu write its static estimate. That is
done for one row of two short lengths; the line through both is read at the full number of tokens.
The estimate knows the compiler's schedule and nothing of HBM: use it for ratios on one chip.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
QUIET = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def compile_kernel(kernel: str, chip: str, gate: str, T: int, H: int, D: int) -> None:
    """Compile one kernel for one row; libtpu writes the estimate on the way."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from deltanet_jax.core.problem import Problem, Tokens
    from deltanet_jax.kernels.mosaic_tpu.backward import backward
    from deltanet_jax.kernels.mosaic_tpu.blocks import Inputs, Saved
    from deltanet_jax.kernels.mosaic_tpu.forward import forward
    from deltanet_jax.kernels.mosaic_tpu.plan import make_plan

    described = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
    sharding = SingleDeviceSharding(described.devices[0])

    def array(*shape: int, dtype: object = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    qkv = array(1, T, H, D, dtype=jnp.bfloat16)
    gates = {"none": None, "scalar": array(1, T, H), "vector": array(1, T, H, D)}
    problem = Problem(Tokens(qkv, qkv, qkv, gates[gate], array(1, T, H)), scale=D**-0.5)
    plan = make_plan(problem, None, False)
    G, C = plan.heads, plan.chunk
    blocks = (H // G, T // C, G)
    tokens = array(*blocks, C, D, dtype=jnp.bfloat16)
    rows = array(*blocks, C)
    given = {"none": (), "scalar": (rows, rows), "vector": (array(*blocks, C, D),)}
    x = Inputs(tokens, tokens, tokens, rows, given[gate])
    state = array(H, D, D)
    if kernel == "forward":
        jax.jit(lambda x, s: forward(x, s, plan, save=True)).lower(x, state).compile()
        return
    saved = Saved(array(*blocks, D, D, dtype=jnp.bfloat16), array(*blocks, C, C))
    run = jax.jit(lambda *a: backward(*a, plan))
    run.lower(x, saved, tokens, state).compile()


def estimate(kernel: str, chip: str, gate: str, T: int, H: int, D: int) -> int:
    """Cycles of one kernel for one row, compiled in a child: libtpu may stop it after writing."""
    with tempfile.TemporaryDirectory() as folder:
        flag = {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_static_llo_profile_to={folder}"}
        command = [sys.executable, __file__, "--child", kernel, chip, gate]
        command += map(str, (T, H, D))
        child = subprocess.run(
            command, env=os.environ | QUIET | flag, capture_output=True, text=True, check=False
        )
        texts = [path.read_text(errors="replace") for path in Path(folder).glob("*.textproto")]
    found = [re.search(r"estimated_cycles: (\d+)", t) for t in texts]
    cycles = max((int(hit.group(1)) for hit in found if hit), default=0)
    if cycles == 0:
        raise RuntimeError(
            f"libtpu gave no estimate of {kernel} for {chip}:\n{child.stderr[-2000:]}"
        )
    return cycles


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--shape", default="2,4096,8,128", help="B,T,H,D")
    parser.add_argument("--gate", default="none", choices=("none", "scalar", "vector"))
    parser.add_argument("--child", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kernel, chip, gate, *numbers = options.child
        compile_kernel(kernel, chip, gate, *map(int, numbers))
        return
    B, T, H, D = map(int, options.shape.split(","))
    short, longer = 256, 512
    print("| chip | forward | backward | sum, Mcycles |\n|---|---|---|---|")
    for chip in options.chips.split(","):
        totals = []
        for kernel in ("forward", "backward"):
            at = [estimate(kernel, chip, options.gate, n, H, D) for n in (short, longer)]
            slope = (at[1] - at[0]) / (longer - short)
            totals.append((at[0] + slope * (B * T - short)) / 1e6)
        print(f"| {chip} | {totals[0]:.3f} | {totals[1]:.3f} | {sum(totals):.3f} |", flush=True)


if __name__ == "__main__":
    main()
