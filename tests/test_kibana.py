"""Kibana's saved objects: their form as Kibana's server checks it, their references, their fields, and the loader.

No Kibana is started. Forms are transcribed from the attribute schemas that Kibana 9 registers for these types; every
chart's aggregations run on a real node, over the mappings that the service installs.
"""

import base64
import json
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from app import catalog, names
from app.collection import CollectionOptions
from scripts import cli, dashboards, kibana
from scripts.client import ApiError, ApiUnreachable
from tests.nodes import written
from tests.test_templates import leaves

OBJECTS: list[dict[str, Any]] = [json.loads(line) for line in kibana.saved_objects().decode().splitlines()]
BY_ID = {(each["type"], each["id"]): each for each in OBJECTS}
CHARTS = {chart.id: chart for chart in dashboards.CHARTS}


def test_the_file_is_what_the_builder_makes():
    assert kibana.saved_objects().decode() == dashboards.ndjson(), "run: python -m scripts.dashboards"


def test_there_is_what_operators_look_for():
    kinds = [each["type"] for each in OBJECTS]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "index-pattern": 3, "search": 4, "lens": len(dashboards.CHARTS), "dashboard": 3,
    }  # fmt: skip
    times = {
        each["id"]: each["attributes"]["timeFieldName"] for each in OBJECTS if each["type"] == "index-pattern"
    }
    assert times == {
        "halflife-documents": "creation_time", "halflife-searches": "@timestamp", "halflife-feedback": "@timestamp",
    }  # fmt: skip
    assert {
        "halflife-documents-by-age", "halflife-documents-by-source", "halflife-freshness", "halflife-no-results",
        "halflife-latency-by-stage", "halflife-searches-by-status", "halflife-slow-queries",
    } <= set(CHARTS)  # fmt: skip


# --- form


