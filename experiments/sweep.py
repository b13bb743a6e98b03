"""Many small trainings, recorded as they go: the seeds of one case run side by side.

Parameters, batches and evaluations are functions of seed and step alone, and the state is
stored after every block of steps: a killed run continues as if nothing had happened.
While one case trains, threads compile the next ones.
"""

import itertools
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from rich.progress import Progress

from experiments import checkpoint
from experiments.compiling import compile_ahead, cpu_optimization
from experiments.progress import progress_bar
from experiments.record import Row, Run
from experiments.saved_options import restore_options
from experiments.tables import console

__all__ = [
    "Case",
    "ModelSweep",
    "OutOfTimeError",
    "Sweep",
    "best_rate",
    "check_names",
    "cross_entropy",
    "run_sweep",
    "spread",
    "train",
    "train_all",
]

Options = TypeVar("Options", bound="Sweep")
Model = Any  # any nnx module; each case calls its own


@dataclass(frozen=True)
class Sweep:
    """Options of every sweep of small trainings."""

    preset: Literal["cpu", "gpu"] = "cpu"
    """Where the defaults below come from; every one of them can be set beside it."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Continue this run directory with its own options, except `minutes`."""
    results: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results")
    """Where run directories go."""
    name: str | None = None
    """Name of the run directory; the time by default."""
    seed: int = 0
    """The first seed."""
    seeds: int = 3
    """Number of seeds, trained side by side."""
    rates: tuple[float, ...] = (3e-3,)
    """Learning rates, trained side by side; the best by the mean over seeds is reported."""
    steps: int = 1000
    """Steps of training, at most."""
    block: int = 100
    """Steps between two rows of the record, and between checkpoints; divides `steps`."""
    batch_size: int = 32
    """Sequences per step."""
    minutes: float | None = None
    """Stop training after this time, at the end of a block, and show what is done by then."""


@dataclass(frozen=True)
class ModelSweep(Sweep):
    """Options of every sweep of small language models."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of computation; parameters are float32."""
    implementation: str | None = None
    """Implementation of the operator; by default the best for the platform."""


class OutOfTimeError(Exception):
    """The run has taken the time that it was given."""


class Case(NamedTuple):
    """One thing to train."""

    key: Mapping[str, object]
    make: Callable[[nnx.Rngs], Model]
    loss: Callable[[Model, jax.Array, jax.Array], jax.Array]
    """Loss of a batch drawn by a key, for the variant of this index."""
    measure: Callable[[Model, jax.Array, jax.Array], dict[str, jax.Array]]
    """Scores reported at the end, on data drawn by a key, for the variant of this index."""
    variants: tuple[Mapping[str, object], ...] = ({},)
    """Settings that one program can take as data, trained side by side: no second compilation."""

    @property
    def title(self) -> str:
        return " ".join(str(value) for value in self.key.values())


def train_all(options: Sweep, record: Run, bar: Progress, cases: Sequence[Case]) -> list[Row]:
    """Train cases one after another; see `train`."""
    # A CPU is busy enough with one program; elsewhere compilation is most of the time.
    pool = ThreadPoolExecutor(1 if jax.default_backend() == "cpu" else 6)
    try:
        programs = [
            None
            if _result(record, case) or _late(options, record)
            else pool.submit(_compile, options, case)
            for case in cases
        ]
        return [
            train(options, record, bar, case, None if program is None else program.result)
            for case, program in zip(cases, programs, strict=True)
        ]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def train(
    options: Sweep,
    record: Run,
    bar: Progress,
    case: Case,
    compiled: "Callable[[], Program] | None" = None,
) -> Row:
    """Train a case over all seeds and rates, or find it in the record.

    Args:
        options: Options of the sweep.
        record: Record of rows, and of the state after every block.
        bar: Progress bar, which gets a task.
        case: The case to train.
        compiled: Waits for the program of this case; by default it is compiled here.

    Raises:
        ValueError: If `block` does not divide `steps`.
        OutOfTimeError: If the run has taken its `minutes`.
    """
    if options.steps % options.block:
        raise ValueError(
            f"`block` must divide `steps`; got block={options.block}, steps={options.steps}"
        )
    task = bar.add_task(case.title, total=options.steps, note="compiling")
    found = _result(record, case)
    if found is not None:
        bar.update(task, completed=options.steps, note="in the record")
        return found
    if _late(options, record):
        raise OutOfTimeError
    program = compiled() if compiled else _compile(options, case)
    path = record.directory / f"checkpoint-{case.title.replace(' ', '-').replace('/', '-')}.npz"
    trained, row = _fit(options, record, case, program, path, partial(bar.update, task))
    found = program.measure(trained, *_arrays(options, case, MEASUREMENT)[::2])
    measured = {name: np.asarray(x).tolist() for name, x in found.items()}
    lanes = [
        {"seed": seed, "rate": rate, **case.variants[variant]}
        | {name: values[i] for name, values in measured.items()}
        for i, (seed, rate, variant) in enumerate(_lanes(options, case))
    ]
    result = record.write({"kind": "result", **case.key, **row, "lanes": lanes})
    path.unlink(missing_ok=True)
    return result


