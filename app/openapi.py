"""The OpenAPI document: every body's schema, with an example each that runs against the sample collection.

Routes read their bodies themselves (strict JSON, failures per item), so what they take is written down here.
"""

import re
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema

from app import answers, asking, collection, fields, values, writing
from app.filters import INNER, INNER_OBJECTS, MAX_VALUE_UNITS
from app.times import INSTANT_SCHEMA

REF = "#/components/schemas/{model}"

SEARCH_EXAMPLES: dict[str, dict[str, Any]] = {
    "plain": {
        "summary": "A question, both routes, time by itself",
        "value": {"collection": "handbook", "query": "how long may I carry over leave?", "top_k": 5},
    },
    "decayed": {
        "summary": "Newer versions first, old ones never invisible",
        "value": {
            "collection": "handbook",
            "query": "how long may I carry over leave?",
            "top_k": 5,
            "as_of": "2026-06-30T00:00:00Z",
            "filter": {"lang": "en"},
            "decay": {"kind": "exp", "half_life": "365d"},
        },
    },
    "routes": {
        "summary": "Own routes, weights and floors",
        "value": {
            "collection": "handbook",
            "query": "how long may I carry over leave?",
            "decay": {"half_life": "180d", "floor": 0.3},
            "routes": [
                {"kind": "text"},
                {"kind": "vector", "weight": 1.0, "decay": {"floor": 0.95}},
                {"kind": "fresh_text", "window": "90d", "weight": 0.5},
            ],
            "fusion": {"method": "rrf", "rank_constant": 60, "window": 100},
        },
    },
    "suggest": {
        "summary": "With spelling suggestions, and without synonyms",
        "value": {"collection": "handbook", "query": "anual leeve", "suggest": True, "synonyms": False},
    },
    "batch": {
        "summary": "Several queries at once",
        "value": {
            "collection": "handbook",
            "decay": {"half_life": "365d"},
            "queries": [{"query": "carry over leave"}, {"query": "年假结转", "filter": {"lang": "zh"}}],
        },
    },
}
WHY_EXAMPLES = {
    "why": {
        "summary": "Why is last year's policy not on the page?",
        "value": {
            "collection": "handbook",
            "query": "how long may I carry over leave?",
            "decay": {"half_life": "365d"},
            "top_k": 3,
            "id": "leave-policy-2023",
        },
    }
}
FEEDBACK_EXAMPLES = {
    "votes": {
        "summary": "The second hit was opened, the first passed over",
        "value": {
            "search_id": "20260131-6f1d0c1a9b7e4f5d8a3b2c1d",
            "user": "u-1042",
            "items": [
                {"id": "leave-policy-2023", "verdict": "ignored"},
                {"id": "leave-policy-2026", "verdict": "clicked"},
            ],
        },
    }
}
UPSERT_EXAMPLES = {
    "upsert": {
        "summary": "One document",
        "value": {
            "documents": [
                {
                    "id": "leave-2026",
                    "title": "Annual leave",
                    "text": "Up to five days of unused leave may be carried over until the end of March.",
                    "creation_time": "2026-01-02",
                    "lang": "en",
                    "metadata": {"owner": "people team"},
                }
            ],
            "refresh": "wait_for",
        },
    }
}
GIVEN: dict[str, Any] = {
    "type": "object",
    "propertyNames": {
        "enum": [name for name in writing.Document.model_fields if name not in ("text", "embedding")]
    },
}
"""Fields of a document that stand beside a file."""
FILES_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "title": "FileForm",
                "required": ["file"],
                "properties": {
                    "file": {
                        "type": "array",
                        "items": {"type": "string", "format": "binary"},
                        "minItems": 1,
                        "maxItems": 100,
                        "description": "The files: one part each, all called `file`.",
                    },
                    "fields": {
                        **GIVEN,
                        "description": "JSON: fields of the documents of all files, such as `lang`, `creation_time`, "
                        "`metadata`. Rows of tables have their own instead where they name one.",
                    },
                    "each": {
                        "description": "JSON: fields of each file's document, `id` among them: a list in the order of "
                        "the files, or an object by file name. `creation_time: null` means undated.",
                        "anyOf": [
                            {"type": "array", "items": {"anyOf": [GIVEN, {"type": "null"}]}},
                            {"type": "object", "additionalProperties": GIVEN},
                        ],
                    },
                    "names": {
                        "$ref": REF.format(model="RowNames"),
                        "description": "JSON: what the columns of tables and keys of lines are called.",
                    },
                    "refresh": {"enum": ["false", "true", "wait_for"], "default": "false"},
                },
                "additionalProperties": False,
                "example": {
                    "file": ["(contents of leave-2026.pdf)"],
                    "fields": {"lang": "en", "metadata": {"owner": "people team"}},
                    "each": [{"id": "leave-2026", "creation_time": "2026-01-02"}],
                    "refresh": "wait_for",
                },
            },
            "encoding": {
                "fields": {"contentType": "application/json"},
                "each": {"contentType": "application/json"},
                "names": {"contentType": "application/json"},
            },
        }
    },
}
PATCH_EXAMPLES = {
    "evergreen": {
        "summary": "Mark a document as never decaying",
        "value": {"documents": [{"id": "leave-2026", "evergreen": True}]},
    }
}
DELETE_EXAMPLES = {
    "ids": {"summary": "By ids", "value": {"ids": ["leave-2026"]}},
    "documents": {
        "summary": "Only as it was when it was read",
        "value": {"documents": [{"id": "leave-2026", "if_version": 114013171875000000}]},
    },
    "filter": {"summary": "By filter", "value": {"filter": {"source": "drafts"}}},
}
COLLECTION_EXAMPLES = {
    "declared": {
        "summary": "With a metadata key that ranges work on",
        "value": {"declared": {"price": "double"}},
    }
}