def thing(required: dict[str, Any], optional: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **(optional or {})},
        "additionalProperties": False,
        **more,
    }


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "number"}, {"type": "boolean"}
META = thing({"searchSourceJSON": TEXT})
# Dashboard, model version 2: unknown attributes are refused.
DASHBOARD = thing(
    {"title": TEXT, "description": TEXT, "kibanaSavedObjectMeta": META, "panelsJSON": TEXT, "optionsJSON": TEXT},
    {"timeRestore": FLAG, "timeFrom": TEXT, "timeTo": TEXT, "refreshInterval": thing({"pause": FLAG, "value": NUMBER}),
     "controlGroupInput": {"type": "object"}, "hits": NUMBER, "version": NUMBER},
)  # fmt: skip
PANEL = thing(
    {"type": {"enum": ["lens", "search"]}, "panelIndex": TEXT, "panelRefName": TEXT,
     "embeddableConfig": {"type": "object"},
     "gridData": thing({"x": {"type": "integer", "minimum": 0, "maximum": 47}, "y": {"type": "integer", "minimum": 0},
                        "w": {"type": "integer", "minimum": 1, "maximum": 48}, "h": {"type": "integer", "minimum": 1},
                        "i": TEXT})},
)  # fmt: skip
# Discover session, model version 5.
SEARCH = thing(
    {"title": TEXT, "description": TEXT, "columns": {"type": "array", "items": TEXT},
     "sort": {"type": "array", "items": {"type": "array", "items": TEXT, "maxItems": 2}},
     "grid": {"type": "object"}, "hideChart": FLAG, "isTextBasedQuery": FLAG, "kibanaSavedObjectMeta": META},
    {"timeRestore": FLAG, "timeRange": thing({"from": TEXT, "to": TEXT}), "rowHeight": NUMBER, "rowsPerPage": NUMBER,
     "breakdownField": TEXT, "sampleSize": NUMBER, "headerRowHeight": NUMBER, "viewMode": TEXT, "density": TEXT},
)  # fmt: skip
DATA_VIEW = thing(
    {"title": TEXT, "name": TEXT, "timeFieldName": TEXT},
    dict.fromkeys(("fields", "fieldAttrs", "fieldFormatMap", "runtimeFieldMap", "sourceFilters", "typeMeta"), TEXT)
    | {"allowNoIndex": FLAG, "allowHidden": FLAG, "type": TEXT},
)  # fmt: skip
QUERY = thing({"query": TEXT, "language": {"enum": ["kuery", "lucene"]}})
COLUMN = thing(
    {"label": TEXT, "dataType": {"enum": ["string", "number", "date", "boolean"]},
     "operationType": {"enum": ["count", "average", "median", "max", "unique_count", "percentile", "date_histogram",
                                "terms", "range"]},
     "isBucketed": FLAG, "scale": {"enum": ["ordinal", "interval", "ratio"]}, "sourceField": TEXT,
     "params": {"type": "object"}},
    {"customLabel": FLAG, "filter": QUERY},
)  # fmt: skip
LENS = thing(
    {"title": TEXT, "description": TEXT, "visualizationType": {"enum": ["lnsXY", "lnsDatatable", "lnsMetric"]},
     "state": thing({
         "datasourceStates": {"type": "object", "required": ["formBased"]}, "visualization": {"type": "object"},
         "query": QUERY, "filters": {"type": "array", "maxItems": 0}, "internalReferences": {"type": "array"},
         "adHocDataViews": {"type": "object"},
     })},
)  # fmt: skip
SERIES = ["line", "bar", "bar_stacked", "bar_percentage_stacked", "bar_horizontal", "area"]
VISUALIZATIONS = {
    "lnsXY": {
        "type": "object",
        "required": ["preferredSeriesType", "legend", "valueLabels", "layers"],
        "properties": {
            "preferredSeriesType": {"enum": SERIES},
            "layers": {"type": "array", "minItems": 1, "items": thing(
                {"layerId": TEXT, "layerType": {"const": "data"}, "seriesType": {"enum": SERIES},
                 "accessors": {"type": "array", "items": TEXT, "minItems": 1}, "xAccessor": TEXT},
                {"splitAccessor": TEXT, "position": TEXT, "showGridlines": FLAG},
            )},
        },
    },
    "lnsDatatable": thing({"layerId": TEXT, "layerType": {"const": "data"},
                           "columns": {"type": "array", "items": thing({"columnId": TEXT, "isTransposed": FLAG})}}),
    "lnsMetric": thing({"layerId": TEXT, "layerType": {"const": "data"}, "metricAccessor": TEXT}),
}  # fmt: skip
FORMS = {"index-pattern": DATA_VIEW, "search": SEARCH, "lens": LENS, "dashboard": DASHBOARD}
OBJECT = thing(
    {"type": {"enum": list(FORMS)}, "id": {"type": "string", "pattern": "^halflife-[a-z0-9-]+$"},
     "attributes": {"type": "object"}, "references": {"type": "array", "items": thing({"type": TEXT, "id": TEXT, "name": TEXT})},
     "coreMigrationVersion": {"const": "8.8.0"}, "typeMigrationVersion": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
     "managed": {"const": False}},
)  # fmt: skip


def of(kind: str) -> list[Any]:
    return [pytest.param(each, id=each["id"]) for each in OBJECTS if each["type"] == kind]


@pytest.mark.parametrize("entry", [pytest.param(each, id=f"{each['type']} {each['id']}") for each in OBJECTS])
def test_each_object_has_the_form_of_its_type(entry):
    jsonschema.validate(entry, OBJECT)
    jsonschema.validate(entry["attributes"], FORMS[entry["type"]])


def test_ids_are_unique():
    assert len(BY_ID) == len(OBJECTS)


def test_every_reference_leads_to_an_object_before_it():
    seen: set[tuple[str, str]] = set()
    for each in OBJECTS:
        for reference in each["references"]:
            assert (reference["type"], reference["id"]) in seen, (each["id"], reference)
        assert len({reference["name"] for reference in each["references"]}) == len(each["references"])
        seen.add((each["type"], each["id"]))


