"""Own how answers look in a terminal: result tables that explain each hit, accounts of one document, comparisons.

Takes the API's JSON and draws with rich; computes nothing the API said already, and asks nobody.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

Json = Mapping[str, Any]

_WIDTH_WITHOUT_TERMINAL = 140
_SNIPPET_CHARS = 160


def console(*, stderr: bool = False) -> Console:
    """Return a console; where no terminal says how wide it is, wide enough for a table."""
    stream = sys.stderr if stderr else sys.stdout
    given = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() or given.isdecimal() else _WIDTH_WITHOUT_TERMINAL
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


# ---- a search -------------------------------------------------------------------------------------------------------


def results(
    answer: Json, *, query: str, collection: str, width: int = _WIDTH_WITHOUT_TERMINAL
) -> RenderableType:
    """Return the answer to a search as a table for so many columns, with what it lacks said before it."""
    hits = answer["hits"]
    names = list(answer["routes"])
    head = Text.assemble(
        (query, "bold"), f"   in '{collection}', as of {_moment(answer['origin'])}, {answer['took_ms']} ms"
    )
    if ranked := answer.get("profile"):
        arm = f" ({ranked['arm']} of experiment {ranked['experiment']})" if ranked.get("experiment") else ""
        head.append(f", profile '{ranked['name']}'{arm}")
    parts: list[RenderableType] = [head, *_lacks(answer), *_time(answer)]
    if not hits:
        return Group(*parts, Text("No hit. " + "; ".join(_totals(answer))))
    table = _HitTable(("#", "score"), names, width=width)
    on_page = frozenset(hit["id"] for hit in hits)
    for number, hit in enumerate(hits, 1):
        said = _by_time(hit, answer.get("recency"), on_page)
        table.add((str(number), score(hit["score"])), hit, shown=_document(hit, said))
    parts += [table.drawn, Text("; ".join(_totals(answer)), style="dim")]
    return Group(*parts)


def widened(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each thing that was searched for beside the query's words, and for each other spelling."""
    for told in answer.get("rewrites") or ():
        yield f"{told['kind']}: {told['of']} → {', '.join(told['texts'])}"
    for suggestion in answer.get("suggestions") or ():
        yield f"did you mean: {suggestion['text']}"


def requests(answer: Json) -> Iterable[str]:
    """Yield the explained request bodies, each as Kibana's Dev Tools take it."""
    import json

    explain = answer.get("explain") or {}
    for request in explain.get("requests", []):
        yield f"# route {request['route']}\n{request['method']} {request['path']}\n{json.dumps(request['body'])}"


def accounts(answer: Json) -> Iterator[str]:
    """Yield Elasticsearch's own account of each hit's score in each route that has one, its parts indented."""
    for number, hit in enumerate(answer["hits"], 1):
        for name, route in hit["routes"].items():
            if told := route.get("explanation"):
                yield "\n".join([f"# {number} {hit['id']}, route {name}", *_account(told, 0)])


def _account(told: Json, depth: int) -> Iterator[str]:
    yield f"{'  ' * depth}{told['value']:.6g}  {told['description']}"
    for part in told.get("details") or ():
        yield from _account(part, depth + 1)


def _lacks(answer: Json) -> list[RenderableType]:
    told: list[RenderableType] = []
    if answer.get("degraded"):
        failed = [
            f"{name} {status['status']}{': ' + status['reason'] if status.get('reason') else ''}"
            for name, status in answer["routes"].items()
            if status["status"] in {"failed", "partial"}
        ]
        told.append(
            Text(f"! This answer is degraded: {'; '.join(failed) or 'see the warnings'}", style="bold red")
        )
    told += [Text(f"! {warning}", style="yellow") for warning in answer.get("warnings", [])]
    return told


def _time(answer: Json) -> list[RenderableType]:
    """Return a line on what decay 'auto' decided, and how many of the hits shown it moved."""
    decision = answer.get("recency")
    if not decision:
        return []
    counts = {
        "newest of their kind": sum(1 for hit in answer["hits"] if hit.get("supersedes")),
        "superseded": sum(1 for hit in answer["hits"] if hit.get("superseded_by")),
    }
    told = "".join(f"; {count} {what}" for what, count in counts.items() if count)
    return [Text(f"time: {decision['mode']}, {decision['reason']}{told}", style="cyan")]