SYNONYM_EXAMPLES = {
    "rules": {
        "summary": "Equivalent terms, and one way",
        "value": {
            "synonyms_set": [
                "电脑, 计算机, computer",
                "annual leave, paid time off, PTO",
                {"id": "k8s", "synonyms": "k8s => kubernetes"},
            ]
        },
    }
}

_BODIES: dict[tuple[str, str], tuple[tuple[type[BaseModel], ...], dict[str, Any]]] = {
    ("/v1/search", "post"): ((asking.Search, asking.SearchBatch, asking.NextPage), SEARCH_EXAMPLES),
    ("/v1/why", "post"): ((asking.Why,), WHY_EXAMPLES),
    ("/v1/feedback", "post"): ((asking.Feedback,), FEEDBACK_EXAMPLES),
    ("/v1/collections/{collection}", "put"): ((collection.CollectionOptions,), COLLECTION_EXAMPLES),
    ("/v1/collections/{collection}/synonyms", "put"): ((collection.SynonymSet,), SYNONYM_EXAMPLES),
    ("/v1/collections/{collection}/documents", "post"): ((writing.Upsert,), UPSERT_EXAMPLES),
    ("/v1/collections/{collection}/documents", "patch"): ((writing.PatchDocuments,), PATCH_EXAMPLES),
    ("/v1/collections/{collection}/documents/delete", "post"): ((writing.DeleteDocuments,), DELETE_EXAMPLES),
}
_ALSO = (writing.RowNames, asking.Query, writing.Document, writing.DocumentPatch, asking.FeedbackItem)
_OPTIONAL_BODIES = {("/v1/collections/{collection}", "put")}


