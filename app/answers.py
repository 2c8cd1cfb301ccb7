"""What callers get: hits and how they came about, the fate of each item, stored documents, and the account of one."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_serializer

from app.ranking import Ranked, RouteKind
from app.times import Instant
from app.values import ItemError, Value
from app.writing import DocumentFields


class Suggestion(Value):
    """The query with words spelled as the collection has them."""

    text: str
    score: float = Field(description="How alike the replaced words are, from 0 to 1.")


class Rewrite(Value):
    """What was searched for beside the query's own words, and where it comes from."""

    source: Literal["synonyms", "model"]
    kind: Literal["synonyms", "keywords", "expansion", "query"]
    of: str = Field(description="What it was made of: a term of the query, or the query.")
    texts: list[str] = Field(description="What was searched for too.")
    rules: list[str] | None = Field(None, description="synonyms: the rules that say so.")
    routes: list[str] | None = Field(None, description="model: the routes that it added.")

    @model_serializer(mode="wrap")
    def _lean(self, handler: Any) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}


class WhyRoute(Value):
    """How one route sees the document."""

    matches: bool
    rank: int | None = Field(
        None, description="Its place in the whole collection under this route's filter, from 1."
    )
    rank_relation: Literal["eq", "gte"] = Field(
        "eq", description="gte: it lies at this rank or further down."
    )
    in_window: bool = False
    score: float | None = None
    decay: float | None = None
    decayed_score: float | None = None
    contribution: float = 0.0
    rank_if_current: int | None = Field(
        None, description="The rank it would have if its own decay factor were 1."
    )
    note: str | None = Field(None, description="Why the route does not find it, or adds nothing.")


class WhyStage(Value):
    """What a stage after fusion did with the document."""

    before: int | None = Field(None, description="Its place in the list that the stage was given, from 1.")
    after: int | None = Field(
        None, description="Its place in the stage's result; null where it is not in it."
    )
    score: float | None = Field(None, description="rerank: the reranker's score of it, on its own scale.")
    note: str


class WhyChunk(Value):
    """Where one chunk of the document stands, in a search that does not collapse hits."""

    number: int
    fused_rank: int
    rank: int | None = Field(
        description="Its place after the stages that follow fusion; null if one dropped it."
    )
    score: float
    routes: dict[str, int] = Field(description="Its rank in the routes that list it.")


class WhyResult(Value):
    """Why a document stands where it stands, or is not there."""

    id: str
    origin: Instant
    exists: bool
    excluded_by: list[str] = Field(description="What keeps it out altogether; empty where it can be found.")
    title: str | None = None
    creation_time: Instant | None = None
    age_days: float | None = None
    evergreen: bool = False
    relevance: float | None = None
    decay: float | None = None
    routes: dict[str, WhyRoute]
    fused_rank: int | None = Field(
        None, description="Its place in the fused list; null where it is not in it."
    )
    fused_score: float | None = Field(
        None, description="Its fused score; what it would be without a window if it is not in it."
    )
    stages: dict[Literal["rerank", "recency", "dedup", "mmr"], WhyStage] = Field(
        default_factory=dict, description="What the search's stages after fusion did with it, in their order."
    )
    chunks: list[WhyChunk] | None = Field(
        None, description="With `collapse` false: its chunks in the fused list, best first."
    )
    rank: int | None = Field(
        None, description="Its place in the whole answer, after every stage; null where it is not in it."
    )
    top_k: int
    page_score: float | None = Field(None, description="The score of the last hit on the first page.")
    on_page: bool
    what_it_takes: list[str] = Field(description="What would bring it onto the first page.")
    profile: Ranked | None = Field(
        None, description="Which profile ranks this search, and the arm that chose it; null where none does."
    )
    warnings: list[str] = Field(default_factory=list)


class ItemResult(Value):
    """What became of one item, in the order sent."""

    id: str | None
    status: Literal[
        "created", "updated", "unchanged", "deleted", "not_found", "conflict", "invalid", "failed"
    ]
    version: int | None = None
    chunks: int | None = None
    truncated: bool | None = None
    error: ItemError | None = None

    @model_serializer(mode="wrap")
    def _lean(self, handler: Any) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None or key == "id"}


class BulkResult(Value):
    """The items' fates and how many of them failed."""

    items: list[ItemResult]
    failed: int


class FeedbackResult(BulkResult):
    """The votes' fates, how many of them failed, and when the others count."""

    counts_from: Instant | None = Field(
        None,
        description="From when on searches with `feedback` count these votes, within 65 seconds; the first search after "
        "it may still be ranked without them, while they are read. Null where none is new.",
    )


class FileItemResult(ItemResult):
    """What became of one document of an upload, or of a file that gave none."""

    file: str = Field(description="The file's name, as sent.")
    row: int | None = Field(None, description="Its row in a table or line file, from 1 with the header.")
    warnings: list[str] | None = None


class FilesResult(Value):
    """The fates of all documents of an upload and how many of them failed."""

    items: list[FileItemResult]
    failed: int


class Deletion(BulkResult):
    """How many documents a delete took away, and the items that were named or failed; of a filter's the first 1,000."""

    deleted: int


class StoredDocument(DocumentFields):
    """A document as stored."""

    id: str
    title: str
    text: str
    version: int
    chunks: int
    indexed_at: Instant | None = None
    revision: int | None = None


class DocumentPage(Value):
    """Documents in the order of their ids, and where the next page begins."""

    documents: list[StoredDocument]
    total: int
    cursor: str | None