@pytest.mark.parametrize("entry", of("lens"))
def test_a_chart_is_whole(entry):
    state = entry["attributes"]["state"]
    [(layer_id, layer)] = state["datasourceStates"]["formBased"]["layers"].items()
    assert [each["name"] for each in entry["references"]] == [f"indexpattern-datasource-layer-{layer_id}"]
    assert entry["references"][0]["type"] == "index-pattern"
    columns = layer["columns"]
    assert layer["columnOrder"] == list(columns)
    for column in columns.values():
        jsonschema.validate(column, COLUMN)
    buckets = [column["isBucketed"] for column in columns.values()]
    assert buckets == sorted(buckets, reverse=True), (
        "Lens nests buckets in the order of columns; figures come last"
    )
    for column in columns.values():
        if column["operationType"] == "terms":
            ordered = columns[column["params"]["orderBy"]["columnId"]]
            assert ordered["isBucketed"] is False
            # Elasticsearch can't order buckets by a percentile that is no whole number, so Lens refuses it.
            assert isinstance(ordered["params"].get("percentile", 0), int)
            assert column["params"]["otherBucket"] or not column["params"]["missingBucket"]
    kind = entry["attributes"]["visualizationType"]
    drawn = state["visualization"]
    jsonschema.validate(drawn, VISUALIZATIONS[kind])
    if kind == "lnsXY":
        [part] = drawn["layers"]
        assert part["layerId"] == layer_id
        used = [
            part["xAccessor"],
            *part["accessors"],
            *([part["splitAccessor"]] if "splitAccessor" in part else []),
        ]
    elif kind == "lnsDatatable":
        assert drawn["layerId"] == layer_id
        used = [each["columnId"] for each in drawn["columns"]]
    else:
        assert drawn["layerId"] == layer_id
        used = [drawn["metricAccessor"]]
    assert sorted(used) == sorted(columns), "every column is drawn, and nothing else"


