"""What callers ask: searches, their further pages, why a document stands where it stands, and votes on hits."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from app import fields
from app.ranking import (
    CanBeOff,
    DecayOrWord,
    Dedup,
    FeedbackOrOff,
    Fraction,
    Fusion,
    Mmr,
    ProfileName,
    Rerank,
    Route,
    check_routes,
    check_stages,
    or_off,
)
from app.refusals import invalid
from app.times import Instant
from app.values import (
    DEFAULT_TOP_K,
    MAX_QUERIES,
    MAX_QUERY_CHARS,
    MAX_ROUTES,
    MAX_TOP_K,
    WHOLE,
    CollectionName,
    DocumentId,
    Filter,
    Text,
    Value,
    Vector,
)


class Highlight(Value):
    """How marked fragments are written."""

    encoder: Literal["html", "default"] = Field(
        "html",
        description="html: `<`, `>`, `&` and quotes of the document are escaped, so that the marks alone are HTML; "
        "default: as stored.",
    )


def _highlight_form(value: Any) -> str:
    return "_options" if isinstance(value, dict | Highlight) else "_flag"


def _explain_form(value: Any) -> str:
    return "_word" if isinstance(value, str) else "_flag"


NOT_BLANK = r"[^\s\u0000\u001c-\u001f\u0085]"
"""As a pattern in the schema: some character is neither white space nor NUL."""


class Query(Value):
    """What is looked for: the part of a search that differs between the queries of a batch."""

    query: Annotated[Text, Field(max_length=MAX_QUERY_CHARS)] = Field(
        description="The question or keywords, as typed.",
        examples=["how long may I carry over leave?"],
        json_schema_extra={"pattern": NOT_BLANK, "minLength": 1},
    )
    query_vector: Vector | None = Field(
        None,
        description="The embedding of `query`, if the caller has it; of the collection's dims. Vector routes with other "
        "words of their own are refused beside it, since those would be embedded here.",
    )
    filter: Filter | None = None
    as_of: Instant | None = Field(
        None,
        description="The origin of decay and age; now if left out. Where it is given, documents created after it are hidden.",
    )
    top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K), WHOLE] = Field(
        DEFAULT_TOP_K,
        description=f"Hits on one page; if left out, {DEFAULT_TOP_K}, or as many as `fusion.window` or the service's limit "
        "allow where that is fewer.",
    )

    @model_validator(mode="after")
    def _not_blank(self) -> Self:
        if not self.query.replace("\0", " ").strip():
            raise invalid(
                "`query` is blank",
                "write words, or list documents with GET /v1/collections/{collection}/documents",
            )
        return self


HIT_NAMES = (
    fields.TITLE,
    fields.TEXT,
    fields.METADATA,
    fields.CREATION_TIME,
    *fields.KEYWORDS,
    *fields.DATES[1:],
    fields.SALIENCE,
)
"""What `fields` of a search may name."""
HitName = Annotated[str, Field(max_length=256), WithJsonSchema({"type": "string", "enum": list(HIT_NAMES)})]


MAX_REWRITE_QUERIES = 4


class RewriteOptions(Value):
    """What a chat model shall make of the query; each part becomes routes of its own."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["keywords"], "properties": {"keywords": {"const": True}}},
                {"required": ["expansion"], "properties": {"expansion": {"const": True}}},
                {"required": ["queries"], "properties": {"queries": {"minimum": 1}}},
            ]
        }
    )

    keywords: bool = Field(False, description="A text route of the words that matter.")
    expansion: bool = Field(False, description="A text route of other words that documents may use.")
    queries: Annotated[int, Field(ge=0, le=MAX_REWRITE_QUERIES), WHOLE] = Field(
        0, description="So many other ways to ask, a route of each kind that the search has for each."
    )
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(0.5, description="Of each route that it adds.")

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not (self.keywords or self.expansion or self.queries):
            raise invalid(
                "asks for nothing", "set `keywords` or `expansion` to true, or `queries` to a number"
            )
        return self


SETTLED: Final = {"settled": True}
"""Context in which a search is read that a first page settled: its window may be its profile's, and shorter than a page."""


