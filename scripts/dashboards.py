"""What Kibana shows of Halflife, built as its saved objects: data views, Discover sessions, Lens charts, dashboards.

    python -m scripts.dashboards       writes es_mappings/kibana/halflife.ndjson anew

Every object has a fixed id, so that loading it again replaces it. Objects are written in forms that Kibana 8.11 and later
read and bring up to date themselves; a newer form would shut older ones out. Pure: nothing is sent from here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "es_mappings" / "kibana" / "halflife.ndjson"
CORE = "8.8.0"
VERSIONS = {"index-pattern": "8.0.0", "search": "10.5.0", "lens": "8.9.0", "dashboard": "10.2.0"}
"""Type -> the form that the attributes are in."""

Json = dict[str, Any]

DOCUMENTS = "halflife-documents"
SEARCHES = "halflife-searches"
FEEDBACK = "halflife-feedback"
LIVE = "not deleted: true"
"""Tombstones are hidden by the read alias' filter, which a pattern over many collections goes around."""


@dataclass(frozen=True)
class View:
    """A data view: which indices, and the date that the time picker means."""

    id: str
    name: str
    pattern: str
    time: str
    formats: Mapping[str, Json] = field(default_factory=dict)


def _number(pattern: str) -> Json:
    return {"id": "number", "params": {"pattern": pattern}}


VIEWS = (
    # Write aliases lead to the current index of each collection, and to no other that a reindex left behind.
    View(DOCUMENTS, "Halflife: documents", "halflife-*-w-*-a", "creation_time"),
    View(
        SEARCHES,
        "Halflife: searches",
        "halflife_searches-*",
        "@timestamp",
        {
            "hit_ages_days": _number("0,0.[0]"),
            "first_age_days": _number("0,0.[0]"),
            "hit_decays": _number("0.[000]"),
        },
    ),
    View(FEEDBACK, "Halflife: feedback", "halflife_feedback-*", "@timestamp"),
)


# --- columns of a chart ------------------------------------------------------------------------------------------------


def count(label: str = "Count", *, only: str | None = None) -> Json:
    """Return the column that counts documents, those that a KQL query finds if one is given."""
    column: Json = {
        "label": label, "customLabel": True, "dataType": "number", "operationType": "count", "isBucketed": False,
        "scale": "ratio", "sourceField": "___records___", "params": {"emptyAsNull": True},
    }  # fmt: skip
    return column if only is None else {**column, "filter": {"query": only, "language": "kuery"}}


def metric(operation: str, name: str, label: str) -> Json:
    """Return a figure of a field: `average`, `median`, `max`, `unique_count`."""
    return {
        "label": label, "customLabel": True, "dataType": "number", "operationType": operation, "isBucketed": False,
        "scale": "ratio", "sourceField": name, "params": {"emptyAsNull": True},
    }  # fmt: skip


def percentile(name: str, rank: int, label: str) -> Json:
    """Return a percentile of a field."""
    return {
        "label": label, "customLabel": True, "dataType": "number", "operationType": "percentile",
        "isBucketed": False, "scale": "ratio", "sourceField": name, "params": {"percentile": rank},
    }  # fmt: skip


def over_time(name: str, label: str, *, interval: str = "auto") -> Json:
    """Return the buckets of a date."""
    return {
        "label": label, "customLabel": True, "dataType": "date", "operationType": "date_histogram",
        "isBucketed": True, "scale": "interval", "sourceField": name,
        "params": {"interval": interval, "includeEmptyRows": True, "dropPartials": False},
    }  # fmt: skip


def top(
    name: str,
    label: str,
    *,
    by: str,
    size: int = 10,
    other: bool = False,
    none: bool = False,
    kind: str = "string",
) -> Json:
    """Return the buckets of the most frequent values, ordered by another column, most first.

    `other`: one more for the rest; `none`: and one for documents without a value, which Lens has only beside the rest.
    """
    return {
        "label": label, "customLabel": True, "dataType": kind, "operationType": "terms", "isBucketed": True,
        "scale": "ordinal", "sourceField": name,
        "params": {
            "size": size, "orderBy": {"type": "column", "columnId": by}, "orderDirection": "desc",
            "otherBucket": other or none, "missingBucket": none, "parentFormat": {"id": "terms"}, "include": [],
            "exclude": [], "includeIsRegex": False, "excludeIsRegex": False,
        },
    }  # fmt: skip


