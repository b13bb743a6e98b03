"""The command line: `python -m experiments --help`."""

import itertools
import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from experiments.associative_retrieval import PRESETS as ASSOCIATIVE_RETRIEVAL
from experiments.associative_retrieval import AssociativeRetrieval
from experiments.associative_retrieval import run as run_associative_retrieval
from experiments.cache_size import CacheSize
from experiments.cache_size import run as run_cache_size
from experiments.compiling import prefer_quick_compilation
from experiments.delta_as_sgd import DeltaAsSgd
from experiments.delta_as_sgd import run as run_delta_as_sgd
from experiments.language_model import PRESETS as LANGUAGE_MODEL
from experiments.language_model import LanguageModel
from experiments.language_model import run as run_language_model
from experiments.memory_capacity import MemoryCapacity
from experiments.memory_capacity import run as run_memory_capacity
from experiments.needle import PRESETS as NEEDLE
from experiments.needle import Needle
from experiments.needle import run as run_needle
from experiments.pack_text import PackText
from experiments.pack_text import run as run_pack_text
from experiments.recall import PRESETS as RECALL
from experiments.recall import Recall
from experiments.recall import run as run_recall
from experiments.record import RecordError
from experiments.saved_options import check_numbers
from experiments.scan_vs_chunk import PRESETS as SCAN_VS_CHUNK
from experiments.scan_vs_chunk import ScanVsChunk
from experiments.scan_vs_chunk import run as run_scan_vs_chunk
from experiments.serving import Serving
from experiments.serving import run as run_serving
from experiments.state_tracking import PRESETS as STATE_TRACKING
from experiments.state_tracking import StateTracking
from experiments.state_tracking import run as run_state_tracking
from experiments.train_sharded import TrainSharded
from experiments.train_sharded import run as run_train_sharded

__all__ = ["main", "parse"]

Options = (
    ScanVsChunk
    | StateTracking
    | AssociativeRetrieval
    | Recall
    | Needle
    | LanguageModel
    | MemoryCapacity
    | CacheSize
    | DeltaAsSgd
    | Serving
    | PackText
    | TrainSharded
)


def parse(arguments: Sequence[str]) -> Options:
    """Parse the options of one experiment; a preset sets its defaults."""
    preset = _preset(arguments)
    commands = (
        Annotated[
            ScanVsChunk,
            tyro.conf.subcommand("scan-vs-chunk", default=SCAN_VS_CHUNK[preset]),
        ]
        | Annotated[
            StateTracking,
            tyro.conf.subcommand("state-tracking", default=STATE_TRACKING[preset]),
        ]
        | Annotated[
            AssociativeRetrieval,
            tyro.conf.subcommand("associative-retrieval", default=ASSOCIATIVE_RETRIEVAL[preset]),
        ]
        | Annotated[Recall, tyro.conf.subcommand("recall", default=RECALL[preset])]
        | Annotated[Needle, tyro.conf.subcommand("needle", default=NEEDLE[preset])]
        | Annotated[
            LanguageModel,
            tyro.conf.subcommand("language-model", default=LANGUAGE_MODEL[preset]),
        ]
        | Annotated[MemoryCapacity, tyro.conf.subcommand("memory-capacity")]
        | Annotated[CacheSize, tyro.conf.subcommand("cache-size")]
        | Annotated[DeltaAsSgd, tyro.conf.subcommand("delta-as-sgd")]
        | Annotated[Serving, tyro.conf.subcommand("serving")]
        | Annotated[PackText, tyro.conf.subcommand("pack-text")]
        | Annotated[TrainSharded, tyro.conf.subcommand("train-sharded")]
    )
    return tyro.cli(
        commands,
        args=list(arguments),
        prog="python -m experiments",
        description="Experiments on delta-rule linear attention; each leaves a run directory.",
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _preset(arguments: Sequence[str]) -> str:
    """Find the preset before the rest is parsed; tyro refuses a wrong one."""
    words = [part for word in arguments for part in word.split("=", 1)]
    named = [value for flag, value in itertools.pairwise(words) if flag == "--preset"]
    return named[-1] if named and named[-1] in SCAN_VS_CHUNK else "cpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one experiment; return the exit status."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax logs errors that it also raises
    prefer_quick_compilation()
    try:
        check_numbers(options)
        match options:
            case ScanVsChunk():
                return run_scan_vs_chunk(options)
            case StateTracking():
                return run_state_tracking(options)
            case AssociativeRetrieval():
                return run_associative_retrieval(options)
            case Recall():
                return run_recall(options)
            case Needle():
                return run_needle(options)
            case LanguageModel():
                return run_language_model(options)
            case MemoryCapacity():
                run_memory_capacity(options)
            case CacheSize():
                run_cache_size(options)
            case DeltaAsSgd():
                run_delta_as_sgd(options)
            case Serving():
                run_serving(options)
            case PackText():
                run_pack_text(options)
            case TrainSharded():
                run_train_sharded(options)
    except (RecordError, ImportError, NotImplementedError, OSError, ValueError) as error:
        # Of several lines that a library says, one.
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0
