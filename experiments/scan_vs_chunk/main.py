"""The ablation from start to end: measure, train, compare, draw."""

import dataclasses
import shlex
from collections.abc import Sequence

from experiments.progress import progress_bar
from experiments.record import Row, Run
from experiments.saved_options import restore_options
from experiments.scan_vs_chunk import drawing, operators, training
from experiments.scan_vs_chunk.implementations import IMPLEMENTATIONS
from experiments.scan_vs_chunk.options import ScanVsChunk
from experiments.tables import console, human_bytes, human_count, human_seconds, make_table

__all__ = ["run"]

EXPERIMENT = "scan-vs-chunk"


def run(options: ScanVsChunk) -> int:
    """Run, or continue a run; return the exit status."""
    if options.resume is not None:
        record = Run.resume(EXPERIMENT, options.resume)
    else:
        record = Run.start(EXPERIMENT, options, options.results, options.name)
    with record:
        if options.resume is not None:
            saved = restore_options(ScanVsChunk, record.config["options"])
            options = dataclasses.replace(saved, operator_seconds=options.operator_seconds)
        console.print(f"record: {record.directory}")
        try:
            with progress_bar() as bar:
                if options.operators:
                    operators.measure(options, record, bar)
                if options.training:
                    training.train(options, record, bar)
            return finish(options, record)
        except KeyboardInterrupt:
            write_table(record)
            drawing.draw_all(options, record)
            command = (
                f"python -m experiments {EXPERIMENT} --resume {shlex.quote(str(record.directory))}"
            )
            console.print(f"interrupted; what was measured is in {record.directory}")
            console.print(f"continue with: {command}", soft_wrap=True)
            return 130


def finish(options: ScanVsChunk, record: Run) -> int:
    """Table, figures, and the verdict on the losses."""
    write_table(record)
    drawing.draw_all(options, record)
    show_operators(options, record.select(kind="operator"))
    failed = bool(record.select(kind="operator", status="failed"))
    if not options.training:
        return int(failed)
    verdict = training.agreement(record, options.loss_tolerance)
    for row in verdict:
        record.write({"kind": "agreement", **row})
    show_training(record, verdict)
    if all(row["agrees"] for row in verdict):
        console.print(f"losses agree step by step within {options.loss_tolerance:g} nats")
        return int(failed)
    console.print(f"[bold red]losses differ by more than {options.loss_tolerance:g} nats[/]")
    return 1


def write_table(record: Run) -> None:
    """Operators and trained layers as one CSV."""
    latest: dict[tuple[object, ...], Row] = {}
    for row in record.rows:
        if row["kind"] in ("operator", "arm"):
            names = ("kind", "implementation", "direction", "B", "T", "H", "d", "C", "arm")
            latest[tuple(row.get(name) for name in names)] = row
    record.write_table(latest.values())


def show_operators(options: ScanVsChunk, rows: Sequence[Row]) -> None:
    """One table per direction; the errors are against float64."""
    for direction in operators.DIRECTIONS:
        mine = [row for row in rows if row["direction"] == direction]
        if not mine:
            continue
        backward = direction == operators.DIRECTIONS[1]
        error = "grad error" if backward else "o, S error"
        columns = ["form", "T", "d", "C", "time", "compile", "memory", "(model)", "FLOPs", error]
        cells = [_cells(row, backward=backward) for row in mine if row["status"] != "not here"]
        console.print(make_table(direction.replace("+", " + "), columns, cells))
    console.print(
        "time: median of single calls, ± half their interquartile range; memory: XLA's temporary "
        "allocation, and its prediction; error: rms(x - x64) / rms(x64) against the float64 oracle"
    )
    for row in rows:
        if row["status"] in ("does not fit", "failed"):
            where = f"B={row['B']} T={row['T']} d={row['d']}"
            name, way = row["implementation"], row["direction"]
            console.print(f"{row['status']}: {name} {way} {where}: {row['reason']}")
    not_here = [(r["implementation"], r["reason"]) for r in rows if r["status"] == "not here"]
    for name, reason in dict.fromkeys(not_here):
        console.print(f"not run here: {name}: {reason}")


def _cells(row: Row, *, backward: bool) -> list[object]:
    tokens = row["T"] if row["B"] == 1 else f"{row['B']}x{row['T']}"
    head = [IMPLEMENTATIONS[row["implementation"]].short, tokens, row["d"], row["C"] or "-"]
    predicted = [human_bytes(row["predicted_temporary_bytes"]), human_count(row["predicted_flops"])]
    if row["status"] != "measured":
        status = "failed" if row["status"] == "failed" else "no fit"
        return [*head, status, "", human_bytes(row.get("temporary_bytes")), *predicted, ""]
    spread = (row["seconds_q75"] - row["seconds_q25"]) / 2
    names = ("error_gradient",) if backward else ("error_output", "error_state")
    errors = " ".join(f"{row[name]:.0e}" for name in names if name in row)
    around = "once" if row["calls"] == 1 else f"±{100 * spread / row['seconds']:.0f}%"
    return [
        *head,
        f"{human_seconds(row['seconds'])} {around}",
        human_seconds(row["compile_seconds"]),
        human_bytes(row["temporary_bytes"]),
        *predicted,
        errors or "-",
    ]


def show_training(record: Run, verdict: Sequence[Row]) -> None:
    """The three layers side by side."""
    arms = {row["arm"]: row for row in record.select(kind="arm")}
    cells = [
        [
            row["arm"],
            f"{arms[row['arm']]['last_loss']:.4f}",
            f"{row['largest_loss_difference']:.1e} at {row['at_step']}",
            f"{arms[row['arm']]['tokens_per_second']:,.0f}",
            human_bytes(arms[row["arm"]]["temporary_bytes"]),
            human_seconds(arms[row["arm"]]["compile_seconds"]),
        ]
        for row in verdict
    ]
    text = record.find(kind="text")
    title = f"One model, one start, {text['bytes']:,} bytes of {text['source']}"
    columns = ["layer", "last loss (nats)", "largest gap (nats) at step", "tokens/s"]
    columns += ["memory", "compile"]
    console.print(make_table(title, columns, cells))
    large = [
        [
            name.removeprefix(training.LARGE),
            f"{row['parameters']:,}",
            f"{row['last_loss']:.4f}",
            f"{row['tokens_per_second']:,.0f}",
            human_bytes(row["temporary_bytes"]),
            human_seconds(row["compile_seconds"]),
        ]
        for name, row in arms.items()
        if name.startswith(training.LARGE)
    ]
    if large:
        columns = ["mixers", "parameters", "last loss (nats)", "tokens/s", "memory", "compile"]
        console.print(make_table("A large model in bfloat16", columns, large))