def ranges(name: str, label: str, bounds: Sequence[tuple[float | None, float | None, str]]) -> Json:
    """Return buckets of a number with given bounds: (from, to, name), None is open."""
    return {
        "label": label, "customLabel": True, "dataType": "string", "operationType": "range", "isBucketed": True,
        "scale": "ordinal", "sourceField": name,
        "params": {
            "type": "range", "maxBars": "auto", "includeEmptyRows": True, "parentFormat": {"id": "range"},
            "ranges": [{"from": low, "to": high, "label": told} for low, high, told in bounds],
        },
    }  # fmt: skip


# --- charts ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chart:
    """A Lens chart over one data view. `columns` in the order of their nesting: buckets first, figures last."""

    id: str
    title: str
    description: str
    view: str
    columns: Mapping[str, Json]
    shape: str
    """`line`, `bar_stacked`, `bar_percentage_stacked`, `bar_horizontal`, `table` or `figure`."""
    x: str | None = None
    split: str | None = None
    query: str = ""

    @property
    def layer(self) -> str:
        """The id of its one layer."""
        return f"{self.id}-layer"

    @property
    def figures(self) -> list[str]:
        """The columns that are no buckets."""
        return [name for name, column in self.columns.items() if not column["isBucketed"]]

    def to_object(self) -> Json:
        """Return it as Kibana stores it."""
        kinds = {"table": "lnsDatatable", "figure": "lnsMetric"}
        state = {
            "datasourceStates": {
                "formBased": {
                    "layers": {
                        self.layer: {
                            "columnOrder": list(self.columns),
                            "columns": dict(self.columns),
                            "incompleteColumns": {},
                            "sampling": 1,
                        }
                    }
                },
                "indexpattern": {"layers": {}},
                "textBased": {"layers": {}},
            },
            "visualization": self._visualization(),
            "query": {"query": self.query, "language": "kuery"},
            "filters": [],
            "internalReferences": [],
            "adHocDataViews": {},
        }
        return saved(
            "lens",
            self.id,
            {
                "title": self.title,
                "description": self.description,
                "visualizationType": kinds.get(self.shape, "lnsXY"),
                "state": state,
            },
            [_reference("index-pattern", self.view, f"indexpattern-datasource-layer-{self.layer}")],
        )

    def _visualization(self) -> Json:
        if self.shape == "table":
            columns = [{"columnId": name, "isTransposed": False} for name in self.columns]
            return {"layerId": self.layer, "layerType": "data", "columns": columns}
        if self.shape == "figure":
            return {"layerId": self.layer, "layerType": "data", "metricAccessor": self.figures[0]}
        layer: Json = {
            "layerId": self.layer, "layerType": "data", "seriesType": self.shape, "accessors": self.figures,
            "xAccessor": self.x, "position": "top", "showGridlines": False,
        }  # fmt: skip
        if self.split is not None:
            layer["splitAccessor"] = self.split
        several = self.split is not None or len(self.figures) > 1
        return {
            "preferredSeriesType": self.shape,
            "legend": {"isVisible": several, "position": "bottom"},
            "valueLabels": "hide",
            "fittingFunction": "None",
            "axisTitlesVisibilitySettings": {"x": False, "yLeft": True, "yRight": True},
            "tickLabelsVisibilitySettings": {"x": True, "yLeft": True, "yRight": True},
            "gridlinesVisibilitySettings": {"x": False, "yLeft": True, "yRight": True},
            "layers": [layer],
        }


AGES = ((None, 1, "today"), (1, 7, "a week"), (7, 30, "a month"), (30, 90, "three months"), (90, 365, "a year"),
        (365, 1095, "three years"), (1095, None, "older"))  # fmt: skip

