"""The command line: `python -m deltanet_jax.convert --help`."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from flax import nnx

from deltanet_jax.convert.files import SHARD_BYTES, new_directory, read_config, refuse
from deltanet_jax.convert.fla import load_fla, save_fla
from deltanet_jax.convert.fla_config import DEFAULTS, wrong_type
from deltanet_jax.convert.qwen3_next import load_qwen3_next
from deltanet_jax.models.delta_net_lm import DeltaNetLM

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it did what was asked, 1 if it says why not."""
    options = _parser().parse_args(arguments)
    # Orbax logs a traceback of every error that it raises.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        print(options.run(options))
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deltanet_jax.convert",
        description="Checkpoints of flash-linear-attention (DeltaNetForCausalLM, "
        "GatedDeltaNetForCausalLM) and the Gated DeltaNet mixers of Qwen3-Next. "
        "Nothing is written unless all of it can be.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    check = commands.add_parser("check", help="say what a directory holds and whether it converts")
    check.add_argument("source", type=Path, help="config.json and safetensors")
    check.set_defaults(run=_check)

    importing = commands.add_parser(
        "import", help="from flash-linear-attention's directory to a checkpoint of this library"
    )
    importing.add_argument("source", type=Path, help="config.json and safetensors")
    importing.add_argument("target", type=Path, help="a new directory of checkpoints, step 0")
    importing.add_argument("--param-dtype", help="of parameters; by default the files'")
    importing.set_defaults(run=_import)
    for command in (check, importing):
        command.add_argument(
            "--ignore",
            action="append",
            default=[],
            metavar="PATTERN",
            help="config keys and tensors to read as if they were absent; may be repeated",
        )

    exporting = commands.add_parser(
        "export", help="from a checkpoint of this library to flash-linear-attention's directory"
    )
    exporting.add_argument("source", type=Path, help="a directory of checkpoints")
    exporting.add_argument("target", type=Path, help="a new directory")
    exporting.add_argument("--step", type=int, help="which checkpoint; the newest by default")
    exporting.add_argument("--dtype", help="of every tensor; by default each in its own")
    exporting.add_argument("--max-shard-bytes", type=int, default=SHARD_BYTES, help="of one file")
    exporting.set_defaults(run=_export)
    return parser


def _check(options: argparse.Namespace) -> str:
    data = read_config(options.source)
    refuse(options.source, wrong_type(data, (*DEFAULTS, "qwen3_next")))
    if (kind := data["model_type"]) == "qwen3_next":
        if options.ignore:
            raise ValueError(f"`--ignore` is for flash-linear-attention's checkpoints; got {kind}")
        mixers = load_qwen3_next(options.source)
        return f"{kind}: the mixers of layers {', '.join(map(str, mixers))} convert"
    return _described(load_fla(options.source, ignore=options.ignore))


def _import(options: argparse.Namespace) -> str:
    from deltanet_jax.models.checkpoint import Checkpoints  # a further dependency

    model = load_fla(options.source, param_dtype=options.param_dtype, ignore=options.ignore)
    size = sum(x.nbytes for x in _leaves(model))
    with new_directory(options.target, size) as directory, Checkpoints(directory) as checkpoints:
        checkpoints.save(0, model)
    return f"{_described(model)}: {options.target}"


def _export(options: argparse.Namespace) -> str:
    from deltanet_jax.models.checkpoint import Checkpoints

    if not options.source.is_dir():
        raise FileNotFoundError(f"{options.source} is not a directory")
    with Checkpoints(options.source) as checkpoints:
        model = DeltaNetLM(checkpoints.load_config(options.step), rngs=nnx.Rngs(0))
        checkpoints.restore(model, step=options.step)
    save_fla(model, options.target, dtype=options.dtype, max_shard_bytes=options.max_shard_bytes)
    return f"{_described(model)}: {options.target}"


def _leaves(model: DeltaNetLM) -> list[jax.Array]:
    leaves: list[jax.Array] = jax.tree.leaves(nnx.state(model))
    return leaves


def _described(model: DeltaNetLM) -> str:
    count = sum(x.size for x in _leaves(model))
    gate = "Gated DeltaNet" if model.config.gate == "scalar" else "DeltaNet"
    return f"{gate}, {model.config.num_layers} layers, {count:,} parameters"


if __name__ == "__main__":
    sys.exit(main())
