"""Checkpoints of other libraries: flash-linear-attention's models and Qwen3-Next's mixers."""

from deltanet_jax.convert.fla import load_fla, save_fla
from deltanet_jax.convert.qwen3_next import load_qwen3_next, save_qwen3_next

__all__ = ["load_fla", "load_qwen3_next", "save_fla", "save_qwen3_next"]
