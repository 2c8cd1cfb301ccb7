"""Own the HTML page that a search through profiles ends in: one file, its plots inline SVG, nothing from the network.

Takes an outcome, gives text. Everything that came from outside (names, reasons) is escaped.
"""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.tuning import Outcome, SetResult, Trial, metric_of

_WIDTH, _HEIGHT = 460, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 44
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1c2430;background:#fff;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin-top:2rem}
.verdict{border-left:4px solid #b45309;background:#fff7ed;padding:.7rem 1rem}.take{border-color:#15803d;background:#f0fdf4}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.25rem .7rem;border-bottom:1px solid #e2e6ec;text-align:right}
td:first-child,th:first-child{text-align:left}figure{display:inline-block;margin:0 1rem 1rem 0;vertical-align:top}
figcaption{color:#55606e;font-size:.85rem;max-width:460px}pre{background:#f4f6f9;padding:.8rem;overflow:auto}
svg text{font-size:11px;fill:#55606e}.note{color:#55606e;font-size:.9rem}
"""
_IN, _OUT, _BEST, _START = "#2563eb", "#c4cad3", "#15803d", "#b45309"


@dataclass(frozen=True, slots=True)
class _Point:
    x: float
    y: float
    colour: str
    told: str
    large: bool = False


def page(outcome: Outcome) -> str:
    """Return the page."""
    task = outcome.task
    title = f"{outcome.advice}: {', '.join(part.name for part in task.targets)}"
    guards = ", ".join(part.name for part in task.guards) or "none"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{_e(title)}</title><style>{_STYLE}</style>",
        f"<h1>{_e(title)}</h1>",
        (f"<p class=note>Gain in {_e(task.metric)} on {_e(', '.join(part.name for part in task.targets))}; guards: "
        f"{_e(guards)}, which may lose {task.max_loss:g}. {len(outcome.trials)} trials"
        f"{', interrupted' if outcome.interrupted else ''}; searched: {_e(', '.join(task.groups))}; seed {task.seed}.</p>"),
        (f"<p class='verdict{' take' if outcome.take else ''}'><b>{outcome.advice}</b>: "
        f"{_e(outcome.reason)}.</p>"),
        "<h2>The sets</h2>", _sets(outcome), _bars(outcome),
        "<h2>The search</h2>", _history(outcome), _pareto(outcome),
        "<h2>Half-life and floor</h2>", _by_parameter(outcome, "half_life_days", "half-life, days", log=True),
        _by_parameter(outcome, "text_floor", "floor of the text routes"),
        _by_parameter(outcome, "fused_floor", "floor after fusion"),
        _by_parameter(outcome, "vector_loss", "1 - floor of the vector routes", log=True),
        "<h2>The parameters</h2>", _parameters(outcome),
        f"<h2>{'The profile' if outcome.take else 'The best that was tried'}</h2>",
        f"<pre>{_e(json.dumps(dict(outcome.best.options), indent=1, ensure_ascii=False))}</pre>",
        "<p class=note>Started from:</p>",
        f"<pre>{_e(json.dumps(dict(task.start.options), indent=1, ensure_ascii=False))}</pre></html>\n",
    ]  # fmt: skip
    return "\n".join(parts)


# ---- tables ---------------------------------------------------------------------------------------------------------


def _sets(outcome: Outcome) -> str:
    rows = []
    for questions, results in (("training", outcome.training), ("held out", outcome.held_out)):
        for result in results:
            metric = metric_of(outcome.task, result.part)
            gap, p = _difference(result, metric)
            role = "guard" if result.part.guard else "to gain"
            rows.append(
                f"<tr><td>{_e(result.part.name)} ({role})<td>{questions}<td>{result.judged}<td>{_e(metric)}"
                f"<td>{_figure(result.start.get(metric))}<td>{_figure(result.best.get(metric))}<td>{gap}<td>{p}"
            )
    return (
        "<table><tr><th>set<th>questions<th>number<th>metric<th>start<th>best<th>difference<th>p"
        + "".join(rows)
        + "</table><p class=note>p: paired t-test. The best was chosen on the training questions, so only the others judge it.</p>"
    )


def _difference(result: SetResult, metric: str) -> tuple[str, str]:
    for difference in result.differences:
        if difference.figure == metric:
            return f"{difference.mean:+.4f}", "" if difference.p is None else f"{difference.p:.3f}"
    return "", ""


def _parameters(outcome: Outcome) -> str:
    rows = []
    for name, told in sorted(
        outcome.confidence.items(), key=lambda item: -outcome.importance.get(item[0], 0.0)
    ):
        between = f"{told['low']:.3g} to {told['high']:.3g}" if "low" in told else ""
        value = told["value"] if isinstance(told["value"], str) else f"{told['value']:.4g}"
        importance = outcome.importance.get(name)
        rows.append(
            f"<tr><td>{_e(name)}<td>{_e(value)}<td>{_percent(told['share'])}<td>{between}<td>{_percent(told['has'])}"
            f"<td>{'' if importance is None else _percent(importance)}"
        )
    return (
        "<table><tr><th>parameter<th>best<th>wins with it<th>winners between<th>winners have it<th>importance"
        + "".join(rows)
        + "</table><p class=note>The training questions are drawn again 2000 times; each time the trial that would have won is "
        "noted. A value that wins in few of them is a matter of chance. Between: 10th to 90th percentile. Importance: "
        "PED-ANOVA, the share of what sets good trials apart.</p>"
    )


# ---- plots ----------------------------------------------------------------------------------------------------------


def _bars(outcome: Outcome) -> str:
    results = [(result, metric_of(outcome.task, result.part)) for result in outcome.held_out]
    step = 46
    height = _TOP + step * len(results) + 6
    rows = []
    for at, (result, metric) in enumerate(results):
        top = _TOP + at * step
        rows.append(f"<text x=0 y={top + 10}>{_e(result.part.name)}, {_e(metric)}</text>")
        for line, (value, colour, told) in enumerate(
            ((result.start.get(metric), _START, "start"), (result.best.get(metric), _BEST, "best"))
        ):
            if value is not None:
                y = top + 14 + line * 12
                rows.append(
                    f"<rect x=0 y={y} width={value * 400:.1f} height=10 fill='{colour}'><title>{told}</title></rect>"
                    f"<text x={value * 400 + 5:.1f} y={y + 9}>{value:.3f} {told}</text>"
                )
    return _figure_of(
        f"<svg width={_WIDTH + 40} height={height}>{''.join(rows)}</svg>", "Each set, held-out questions."
    )


def _history(outcome: Outcome) -> str:
    points = [_point(outcome, trial, float(trial.number)) for trial in outcome.trials]
    line: list[tuple[float, float]] = []
    best = -math.inf
    for trial in outcome.trials:
        if trial.within(outcome.task.max_loss):
            best = max(best, trial.gain)
        if best > -math.inf:
            line.append((float(trial.number), best))
    return _scatter(
        points,
        "trial",
        "gain",
        "Trial by trial; the line is the best so far. Grey: a guard loses too much.",
        line=line,
    )


def _pareto(outcome: Outcome) -> str:
    if not outcome.task.guards:
        return ""
    told = [(max(trial.losses.values()), trial) for trial in outcome.trials]
    points = [_point(outcome, trial, loss) for loss, trial in told]
    front: list[tuple[float, float]] = []
    for loss, trial in sorted(told, key=lambda item: (item[0], -item[1].gain)):
        if not front or trial.gain > front[-1][1]:
            front.append((loss, trial.gain))
    return _scatter(
        points, "loss of the guard that loses most", "gain",
        "Gain against loss; the line joins the trials that no other beats in both, the dashes are the bound.",
        line=front, limit=outcome.task.max_loss,
    )  # fmt: skip


def _by_parameter(outcome: Outcome, name: str, label: str, *, log: bool = False) -> str:
    points = [
        _point(outcome, trial, float(trial.parameters[name]))
        for trial in outcome.trials
        if name in trial.parameters and trial.number
    ]
    if len(points) < 2:
        return ""
    return _scatter(
        points, label, "gain", f"Gain against {label}, whatever the other parameters were.", log=log
    )


def _point(outcome: Outcome, trial: Trial, x: float) -> _Point:
    colour = _IN if trial.within(outcome.task.max_loss) else _OUT
    if trial.number == 0:
        colour = _START
    elif trial.number == outcome.best.number:
        colour = _BEST
    losses = "".join(f", {name} {0.0 - loss:+.4f}" for name, loss in trial.losses.items())
    told = f"trial {trial.number}: {trial.gain:+.4f}{losses}; {json.dumps(dict(trial.parameters), ensure_ascii=False)}"
    return _Point(x, trial.gain, colour, told, large=trial.number in (0, outcome.best.number))


def _scatter(
    points: Sequence[_Point],
    x_label: str,
    y_label: str,
    caption: str,
    *,
    line: Sequence[tuple[float, float]] = (),
    log: bool = False,
    limit: float | None = None,
) -> str:
    xs = [point.x for point in points] + ([] if limit is None else [limit])
    x_ticks, y_ticks = _ticks(xs, log=log), _ticks([point.y for point in points])

    def across(value: float) -> float:
        return _LEFT + _share(value, x_ticks, log=log) * (_WIDTH - _LEFT - _RIGHT)

    def down(value: float) -> float:
        return _HEIGHT - _BOTTOM - _share(value, y_ticks) * (_HEIGHT - _TOP - _BOTTOM)

    drawn = [
        f"<line x1={_LEFT} x2={_WIDTH - _RIGHT} y1={down(tick):.1f} y2={down(tick):.1f} stroke='#e2e6ec'/>"
        f"<text x={_LEFT - 6} y={down(tick) + 4:.1f} text-anchor=end>{tick:.3g}</text>"
        for tick in y_ticks
    ]
    drawn += [
        f"<text x={across(tick):.1f} y={_HEIGHT - _BOTTOM + 16} text-anchor=middle>{tick:.3g}</text>"
        for tick in x_ticks
    ]
    if limit is not None:
        drawn.append(
            f"<line x1={across(limit):.1f} x2={across(limit):.1f} y1={_TOP} y2={_HEIGHT - _BOTTOM} stroke='#55606e' "
            "stroke-dasharray='4 3'/>"
        )
    if len(line) > 1:
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line)
        drawn.append(f"<polyline points='{path}' fill=none stroke='{_BEST}' stroke-opacity='.5'/>")
    drawn += [
        f"<circle cx={across(point.x):.1f} cy={down(point.y):.1f} r={6 if point.large else 3.5} fill='{point.colour}' "
        f"fill-opacity='.85'><title>{_e(point.told)}</title></circle>"
        for point in sorted(points, key=lambda point: point.large)
    ]
    drawn.append(
        f"<text x={(_LEFT + _WIDTH) / 2} y={_HEIGHT - 8} text-anchor=middle>{_e(x_label)}</text>"
        f"<text x=12 y={(_HEIGHT - _BOTTOM) / 2} text-anchor=middle transform='rotate(-90 12 {(_HEIGHT - _BOTTOM) / 2})'>"
        f"{_e(y_label)}</text>"
    )
    return _figure_of(f"<svg width={_WIDTH} height={_HEIGHT} role=img>{''.join(drawn)}</svg>", caption)


def _ticks(values: Sequence[float], *, log: bool = False) -> list[float]:
    """Return four or five values that span all of these; at least two that differ."""
    low, high = min(values), max(values)
    if log:
        low, high = math.log10(max(low, 1e-6)), math.log10(max(high, 1e-6))
    if high - low < 1e-9:
        low, high = low - 0.01, high + 0.01
    steps = [low + (high - low) * at / 4 for at in range(5)]
    return [10**value for value in steps] if log else steps


def _share(value: float, ticks: Sequence[float], *, log: bool = False) -> float:
    low, high = ticks[0], ticks[-1]
    if log:
        low, high, value = math.log10(low), math.log10(high), math.log10(max(value, 1e-6))
    return (value - low) / (high - low)


def _figure_of(drawing: str, caption: str) -> str:
    return f"<figure>{drawing}<figcaption>{_e(caption)}</figcaption></figure>"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _percent(value: float) -> str:
    return f"{value * 100:.0f} %"


def _e(text: Any) -> str:
    return html.escape(str(text))