def _result(record: Run, case: Case) -> Row | None:
    return record.find(kind="result", **case.key)


def _late(options: Sweep, record: Run) -> bool:
    return options.minutes is not None and record.seconds >= 60 * options.minutes


def _lanes(options: Sweep, case: Case) -> list[tuple[int, float, int]]:
    """Seed, rate and variant of each training that runs beside the others."""
    seeds = range(options.seed, options.seed + options.seeds)
    return list(itertools.product(seeds, options.rates, range(len(case.variants))))


def _arrays(options: Sweep, case: Case, stream: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys, rates and variants of the lanes; lanes of one seed have one key."""
    seeds, rates, variants = (jnp.asarray(x) for x in zip(*_lanes(options, case), strict=True))
    keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), stream))(seeds)
    return keys, rates, variants


PARAMETERS, BATCHES, MEASUREMENT = range(3)


def _optimizer(options: Sweep) -> optax.GradientTransformation:
    """AdamW at rate 1, warmed up for a twentieth and then decayed; lanes scale its updates."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, 1.0, max(1, options.steps // 20), max(2, options.steps), end_value=0.1
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-4))


def _graph(case: Case) -> nnx.GraphDef[Model]:
    return nnx.split(nnx.eval_shape(lambda: case.make(nnx.Rngs(0))))[0]


class Program(NamedTuple):
    """A case compiled for all its lanes."""

    start: Callable[..., Any]
    """Keys to the state before the first step: parameters and moments."""
    block: Callable[..., Any]
    """State, keys, rates, variants and the first step to the next state and the losses."""
    measure: Callable[..., dict[str, jax.Array]]
    """Parameters, keys and variants to the measurements."""
    seconds: float
    """Time of compilation."""


def _compile(options: Sweep, case: Case) -> Program:
    """All programs of a case; nothing of it is run."""
    graph, optimizer = _graph(case), _optimizer(options)

    def start(key: jax.Array) -> tuple[nnx.State, optax.OptState]:
        params = nnx.state(case.make(nnx.Rngs(key)))
        return params, optimizer.init(params)

    def step(
        state: tuple[nnx.State, optax.OptState], key: jax.Array, rate: jax.Array, variant: jax.Array
    ) -> tuple[tuple[nnx.State, optax.OptState], jax.Array]:
        params, moments = state
        loss, gradient = jax.value_and_grad(
            lambda params: case.loss(nnx.merge(graph, params), key, variant)
        )(params)
        updates, moments = optimizer.update(gradient, moments, params)
        params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
        return (params, moments), loss

    def block(
        state: Any, key: jax.Array, rate: jax.Array, variant: jax.Array, first: jax.Array
    ) -> Any:
        def advance(state: Any, index: jax.Array) -> Any:
            return step(state, jax.random.fold_in(key, index), rate, variant)

        return jax.lax.scan(advance, state, first + jnp.arange(options.block))

    def measure(params: nnx.State, key: jax.Array, variant: jax.Array) -> dict[str, jax.Array]:
        return case.measure(nnx.merge(graph, params), key, variant)

    keys, rates, variants = _arrays(options, case, PARAMETERS)
    state = jax.eval_shape(jax.vmap(start), keys)
    blocks = jax.vmap(block, in_axes=(0, 0, 0, 0, None))
    # A case of a thousand small steps takes longer to optimise than to run.
    build = partial(compile_ahead, compiler_options=cpu_optimization(0))
    built = (
        build(jax.vmap(start), keys),
        build(blocks, state, keys, rates, variants, jnp.asarray(0), donate_argnums=0),
        build(jax.vmap(measure), state[0], keys, variants),
    )
    return Program(*(x.program for x in built), seconds=sum(x.seconds for x in built))


