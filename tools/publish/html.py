"""Exports the notebooks as web pages into html/.

Each page is one file that loads nothing from anywhere, with alt texts on its pictures.
"""

import re
from pathlib import Path

import nbformat
from jinja2 import DictLoader
from nbconvert import HTMLExporter

from tools.publish.build import NOTEBOOKS, sources, target

OUT = NOTEBOOKS.parent / "html"
# nbconvert's page, except that a picture's caption becomes its alt text, that its palest letters
# can be read, and that no word of an output is broken in two
TEMPLATE = """{%- extends 'lab/index.html.j2' -%}
{%- block extra_css -%}{{ super() }}<style>
.jp-InputPrompt, .jp-OutputPrompt { color: #5b6770 !important; opacity: 1 !important; }
div.highlight .ow { color: #7a1fb8; } div.highlight .c1 { color: #2f6060; }
.jp-RenderedHTMLCommon a { text-decoration: underline !important; }
.jp-RenderedText pre { word-break: normal !important; overflow-wrap: anywhere; }
div.highlight .mi, div.highlight .mf { color: #006b00; }
</style>{%- endblock extra_css -%}
{%- block data_png scoped -%}
<div class="jp-RenderedImage jp-OutputArea-output" tabindex="0"><img
src="data:image/png;base64,{{ output.data['image/png'] | trim }}"
alt="{{ output | get_metadata('alt', 'image/png') | escape_html }}"></div>
{%- endblock data_png -%}
"""
REMOTE = re.compile(
    r"""<script\b[^>]*\bsrc=["']https?:[^>]*>\s*</script>"""
    r"""|<link\b[^>]*\bhref=["']https?:[^>]*>"""
    r"""|<script type="module">\s*document\.addEventListener.*?mermaid.*?</script>""",
    re.S,
)


def page(path: Path) -> str:
    """A built notebook as one offline HTML page. ValueError if something remote is left in it."""
    exporter = HTMLExporter(
        extra_loaders=[DictLoader({"page.html.j2": TEMPLATE})], template_file="page.html.j2"
    )
    exporter.mathjax_url = exporter.require_js_url = exporter.jquery_url = ""
    exporter.mermaid_js_url = ""
    body, _ = exporter.from_notebook_node(nbformat.read(path, as_version=4))
    body = REMOTE.sub("", body)
    left = re.findall(r"""(?:src|href)=["'](https?:[^"']+\.(?:js|css|woff2?))["']""", body)
    if left:
        raise ValueError(f"{path.name} would load {left} from the network")
    return body


def main() -> None:
    """Export every notebook, the learner's and the solved one, into html/."""
    OUT.mkdir(exist_ok=True)
    for name in sources():
        for solved in (False, True):
            stem = Path(name).name  # of an appendix without its folder
            file = OUT / (f"{stem}_solutions.html" if solved else f"{stem}.html")
            file.write_text(page(target(name, solved)), encoding="utf-8")
            print(f"wrote {file.relative_to(NOTEBOOKS.parent)}, {file.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
