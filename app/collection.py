"""A collection: the options that it is made or changed with, its synonyms, and what is told of it."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_serializer, model_validator

from app import fields
from app.ranking import Experiment, Profile, ProfileName
from app.refusals import INTERVAL_PATTERN, KEY_PATTERN, invalid
from app.times import Instant, format_instant, parse_instant
from app.values import MAX_KEYWORD_CHARS, WHOLE, ItemError, Text, Value

DeclaredType = Literal["long", "double", "date", "keyword", "boolean"]
FieldName = Annotated[str, Field(pattern=KEY_PATTERN)]
Similarity = Literal["cosine", "dot_product", "l2_norm", "max_inner_product"]


NOT_DECLARABLE = (
    "and",
    "or",
    "not",
    fields.TEXT,
    fields.METADATA,
    fields.CHUNKS,
    fields.DECLARED,
    fields.DELETED,
    fields.DOCUMENT_ID,
)


IF_REVISION: Final = (
    "Change it only if the collection is at this `revision`, else 409: so of two who read it, change it and write it back, "
    "none undoes the other's change."
)


MOST_DECLARED = 200
"""Keys that a collection declares at most."""


def typed_copy(value: Any, kind: DeclaredType) -> Any:
    """Return one metadata value in the type that its key declares; raises ValueError rather than change its meaning."""
    match kind:
        case "date":
            return format_instant(parse_instant(value))
        case "boolean" if isinstance(value, bool):
            return value
        case "keyword" if isinstance(value, bool):
            return "true" if value else "false"
        case "keyword" if isinstance(value, int):
            return _short(str(value))
        case "keyword" if isinstance(value, str):
            return _short(value)
        case "long" | "double" if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"this is {_kind(value)}")
        case "long":
            if isinstance(value, float) and not value.is_integer():
                raise ValueError("this is a fraction")
            if not -(2**63) <= value < 2**63:
                raise ValueError("this has more than 64 bits")
            return int(value)
        case "double":
            try:
                return float(value)
            except OverflowError as cause:
                raise ValueError("this is too large") from cause
        case _:
            raise ValueError(f"this is {_kind(value)}")


def _short(value: str) -> str:
    if len(value) > MAX_KEYWORD_CHARS:
        raise ValueError(f"this has {len(value)} characters")
    return value


def _kind(value: Any) -> str:
    names = {
        str: "text",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        dict: "an object",
        list: "a list",
    }
    return names.get(type(value), "something else")


class CollectionOptions(Value):
    """How a collection is made; what can't change in place needs a reindex."""

    model: Annotated[Text, Field(min_length=1, max_length=256)] | None = Field(
        None,
        description="The embedding model, one of those that the service knows; its first one if left out.",
    )
    dims: Annotated[int, Field(ge=1, le=4096), WHOLE] | None = Field(
        None, description="The model's if left out; others are for vectors that callers bring."
    )
    similarity: Similarity = "cosine"
    declared: Annotated[dict[FieldName, DeclaredType], Field(max_length=MOST_DECLARED)] = Field(
        default_factory=dict,
        json_schema_extra={"propertyNames": {"not": {"enum": [*fields.RESERVED, *NOT_DECLARABLE]}}},
        description="Metadata keys that are typed, so that ranges work on them. Keys that no stored document has can "
        "be added at any time; those left out stay.",
    )
    shards: Annotated[int, Field(ge=1, le=64), WHOLE] = 1
    replicas: Annotated[int, Field(ge=0, le=5), WHOLE] | None = Field(
        None,
        description="Copies of each shard; one where the cluster has two nodes or more if left out or null. Can be "
        "changed at any time.",
    )
    refresh_interval: Annotated[str, Field(pattern=INTERVAL_PATTERN)] | None = Field(
        None,
        description="How often written documents become visible to searches: 1s if left out, -1 never by itself; can "
        "be changed at any time.",
        examples=["1s", "30s"],
    )
    profiles: Annotated[dict[ProfileName, Profile], Field(max_length=100)] = Field(
        default_factory=dict,
        description="Ranking profiles that searches may name; can be changed at any time.",
    )
    default_profile: ProfileName | None = Field(
        None,
        description="The profile of searches that name none; none: decay 'auto', both routes, adaptive fusion.",
    )
    experiment: Experiment | None = Field(
        None,
        description="Deals searches that name no profile to several; null ends it. Can be changed at any time.",
        examples=[
            {
                "name": "decay-2026-02",
                "arms": [{"profile": "plain", "percent": 50}, {"profile": "recent", "percent": 50}],
                "by": "subject",
            }
        ],
    )
    if_revision: Annotated[int, Field(ge=0), WHOLE] | None = Field(None, description=IF_REVISION)

    @model_validator(mode="after")
    def _no_clash(self) -> Self:
        for name in self.declared:
            if name in fields.RESERVED or name in NOT_DECLARABLE:
                raise invalid(
                    f"`declared.{name}` is taken by the documents' own fields or the filter language",
                    "declare it under another name",
                )
        named = "profiles" in self.model_fields_set
        if named and self.default_profile is not None and self.default_profile not in self.profiles:
            raise invalid(
                f"`default_profile` '{self.default_profile}' is not among `profiles`",
                "name one that is, or add it",
            )
        arms = [] if self.experiment is None else self.experiment.arms
        for at, arm in enumerate(arms):
            if named and arm.profile not in self.profiles:
                raise invalid(
                    f"`experiment.arms[{at}].profile` '{arm.profile}' is not among `profiles`",
                    "name one that is, or add it",
                )
        return self


