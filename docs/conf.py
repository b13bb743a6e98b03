"""Sphinx configuration."""

from deltanet_jax._version import __version__

project = "deltanet_jax"
copyright = "the deltanet_jax authors"
release = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

# Notebooks run at every build, and a cell that fails is a build that fails.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300

html_theme = "furo"
html_title = "deltanet_jax"
html_static_path = ["_static"]
html_css_files = ["site.css"]

autodoc_typehints = "none"
autodoc_member_order = "bysource"