CHARTS = (
    Chart(
        "halflife-documents-by-age", "Documents by age", "How many documents were created when, by source.",
        DOCUMENTS, {"when": over_time("creation_time", "created"), "source": top("source", "source", by="n", none=True),
                    "n": count("documents")},
        "bar_stacked", x="when", split="source", query=LIVE,
    ),
    Chart(
        "halflife-documents-by-source", "Documents by source", "Which sources the documents come from.",
        DOCUMENTS, {"source": top("source", "source", by="n", none=True), "n": count("documents")},
        "bar_horizontal", x="source", query=LIVE,
    ),
    Chart(
        "halflife-documents-indexed", "Documents indexed", "When documents were last written.",
        DOCUMENTS, {"when": over_time("indexed_at", "indexed"), "n": count("documents")},
        "bar_stacked", x="when", query=LIVE,
    ),
    Chart(
        "halflife-documents-by-kind", "Documents by type and language", "What lies in the collections.",
        DOCUMENTS, {"type": top("document_type", "type", by="n", none=True),
                    "lang": top("lang", "language", by="n", size=5, none=True),
                    "n": count("documents")},
        "table", query=LIVE,
    ),
    Chart(
        "halflife-searches-count", "Searches", "Logged searches; multiply by 1 / HALFLIFE_SEARCH_LOG_RATE.",
        SEARCHES, {"n": count("searches")}, "figure",
    ),
    Chart(
        "halflife-searches-by-status", "Degraded rate", "The share of answers that lacked something, or failed.",
        SEARCHES, {"when": over_time("@timestamp", "time"), "status": top("status", "status", by="n", size=3),
                   "n": count("searches")},
        "bar_percentage_stacked", x="when", split="status",
    ),
    Chart(
        "halflife-degraded-reasons", "Why answers were degraded or failed", "The reasons told to callers.",
        SEARCHES, {"reason": top("reasons", "reason", by="n"), "n": count("searches")}, "table",
    ),
    Chart(
        "halflife-latency", "Latency", "Time of a whole search in the service.",
        SEARCHES, {"when": over_time("@timestamp", "time"), "p50": percentile("took_ms", 50, "p50, ms"),
                   "p95": percentile("took_ms", 95, "p95, ms"), "p99": percentile("took_ms", 99, "p99, ms")},
        "line", x="when",
    ),
    Chart(
        "halflife-latency-by-stage", "Latency by stage", "p95 of what each stage took.",
        SEARCHES, {"when": over_time("@timestamp", "time"),
                   **{name: percentile(f"stages.{name}_ms", 95, f"{name}, p95, ms")
                      for name in ("rewrite", "embed", "recall", "fetch", "rerank")}},
        "line", x="when",
    ),
    Chart(
        "halflife-latency-by-route", "Latency by route", "p95 of what the cluster took for each kind of route.",
        SEARCHES, {"when": over_time("@timestamp", "time"),
                   **{name: percentile(f"route_took_ms.{name}", 95, f"{name}, p95, ms")
                      for name in ("text", "vector", "fresh_text", "fresh_vector")}},
        "line", x="when",
    ),
    Chart(
        "halflife-freshness", "Freshness of what is returned", "Ages of all hits shown, and of the first.",
        SEARCHES, {"when": over_time("@timestamp", "time"),
                   "all": metric("median", "hit_ages_days", "all hits, median age in days"),
                   "first": metric("median", "first_age_days", "first hit, median age in days"),
                   "old": percentile("hit_ages_days", 90, "all hits, p90 of age in days")},
        "line", x="when",
    ),
    Chart(
        "halflife-first-hit-age", "Age of the first hit", "How many searches are answered by what is how old.",
        SEARCHES, {"age": ranges("first_age_days", "at most", AGES), "n": count("searches")},
        "bar_stacked", x="age",
    ),
    Chart(
        "halflife-decay-factors", "Decay factors of the hits", "How much age costs what is shown, by kind of decay.",
        SEARCHES, {"when": over_time("@timestamp", "time"),
                   "kind": top("decay.kind", "decay", by="factor", size=4, none=True),
                   "factor": metric("average", "hit_decays", "factor, average")},
        "line", x="when", split="kind",
    ),
    Chart(
        "halflife-recency", "What adaptive recency decided", "off, equals, around a time, or news; searches with decay 'auto'.",
        SEARCHES, {"when": over_time("@timestamp", "time"), "mode": top("recency", "recency", by="n", size=5),
                   "n": count("searches")},
        "bar_percentage_stacked", x="when", split="mode", query="recency: *",
    ),
    Chart(
        "halflife-no-results", "Queries without results", "Empty answers, by query (text where it is logged).",
        SEARCHES, {"hash": top("query_hash", "query hash", by="n", size=20),
                   "text": top("query", "query", by="n", size=1, none=True), "n": count("searches")},
        "table", query="results: 0 and not status: failed",
    ),
    Chart(
        "halflife-no-results-rate", "Answers without results", "Empty answers beside all.",
        SEARCHES, {"when": over_time("@timestamp", "time"),
                   "empty": count("without results", only="results: 0 and not status: failed"), "n": count("all")},
        "line", x="when",
    ),
    Chart(
        "halflife-slow-queries", "Top slow queries", "By p95; the hash is keyed, the text stands in Discover where it is logged.",
        SEARCHES, {"hash": top("query_hash", "query hash", by="p95", size=20), "n": count("searches"),
                   "p95": percentile("took_ms", 95, "p95, ms"), "max": metric("max", "took_ms", "slowest, ms")},
        "table",
    ),
    Chart(
        "halflife-by-profile", "By profile and arm", "Searches, latency and clicks of each ranking profile.",
        SEARCHES, {"profile": top("profile", "profile", by="n", none=True), "arm": top("arm", "arm", by="n", size=3, none=True),
                   "n": count("searches"), "p95": percentile("took_ms", 95, "p95, ms"),
                   "clicked": count("with a click", only="first_clicked_rank: *"),
                   "rank": metric("average", "first_clicked_rank", "first click at rank, average")},
        "table",
    ),
    Chart(
        "halflife-by-collection", "By collection", "Searches of each collection.",
        SEARCHES, {"collection": top("collection", "collection", by="n"), "n": count("searches"),
                   "p95": percentile("took_ms", 95, "p95, ms"),
                   "empty": count("without results", only="results: 0 and not status: failed"),
                   "degraded": count("degraded or failed", only="not status: ok")},
        "table",
    ),
    Chart(
        "halflife-votes", "Votes", "What callers made of hits.",
        FEEDBACK, {"when": over_time("@timestamp", "time"), "verdict": top("verdict", "verdict", by="n", size=4),
                   "n": count("votes")},
        "bar_stacked", x="when", split="verdict",
    ),
    Chart(
        "halflife-clicks-by-rank", "Clicks by rank", "Where the hits stood that were clicked or called helpful.",
        FEEDBACK, {"rank": top("rank", "rank", by="n", size=10, kind="number"), "n": count("votes")},
        "bar_horizontal", x="rank", query="verdict: (clicked or helpful)",
    ),
    Chart(
        "halflife-voted-documents", "Documents most voted on", "With the number of those who voted.",
        FEEDBACK, {"document": top("document_id", "document", by="n", size=20), "n": count("votes"),
                   "good": count("for it", only="verdict: (clicked or helpful)"),
                   "voters": metric("unique_count", "voter", "voters")},
        "table",
    ),
)  # fmt: skip


