"""How Sphinx builds the documentation: `make docs`."""

import re
from pathlib import Path

import lightning_egeria

HERE = Path(__file__).resolve().parent
_INCLUDES = re.compile(r"^```\{include\} (\.\./\S+)$", re.MULTILINE)
# Documents outside this folder that pages include, and their pages. Links to and in the documents lead to these pages.
PAGES = {
    (page.parent / target).resolve().relative_to(HERE.parent).as_posix(): page.relative_to(HERE).as_posix()
    for page in HERE.rglob("*.md")
    for target in _INCLUDES.findall(page.read_text())
}

project = "lightning_egeria"
author = "the lightning_egeria authors"
version = release = lightning_egeria.__version__
html_title = f"lightning_egeria {release}"
html_theme = "furo"
pygments_dark_style = "github-dark"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = [
    "myst.header",  # a part of a method card begins at its own level
]

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

# Docstrings put names of all kinds in single backticks: names with a page become links, the others stay code.
default_role = "py:obj"
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    # A build downloads nothing, so there is no inventory of other projects.
    (r"py:.*", r"(torch|pl|lightning|torchmetrics|rich|nn|collections|pathlib|os|enum|typing)\..*"),
    # Annotations name type aliases and classes without a page. Their short names stay code.
    ("py:class", r"\w+"),
    ("py:class", r"lightning_egeria\..*\.(BatchLimits|Panel|Plan|ThroughputModel)"),
]


def _relocate_links(app, path, docname, content):
    """Have the links of an included document lead to where their target is from here."""
    source = (HERE / path).resolve()
    root, folder = HERE.parent, (HERE / app.env.docname).parent

    def relocated(match):
        target, hash_, anchor = match["target"].partition("#")
        file = (source.parent / target).resolve()
        if not target or not file.is_relative_to(root):
            return match[0]
        name = file.relative_to(root).as_posix()
        if file.is_dir() or (not file.exists() and name not in PAGES):
            return f"`{name}`"  # a folder has no page
        place = HERE / PAGES[name] if name in PAGES else file
        return f"{match['text']}({_relative(place, folder)}{hash_}{anchor})"

    content[0] = re.sub(r"(?P<text>!?\[[^\]]*\])\((?!\w+:)(?P<target>[^)\s]+)\)", relocated, content[0])


def _relative(path, folder):
    ups = 0
    while not path.is_relative_to(folder):
        folder, ups = folder.parent, ups + 1
    return "../" * ups + path.relative_to(folder).as_posix()


def setup(app):
    """Called by Sphinx."""
    app.connect("include-read", _relocate_links)
