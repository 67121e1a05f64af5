"""What all explorers share: steps, controls, and three representations.

Live it is stock ipywidgets around one SVG that is replaced in place; saved, exported or opened
without running it is the same scene as a PNG with its caption (in JupyterLab by `labextension/`).
Knows no lesson.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ipywidgets as widgets

from tutorial_engine.checks import check_text
from tutorial_engine.viz.drawing.picture import WIDGET_VIEW, Picture
from tutorial_engine.viz.drawing.scene import Frame, Scene
from tutorial_engine.viz.explorers.player import save_player
from tutorial_engine.viz.tokens import escape

# In JupyterLab the picture becomes smaller where it and its controls are taller than the notebook's
# view: who moves the slider sees all of it. 128 pixels of the window are JupyterLab's own.
FITS = (
    ".te-message:has(>:empty:last-child){display:none}"
    ".jp-Notebook .te-together{max-height:calc(100vh - 128px)}"
    ".te-together>*{flex:none}"
    ".te-together>.te-picture{flex:0 1 auto;min-height:330px}"
    ".te-picture,.te-picture>*{display:flex;flex-direction:column;min-height:0}"
    ".te-picture svg{height:auto;min-height:0}"
)


class Explorer:
    """Base class. A subclass names its parameters and says what is seen at a step.

    It implements `rerun()` (run the engine for the present parameters; ValueError = tell the
    learner and keep the last picture; `note` = tell and draw), `scene(step)` and `caption(step)`.
    """

    title = "Explorer"
    step_name = "step"
    zoom = 1.4  # of the stored PNG: less for a large scene, or notebooks grow heavy
    # where the slider stands when the number of steps has changed; "same" is for comparing
    stands: Literal["first", "same", "last"] = "first"

    def __init__(
        self,
        parameters: Mapping[str, widgets.Widget],
        buttons: Mapping[str, Any] | None = None,
        panel: widgets.Widget | None = None,
    ) -> None:
        """`panel`: controls that are neither, between the buttons and the steps."""
        self.parameters, self.buttons = dict(parameters), dict(buttons or {})
        self._scene_html, self._caption_html, self._message_html = (
            widgets.HTML(layout=widgets.Layout(margin="0")) for _ in range(3)
        )
        self.slider = widgets.IntSlider(
            description=self.step_name,
            min=0,
            max=0,
            continuous_update=True,
            layout=widgets.Layout(width="420px"),
        )
        self.play = widgets.Play(min=0, max=0, interval=600)
        widgets.jslink((self.play, "value"), (self.slider, "value"))
        self.back = button("◀", "one step back", lambda: self._go(-1), "44px")
        self.forward = button("▶", "one step on", lambda: self._go(1), "44px")
        writes = f"writes {self.page}"
        page = button("save as a page", writes, self._save_page)
        together = widgets.VBox(
            [
                widgets.HTML(f"<b>{escape(self.title)}</b>"),
                row([*parameters.values(), *([row(self.buttons.values())] if buttons else [])]),
                *([panel] if panel else []),
                widgets.HBox([self.play, self.back, self.forward, self.slider, page]),
                self._message_html,
                self._scene_html,
            ]
        )
        together.add_class("te-together")
        self._message_html.add_class("te-message")
        self._scene_html.add_class("te-picture")
        style = widgets.HTML(f"<style>{FITS}</style>", layout=widgets.Layout(display="none"))
        self.view = widgets.VBox([together, self._caption_html, style])
        self._changing = False
        self.error = ""  # what the last rerun complained about
        self.note = ""  # what it has to say of a picture that it did draw
        self._rerun()
        if self.error:
            raise ValueError(self.error)
        self.slider.observe(lambda _: self._draw(), names="value")
        for parameter in parameters.values():
            parameter.observe(lambda _: self._rerun(), names="value")

    # -- what a subclass says -----------------------------------------------------------------

    def rerun(self) -> int:
        """Compute what does not depend on the step, with the real engine -> how many steps."""
        raise NotImplementedError

    def scene(self, step: int) -> Scene:
        """What is seen at this step."""
        raise NotImplementedError

    def caption(self, step: int) -> str:
        """One sentence with the numbers of this very picture."""
        raise NotImplementedError

    # -- what all of them do ------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step that is shown."""
        return self.slider.value

    def value(self, name: str) -> Any:
        """The present value of a parameter."""
        return self.parameters[name].value

    def set(self, step: int | None = None, **values: Any) -> Picture:
        """Turn the knobs from code; returns the picture.

        ValueError, and everything as before, for what cannot be shown.
        """
        unknown = values.keys() - self.parameters.keys()
        if unknown:
            names, has = sorted(unknown), sorted(self.parameters)
            raise ValueError(f"no knob {names}; this explorer has {has}")
        before, step_before = {name: self.parameters[name].value for name in values}, self.step
        try:
            for name, value in values.items():
                self.parameters[name].value = value
                taken = self.parameters[name].value
                if taken != value:
                    raise ValueError(f"{name} cannot be {value!r}; the nearest is {taken!r}")
            if values and self.error:
                raise ValueError(self.error)
            if step is not None:
                if not 0 <= step < self.num_steps:
                    end = self.num_steps - 1
                    raise ValueError(f"step {step} is outside 0 .. {end}")
                self.slider.value = step
        except ValueError:
            for name, value in before.items():  # as if nothing had been asked
                self.parameters[name].value = value
            self.slider.value = step_before
            raise
        return self.picture()

    def picture(self) -> Picture:
        """What is shown now, as a Picture."""
        return self.shown.picture(self.shown_caption, self.zoom)

    def player(self, path: str | Path) -> Path:
        """Write all steps of what is shown as one HTML page that needs nothing else → its path.

        ValueError for a folder that is not there.
        """
        frames = [Frame(self.scene(step), self.caption(step)) for step in range(self.num_steps)]
        title, step_name = self.title, self.step_name
        return save_player([frames], path, title, step_name=step_name, start=self.step)

    @property
    def page(self) -> str:
        """The file that the button writes, in the folder of the notebook."""
        return f"{self.title.lower().replace(' ', '-')}.html"

    def _save_page(self) -> None:
        path = self.player(self.page)
        name = f"<b>{escape(path.name)}</b>"
        said = (
            f"Saved as {name}, beside the notebook. It opens in any browser, without this notebook."
        )
        self._message_html.value = f'<div role="status">{said}</div>'

    def turn(self, **values: Any) -> None:
        """Move several knobs as one change: one rerun, one drawing."""
        self._changing = True
        try:
            for name, value in values.items():
                self.parameters[name].value = value
        finally:
            self._changing = False
        self._rerun()

    def _go(self, by: int) -> None:
        self.slider.value = min(max(self.step + by, 0), self.num_steps - 1)

    def _rerun(self) -> None:
        if self._changing:  # a rerun may adjust other knobs; it draws once, at its end
            return
        self._changing = True
        try:
            for name, parameter in self.parameters.items():
                check_text(name, parameter.value)
            self.note = ""
            self.num_steps = self.rerun()
        except ValueError as error:
            self.error = str(error)
            why = self.error if self.error.endswith((".", "!", "?")) else f"{self.error}."
            said = escape(f"{why} The picture below is the one before.")
            self._message_html.value = (
                f'<div class="te-error" role="alert" style="color:#D55E00">{said}</div>'
            )
            return
        finally:
            self._changing = False
        self.error = ""
        last = self.num_steps - 1
        if self.slider.max != last:
            self._changing = True  # several knobs move; draw once, after the last of them
            self.slider.max = self.play.max = last
            self.slider.value = {"first": 0, "same": self.step, "last": last}[self.stands]
            self._changing = False
        self._draw()

    def _draw(self) -> None:
        if self._changing:
            return
        if not self.error:  # and no longer that a page was saved
            note = f'<div class="te-note" role="status">{escape(self.note)}</div>'
            self._message_html.value = note if self.note else ""
        self.shown, self.shown_caption = self.scene(self.step), self.caption(self.step)
        self._scene_html.value = self.shown.svg()
        caption = escape(self.shown_caption)
        self._caption_html.value = (
            f'<div class="te-caption" style="max-width:860px">{caption}</div>'
        )

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data, metadata = self.picture()._repr_mimebundle_()
        return live_view(self.view, **options) | data, metadata


