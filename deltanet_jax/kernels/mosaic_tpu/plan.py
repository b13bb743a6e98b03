"""Support of the TPU kernels, and how a problem is cut into grid cells."""

from typing import NamedTuple

import jax

from deltanet_jax.core.problem import GateKind, Problem

__all__ = ["Plan", "make_plan", "why_not"]

FIELDS = ("q", "k", "v", "g", "beta")  # per-token arrays that the kernels take
HEAD_DIMS = (64, 128, 256)
CHUNK_SIZES = (16, 32, 64, 128, 256)
DEFAULT_CHUNK = 128
# Under the 64 MiB of the smallest core's VMEM, with room for what XLA keeps there.
VMEM_LIMIT = 40 * 2**20
# Heads of 128 x 128 in one grid cell. Their serial chains hide each other's latency; more of them
# cost VMEM and compile time, in float32 six products for one, and a vector gate has more to
# hide it with.
MAX_HEADS = {"bfloat16": 8, "float32": 2}
MAX_HEADS_VECTOR_GATE = 4


class Plan(NamedTuple):
    """The static choices of one call; a grid cell has some heads and walks their chunks."""

    chunk: int  # tokens per chunk, C
    heads: int  # value heads per cell, G; batch and heads are one axis
    key_heads: int  # key heads per cell
    group: int  # value heads per key head
    scale: float
    delta: bool
    gate: GateKind
    precision: jax.lax.Precision | None  # of all products; None for 16-bit inputs, as Mosaic wants
    interpret: object  # False, True, or the parameters of Pallas's TPU interpreter


def why_not(problem: Problem, chunk_size: int | None = None) -> str | None:
    """Return why these kernels cannot run the problem, or `None`; from shapes and dtypes only."""
    if others := problem.fields_beside(FIELDS):
        return f"the TPU kernels do not take `{others[0]}`"
    q, v = problem.q, problem.v
    K, V = q.shape[-1], v.shape[-1]
    dtypes = {str(x.dtype) for x in (q, problem.k, v)}
    if len(dtypes) != 1 or not dtypes & {"bfloat16", "float32"}:
        got = ", ".join(sorted(dtypes))
        return f"the TPU kernels take bfloat16 or float32 inputs of one dtype; got {got}"
    if dtypes == {"bfloat16"} and problem.precision not in (None, jax.lax.Precision.DEFAULT):
        return f"the TPU kernels round 16-bit products; got precision={problem.precision}"
    if K not in HEAD_DIMS or V not in HEAD_DIMS:
        return f"the TPU kernels need head sizes in {HEAD_DIMS}; got K={K}, V={V}"
    if chunk_size is not None and chunk_size not in CHUNK_SIZES:
        return f"the TPU kernels need a chunk size in {CHUNK_SIZES}; got {chunk_size}"
    return None


def make_plan(problem: Problem, chunk_size: int | None, interpret: object) -> Plan:
    """Choose the chunk size and the heads of a grid cell."""
    B, T, H, K = problem.q.shape
    HV, V = problem.v.shape[2:]
    group = HV // H
    if chunk_size is None:
        chunk_size = next(c for c in CHUNK_SIZES if c >= min(T, DEFAULT_CHUNK))
    tile = max(chunk_size, 128) * max(K, V, chunk_size, 128)
    most = MAX_HEADS[str(problem.v.dtype)]
    gate = _gate_kind(problem)
    if gate == "vector":
        most = min(most, MAX_HEADS_VECTOR_GATE)
    fits = max(1, most * 128 * 128 // max(tile, K * V))
    heads = max(
        n for n in range(1, fits + 1) if (B * HV) % n == 0 and (n % group == 0 or group % n == 0)
    )
    precision = problem.precision
    if str(problem.v.dtype) == "bfloat16":
        precision = None
    elif precision is None:
        precision = jax.lax.Precision.HIGHEST
    return Plan(
        chunk=chunk_size,
        heads=heads,
        key_heads=max(1, heads // group),
        group=group,
        scale=problem.scale,
        delta=problem.beta is not None,
        gate=gate,
        precision=precision,
        interpret=interpret,
    )


def _gate_kind(problem: Problem) -> GateKind:
    """Return the kind of gate once resets are written into it."""
    resets_alone = problem.gate == "none" and problem.reset is not None
    return "scalar" if resets_alone else problem.gate