class Search(Query):
    """One search, whole."""

    collection: CollectionName
    decay: DecayOrWord | None = Field(
        None,
        description="How age lowers scores. 'auto': only between documents that say the same thing, around a time that the "
        "query names, or, where the best hits are news, for all; the answer's `recency` tells which. Left out: the "
        "collection's ranking profile, else 'auto', but 'off' with additive fusion. Where a route has a strength of its own, "
        "that alone counts, instead of a profile's 'auto' or 'off' too.",
    )
    fold_superseded: bool = Field(
        False,
        description="With decay 'auto': leave out the hits that a newer one supersedes, and name them in its `supersedes`. Left "
        "out: the profile's. "
        "Refused beside another `decay`, since nothing is superseded then.",
    )
    profile: ProfileName | None = Field(
        None,
        description="A ranking profile of the collection; that of its experiment's arm, else its default one if left out.",
    )
    subject: Annotated[Text, Field(min_length=1, max_length=256)] | None = Field(
        None,
        description="Whom the search is for, as the caller likes to name them: an experiment by subject gives one subject the "
        "same arm each time. Not stored.",
    )
    routes: Annotated[list[Route], Field(min_length=1, max_length=MAX_ROUTES)] | None = Field(
        None, description="The recall queries; the profile's, else `text` and `vector` if left out."
    )
    fusion: Fusion | None = None
    feedback: FeedbackOrOff | None = Field(
        None,
        description="Whether votes on earlier hits count: an object, or 'off'; left out: the profile's, else off.",
    )
    min_relevance: Annotated[Fraction | None, BeforeValidator(or_off), CanBeOff] = Field(
        None,
        description="Least cosine of a hit (of each chunk, where `collapse` is false), applied in the cluster. Its scale is the model's. With multilingual-e5-small the "
        "best hit has 0.83 to 0.92 where something answers the question, 0.80 to 0.85 where nothing does: begin with 0.84; "
        "0.5 cuts nothing. To find one, ask a few questions that nothing answers, and take more than the best `relevance` "
        "they get. Left out: the profile's; 'off': none.",
        examples=[0.84],
    )
    rerank: Annotated[Rerank | None, BeforeValidator(or_off), CanBeOff] = Field(
        None, description="Left out: the profile's; 'off': none."
    )
    dedup: Annotated[Dedup | None, BeforeValidator(or_off), CanBeOff] = Field(
        None, description="Left out: the profile's; 'off': none."
    )
    mmr: Annotated[Mmr | None, BeforeValidator(or_off), CanBeOff] = Field(
        None, description="Left out: the profile's; 'off': none."
    )
    collapse: bool = Field(
        True,
        description="One hit per document (its best chunk); false: one per chunk, none of which supersedes another.",
    )
    neighbours: Annotated[int, Field(ge=0, le=20), WHOLE] = Field(
        0, description="Chunks before and after the best one that `text` includes."
    )
    valid_time: Literal["only", "any"] = Field(
        "only",
        description="only: documents with start_date/end_date must be true at the origin; any: they need not.",
    )
    rewrite: RewriteOptions | None = Field(
        None, description="Let a chat model widen the search; refused where none is configured."
    )
    suggest: bool | None = Field(
        None,
        description="Spelling suggestions: true: always looked for; false: never; left out: where a text route finds nothing.",
    )
    synonyms: bool = Field(
        True, description="Let the collection's synonyms widen what the text routes look for."
    )
    highlight: Annotated[
        Annotated[Highlight, Tag("_options")] | Annotated[bool, Tag("_flag")], Discriminator(_highlight_form)
    ] = Field(
        False,
        description="Mark the text route's terms in title and text with `<em>`; HTML of the document is escaped unless "
        "{'encoder': 'default'} asks for it as stored.",
    )
    fields: Annotated[list[HitName], Field(max_length=64)] | None = Field(
        None,
        description="Which of the document's own fields a hit carries ('title', 'metadata', 'tags', …); all if left out. Its id and "
        "`creation_time` always come.",
    )
    include_embedding: bool = Field(False, description="Add the stored vector of the hit's chunk.")
    explain: Annotated[
        Annotated[Literal["cluster"], Tag("_word")] | Annotated[bool, Tag("_flag")],
        Discriminator(_explain_form),
    ] = Field(
        False,
        description="true: add what costs more, missed routes' figures and the request bodies for Kibana; 'cluster': "
        "Elasticsearch's own account of each score too, for the page's first 10 documents.",
    )
    touch: bool = Field(
        False,
        description="Set `last_accessed_at` of the returned documents to the origin, in the background and never back in "
        "time; refused for an `as_of` further ahead of the service's clock than HALFLIFE_TOUCH_AHEAD_S (a year).",
    )
    paging: bool = Field(True, description="false: no cursor, and no point in time is held open.")
    strict: bool = Field(False, description="Answer an error rather than a degraded result.")
    timeout_ms: Annotated[int, Field(ge=50, le=60_000), WHOLE] | None = Field(
        None, description="Time budget of this request; the service's own where that is shorter."
    )

    @model_validator(mode="after")
    def _coherent(self, info: ValidationInfo) -> Self:
        check_routes(self.routes, self.decay)
        window = self.fusion.window if self.fusion and info.context is not SETTLED else None
        if window is not None and self.top_k > window:
            if "top_k" in self.model_fields_set:
                raise invalid(
                    f"`top_k` {self.top_k} is more than `fusion.window` {window}", "raise the window"
                )
            # Left open, so it stays out of the fields that were given; frozen for everyone but its own reading.
            object.__setattr__(self, "top_k", window)
        unknown = [name for name in self.fields or [] if name not in HIT_NAMES]
        if unknown:
            raise invalid(
                f"`fields` names '{unknown[0][:40]}', which no hit has", f"choose from {', '.join(HIT_NAMES)}"
            )
        if self.fold_superseded and self.decay not in (None, "auto"):
            raise invalid(
                "`fold_superseded` is set, but only decay 'auto' finds what is superseded",
                "ask for `decay`: 'auto', or drop it",
            )
        if self.fold_superseded and not self.collapse:
            raise invalid("`fold_superseded` compares documents, not chunks", "drop it, or `collapse`: false")
        check_stages(self.rerank, self.mmr)
        return self


