"""How Sphinx builds the site from what `tools.publish.site` has put side by side.

Nothing is run, and nothing is loaded from another host: the site works from disk.
"""

import json
import re
from html import escape
from pathlib import Path

from sphinx.search import IndexBuilder

import tutorial_engine

project = "tutorial_engine"
html_title = "tutorial_engine"
copyright = "the authors of tutorial_engine, Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = []

nb_execution_mode = "off"  # the stored outputs are shown
nb_ipywidgets_js = {}  # it would come from another host
nb_merge_streams = True
myst_heading_anchors = 3
myst_links_external_new_tab = False
suppress_warnings = [
    "myst.header",  # an exercise may follow a first heading
    "mystnb.unknown_mime_type",
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # as they are written
default_role = "code"
toc_object_entries = False  # a page's contents are its modules: thousands of names are no overview

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_extra_path = ["extra"]
html_show_sphinx = False
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses from disk
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_favicon = "_static/favicon.svg"
html_use_index = False
html_domain_indices = False

HERE = Path(__file__).parent
WHERE = json.loads((HERE / "site.json").read_text(encoding="utf-8"))
# names of the package would come before the lessons that explain them
IndexBuilder.get_objects = lambda self, fn2index: {}

html_baseurl = WHERE["address"]
html_theme_options = {
    "light_css_variables": {"color-brand-content": "#0072B2"},
    "footer_icons": [
        {"name": "Repository", "url": WHERE["repository"], "html": "GitHub", "class": "words"}
    ],
}
ABOUT = (
    "You write the parts of a real LLM inference engine, on a laptop. It gives the same tokens as "
    "Hugging Face and plans the same steps as vLLM."
)
MARKUP = re.compile(r"(?<!`)([*|\\]|_(?=\W|$))")


def plain_docstring(app, what, name, obj, options, lines):
    """Our docstrings are plain text with `code`: nothing in them is reStructuredText."""
    if lines and lines[0].startswith("Alias for field number"):  # a NamedTuple's own
        del lines[:]
    for i, line in enumerate(lines):
        parts = line.split("`")
        parts[::2] = [MARKUP.sub(r"\\\1", part) for part in parts[::2]]
        lines[i] = "`".join(parts).strip()


def level_headings(app, name, template, context, doctree):
    """The theme's sidebar has headings of no level, which a screen reader cannot place."""
    tree = context["furo_navigation_tree"]
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )


def name_for_others(app, name, template, context, doctree):
    """What a search engine and a message with a link to the page show of it."""
    title = re.sub(r"<[^>]+>", "", context.get("title") or project)
    tags = {
        "og:title": title,
        "og:description": ABOUT,
        "og:type": "website",
        "og:site_name": project,
        "og:image": f"{html_baseurl}social.png",
    }
    lines = [f'<meta property="{key}" content="{escape(words)}">' for key, words in tags.items()]
    lines.append('<meta name="twitter:card" content="summary_large_image">')
    lines.append(f'<meta name="description" content="{escape(ABOUT)}">')
    context["metatags"] = context.get("metatags", "") + "".join(lines)


def without_this_machine(app, what, name, obj, options, signature, returns):
    """A default that is a path is one below the checkout, wherever that lies."""
    root = f"{Path(tutorial_engine.__file__).parents[1]}/"
    return signature and signature.replace(root, ""), returns


def setup(app):
    """Called by Sphinx."""
    app.connect("html-page-context", name_for_others)
    app.connect("autodoc-process-docstring", plain_docstring)
    app.connect("autodoc-process-signature", without_this_machine)
    app.connect("html-page-context", level_headings, priority=900)  # after the theme