def _by_time(hit: Json, decision: Json | None, shown: frozenset[str]) -> str:
    """Return what decay 'auto' did with a hit, behind a mark; empty where it did nothing."""
    did = hit.get("recency") or ""
    if decision:
        # What was decided for the query stands above the table already.
        did = did.removeprefix(f"auto → {decision['mode']}, {decision['reason']}").lstrip(":; ")
    if newer := hit.get("superseded_by"):
        mark = f"↓ superseded by {clean(newer)}"
    elif older := hit.get("supersedes"):
        mark = "↑ supersedes " + ", ".join(
            clean(each) + ("" if each in shown else " (not shown)") for each in older
        )
    else:
        return f"◷ {did}" if did else ""
    return f"{mark}: {did}" if did else mark


def _totals(answer: Json) -> list[str]:
    told = []
    for name, status in answer["routes"].items():
        total = status.get("total")
        count = f"{'at least ' if total['relation'] == 'gte' else ''}{total['value']}" if total else "?"
        took = f", {status['took_ms']} ms" if status.get("took_ms") is not None else ""
        told.append(
            f"{name}: {count} match{took}" if status["status"] == "ok" else f"{name}: {status['status']}"
        )
    return told


def _document(hit: Json, by_time: str) -> Text:
    told = _title(hit)
    if by_time:
        told.append(f"\n{by_time}", style="cyan")
    highlights = hit.get("highlights") or {}
    text = next(iter(highlights.get("text", [])), None) or hit.get("text") or ""
    if shown := snippet(text, _SNIPPET_CHARS):
        told.append(f"\n{shown}", style="dim")
    if same := hit.get("near_duplicates"):
        told.append(f"\nsays the same as: {', '.join(same)}", style="dim")
    return told


def clean(text: str) -> str:
    """Return a document's words without what a terminal would take as commands."""
    return "".join(char if char.isprintable() else " " for char in text)