class SynonymRule(Value):
    """One rule, as in Elasticsearch's synonym sets."""

    synonyms: Annotated[Text, Field(min_length=1, max_length=2_000)] = Field(
        json_schema_extra={"pattern": ",|=>"},
        description="Equivalent terms with commas between them, or one way: `terms => terms`.",
        examples=["电脑, 计算机, computer", "k8s => kubernetes"],
    )
    id: Annotated[Text, Field(min_length=1, max_length=128)] | None = Field(
        None, description="A name of the caller's own for it."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"synonyms": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _lean(self, handler: Any) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}


MAX_SYNONYM_RULES = 2_000
MAX_SYNONYM_CHARS = 100_000


def _rules_or_texts(schema: dict[str, Any]) -> None:
    text = SynonymRule.model_json_schema()["properties"]["synonyms"]
    schema["items"] = {"anyOf": [schema["items"], text]}


class _Synonyms(Value):
    synonyms_set: Annotated[list[SynonymRule], Field(max_length=MAX_SYNONYM_RULES)] = Field(
        json_schema_extra=_rules_or_texts
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        # It is kept in the mapping, which the whole cluster holds in memory.
        size = sum(len(rule.synonyms) + len(rule.id or "") for rule in self.synonyms_set)
        if size > MAX_SYNONYM_CHARS:
            raise invalid(
                f"`synonyms_set` holds {size} characters, {MAX_SYNONYM_CHARS} are the most",
                "keep the rules that queries need",
            )
        return self


class SynonymSet(_Synonyms):
    """The synonyms of a collection, as a body of Elasticsearch's `_synonyms` has them; rules may also be plain text."""

    if_revision: Annotated[int, Field(ge=0), WHOLE] | None = Field(None, description=IF_REVISION)


class StoredSynonyms(_Synonyms):
    """The synonyms of a collection as they are."""

    collection: str
    revision: int = Field(0, description="The collection's, for `if_revision`.")


class Collection(Value):
    """What a collection is, as stored in its index."""

    name: str
    index: str
    uid: str | None = Field(
        None,
        description="Stays with the collection through every reindex, and tells it from an earlier one of its name; "
        "null for one that an earlier release made.",
    )
    dims: int
    similarity: Similarity
    declared: dict[str, DeclaredType]
    model: str | None = None
    template_version: int
    profiles: dict[str, Profile] = Field(default_factory=dict)
    default_profile: str | None = None
    experiment: Experiment | None = None
    revision: int = Field(
        0,
        description="Counts the changes of declared keys, profiles, experiment and synonyms, for `if_revision`.",
    )
    unreadable: dict[str, str] = Field(
        default_factory=dict,
        exclude_if=lambda value: not value,
        description="Stored options that this release can't read -> what is wrong with them; absent where all can be read. "
        "They count as not given, and a search by such a profile is refused; write them anew to mend them.",
    )
    synonyms: list[SynonymRule] = Field(
        default_factory=list, exclude=True, description="Asked for on their own: GET …/synonyms."
    )


class BrokenCollection(Value):
    """A collection whose index or aliases are not as they should be: no request to it is answered until they are."""

    name: str
    error: "ItemError"


class Ages(Value):
    """How old a collection's documents are, by their creation time."""

    oldest: Instant | None
    newest: Instant | None
    undated: int
    evergreen: int


class CollectionDetails(Collection):
    """What a collection is and what it holds."""

    documents: int
    deleted: int | None = Field(
        description="Tombstones of deleted documents, until `halflife purge` removes them; null for a key with a filter."
    )
    chunks: int
    size_bytes: int | None = Field(description="On disk, all copies; null for a key with a filter.")
    shards: int
    replicas: int
    refresh_interval: str
    ages: Ages