def install(app: FastAPI) -> None:
    """Make the application serve the completed document."""

    def generate() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = complete(
                get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = generate  # type: ignore[method-assign]


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with the bodies that routes read themselves, and problems as the errors of all of them."""
    wanted: list[type[BaseModel]] = [
        *{model: None for bodies, _ in _BODIES.values() for model in bodies},
        *_ALSO,
    ]
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    _, answered = models_json_schema(
        [(model, "serialization") for model in _ANSWERS], ref_template=REF, schema_generator=_Written
    )
    schemas.update(answered.get("$defs", {}))
    # What callers send and get alike (profiles) is described as it is sent.
    _, sent = models_json_schema([(model, "validation") for model in wanted], ref_template=REF)
    schemas.update(sent.get("$defs", {}))
    _close(sent)
    for schema in schemas.values():
        _name_filter(schema.get("properties", {}))
    schemas |= _filter_schemas()
    # An empty filter would delete everything, which has its own word.
    schemas["DeleteDocuments"]["properties"]["filter"]["anyOf"][0]["$ref"] = REF.format(model="NestedFilter")
    schemas["SearchBatch"] = _batch_schema(schemas["Search"], schemas["SearchBatch"])
    schemas["SearchResults"] = RESULTS_SCHEMA
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    schemas["Problem"] = PROBLEM_SCHEMA
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body = _BODIES.get((path, method))
            if body is not None:
                references = [{"$ref": REF.format(model=model.__name__)} for model in body[0]]
                operation["requestBody"] = {
                    "required": (path, method) not in _OPTIONAL_BODIES,
                    "content": {
                        "application/json": {
                            "schema": references[0] if len(references) == 1 else {"anyOf": references},
                            "examples": body[1],
                        }
                    },
                }
            if (path, method) == ("/v1/collections/{collection}/files", "post"):
                operation["requestBody"] = FILES_BODY
            operation["responses"].pop("422", None)
            for parameter in operation.get("parameters", ()):
                _complete_parameter(parameter, schemas)
            if path == "/v1/search":
                operation["responses"]["200"]["content"]["application/json"]["schema"] = {
                    "anyOf": [{"$ref": REF.format(model=name)} for name in ("SearchResult", "SearchResults")]
                }
            if path == "/metrics":
                operation["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
            if path == "/readyz":
                operation["responses"]["503"] = {
                    **operation["responses"]["200"],
                    "description": "It can't serve: what is missing.",
                }
            for scope in (name for each in operation.get("security", ()) for name in each["bearer"]):
                told = f"Where keys are configured: the scope `{scope}`."
                operation["description"] = f"{operation.get('description', '')}\n\n{told}".strip()
                if scope == "read":
                    operation.setdefault("parameters", []).append(TIMEOUT_PARAMETER)
            for status in _failures(path, method, operation):
                operation["responses"].setdefault(
                    str(status), {"$ref": f"#/components/responses/Problem{status}"}
                )
            if path.startswith("/v1/"):
                operation["responses"]["default"] = {"$ref": "#/components/responses/Problem"}
            for response in operation["responses"].values():
                if "$ref" not in response:
                    response["headers"] = {"X-Request-Id": REQUEST_ID_HEADER}
    document["components"]["responses"] = {
        "Problem": _problem("Anything else that went wrong."),
        **{
            f"Problem{status}": _problem(told, waits=status in _WAITING) for status, told in _FAILURES.items()
        },
    }
    return document


def _failures(path: str, method: str, operation: dict[str, Any]) -> list[int]:
    """Return the statuses of the refusals and failures that an operation knows."""
    scopes = {scope for each in operation.get("security", ()) for scope in each["bearer"]}
    if not scopes:
        return []
    found = {401, 403}
    if path.startswith("/v1/"):
        found |= {422, 429, 502, 503}
        found |= {404} if "{" in path or method == "post" else set()
        found |= {408, 413} if "requestBody" in operation else set()
        found |= {504} if "read" in scopes else {409, 507}
    if path == "/v1/feedback":
        # Whoever may read may vote, which is a write.
        found = (found - {504}) | {507}
    if path == "/v1/search" or any(each["name"] == "cursor" for each in operation.get("parameters", ())):
        found |= {410}
    if path.endswith("/files"):
        found |= {400}
    return sorted(found)


def _problem(told: str, *, waits: bool = False) -> dict[str, Any]:
    return {
        "description": f"{told} The body says which field is at fault and what to do (RFC 9457).",
        "headers": {
            "X-Request-Id": REQUEST_ID_HEADER,
            **({"Retry-After": RETRY_AFTER_HEADER} if waits else {}),
        },
        "content": {"application/problem+json": {"schema": {"$ref": REF.format(model="Problem")}}},
    }


_FAILURES: dict[int, str] = {
    400: "The form can't be read.",
    401: "Keys are configured, and none that is known came with the request.",
    403: "The key does not allow this; without keys, the caller is not on this machine.",
    404: "It is not there, or not for this key.",
    408: "The body paused too long or came too slowly.",
    409: "It contradicts what is stored or under way.",
    410: "The cursor has expired.",
    413: "The body is over the service's limit.",
    422: "The request contradicts the schema, the service's limits or itself; nothing was done.",
    429: "Over the rate of this key, or of this address where there are no keys.",
    502: "Elasticsearch, the embedding server or the reranker refused, or gave an answer that can't be used.",
    503: "Too many requests at once, or something that this needs does not answer.",
    504: "The time budget was used up.",
    507: "Elasticsearch has no disk space left.",
}
_WAITING = (429, 503, 504, 507)
REQUEST_ID_HEADER: dict[str, Any] = {
    "description": "The request's id in the logs of the service and of Elasticsearch: that which came with the request, "
    "else a new one.",
    "required": True,
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"},
}
RETRY_AFTER_HEADER: dict[str, Any] = {
    "description": "Seconds to wait before trying again; given where the service can tell.",
    "schema": {"type": "integer", "minimum": 1},
}


_ANSWERS = (
    answers.SearchResult, answers.WhyResult, answers.BulkResult, answers.FilesResult, answers.Deletion,
    answers.DocumentPage, answers.StoredDocument, collection.Collection, collection.BrokenCollection, collection.CollectionDetails,
    collection.StoredSynonyms,
)  # fmt: skip


class _Written(GenerateJsonSchema):
    """Describes answers by their fields; serialisers that leave empty ones out would hide them all."""

    def ser_schema(self, schema: Any) -> JsonSchemaValue | None:
        return None if schema["type"] == "function-wrap" else super().ser_schema(schema)


def _close(node: Any) -> None:
    """Say that an object whose keys have a pattern has no other keys: pydantic refuses them, its schema does not."""
    if isinstance(node, list):
        for each in node:
            _close(each)
    elif isinstance(node, dict):
        if isinstance(node.get("patternProperties"), dict):
            node.setdefault("additionalProperties", False)
        for each in node.values():
            _close(each)


def _name_filter(properties: dict[str, Any]) -> None:
    """Let a property that takes a filter refer to the filter's grammar."""
    given = properties.get("filter")
    if given is None:
        return
    example = given["anyOf"][0].get("examples", [])
    properties["filter"] = {
        "anyOf": [{"$ref": REF.format(model="Filter")}, {"type": "null"}],
        "default": None,
        "examples": example,
    }


def _complete_parameter(parameter: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Say of a parameter what its route checks by itself."""
    name, place = parameter["name"], parameter["in"]
    if (name, place) == ("collection", "path"):
        parameter["schema"] = schemas["Search"]["properties"]["collection"]
    elif (name, place) == ("document_id", "path"):
        parameter["schema"] = schemas["Document"]["properties"]["id"]
    elif (name, place) == ("filter", "query"):
        parameter.pop("schema")
        parameter["content"] = {"application/json": {"schema": {"$ref": REF.format(model="Filter")}}}
    elif (name, place) == ("confirm", "query"):
        parameter["required"] = True
        parameter["schema"] = schemas["Search"]["properties"]["collection"]
    elif place == "query" and "anyOf" in parameter["schema"]:
        # A parameter is text or absent; nobody can write null in a URL.
        [schema] = [each for each in parameter["schema"].pop("anyOf") if each != {"type": "null"}]
        parameter["schema"] |= schema


def _batch_schema(search: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a batch: what its queries share stands beside them, each may carry any other field."""
    shared = {
        name: schema for name, schema in search["properties"].items() if name not in ("query", "query_vector")
    }
    own = {name: schema for name, schema in search["properties"].items() if name != "collection"}
    query = {
        "type": "object",
        "title": "BatchQuery",
        "properties": own,
        "required": ["query"],
        "additionalProperties": False,
    }
    queries = {**batch["properties"]["queries"], "items": {"anyOf": [query, own["query"]]}}
    return {
        **batch,
        "properties": {"queries": queries, **shared},
        "required": ["collection", "queries"],
        "additionalProperties": False,
    }


def _filter_schemas() -> dict[str, Any]:
    """Return the grammar of filters: each reserved field with what it is compared with, other names as metadata."""
    text = {"type": "string", "maxLength": MAX_VALUE_UNITS}
    scalars: dict[str, dict[str, Any]] = {
        "keyword": text,
        "date": INSTANT_SCHEMA,
        "boolean": {"type": "boolean"},
        "double": {"type": "number"},
        "any": {"anyOf": [text, {"type": "number"}, {"type": "boolean"}]},
    }
    ranged = ("date", "double", "any")
    tests = {}
    for kind, value in scalars.items():
        several = {"type": "array", "items": value, "maxItems": values.MAX_FILTER_TERMS}
        operators: dict[str, Any] = {
            "in": several,
            "ne": {"anyOf": [value, {**several, "minItems": 1}]},
            "exists": {"type": "boolean"},
        }
        if kind in ranged:
            operators |= dict.fromkeys(("gt", "gte", "lt", "lte"), value)
        object_form = {
            "type": "object",
            "properties": operators,
            "minProperties": 1,
            "additionalProperties": False,
            "allOf": [
                {"not": {"required": ["gt", "gte"]}},
                {"not": {"required": ["lt", "lte"]}},
                # A field that is not there has no value to test.
                {
                    "anyOf": [
                        {"not": {"required": ["exists"]}},
                        {"properties": {"exists": {"const": True}}},
                        {"maxProperties": 1},
                    ]
                },
            ],
        }
        tests[kind] = {"anyOf": [value, several, object_form]}
    filters = {"$ref": REF.format(model="NestedFilter")}
    group = {"type": "array", "items": filters, "minItems": 1}
    grammar = {
        "type": "object",
        "title": "Filter",
        "description": (
            "Field or metadata key -> a value, a list of values (any of them), or an object of operators "
            "(gt, gte, lt, lte, in, ne, exists); `and` / `or` take lists of filters, `not` takes one. Ranges need a date "
            f"field or a field declared for the collection. Nested at most {values.MAX_FILTER_DEPTH} deep. Metadata keys that "
            f"are called {', '.join(INNER)} are written with `metadata.` before them."
        ),
        "properties": {
            **{name: tests[kind] for name, kind in fields.RESERVED.items()},
            "and": group,
            "or": group,
            "not": filters,
            # What the index or a stored document calls something that no filter sees. A collection that declares such a
            # key takes its bare name too; `metadata.<name>` holds for all.
            **dict.fromkeys((*INNER, fields.METADATA), False),
        },
        "patternProperties": {f"^{re.escape(prefix)}": False for prefix in INNER_OBJECTS},
        "additionalProperties": tests["any"],
        "examples": [{"lang": "en", "creation_time": {"gte": "2025-01-01"}, "not": {"tags": "draft"}}],
    }
    return {"Filter": grammar, "NestedFilter": {**grammar, "title": "NestedFilter", "minProperties": 1}}


RESULTS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "SearchResults",
    "description": "The answers to a batch, in the order of its queries; a query that failed has its problem.",
    "required": ["results"],
    "additionalProperties": False,
    "properties": {
        "results": {
            "type": "array",
            "items": {"anyOf": [{"$ref": REF.format(model=name)} for name in ("SearchResult", "Problem")]},
        }
    },
}

TIMEOUT_PARAMETER: dict[str, Any] = {
    "name": "X-Halflife-Timeout-Ms",
    "in": "header",
    "required": False,
    "description": "Time budget of this request in milliseconds; the service's own (HALFLIFE_REQUEST_TIMEOUT_S) where "
    "that is shorter. Past it a search answers with what it has, or the answer is 504.",
    "schema": {"type": "integer", "minimum": 50, "maximum": 999_999_999},
    "example": 2000,
}

PROBLEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "Problem",
    "description": "RFC 9457 problem details.",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "examples": ["urn:halflife:problem:invalid-request"]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "field": {"type": "string", "description": "The field at fault."},
        "remedy": {"type": "string", "description": "What to do about it."},
        "retry_after_s": {"type": "number"},
        "request_id": {"type": ["string", "null"]},
        "errors": {"type": "array", "items": {"type": "object"}},
    },
}
