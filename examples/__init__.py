"""The library inside other libraries; each module is short enough to copy."""
