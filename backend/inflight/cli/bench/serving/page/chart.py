"""Line charts as inline SVG, whose colours follow the page's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from inflight.cli.bench.serving.page.scale import Scale
from inflight.cli.bench.svg import PALETTE, attribute

_WIDTH, _HEIGHT = 560, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 64, 52
_LEGEND_WIDTH = 118

STYLE = """
svg text { font: 12px system-ui, sans-serif; fill: var(--text); }
svg .title { font-size: 15px; font-weight: 600; }
svg .axis { fill: var(--muted); }
svg .grid { stroke: var(--line); }
svg path { fill: none; stroke-width: 2; }
""" + "".join(
    f"svg .s{index} {{ stroke: {colour}; }} svg .m{index} {{ fill: {colour}; }}\n"
    for index, colour in enumerate(PALETTE)
)


@dataclass(frozen=True, slots=True)
class Point:
    """
    Attributes:
        label: shown when the pointer is over it; a point without one is not marked.
        name: shown beside it.
    """

    x: float
    y: float
    label: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: list[Point]


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x_label: str
    y_label: str
    x: Scale
    y: Scale
    series: list[Series]

    def svg(self) -> str:
        lines = [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
            f'role="img" aria-label="{attribute(self.title)}">',
            f'<text class="title" x="{_LEFT}" y="20">{escape(self.title)}</text>',
            *self._legend(),
            *self._axes(),
        ]
        for index, series in enumerate(self.series):
            lines += self._series(series, index % len(PALETTE))
        return "\n".join([*lines, "</svg>"])

    def _legend(self) -> Iterator[str]:
        for index, series in enumerate(self.series):
            x, y = _LEFT + index % 4 * _LEGEND_WIDTH, 38 + index // 4 * 15
            colour = index % len(PALETTE)
            yield f'<rect class="m{colour}" x="{x}" y="{y - 9}" width="10" height="10"/>'
            yield f'<text x="{x + 15}" y="{y}">{escape(series.name)}</text>'

    def _axes(self) -> Iterator[str]:
        bottom = _HEIGHT - _BOTTOM
        for tick in self.y.ticks:
            y = self._y(tick)
            yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
            yield (
                f'<text class="axis" text-anchor="end" x="{_LEFT - 8}" y="{y + 4:.1f}">'
                f"{_number(tick)}</text>"
            )
        for tick in self.x.ticks:
            x = self._x(tick)
            yield f'<line class="grid" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>'
            yield (
                f'<text class="axis" text-anchor="middle" x="{x}" y="{bottom + 18}">'
                f"{_number(tick)}</text>"
            )
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        yield (
            f'<text class="axis" text-anchor="middle" x="{middle}" y="{_HEIGHT - 12}">'
            f"{escape(self.x_label)}</text>"
        )
        across = (_TOP + bottom) / 2
        yield (
            f'<text class="axis" text-anchor="middle" x="16" y="{across}" '
            f'transform="rotate(-90 16 {across})">{escape(self.y_label)}</text>'
        )

    def _series(self, series: Series, colour: int) -> Iterator[str]:
        places = [(self._x(point.x), self._y(point.y)) for point in series.points]
        steps = " L".join(f"{x} {y}" for x, y in places)
        if steps:
            yield f'<path class="s{colour}" d="M{steps}"/>'
        for point, (x, y) in zip(series.points, places, strict=True):
            if point.label:
                yield (
                    f'<circle class="m{colour}" cx="{x}" cy="{y}" r="4">'
                    f"<title>{escape(point.label)}</title></circle>"
                )
            if point.name:
                yield f'<text class="axis" x="{x + 7}" y="{y + 14}">{escape(point.name)}</text>'

    def _x(self, value: float) -> float:
        return round(_LEFT + self.x.place(value) * (_WIDTH - _LEFT - _RIGHT), 1)

    def _y(self, value: float) -> float:
        return round(_HEIGHT - _BOTTOM - self.y.place(value) * (_HEIGHT - _TOP - _BOTTOM), 1)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
