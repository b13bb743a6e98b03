"""Sphinx configuration."""

import inspect
import re

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from deltanet_jax._version import __version__

project = "deltanet_jax"
copyright = "the deltanet_jax authors"
release = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3
myst_update_mathjax = False
# Equations become MathML when the site is built, so a page needs no script and no network.
html_math_renderer = "mathml"

# Notebooks run at every build, and a cell that fails is a build that fails.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

html_theme = "furo"
html_title = "deltanet_jax"
html_static_path = ["_static"]
html_css_files = ["site.css"]

napoleon_use_ivar = True  # attributes are a list, as arguments are
napoleon_attr_annotations = False  # shapes are in the words
default_role = "code"  # docstrings have `names`, as Markdown has
autoclass_content = "both"
autodoc_default_options = {"special-members": "__call__"}
autodoc_typehints = "none"
autodoc_member_order = "bysource"


PLAIN = (str, int, float, type(None))


def _signature(
    app: Sphinx, what: str, name: str, thing: type, options: object, given: str, returns: str
) -> tuple[str, str] | None:
    """Show the arguments of `__init__` for a class, which the metaclass of Flax hides."""
    if what != "class" or "rngs" not in inspect.signature(thing.__init__).parameters:
        return None
    if "__init__" not in vars(thing):
        return "(...)", returns
    shown = [
        p.replace(annotation=p.empty, default=p.default if _plain(p) else ...)
        for p in inspect.signature(thing.__init__).parameters.values()
    ]
    return str(inspect.Signature(shown[1:])).replace("Ellipsis", "..."), returns


def _plain(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty or isinstance(parameter.default, PLAIN)


def _skip(
    app: Sphinx, what: str, name: str, thing: object, skip: bool, options: object
) -> bool | None:
    """Skip the fields of named tuples, which have no text of their own."""
    return True if (getattr(thing, "__doc__", None) or "").startswith("Alias for field") else None


TAG = re.compile(r"\\tag\{(\w+)\}")


def _inline_math(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(latex2mathml.tex2mathml(node.astext()))
    raise nodes.SkipNode


def _math_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a displayed equation with its number beside it."""
    tag = TAG.search(node.astext())
    equation = latex2mathml.tex2mathml(TAG.sub("", node.astext()).strip(), as_block=True)
    number = f'<span class="eqno">({tag[1]})</span>' if tag else ""
    translator.body.append(f'<div class="math">{number}{equation}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-skip-member", _skip)
    app.add_html_math_renderer("mathml", (_inline_math, None), (_math_block, None))