class Rewriting(Value):
    """What a chat model made of a query."""

    keywords: list[str] = Field(default_factory=list)
    expansion: list[str] = Field(default_factory=list)
    queries: list[str] = Field(default_factory=list)


class Wording(Value):
    """Another wording of a query; a document must hold each of its `terms`, as a phrase where they are of several words."""

    query: str
    terms: list[str]


class SearchBatch(Value):
    """Several queries of one collection, answered in order; what is common to them stands beside the list."""

    model_config = ConfigDict(extra="allow")

    queries: Annotated[list[Any], Field(min_length=1, max_length=MAX_QUERIES)] = Field(
        description="Objects with `query` and whatever else differs; each may also carry any other search field.",
        json_schema_extra={"items": {"$ref": "#/components/schemas/Query"}},
    )


class NextPage(Value):
    """The page after the one that gave this cursor."""

    cursor: Annotated[str, Field(min_length=1, max_length=65_536)]


class FeedbackItem(Value):
    """What became of one hit."""

    id: DocumentId = Field(description="A document that the search returned.")
    verdict: Literal["clicked", "ignored", "helpful", "unhelpful"] = Field(
        description="clicked, ignored: what was done with it, weighed by its rank; helpful, unhelpful: a judgement."
    )


class Feedback(Value):
    """What a caller made of the hits of one logged search."""

    search_id: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9-]+$")] = Field(
        description="As the search's answer told it.", examples=["20260131-6f1d0c1a9b7e4f5d8a3b2c1d"]
    )
    items: Annotated[list[Any], Field(min_length=1, max_length=1000)] = Field(
        json_schema_extra={"items": {"$ref": "#/components/schemas/FeedbackItem"}},
    )
    user: Annotated[Text, Field(min_length=1, max_length=256)] | None = Field(
        None,
        description=(
            "Whom the caller speaks for, as it likes to name them; stored as a keyed hash. One vote counts per user "
            "(or caller, if left out), search and document."
        ),
    )


class Why(Search):
    """A search, and a document to account for in it."""

    id: DocumentId = Field(description="The document whose place in this search's result is asked about.")
