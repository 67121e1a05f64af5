"""A finished picture: SVG, PNG, and a sentence that says what it shows.

Knows how a notebook displays it and how it is saved; knows nothing of how it was drawn.
"""

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from tutorial_engine.viz.drawing.png import SHADED, kept_at_night

PANE = (880, 590)  # pixels of a notebook on a screen of 1280 × 720, beside JupyterLab's file list
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"  # what a live widget is displayed by


@dataclass(frozen=True, repr=False)
class Picture:
    """Shown as PNG (it also works in a notebook that was not run); the caption is the alt text."""

    svg: str
    png: bytes
    caption: str

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        """The PNG, with the caption as text and as alt text.

        One that would be taller than a notebook's pane is shown so narrow that it fits. In a dark
        JupyterLab it is turned (labextension/), but for its magnitudes: `keep` says where.
        """
        look: dict[str, Any] = {"alt": self.caption}
        wide, tall = Image.open(io.BytesIO(self.png)).size
        if tall * min(1, PANE[0] / wide) > PANE[1]:
            look["width"] = wide * PANE[1] // tall
        if SHADED.search(self.svg):
            look["keep"] = base64.b64encode(kept_at_night(self.svg, (wide, tall))).decode()
        data = {"image/png": base64.b64encode(self.png).decode(), "text/plain": self.caption}
        return data, {"image/png": look}

    def __repr__(self) -> str:
        return f"Picture({self.caption!r})"

    def save(self, folder: Path | str, name: str = "") -> None:
        """Write `name`.svg and `name`.png into the folder, byte for byte the same every time."""
        if not name:
            raise ValueError(
                "it is saved as SVG and as PNG: give a folder and a name, as in "
                'save("pictures", "run")'
            )
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.svg").write_text(self.svg, encoding="utf-8")
        (folder / f"{name}.png").write_bytes(self.png)