def snippet(text: str, limit: int) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(clean(text[: limit * 3]).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def _route(route: Json | None, *, wide: bool) -> Text:
    if route is None:
        return Text("–", style="dim")
    if route.get("score") is None:
        return Text(route.get("note") or "–", style="dim")
    place = f"{route['rank']}." if route.get("rank") is not None else "–"
    told = f"{place}{'  ' if wide else chr(10)}{score(route['score'])}"
    if route.get("decay") is not None:
        told += f" × {route['decay']:.2f}"
    return Text(told, style="" if route.get("rank") is not None else "dim")


def _factor(hit: Json) -> str:
    if hit.get("evergreen"):
        return "evergreen"
    return "–" if hit.get("decay") is None else f"{hit['decay']:.2f}"


def score(value: float) -> str:
    """Return a score with the digits that tell hits apart."""
    return f"{value:.4f}" if abs(value) < 1 else f"{value:.2f}"


def age(days: float | None) -> str:
    """Return an age as people say it: days, or years from two years on."""
    if days is None:
        return "–"
    if abs(days) < 1:
        return f"{days * 24:.0f} h"
    return f"{days:.0f} d" if abs(days) < 730 else f"{days / 365.25:.1f} y"


def _day(moment: str | None) -> str:
    return moment[:10] if moment else "undated"


def _moment(moment: str) -> str:
    return moment[:10] if moment.endswith("T00:00:00.000Z") else moment[:16].replace("T", " ") + " UTC"


# ---- one document ---------------------------------------------------------------------------------------------------


def account(answer: Json) -> RenderableType:
    """Return an answer of /v1/why in words and a table."""
    name = f"'{clean(answer.get('title') or answer['id'])}'"
    parts: list[RenderableType] = []
    if not answer["exists"]:
        verdict = f"There is no document '{clean(answer['id'])}' in this collection."
    elif answer["excluded_by"]:
        verdict = f"{name} can't be found by this search."
    elif answer["on_page"]:
        verdict = f"{name} stands at rank {answer['rank']} of the first {answer['top_k']}."
    elif answer.get("rank"):
        verdict = f"{name} stands at rank {answer['rank']}, behind the first {answer['top_k']}."
    elif answer.get("fused_rank"):
        verdict = (
            f"{name} stood at rank {answer['fused_rank']} of the fused list, and a later stage dropped it."
        )
    else:
        verdict = f"{name} is in no route's window, so it is not in the fused list."
    parts.append(Text(verdict, style="bold"))
    if answer["exists"]:
        facts = [
            f"id {clean(answer['id'])}",
            f"created {_day(answer.get('creation_time'))}",
            f"age {age(answer.get('age_days'))}",
        ]
        facts.append(f"factor {_factor(answer)}")
        if answer.get("relevance") is not None:
            facts.append(f"relevance {answer['relevance']:.3f}")
        if answer.get("fused_score") is not None:
            facts.append(f"fused score {answer['fused_score']:.5f}")
        if answer.get("page_score") is not None:
            facts.append(f"the page's last hit {answer['page_score']:.5f}")
        parts.append(Text(", ".join(facts)))
    parts += [Text(f"✗ {reason}", style="red") for reason in answer["excluded_by"]]
    if answer["routes"]:
        parts.append(_account_table(answer["routes"]))
    parts += [Text(f"{stage}: {did['note']}") for stage, did in answer.get("stages", {}).items()]
    if answer["what_it_takes"]:
        parts.append(
            Text("What would bring it onto the first page:" if not answer["on_page"] else "What it takes:")
        )
        parts += [Text(f"→ {step}") for step in answer["what_it_takes"]]
    parts += [Text(f"! {warning}", style="yellow") for warning in answer.get("warnings", [])]
    return Group(*parts)


def _account_table(routes: Mapping[str, Json]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("route", "rank", "score", "decay", "score × decay", "adds", "rank if it were new", "note"):
        table.add_column(name, justify="left" if name in {"route", "note"} else "right")
    for name, route in routes.items():
        rank = "no match"
        if route["matches"] and route.get("rank") is not None:
            rank = f"{'≥ ' if route.get('rank_relation') == 'gte' else ''}{route['rank']}"
            rank += "" if route["in_window"] else " (outside)"
        cells = [
            route.get("score"),
            route.get("decay"),
            route.get("decayed_score"),
            route.get("contribution"),
        ]
        table.add_row(
            name,
            rank,
            *("–" if cell is None else f"{cell:.4f}" for cell in cells),
            str(route.get("rank_if_current") or "–"),
            route.get("note") or "",
        )
    return table


# ---- two orders -----------------------------------------------------------------------------------------------------


def comparison(
    before: Sequence[Json],
    after: Sequence[Json],
    *,
    shown: int,
    routes: Sequence[str],
    width: int = _WIDTH_WITHOUT_TERMINAL,
) -> Table:
    """Return one table of two answers' hits to one question: where each stood without decay, where it stands with it."""
    earlier = {hit["id"]: number for number, hit in enumerate(before, 1)}
    later = {hit["id"]: (number, hit) for number, hit in enumerate(after, 1)}
    table = _HitTable(("without\ndecay", "with\ndecay"), routes, width=width)
    for number, hit in enumerate(after[:shown], 1):
        was = earlier.get(hit["id"])
        table.add((str(was or "–"), _moved(was, number)), hit, shown=_title(hit))
    kept = {hit["id"] for hit in after[:shown]}
    # What decay sent down belongs in the picture too.
    for number, hit in enumerate(before[:shown], 1):
        if hit["id"] not in kept:
            place, fallen = later.get(hit["id"], (None, {**hit, "routes": {}, "decay": None}))
            table.add(
                (str(number), Text(f"▼ {place or '–'}", style="red")), fallen, shown=_title(hit), style="dim"
            )
    return table.drawn


class _HitTable:
    """A table of hits: some leading columns, the document and its age, and a column for each route.

    Where the terminal is narrow, date, age and factor stand below the document, and a route's figures on two lines.
    """

    def __init__(self, leading: Sequence[str], routes: Sequence[str], *, width: int) -> None:
        self.routes = routes
        self.wide = width >= 74 + 24 * len(routes)
        self.drawn = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for name in leading:
            self.drawn.add_column(name, justify="right", no_wrap=True)
        self.drawn.add_column("document", ratio=1, min_width=20)
        for name in ("created", "age", "factor") if self.wide else ():
            self.drawn.add_column(name, justify="left" if name == "created" else "right", no_wrap=True)
        between = "  " if self.wide else "\n"
        for name in routes:
            self.drawn.add_column(f"{name}\nrank{between}score × decay", justify="right", no_wrap=True)

    def add(self, leading: Sequence[str | Text], hit: Json, *, shown: Text, style: str = "") -> None:
        """Add a row for a hit; `shown` is what the document's cell says."""
        facts = [_day(hit.get("creation_time")), age(hit.get("age_days")), _factor(hit)]
        if not self.wide:
            factor = facts[2] if hit.get("evergreen") else f"factor {facts[2]}"
            shown.append(f"\n{facts[0]}, {facts[1]}, {factor}", style="dim")
        cells = facts if self.wide else []
        routes = [_route(hit["routes"].get(name), wide=self.wide) for name in self.routes]
        self.drawn.add_row(*leading, shown, *cells, *routes, style=style)


def _moved(was: int | None, now: int) -> Text:
    if was is None or now < was:
        return Text(f"▲ {now}", style="green")
    return Text(f"▼ {now}", style="red") if now > was else Text(str(now))


def _title(hit: Json) -> Text:
    told = Text(overflow="fold")
    title = clean(hit.get("title") or "").strip()
    told.append(title or clean(hit["id"]), style="bold")
    if title:
        told.append(f"  {clean(hit['id'])}", style="cyan")
    return told