def _fit(
    options: Sweep,
    record: Run,
    case: Case,
    program: Program,
    path: Path,
    report: Callable[..., None],
) -> tuple[nnx.State, Row]:
    """The parameters of every lane after training, and what it took."""
    lanes = _arrays(options, case, BATCHES)
    fresh = program.start(_arrays(options, case, PARAMETERS)[0])
    state, first = checkpoint.load(path, fresh)
    begin = time.perf_counter()
    for end in range(first + options.block, options.steps + 1, options.block):
        if _late(options, record):
            raise OutOfTimeError
        state, losses = program.block(state, *lanes, jnp.asarray(end - options.block))
        means = np.asarray(losses).mean(1)
        record.write({"kind": "train", **case.key, "step": end, "loss": list(means)})
        checkpoint.save(path, state, end)
        report(completed=end, note=f"loss {means.min():.3g} to {means.max():.3g}")
    report(completed=options.steps)
    seconds = time.perf_counter() - begin
    return state[0], {
        "parameters": sum(x[0].size for x in jax.tree.leaves(state[0])),
        "compile_seconds": program.seconds,
        # Nothing to measure where the checkpoint was the last.
        "seconds_per_step": seconds / (options.steps - first) if first < options.steps else None,
    }


def check_names(option: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `ValueError` if an option has a name that is not known."""
    known = tuple(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"`{option}` must be among {', '.join(known)}; got {', '.join(map(repr, unknown))}"
        )


def cross_entropy(
    logits: jax.Array, targets: jax.Array, ignore: int = -1
) -> tuple[jax.Array, jax.Array]:
    """Mean cross entropy in nats and accuracy over the targets that are not `ignore`."""
    counted = targets != ignore
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counted, targets, 0))
    right = jnp.argmax(logits, axis=-1) == targets
    count = jnp.maximum(counted.sum(), 1)
    return jnp.sum(losses, where=counted) / count, jnp.sum(right, where=counted) / count


def best_rate(lanes_of: Iterable[Row], metric: str, *, smallest: bool = False) -> list[Row]:
    """Select the lanes of the learning rate whose mean over seeds is the best."""
    lanes: dict[float, list[Row]] = {}
    for lane in lanes_of:
        lanes.setdefault(lane["rate"], []).append(lane)
    sign = -1 if smallest else 1
    # A lane that diverged is recorded as "nan", and loses.
    return max(lanes.values(), key=lambda ls: np.nan_to_num(
        sign * np.mean([float(lane[metric]) for lane in ls]), nan=-np.inf))  # fmt: skip


def spread(values: Iterable[float], digits: int = 3) -> str:
    """`mean [least, greatest]` over seeds."""
    xs = [float(x) for x in values]
    return f"{np.mean(xs):.{digits}f} [{min(xs):.{digits}f}, {max(xs):.{digits}f}]"


def run_sweep(
    experiment: str,
    options: Options,
    body: Callable[[Options, Run, Progress], None],
    finish: Callable[[Options, Run], None],
) -> int:
    """Run, or continue a run; return the exit status."""
    if options.resume is not None:
        record = Run.resume(experiment, options.resume)
    else:
        record = Run.start(experiment, options, options.results, options.name)
    with record:
        if options.resume is not None:
            saved = restore_options(type(options), record.config["options"])
            options = replace(saved, minutes=options.minutes)
        console.print(f"record: {record.directory}")
        try:
            with progress_bar() as bar:
                body(options, record, bar)
        except (KeyboardInterrupt, OutOfTimeError) as stop:
            interrupted = isinstance(stop, KeyboardInterrupt)
            again = f"python -m experiments {experiment} --resume"
            why = "interrupted" if interrupted else "out of time"
            console.print(f"{why}; what was measured is in {record.directory}")
            console.print(f"continue with: {again} {shlex.quote(str(record.directory))}",
                          soft_wrap=True)  # fmt: skip
            if interrupted:
                return 130
            if record.find(kind="result") is None:
                return 0
        finish(options, record)
    return 0
