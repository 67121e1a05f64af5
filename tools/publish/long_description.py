"""The page of the package index: README.md, with whole addresses in the place of relative ones.

Called by the build (pyproject.toml names it), for an index knows no files of the repository.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?!https?:|#)([^)\s]+)")
HTML = re.compile(r'((?:src|srcset)=")(?!https?:)([^"]+)')


def whole(text: str, repository: str) -> str:
    """The Markdown with the repository's address before each relative link and picture."""
    raw = repository.replace("//github.com/", "//raw.githubusercontent.com/") + "/HEAD/"
    page = repository + "/blob/HEAD/"
    text = LINK.sub(lambda m: f"{m[1]}{m[2]}{raw if m[1] else page}{m[3]}", text)
    return HTML.sub(rf"\g<1>{raw}\g<2>", text)


class LongDescription(MetadataHookInterface):
    """Hatchling's hook: fills the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by the build with the table [project]."""
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        text = whole(text, metadata["urls"]["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