# --- Discover -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Session:
    """A Discover session: which fields of which documents, in what order."""

    id: str
    title: str
    description: str
    view: str
    columns: Sequence[str]
    sort: tuple[str, str]
    query: str = ""

    def to_object(self) -> Json:
        """Return it as Kibana stores it."""
        name = "kibanaSavedObjectMeta.searchSourceJSON.index"
        source = {"query": {"query": self.query, "language": "kuery"}, "filter": [], "indexRefName": name}
        return saved(
            "search",
            self.id,
            {
                "title": self.title,
                "description": self.description,
                "columns": list(self.columns),
                "sort": [list(self.sort)],
                "grid": {},
                "hideChart": False,
                "isTextBasedQuery": False,
                "timeRestore": False,
                "kibanaSavedObjectMeta": {"searchSourceJSON": _text(source)},
            },
            [_reference("index-pattern", self.view, name)],
        )


SESSIONS = (
    Session("halflife-newest", "Halflife: newest documents", "What was created last.", DOCUMENTS,
            ("document_id", "title", "source", "lang", "indexed_at"), ("creation_time", "desc"), LIVE),
    Session("halflife-slow", "Halflife: slow searches", "The slowest first, with their stages.", SEARCHES,
            ("collection", "query", "query_hash", "took_ms", "stages.rewrite_ms", "stages.embed_ms", "stages.recall_ms", "stages.fetch_ms",
             "stages.rerank_ms", "request_id"), ("took_ms", "desc")),
    Session("halflife-empty", "Halflife: searches without results", "What was looked for in vain.", SEARCHES,
            ("collection", "query", "query_hash", "profile", "request_id"), ("@timestamp", "desc"),
            "results: 0 and not status: failed"),
    Session("halflife-troubled", "Halflife: degraded and failed searches", "With their reasons.", SEARCHES,
            ("collection", "status", "error", "reasons", "took_ms", "request_id"), ("@timestamp", "desc"),
            "not status: ok"),
)  # fmt: skip


