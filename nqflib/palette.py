"""The colours and the drawing style of every figure: one meaning, one colour, in both themes.

A figure is drawn twice, on white and on near-black, so a colour here is a *slot* of matplotlib's
colour cycle ("C0", "C1", ...) that `style` fills with a different shade per theme. The shades keep
the hue, reach contrast 3:1 on their background, and stay apart under simulated protanopia,
deuteranopia and tritanopia (smallest OKLab distances are checked in `tests/test_figures.py`).

Slots 0-7 are unordered (blue, vermilion, green, plum, amber, sky, brown, ink); slots 8-20 are an
ordered ramp for batch sizes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from cycler import cycler
from matplotlib import colormaps
from matplotlib.colors import to_hex

Theme = Literal["light", "dark"]

# Shades found by maximising the smallest OKLab distance over normal and colour-blind vision, hues
# held near those of Okabe and Ito (2008). Sky and amber of that palette are too pale on white.
_SHADES = {
    "light": ("#1a5cbd", "#b9580b", "#34a08d", "#983464", "#cf7e03", "#2583af", "#4b400b", "#2b3038"),
    "dark": ("#3280fb", "#f68503", "#74b79c", "#b655a1", "#fed365", "#25bdff", "#8a7614", "#dbe1ea"),
}
_RAMP_ENDS = {"light": (0.0, 0.58), "dark": (0.38, 1.0)}  # the part of viridis with contrast 3:1
_RAMP_STEPS = 13
BACKGROUND = {"light": "#ffffff", "dark": "#121212"}  # the page behind the figure
_GREY = {"light": "#5b6573", "dark": "#a3adba"}
_GRID = {"light": "#e3e6ea", "dark": "#2e3641"}

INK = "C7"  # the measured truth, when there is one curve of it and several approximations
MODE: tuple[str, ...] = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C7")
"""Colour of mode k (feature k, order parameter k): `MODE[k]`."""

SURROGATE: Mapping[str, str] = MappingProxyType({"true": INK, "none": INK, "prox": "C0", "quad": "C1", "hquad": "C2"})
"""Colour of a surrogate of training; `none` (no surrogate) and `true` are the network itself."""

OPTIMIZER: Mapping[str, str] = MappingProxyType(
    {"adam": "C3", "stale_adam": "C4", "frozen_adam": "C5", "sgdm": "C6", "sgd": "C2", "gd": INK}
)
"""Colour of an optimizer."""

BATCH: Mapping[int, str] = MappingProxyType({2**k: f"C{8 + k}" for k in range(_RAMP_STEPS)})
"""Colour of a batch size, for the powers of two from 1 to 4096; larger is lighter in dark mode."""

# Theory and known values of the paper stand behind the measured marks.
THEORY: Mapping[str, Any] = MappingProxyType(
    {"color": INK, "linewidth": 1.2, "linestyle": (0, (4, 2.5)), "zorder": 1.5}
)
"""Keyword arguments of a line that shows theory: thin, dashed, behind the marks."""

PAPER: Mapping[str, Any] = MappingProxyType(
    {
        "color": INK,
        "linestyle": "none",
        "marker": "D",
        "markersize": 6,
        "markerfacecolor": "none",
        "markeredgewidth": 1.3,
        "zorder": 3,
    }
)
"""Keyword arguments of a mark that shows a value printed in the paper: an open diamond."""


def colours(theme: Theme) -> tuple[str, ...]:
    """The colour cycle of a theme: 8 unordered shades, then the ordered ramp."""
    return (*_SHADES[theme], *ramp(theme, _RAMP_STEPS))


def ramp(theme: Theme, steps: int) -> tuple[str, ...]:
    """An ordered ramp of any number of shades of a theme, at least 2."""
    low, high = _RAMP_ENDS[theme]
    viridis = colormaps["viridis"]
    return tuple(to_hex(viridis(low + (high - low) * k / (steps - 1))) for k in range(steps))


def style(theme: Theme) -> dict[str, Any]:
    """Matplotlib settings of a theme.

    Type is 12.5 pt at a width of 6.4 in. On a phone 375 px wide the figure is 343 px wide, a scale of
    0.74 px per pt, which leaves 9.3 px of type.
    """
    ink, grey, grid = _SHADES[theme][7], _GREY[theme], _GRID[theme]
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": grey,
        "axes.facecolor": "none",
        "axes.formatter.min_exponent": 3,  # 0.5 and 20 rather than 5 × 10⁻¹ and 2 × 10¹ on logarithmic axes
        "axes.formatter.use_mathtext": True,
        "axes.grid": True,
        "axes.labelcolor": ink,
        "axes.labelsize": 12.5,
        "axes.linewidth": 0.9,
        "axes.prop_cycle": cycler(color=list(colours(theme))),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": ink,
        "axes.titlelocation": "left",
        "axes.titlesize": 12.5,
        "figure.facecolor": "none",
        "figure.titlesize": 13,
        "font.family": "DejaVu Sans",  # the one family that matplotlib brings along everywhere
        "font.size": 12.5,
        "grid.color": grid,
        "grid.linewidth": 0.8,
        "hatch.color": grey,
        "image.cmap": "viridis",
        "legend.fontsize": 12.5,
        "legend.frameon": False,
        "legend.handlelength": 1.6,
        "lines.linewidth": 2.0,
        "lines.markersize": 5.5,
        "lines.solid_capstyle": "round",
        "mathtext.fontset": "dejavusans",
        "patch.edgecolor": BACKGROUND[theme],
        "savefig.facecolor": "none",
        "text.color": ink,
        "xtick.color": grey,
        "xtick.labelcolor": ink,
        "xtick.labelsize": 12.5,
        "ytick.color": grey,
        "ytick.labelcolor": ink,
        "ytick.labelsize": 12.5,
    }
