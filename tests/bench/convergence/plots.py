"""Plots of the stored arms, as SVG whose bytes depend on nothing but the lines."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.protocols.errors import ConfigError
from atoll_bench.convergence.store import Line
from atoll_bench.convergence.trial import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curves = Mapping[str, Sequence[Line]]
"""Lines of all seeds, by the name of the arm."""
_AXES: Mapping[str, tuple[str, Callable[[Point], float]]] = {
    "tokens": ("tokens of all members, millions", lambda point: point.tokens / 1e6),
    "bytes": ("bytes that one member sent", lambda point: point.sent_bytes),
}
"""By name of the plot: the label of its horizontal axis, and the values."""
_SETTINGS = {"svg.hashsalt": "atoll", "svg.fonttype": "none", "font.size": 8.0, "path.simplify": False}


def draw(path: Path, kind: str, curves: Curves) -> None:
    """Write the plot of validation loss against `tokens` or `bytes`. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"no plots: {error}", hint="pip install 'matplotlib>=3.10,<4'") from error
    label, value_of = _AXES[kind]
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.subplots()
        for at, (name, lines) in enumerate(curves.items()):
            _draw_arm(axes, name, lines, value_of, at)
        axes.set_xlabel(label)
        axes.set_ylabel("validation loss, bits per byte")
        if kind == "bytes":
            axes.set_xscale("log")
        axes.legend(fontsize=6, ncols=2)
        axes.grid(alpha=0.3)
        # Without a date the same lines give the same file.
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw_arm(axes: "Axes", name: str, lines: Sequence[Line], value_of: Callable[[Point], float], at: int) -> None:
    """The mean over seeds, and a band from the best to the worst of them."""
    count = min(len(line.points) for line in lines)
    points = [[line.points[i] for line in lines] for i in range(count)]
    at_x = [value_of(each[0]) for each in points]
    losses = [[point.val_bpb for point in each] for each in points]
    style = "-" if at < 10 else "--"
    axes.plot(
        at_x, [sum(each) / len(each) for each in losses], style, color=f"C{at % 10}", label=name, linewidth=1
    )
    if len(lines) > 1:
        axes.fill_between(
            at_x, list(map(min, losses)), list(map(max, losses)), color=f"C{at % 10}", alpha=0.2, linewidth=0
        )