# --- dashboards -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dashboard:
    """Charts and sessions on a grid 48 wide: rows of (height, (object's id, width), …)."""

    id: str
    title: str
    description: str
    rows: Sequence[tuple[int, Sequence[tuple[str, int]]]]
    since: str

    def to_object(self) -> Json:
        """Return it as Kibana stores it."""
        panels: list[Json] = []
        references: list[Json] = []
        kinds = {**{chart.id: "lens" for chart in CHARTS}, **{each.id: "search" for each in SESSIONS}}
        y = 0
        for height, cells in self.rows:
            x = 0
            for number, (name, width) in enumerate(cells, start=len(panels) + 1):
                at = str(number)
                panels.append({
                    "type": kinds[name], "panelIndex": at, "panelRefName": f"panel_{at}",
                    "gridData": {"x": x, "y": y, "w": width, "h": height, "i": at},
                    "embeddableConfig": {"enhancements": {}},
                })  # fmt: skip
                references.append(_reference(kinds[name], name, f"{at}:panel_{at}"))
                x += width
            y += height
        options = {"useMargins": True, "syncColors": False, "syncCursor": True, "syncTooltips": False,
                   "hidePanelTitles": False}  # fmt: skip
        return saved(
            "dashboard",
            self.id,
            {
                "title": self.title,
                "description": self.description,
                "panelsJSON": _text(panels),
                "optionsJSON": _text(options),
                "timeRestore": True,
                "timeFrom": self.since,
                "timeTo": "now",
                "refreshInterval": {"pause": True, "value": 60_000},
                "kibanaSavedObjectMeta": {
                    "searchSourceJSON": _text({"query": {"query": "", "language": "kuery"}, "filter": []})
                },
                "version": 1,
            },
            references,
        )


DASHBOARDS = (
    Dashboard(
        "halflife-dashboard-documents", "Halflife: documents",
        "What the collections hold: by age, source, type, and when it was written.",
        ((14, (("halflife-documents-by-age", 32), ("halflife-documents-by-source", 16))),
         (12, (("halflife-documents-indexed", 24), ("halflife-documents-by-kind", 24))),
         (16, (("halflife-newest", 48),))),
        "now-10y",
    ),
    Dashboard(
        "halflife-dashboard-searches", "Halflife: searches",
        "What is asked, how fast and how fresh the answers are, what finds nothing. Needs the search log.",
        ((10, (("halflife-searches-count", 8), ("halflife-searches-by-status", 20), ("halflife-latency", 20))),
         (12, (("halflife-latency-by-stage", 24), ("halflife-latency-by-route", 24))),
         (12, (("halflife-freshness", 24), ("halflife-first-hit-age", 12), ("halflife-decay-factors", 12))),
         (12, (("halflife-no-results-rate", 16), ("halflife-no-results", 20), ("halflife-recency", 12))),
         (12, (("halflife-slow-queries", 24), ("halflife-degraded-reasons", 24))),
         (10, (("halflife-by-collection", 24), ("halflife-by-profile", 24)))),
        "now-24h",
    ),
    Dashboard(
        "halflife-dashboard-feedback", "Halflife: feedback",
        "What callers made of the hits. Needs the search log and POST /v1/feedback.",
        ((12, (("halflife-votes", 28), ("halflife-clicks-by-rank", 20))),
         (14, (("halflife-voted-documents", 48),))),
        "now-30d",
    ),
)  # fmt: skip


# --- all of it ----------------------------------------------------------------------------------------------------------


def saved(kind: str, id_: str, attributes: Json, references: Sequence[Json] = ()) -> Json:
    """Return a saved object as an export has it, without what Kibana fills in."""
    return {
        "type": kind,
        "id": id_,
        "attributes": attributes,
        "references": list(references),
        "coreMigrationVersion": CORE,
        "typeMigrationVersion": VERSIONS[kind],
        "managed": False,
    }


def objects() -> list[Json]:
    """Return all saved objects, what is referred to before what refers to it."""
    views = [
        saved(
            "index-pattern",
            view.id,
            {
                "title": view.pattern,
                "name": view.name,
                "timeFieldName": view.time,
                "sourceFilters": "[]",
                "fields": "[]",
                "fieldAttrs": "{}",
                "fieldFormatMap": _text(view.formats),
                "runtimeFieldMap": "{}",
                "typeMeta": "{}",
                "allowNoIndex": True,
            },
        )
        for view in VIEWS
    ]
    return views + [each.to_object() for each in (*SESSIONS, *CHARTS, *DASHBOARDS)]


def ndjson() -> str:
    """Return the file that Kibana imports: an object on each line."""
    return "".join(json.dumps(each, ensure_ascii=False, separators=(",", ":")) + "\n" for each in objects())


def _reference(kind: str, id_: str, name: str) -> Json:
    return {"type": kind, "id": id_, "name": name}


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def main() -> int:
    """Write the file."""
    FILE.write_text(ndjson(), encoding="utf-8")
    print(f"{len(objects())} objects in {FILE}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