def _is_none(value: Any) -> bool:
    return value is None


# A serialiser of the whole model would do the same, and take two thirds of the time of writing an answer.
Shown = TypeVar("Shown")
IfAny = Annotated[Shown | None, Field(exclude_if=_is_none)]
"""What an answer shows only where there is something to show."""


class Total(Value):
    """How many documents a route matches, as Elasticsearch counts them."""

    value: int
    relation: Literal["eq", "gte"]


class RouteStatus(Value):
    """How one route did."""

    kind: IfAny[RouteKind] = Field(None, description="What kind of route it is, whatever its name.")
    status: Literal["ok", "partial", "failed", "skipped"]
    took_ms: int | None = None
    total: Total | None = None
    returned: int = Field(0, description="Of these, within `fusion.window`.")
    reason: IfAny[str] = None
    confidence: IfAny[float] = Field(
        None, description="adaptive fusion: how far its first hits stand out from the rest, from 0 to 1."
    )
    weight: IfAny[float] = Field(
        None, description="adaptive fusion: its share of the score, by weight and confidence; all sum to 1."
    )


class RouteHit(Value):
    """One route's part in a hit: `score` as the query scored it, times `decay` is `decayed_score`.

    With linear and adaptive fusion `contribution` is the route's weight times `normalized`; adaptive weights follow the
    route's confidence and stand in the answer's `routes`.
    """

    rank: int | None
    score: float | None
    decay: float | None
    decayed_score: float | None
    contribution: float
    normalized: IfAny[float] = None
    note: IfAny[str] = None
    explanation: IfAny[dict[str, Any]] = Field(
        None, description="Elasticsearch's own account of `decayed_score`: value, description, details."
    )


class HitFeedback(Value):
    """What votes did to a hit: `factor` multiplied its score; the counts are what it rests on, decayed in `rate`."""

    factor: float
    voters: int
    basis: Literal["question", "document"] = Field(
        description="Whose votes: those on hits of the same question, or (at half the weight) those under any."
    )
    rate: float = Field(
        description="Share of votes for it among those that looked at it, decayed and capped."
    )
    clicked: int
    ignored: int
    helpful: int
    unhelpful: int


RecencyMode = Literal["off", "equals", "around", "news"]


class RecencyDecision(Value):
    """What `decay: "auto"` decided for this query."""

    mode: RecencyMode = Field(
        description="off: time counts for nothing; equals: newest first among hits that say the same thing; around: "
        "nearest first to a time that the query names; news: newer hits count for more."
    )
    reason: str


class Hit(Value):
    """One result, and why it stands where it stands."""

    id: str
    score: float = Field(
        description="What the fused list is ordered by; after a rerank the rerank's. MMR, and `keep: newer` of dedup, place hits otherwise."
    )
    fused_score: float
    title: str | None = None
    text: str | None = None
    creation_time: Instant | None = None
    metadata: dict[str, Any] | None = None
    fields: dict[str, Any] = Field(
        default_factory=dict, description="The document's other fields that are set."
    )
    age_days: float | None = Field(
        description="Days from the decay's date to the origin; negative in the future."
    )
    relevance: float | None = Field(description="Cosine of query and chunk, clamped to [0, 1].")
    decay: float | None = Field(description="The factor of the request's decay; null where it is off.")
    evergreen: bool = False
    routes: dict[str, RouteHit]
    chunk: IfAny[dict[str, Any]] = Field(
        None, description="Which chunk: number, start and end in the document's text."
    )
    highlights: IfAny[dict[str, list[str]]] = None
    embedding: IfAny[list[float]] = None
    rerank_score: IfAny[float] = None
    superseded_by: IfAny[str] = Field(
        None, description="The newest hit that says the same thing, by decay 'auto'."
    )
    supersedes: IfAny[list[str]] = Field(
        None, description="The older ones among the best hits that say the same thing, by decay 'auto'."
    )
    recency: IfAny[str] = Field(
        None, description="What decay 'auto' did with this hit; where it did something, or with `explain`."
    )
    near_duplicates: IfAny[list[str]] = Field(
        None,
        description="Ids dropped as near duplicates of this hit; with `collapse` false its own id too, for another of its chunks.",
    )
    additive: IfAny[dict[str, float]] = Field(None, description="The terms of an additive score.")
    feedback: IfAny[HitFeedback] = Field(None, description="What votes on it count, where `feedback` is on.")


class SearchResult(Value):
    """The answer to one search."""

    origin: Instant
    took_ms: int
    degraded: bool
    warnings: list[str]
    cursor: str | None
    routes: dict[str, RouteStatus]
    hits: list[Hit]
    explain: IfAny[dict[str, Any]] = None
    recency: IfAny[RecencyDecision] = Field(
        None, description="What decay 'auto' decided; absent where it is not in use."
    )
    profile: IfAny[Ranked] = Field(
        None, description="Which profile ranked this, and the arm that chose it; absent where none did."
    )
    touched: IfAny[int] = Field(
        None,
        description="With `touch`: of how many returned documents `last_accessed_at` is set to the origin, within about a "
        "second and never back in time; fewer than were returned where too many wait already.",
    )
    search_id: IfAny[str] = Field(None, description="Where the search is logged: what feedback refers to.")
    rewrites: IfAny[list[Rewrite]] = Field(
        None, description="What was searched for beside the query's own words; left out where nothing was."
    )

    suggestions: IfAny[list[Suggestion]] = Field(
        None,
        description="Other spellings of the query that documents within its filters have, the likeliest first.",
    )
