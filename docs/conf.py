"""Sphinx configuration."""

from deltanet_jax._version import __version__

project = "deltanet_jax"
copyright = "the deltanet_jax authors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "deltanet_jax"
exclude_patterns = ["_build"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
