"""Sphinx's configuration: strict, and without anything from the network."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import kvell

project = "Kvell"
copyright = "The Kvell developers"  # noqa: A001 - Sphinx's name
release = version = kvell.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx_click",
    "myst_parser",
    "scripts.reference.hooks",
]
nitpicky = True
# What others document, far from here, and types that are private and only named.
OTHERS = (
    r"argparse|collections|contextlib|enum|fastapi|kvell\.engine\.engine"
    r"|kvell\.models\.text\.(gap_tokens|rendering)|kvell\.(mempool\.rendezvous|vocabulary)"
    r"|msgspec|numpy|os|pathlib|typing"
)
nitpick_ignore_regex = [
    ("py:.*", rf"({OTHERS})\..*"),
    ("py:class", "CompiledTemplate|UnenforcedKeyword|Entry|Key|Any"),
]
autodoc_default_options = {
    "members": True,
    "member-order": "bysource",
}
autodoc_typehints = "description"
autodoc_typehints_description_target = "all"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
myst_heading_anchors = 3
html_theme = "furo"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_title = f"Kvell {release}"
html_copy_source = False
html_show_sphinx = False
