"""Introduced in notebook 01. What all explorers share: steps, controls, and three representations.

Live it is stock ipywidgets around one SVG that is replaced in place; saved, exported or opened
without running it is the same scene as a PNG with its caption. Knows no lesson.
"""

from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

from tutorial_engine.viz.picture import WIDGET_VIEW, Picture, bundle
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.tokens import escape


class Explorer:
    """Base class. A subclass names its parameters and says what is seen at a step.

    It implements `rerun()` (run the engine for the present parameters; ValueError = tell the
    learner and keep the last picture), `num_steps`, `scene(step)`, `caption(step)`.
    """

    title = "Explorer"
    step_name = "step"
    zoom = 1.4  # of the stored PNG: less for a large scene, or notebooks grow heavy

    def __init__(self, parameters: dict[str, widgets.Widget]) -> None:
        self.parameters = parameters
        self._scene_html = widgets.HTML(layout=widgets.Layout(margin="0"))
        self._caption_html = widgets.HTML(layout=widgets.Layout(margin="0"))
        self._message_html = widgets.HTML(layout=widgets.Layout(margin="0"))
        self.slider = widgets.IntSlider(
            description=self.step_name,
            min=0,
            max=0,
            continuous_update=True,
            layout=widgets.Layout(width="420px"),
        )
        self.play = widgets.Play(min=0, max=0, interval=600)
        widgets.jslink((self.play, "value"), (self.slider, "value"))
        self.back, self.forward = (
            _button("◀", "one step back", lambda _: self._go(-1)),
            _button("▶", "one step on", lambda _: self._go(1)),
        )
        controls = widgets.HBox([self.play, self.back, self.forward, self.slider])
        rows = widgets.HBox(list(parameters.values()), layout=widgets.Layout(flex_flow="row wrap"))
        self.view = widgets.VBox(
            [
                widgets.HTML(f"<b>{escape(self.title)}</b>"),
                rows,
                controls,
                self._message_html,
                self._scene_html,
                self._caption_html,
            ]
        )
        self._changing = False
        self.error = ""  # what the last rerun complained about
        self._rerun()
        if self.error:
            raise ValueError(self.error)
        self.slider.observe(lambda _: self._draw(), names="value")
        for parameter in parameters.values():
            parameter.observe(lambda _: self._rerun(), names="value")

    # -- what a subclass says -----------------------------------------------------------------

    def rerun(self) -> None:
        """Compute everything that does not depend on the step, with the real engine."""
        raise NotImplementedError

    @property
    def num_steps(self) -> int:
        """How many steps the slider has."""
        raise NotImplementedError

    @property
    def start_step(self) -> int:
        """Where the slider stands after a change in the number of steps."""
        return 0

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
            raise ValueError(
                f"no knob {sorted(unknown)}; this explorer has {sorted(self.parameters)}"
            )
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
                    raise ValueError(f"step {step} is outside 0 .. {self.num_steps - 1}")
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

    def _go(self, by: int) -> None:
        self.slider.value = min(max(self.step + by, 0), self.num_steps - 1)

    def _rerun(self) -> None:
        if self._changing:  # a rerun may adjust other knobs; it draws once, at its end
            return
        self._changing = True
        try:
            self.rerun()
        except ValueError as error:
            self.error = str(error)
            self._message_html.value = (
                f'<div class="te-error" role="alert" style="color:#D55E00">{escape(self.error)} '
                "The picture below is the one before.</div>"
            )
            return
        finally:
            self._changing = False
        self.error = self._message_html.value = ""
        last = self.num_steps - 1
        if self.slider.max != last:
            self._changing = True  # several knobs move; draw once, after the last of them
            self.slider.max = self.play.max = last
            self.slider.value = self.start_step
            self._changing = False
        self._draw()

    def _draw(self) -> None:
        if self._changing:
            return
        self.shown, self.shown_caption = self.scene(self.step), self.caption(self.step)
        self._scene_html.value = self.shown.svg()
        caption = escape(self.shown_caption)
        self._caption_html.value = (
            f'<div class="te-caption" style="max-width:860px">{caption}</div>'
        )

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        picture = self.picture()
        data, metadata = bundle(picture.png, picture.caption)
        return live_view(self.view, **options) | data, metadata


def live_view(widget: widgets.Widget, **options: Any) -> dict[str, Any]:
    """The part of a mime bundle that shows the widget itself, where there is a kernel behind it."""
    live = widget._repr_mimebundle_(**options) or {}
    return {key: value for key, value in live.items() if key == WIDGET_VIEW}


def _button(label: str, tooltip: str, action: Callable[[Any], None]) -> widgets.Button:
    button = widgets.Button(description=label, tooltip=tooltip, layout=widgets.Layout(width="44px"))
    button.on_click(action)
    return button
