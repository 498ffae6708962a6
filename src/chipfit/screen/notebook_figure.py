"""A matplotlib figure that notebooks show. This module imports matplotlib; `figures` imports it with the first plot."""

import io

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure outside pyplot: a notebook shows it once, and no window or global state is left behind."""

    def _repr_png_(self) -> bytes:
        drawn = io.BytesIO()
        self.savefig(drawn, format="png")
        return drawn.getvalue()