def live_view(widget: widgets.Widget, **options: Any) -> dict[str, Any]:
    """The part of a mime bundle that shows the widget itself, where there is a kernel behind it."""
    live = widget._repr_mimebundle_(**options) or {}
    return {key: value for key, value in live.items() if key == WIDGET_VIEW}


# -- controls -------------------------------------------------------------------------------------


def text(name: str, value: str, width: str = "640px") -> widgets.Text:
    """A line of text; it counts when it is finished, not at every letter."""
    return _laid(widgets.Text(value, description=name, continuous_update=False), width)


def number(name: str, value: int, least: int, most: int, width: str = "150px") -> Any:
    """A whole number from `least` to `most`. ValueError for a first value outside."""
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, got {value}")
    return _laid(widgets.BoundedIntText(value, min=least, max=most, description=name), width)


def slider(name: str, value: int, least: int, most: int) -> Any:
    """A whole number to be dragged: for what is computed at once."""
    return _laid(widgets.IntSlider(value, least, most, description=name), "268px")


def decimal(name: str, value: float, least: float, most: float, by: float) -> Any:
    """A number with a point, to be dragged in steps of `by`: for what is computed at once."""
    made = widgets.FloatSlider(value, min=least, max=most, step=by, description=name)
    return _laid(made, "268px")


def amount(name: str, value: float, least: float, most: float, width: str = "190px") -> Any:
    """A number with a point from `least` to `most`, to be typed."""
    return _laid(widgets.BoundedFloatText(value, min=least, max=most, description=name), width)


def lines(name: str, value: str) -> widgets.Textarea:
    """Several lines of text; they count when they are finished, not at every letter."""
    made = _laid(widgets.Textarea(value, description=name, continuous_update=False), "640px")
    made.layout.height = "78px"
    return made


def choice(name: str, options: Sequence[str], value: str, width: str = "240px") -> widgets.Dropdown:
    """One of several words. ValueError for a first value that is not among them."""
    if value not in options:
        one_of = "{name} must be one of {options}, got {value!r}"
        raise ValueError(one_of.format(name=name, options=", ".join(options), value=value))
    return _laid(widgets.Dropdown(options=list(options), value=value, description=name), width)


def button(
    label: str, tooltip: str, action: Callable[[], None], width: str = "auto"
) -> widgets.Button:
    """A button; pressing it calls the action."""
    made = widgets.Button(description=label, tooltip=tooltip, layout=widgets.Layout(width=width))
    made.on_click(lambda _: action())
    return made


def row(controls: Iterable[widgets.Widget]) -> widgets.HBox:
    """Controls side by side, in as many lines as it takes."""
    return widgets.HBox(list(controls), layout=widgets.Layout(flex_flow="row wrap"))


def _laid(control: Any, width: str) -> Any:
    control.layout = widgets.Layout(width=width, margin="2px 12px 2px 0")
    control.style.description_width = "initial"
    return control
