"""Draws where the time of a step goes, one bar per kind of step. SVG for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from inflight.cli.bench.svg import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    attribute,
)
from inflight.cli.bench.trace import GAP, GROUPS, OTHER, StepProfile

_WIDTH = 960
_LEFT, _RIGHT = 150, 24
_BAR_HEIGHT, _BAR_PITCH = 44, 72
_TOP = 64
_LEGEND_PITCH = 24
_LEGEND_COLUMN = 230
# Narrower segments have no label, only legend and tooltip.
_MIN_LABEL_WIDTH = 44

_COLOURS = {
    "linear": BLUE,
    "experts": YELLOW,
    "attention": ORANGE,
    "norm, rope, activation": GREEN,
    "sampling": PURPLE,
    "batch state": SKY,
    "copies": RED,
    OTHER: GREY,
    GAP: "none",
}
_STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1a1a1a; }
  .title { font-size: 17px; font-weight: 600; }
  .small { font-size: 12px; fill: #595959; }
  .inside { font-size: 12px; fill: #fff; text-anchor: middle; }
  .dark { fill: #1a1a1a; }
  .gap { fill: none; stroke: #8a8a8a; stroke-dasharray: 4 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #ededed; } .small { fill: #a6a6a6; } .dark { fill: #1a1a1a; }
  }
"""
# White text is hard to read on these.
_LIGHT = {"attention", "batch state", "sampling", "experts"}


def svg(title: str, profiles: Sequence[StepProfile]) -> str:
    """A stacked bar per step, each as wide as the picture, labelled with its duration.

    Args:
        title: above the bars.
        profiles: from top to bottom.
    """
    present = {group for profile in profiles for group in profile.groups()}
    legend = [group for group in (*GROUPS, OTHER, GAP) if group in present]
    columns = max(1, (_WIDTH - _LEFT) // _LEGEND_COLUMN)
    legend_top = _TOP + len(profiles) * _BAR_PITCH
    height = legend_top + -(-len(legend) // columns) * _LEGEND_PITCH + 16
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img" aria-label="{attribute(title)}">',
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="24" y="34">{escape(title)}</text>',
    ]
    for index, profile in enumerate(profiles):
        lines += _bar(profile, _TOP + index * _BAR_PITCH)
    for index, group in enumerate(legend):
        x = _LEFT + index % columns * _LEGEND_COLUMN
        y = legend_top + index // columns * _LEGEND_PITCH
        lines.append(_rectangle(group, x, y, 14, 14))
        lines.append(f'<text class="small" x="{x + 20}" y="{y + 12}">{escape(group)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _bar(profile: StepProfile, y: float) -> Iterator[str]:
    middle = y + _BAR_HEIGHT / 2
    yield f'<text x="24" y="{middle - 3:.0f}">{escape(profile.kind)}</text>'
    length = f"{profile.step_us / 1e3:.2f} ms"
    yield f'<text class="small" x="24" y="{middle + 15:.0f}">{length}</text>'
    x = float(_LEFT)
    for group, us in profile.groups().items():
        share = us / profile.step_us
        width = share * (_WIDTH - _LEFT - _RIGHT)
        label = f"{group}: {us:.0f} us, {share:.1%}"
        yield f"<g><title>{escape(label)}</title>{_rectangle(group, x, y, width, _BAR_HEIGHT)}"
        if width >= _MIN_LABEL_WIDTH:
            kind = "small" if group == GAP else "inside dark" if group in _LIGHT else "inside"
            anchor = ' text-anchor="middle"' if group == GAP else ""
            yield (
                f'<text class="{kind}"{anchor} x="{x + width / 2:.1f}" y="{middle + 4:.0f}">'
                f"{share:.1%}</text>"
            )
        yield "</g>"
        x += width


def _rectangle(group: str, x: float, y: float, width: float, height: float) -> str:
    paint = 'class="gap"' if group == GAP else f'fill="{_COLOURS[group]}"'
    return f'<rect {paint} x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height}"/>'
