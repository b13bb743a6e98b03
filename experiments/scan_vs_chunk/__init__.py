"""The scan-versus-chunk ablation: one recurrence, its forms, what they cost."""

from experiments.scan_vs_chunk.main import run
from experiments.scan_vs_chunk.options import PRESETS, ScanVsChunk

__all__ = ["PRESETS", "ScanVsChunk", "run"]