@pytest.mark.parametrize("entry", of("dashboard"))
def test_a_dashboard_places_its_panels_side_by_side(entry):
    panels = json.loads(entry["attributes"]["panelsJSON"])
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        jsonschema.validate(panel, PANEL)
        grid = panel["gridData"]
        assert grid["i"] == panel["panelIndex"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert max(x for x, _ in cells) < 48
        assert not taken & cells, panel
        taken |= cells
    wanted = [(f"{panel['panelIndex']}:{panel['panelRefName']}", panel["type"]) for panel in panels]
    assert [(each["name"], each["type"]) for each in entry["references"]] == wanted
    json.loads(entry["attributes"]["optionsJSON"])


def test_every_chart_and_session_is_on_a_dashboard_or_by_itself():
    placed = {each["id"] for entry in OBJECTS if entry["type"] == "dashboard" for each in entry["references"]}
    assert set(CHARTS) <= placed


@pytest.mark.parametrize("entry", of("search"))
def test_a_session_names_its_data_view(entry):
    source = json.loads(entry["attributes"]["kibanaSavedObjectMeta"]["searchSourceJSON"])
    jsonschema.validate(source["query"], QUERY)
    assert [each["name"] for each in entry["references"]] == [source["indexRefName"]]


# --- fields


def mapped(view: str) -> dict[str, str]:
    """Return the fields behind a data view, as the shipped templates map them."""
    template = {
        "halflife-documents": catalog.MAPPINGS, "halflife-searches": catalog.SEARCHES_TEMPLATE,
        "halflife-feedback": catalog.FEEDBACK_TEMPLATE,
    }[view]  # fmt: skip
    return leaves(catalog.shipped(template)["template"]["mappings"]["properties"])


FIELD_KINDS = {
    "date_histogram": {"date"},
    "terms": {"keyword", "integer", "boolean"},
    "range": {"double", "float", "integer", "long"},
    "average": {"double", "float", "integer", "long"},
    "median": {"double", "float", "integer", "long"},
    "max": {"double", "float", "integer", "long"},
    "percentile": {"double", "float", "integer", "long"},
    "unique_count": {"keyword"},
}


@pytest.mark.parametrize("chart", CHARTS.values(), ids=CHARTS)
def test_every_field_drawn_is_mapped_with_a_type_that_can_be_drawn(chart):
    known = mapped(chart.view)
    for column in chart.columns.values():
        if column["sourceField"] != "___records___":
            assert known.get(column["sourceField"]) in FIELD_KINDS[column["operationType"]], column[
                "sourceField"
            ]


@pytest.mark.parametrize("session", dashboards.SESSIONS, ids=lambda each: each.id)
def test_every_field_listed_is_mapped(session):
    known = mapped(session.view)
    assert set(session.columns) | {session.sort[0]} <= set(known)


@pytest.mark.parametrize("view", dashboards.VIEWS, ids=lambda each: each.id)
def test_each_data_view_reaches_its_indices_by_a_date_they_have(view):
    from fnmatch import fnmatch

    assert mapped(view.id)[view.time] == "date"
    examples = {
        "halflife-documents": names.write_alias("handbook", 3),
        "halflife-searches": names.own_dated_index("searches", datetime(2026, 1, 31, tzinfo=UTC)),
        "halflife-feedback": names.own_dated_index(
            "feedback", datetime(2026, 1, 31, tzinfo=UTC), monthly=True
        ),
    }
    assert [each for each, name in examples.items() if fnmatch(name, view.pattern)] == [view.id]
    # Neither the concrete indices, which may be retired ones, nor a fence.
    assert not fnmatch(names.index_name("handbook", datetime(2026, 1, 31, tzinfo=UTC)), "halflife-*-w-*-a")
    assert not fnmatch(names.write_alias("handbook", 4, "b"), "halflife-*-w-*-a")


def kql(text: str) -> dict[str, Any]:
    """Return the query that Kibana makes of the little KQL that the charts use."""
    if not text:
        return {"match_all": {}}
    must: list[Any] = []
    must_not: list[Any] = []
    for part in text.split(" and "):
        negated = part.startswith("not ")
        name, _, value = part.removeprefix("not ").partition(": ")
        assert name.replace("_", "").replace(".", "").isalnum(), part
        clause: dict[str, Any]
        if value == "*":
            clause = {"exists": {"field": name}}
        elif value.startswith("("):
            clause = {"terms": {name: value.strip("()").split(" or ")}}
        else:
            clause = {"term": {name: value}}
        (must_not if negated else must).append(clause)
    return {"bool": {"filter": must, "must_not": must_not}}


def aggregations(chart: dashboards.Chart) -> dict[str, Any]:
    """Return the aggregations that a chart stands for: buckets nested in the order of columns, figures innermost."""
    inner: dict[str, Any] = {}
    for name in chart.figures:
        column = chart.columns[name]
        field, kind = column["sourceField"], column["operationType"]
        percents = [column["params"].get("percentile", 50)]
        made: dict[str, Any] = {
            "count": {"filter": {"match_all": {}}},
            "average": {"avg": {"field": field}},
            "max": {"max": {"field": field}},
            "median": {"percentiles": {"field": field, "percents": percents}},
            "percentile": {"percentiles": {"field": field, "percents": percents}},
            "unique_count": {"cardinality": {"field": field}},
        }[kind]
        if "filter" in column:
            made = {"filter": kql(column["filter"]["query"])}
        inner[name] = made
    for name, column in reversed(list(chart.columns.items())):
        if not column["isBucketed"]:
            continue
        field = column["sourceField"]
        if column["operationType"] == "date_histogram":
            made = {"date_histogram": {"field": field, "calendar_interval": "month"}}
        elif column["operationType"] == "terms":
            made = {"terms": {"field": field, "size": column["params"]["size"]}}
            if column["params"]["missingBucket"]:
                made["terms"]["missing"] = "__missing__"
        else:
            bounds = [
                {key: each[key] for key in ("from", "to") if each[key] is not None}
                for each in column["params"]["ranges"]
            ]
            made = {"range": {"field": field, "ranges": bounds}}
        inner = {name: {**made, "aggs": inner}}
    return inner


@pytest.fixture
async def filled(cluster, unique) -> AsyncIterator[dict[str, str]]:
    """Return data view -> an index that has what its charts draw: a collection, a day of searches, a month of votes."""
    await catalog.install_templates(cluster, dims=4)
    await catalog.install_own_templates(cluster, *catalog.OWN_TEMPLATES)
    name = unique("drawn")
    moment = datetime.now(UTC)
    await catalog.create(cluster, name, CollectionOptions(), dims=4, model=None, moment=moment)
    alias = (await written(cluster, name)).alias
    old = moment - timedelta(days=9000)  # days that no other test writes to
    day, month = names.own_dated_index("searches", old), names.own_dated_index("feedback", old, monthly=True)
    at = moment.isoformat()
    documents: list[dict[str, Any]] = [
        {
            "document_id": "a",
            "title": "A",
            "source": "wiki",
            "creation_time": at,
            "indexed_at": at,
            "lang": "en",
            "document_type": "page",
            "chunks": [{"text": "one"}, {"text": "two"}],
        },
        {"document_id": "b", "deleted": True},
    ]
    searches: list[dict[str, Any]] = [
        {
            "@timestamp": at,
            "query_hash": "h",
            "collection": name,
            "status": "ok",
            "results": 2,
            "took_ms": 12,
            "stages": {"embed_ms": 1.5, "recall_ms": 5, "fetch_ms": 4},
            "route_took_ms": {"text": 3, "vector": 5},
            "hit_ages_days": [3.5, 400.0],
            "first_age_days": 3.5,
            "hit_decays": [0.9, 0.5],
            "decay": {"kind": "exp"},
            "profile": "news",
            "recency": "equals",
            "first_clicked_rank": 2,
        },
        {
            "@timestamp": at,
            "query_hash": "g",
            "collection": name,
            "status": "degraded",
            "results": 0,
            "took_ms": 900,
            "reasons": ["no embedder"],
        },
    ]
    votes = [
        {"@timestamp": at, "document_id": "a", "verdict": "clicked", "rank": 1, "voter": "v", "key_id": "k"}
    ]
    entries = [(alias, each["document_id"], each) for each in documents]
    entries += [(day, str(number), each) for number, each in enumerate(searches)]
    entries += [(month, str(number), each) for number, each in enumerate(votes)]
    for outcome in await cluster.record(entries):
        assert outcome.fate == "applied", outcome
    for each in (alias, day, month):
        await cluster.refresh(each)
    yield {"halflife-documents": alias, "halflife-searches": day, "halflife-feedback": month}
    await cluster.delete_indices([day, month])


@pytest.mark.node
async def test_every_chart_draws_something_on_a_real_node(filled, cluster):
    for chart in dashboards.CHARTS:
        body = {"size": 0, "query": kql(chart.query), "aggs": aggregations(chart), "track_total_hits": True}
        answer = await cluster.search(filled[chart.view], body, timeout_s=30)
        assert answer["hits"]["total"]["value"] > 0, chart.id
        level = answer["aggregations"]
        for name, column in chart.columns.items():
            if column["isBucketed"]:
                # Down to the innermost: a table whose inner buckets are empty has no rows.
                assert level[name]["buckets"], (chart.id, name)
                level = level[name]["buckets"][0]
    # Chunks are parts of their documents, and tombstones are none.
    documents = await cluster.search(
        filled["halflife-documents"],
        {"size": 0, "query": kql(dashboards.LIVE), "track_total_hits": True},
        timeout_s=30,
    )
    assert documents["hits"]["total"]["value"] == 1


@pytest.mark.node
async def test_the_patterns_reach_the_real_names(filled, cluster):
    assert filled["halflife-documents"] in await cluster.resolve_aliases("halflife-*-w-*-a")
    assert filled["halflife-searches"] in await cluster.resolve_index("halflife_searches-*")
    assert filled["halflife-feedback"] in await cluster.resolve_index("halflife_feedback-*")


# --- the loader, against a server that looks at what Kibana looks at


class FakeKibana:
    """Checks requests as Kibana's import route does, and answers as told."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.answers: list[tuple[int, Any]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                fake.requests.append({"path": self.path, "headers": dict(self.headers), "body": body})
                status, told = (
                    fake.answers.pop(0) if fake.answers else fake.check(self.path, self.headers, body)
                )
                data = told.encode() if isinstance(told, str) else json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def check(self, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        if not headers.get("kbn-xsrf"):
            return 400, {"statusCode": 400, "message": "Request must contain a kbn-xsrf header."}
        if path.partition("?")[0].removeprefix("/s/team") != "/api/saved_objects/_import":
            return 404, {"statusCode": 404, "message": "Not Found"}
        form = BytesParser(policy=HTTP).parsebytes(
            b"Content-Type: " + headers["Content-Type"].encode() + b"\r\n\r\n" + body
        )
        parts = list(form.iter_parts())
        if [part.get_param("name", header="content-disposition") for part in parts] != ["file"]:
            return 400, {"statusCode": 400, "message": "[request body.file]: expected value of type [Stream]"}
        if not str(parts[0].get_filename()).endswith(".ndjson"):
            return 400, {"statusCode": 400, "message": "Invalid file extension"}
        sent = parts[0].get_payload(decode=True)
        assert isinstance(sent, bytes)
        loaded = [json.loads(line) for line in sent.splitlines()]
        return 200, {"success": True, "successCount": len(loaded), "warnings": []}


@pytest.fixture
def fake() -> Iterator[FakeKibana]:
    made = FakeKibana()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def test_loading_sends_the_file_as_kibana_wants_it(fake):
    done = kibana.load(kibana.Kibana(fake.url, api_key="a2V5"))
    assert done == kibana.Loaded(len(OBJECTS), ())
    [request] = fake.requests
    assert request["path"] == "/api/saved_objects/_import?overwrite=true"
    assert request["headers"]["Authorization"] == "ApiKey a2V5"


def test_loading_into_a_space_as_a_user(fake):
    kibana.load(kibana.Kibana(f"{fake.url}/", space="team", username="elastic", password="secret"))
    [request] = fake.requests
    assert request["path"] == "/s/team/api/saved_objects/_import?overwrite=true"
    login = base64.b64decode(request["headers"]["Authorization"].removeprefix("Basic ")).decode()
    assert login == "elastic:secret"


def test_a_starting_kibana_is_waited_for(fake):
    fake.answers = [(503, "Kibana server is not ready yet")]
    assert kibana.load(kibana.Kibana(fake.url), wait_s=10).count == len(OBJECTS)
    assert len(fake.requests) == 2


def test_without_patience_a_starting_kibana_is_told(fake):
    fake.answers = [(503, "Kibana server is not ready yet")]
    with pytest.raises(ApiUnreachable, match="not ready"):
        kibana.load(kibana.Kibana(fake.url))


def test_objects_that_fail_are_told_one_by_one(fake, monkeypatch):
    fake.answers = [
        (200, {"success": False, "successCount": 1, "errors": [
            {"type": "lens", "id": "halflife-latency", "error": {"type": "missing_references", "references": [
                {"type": "index-pattern", "id": "halflife-searches"}]}},
            {"type": "search", "id": "halflife-slow", "error": {"type": "unknown", "message": "broken"}},
        ]})
    ]  # fmt: skip
    told = CliRunner().invoke(cli.app, ["kibana", "load", "--url", fake.url], prog_name="halflife")
    assert told.exit_code == 1
    assert "lens halflife-latency: missing_references (index-pattern halflife-searches)" in told.output
    assert "search halflife-slow: broken" in told.output


@pytest.mark.parametrize(
    "status, body, match",
    [
        (401, {"statusCode": 401, "message": "unauthorized"}, "HTTP 401, unauthorized"),
        (403, {"statusCode": 403, "message": "Forbidden"}, "HTTP 403"),
        (404, "<html>not here</html>", "HTTP 404"),
        (200, "<html>a login page</html>", "HTTP 200"),
    ],
)
def test_a_refusal_is_told_with_its_remedy(fake, status, body, match):
    fake.answers = [(status, body)]
    with pytest.raises(ApiError, match=match) as caught:
        kibana.load(kibana.Kibana(fake.url))
    assert caught.value.remedy


def test_nobody_there_is_told():
    with pytest.raises(ApiUnreachable, match="does not answer"):
        kibana.load(kibana.Kibana("http://127.0.0.1:9"))


@pytest.mark.parametrize(
    "login", [{"username": "x"}, {"password": "x"}, {"api_key": "x", "username": "x", "password": "x"}]
)
def test_a_login_that_contradicts_itself_is_refused(login):
    with pytest.raises(ApiError):
        kibana.load(kibana.Kibana("http://127.0.0.1:9", **login))


def test_the_file_can_be_shown():
    told = CliRunner().invoke(cli.app, ["kibana", "show"], prog_name="halflife")
    assert told.exit_code == 0
    assert told.stdout == dashboards.ndjson()
