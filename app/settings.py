"""The environment, read once by the wiring: every setting is `HALFLIFE_…`, with its unit in its name.

Nothing below `api` and `main` knows that there is an environment. The README's table is made from this module.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from app.values import (
    DEFAULT_WINDOW,
    MAX_FILTER_DEPTH,
    MAX_FILTER_TERMS,
    MAX_ITEMS,
    MAX_QUERIES,
    MAX_QUERY_CHARS,
    MAX_TOP_K,
    MAX_WINDOW,
)

EMPTY_IS_A_CHOICE: Final = frozenset({"embedding_query_prefix", "embedding_document_prefix"})
"""Settings whose empty value says something else than leaving them out does."""


class _Environment(EnvSettingsSource):
    """The environment, in which a blank variable is one left out: compose files pass on what nobody filled in."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return _unless_blank(super().get_field_value(field, field_name), field_name)


class _SecretFiles(SecretsSettingsSource):
    """A folder of secrets, in which a blank file is one that is not there. Raises SettingsError for what can't be read."""

    def __call__(self) -> dict[str, Any]:
        # Looked at before, since pydantic would warn of these in its own words, and go on without the secret.
        folder = Path(str(self.secrets_dir)).expanduser()
        names = {f"halflife_{name}" for name in self.settings_cls.model_fields}
        try:
            found = sorted(path for path in folder.iterdir() if path.name.lower() in names)
        except OSError as cause:
            raise SettingsError(
                f"HALFLIFE_SECRETS_DIR: the folder can't be read ({cause.strerror})"
            ) from cause
        for path in found:
            if (fault := _unusable(path, folder)) is not None:
                raise SettingsError(f"HALFLIFE_SECRETS_DIR: {path.name} {fault}")
        return super().__call__()

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        try:
            return _unless_blank(super().get_field_value(field, field_name), field_name)
        except (OSError, UnicodeDecodeError) as cause:
            why = cause.strerror if isinstance(cause, OSError) else "it is not UTF-8"
            raise SettingsError(
                f"HALFLIFE_SECRETS_DIR: the file of {field_name} can't be read ({why})"
            ) from cause


def _unusable(path: Path, folder: Path) -> str | None:
    """Return why what lies in the folder of secrets is no file of it; None where it is one."""
    try:
        target = path.resolve(strict=True)
    except FileNotFoundError:
        return f"is a link to {path.readlink()}, where nothing is"
    except (OSError, RuntimeError):
        return "is a link that can't be followed"
    if not target.is_file():
        return "is no file" if not target.is_dir() else "is a folder, not a file with the secret"
    return (
        None if folder.resolve() in target.parents else "is a link out of the folder, which is not followed"
    )


def _unless_blank(found: tuple[Any, str, bool], name: str) -> tuple[Any, str, bool]:
    value, key, is_complex = found
    blank = isinstance(value, str) and not value.strip() and name not in EMPTY_IS_A_CHOICE
    # Kubernetes gives this to each pod beside a service called halflife: an address, and not the port to listen at.
    linked = name == "port" and isinstance(value, str) and value.startswith(("tcp://", "udp://"))
    return None if blank or linked else value, key, is_complex


class EmbeddingModel(BaseModel):
    """One more embedding model, and how it is spoken to.

    What is left out is not taken from the first model: no prefixes, no key, and dims that its server is asked for.
    Only `max_input_tokens`, and what has no field here (batches, concurrency, timeouts), is as for the first one.
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    url: str
    model: str | None = None
    """Its name at that server; None: the one that collections know it by."""
    dims: Annotated[int, Field(ge=1, le=4096)] | None = None
    api_key: SecretStr | None = None
    query_prefix: str = ""
    document_prefix: str = ""
    max_input_tokens: Annotated[int, Field(ge=16)] | None = None
    send_dimensions: bool = False

    @field_validator("model", "api_key", mode="before")
    @classmethod
    def _unless_blank(cls, given: object) -> object:
        return None if isinstance(given, str) and not given.strip() else given

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.send_dimensions and self.dims is None:
            raise ValueError("`send_dimensions` needs `dims`: it is the number sent")
        return self


UNREAD_REMEDY = (
    "lower HALFLIFE_CHUNK_TOKENS, or, where the model reads more than that, raise HALFLIFE_EMBEDDING_MAX_INPUT_TOKENS "
    "(`max_input_tokens` of a further model)"
)


class Settings(BaseSettings):
    """Where things are and how much one request may cost."""

    model_config = SettingsConfigDict(
        env_prefix="HALFLIFE_", env_file=None, extra="ignore", hide_input_in_errors=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read what the environment leaves out from files: `HALFLIFE_SECRETS_DIR` holds one for each setting.

        A file is called like its variable, in small letters, as Docker and Kubernetes mount secrets. What is blank is
        left out. Raises SettingsError where there is no such folder: without its secrets others would be at work.
        """
        environment = _Environment(settings_cls)
        folder = os.environ.get("HALFLIFE_SECRETS_DIR", "").strip()
        if not folder:
            return init_settings, environment
        if not Path(folder).expanduser().is_dir():
            raise SettingsError(f"HALFLIFE_SECRETS_DIR: there is no folder {folder}")
        return init_settings, environment, _SecretFiles(settings_cls, secrets_dir=folder)

    elasticsearch_url: Annotated[str, NoDecode] = Field(
        "http://127.0.0.1:9200",
        description="Address of the cluster (9.0 or newer); several nodes with commas between.",
    )
    elasticsearch_api_key: SecretStr | None = Field(None, description="API key, as Elasticsearch encodes it.")
    elasticsearch_username: str | None = Field(None, description="User, where no API key is used.")
    elasticsearch_password: SecretStr | None = Field(None, description="The user's password.")
    elasticsearch_ca: str | None = Field(
        None, description="File of the CA that signed the cluster's certificate."
    )
    elasticsearch_verify_certs: bool = Field(
        True, description="false accepts any certificate: for trials only."
    )
    elasticsearch_timeout_s: float = Field(
        10.0, gt=0, le=300, description="Longest wait for one request to the cluster."
    )
    elasticsearch_connections: int = Field(
        20,
        ge=1,
        le=1000,
        description="Connections to each node; as many writes wait for a cluster that is away, further ones get 503 at once.",
    )
    elasticsearch_pool_wait_s: float = Field(
        2.0, gt=0, le=60, description="Longest wait for one of those connections; then 503."
    )
    startup_wait_s: float = Field(
        60.0, ge=0, le=3600, description="How long start-up waits for the cluster and the embedder."
    )

    embedding_base_url: str = Field(
        "http://127.0.0.1:9400/v1",
        description="An OpenAI-compatible server, up to where `/embeddings` is appended.",
    )
    embedding_api_key: SecretStr | None = Field(
        None, description="Its key; left out for servers without one."
    )
    embedding_model: str = Field(
        "multilingual-e5-small", description="The model's name, as that server knows it."
    )
    embedding_dims: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Length of its vectors; asked from the server at start-up if left out.",
    )
    embedding_send_dimensions: bool = Field(
        False, description="Ask the server for `embedding_dims` (OpenAI's v3 models)."
    )
    embedding_query_prefix: str = Field(
        "query: ", description="Put before queries; E5-style models need it. Empty for OpenAI."
    )
    embedding_document_prefix: str = Field("passage: ", description="Put before passages; likewise.")
    embedding_max_batch: int = Field(32, ge=1, le=2048, description="Texts in one embedding request.")
    embedding_max_batch_tokens: int = Field(
        100_000, ge=16, description="Estimated tokens in one embedding request."
    )
    embedding_max_input_tokens: int = Field(
        512, ge=16, description="Tokens of one text that the model reads."
    )
    embedding_concurrency: int = Field(4, ge=1, le=256, description="Embedding requests under way at once.")
    embedding_timeout_s: float = Field(
        30.0, gt=0, le=600, description="Longest wait for one embedding request."
    )
    embedding_query_timeout_s: float = Field(
        2.0, gt=0, le=60, description="Longest wait for a query's embedding."
    )
    embedding_stall_s: float | None = Field(
        None,
        gt=0,
        le=1200,
        description="A write gives up with 503 once the embedding server has answered nobody for so long. At least "
        "`HALFLIFE_EMBEDDING_TIMEOUT_S`; twice that if left out, so that a batch that took too long can still be answered in halves.",
    )
    embedding_cache_size: int = Field(1024, ge=0, le=1_000_000, description="Query vectors kept in memory.")

    embedding_models: Annotated[dict[str, EmbeddingModel], NoDecode] = Field(
        default_factory=dict,
        description="More models that collections may be made with, as JSON: name -> `url`, `dims` (asked if left out), "
        "`query_prefix` and `document_prefix` (both empty: an E5-style model needs them named), `api_key` (none), `model` "
        "(its name there; else the same), `send_dimensions` (false), `max_input_tokens` (as the first one). Each collection "
        "uses its own, so that a change of model stops neither reads nor writes.",
    )
    chunk_tokens: int = Field(
        400,
        ge=32,
        le=8192,
        description="Estimated tokens of one chunk, its title included. Of a longer one than the model reads (HALFLIFE_EMBEDDING_MAX_INPUT_TOKENS) the end has no vector.",
    )
    chunk_overlap_tokens: int = Field(40, ge=0, le=4096, description="Tokens that neighbouring chunks share.")

    file_max_bytes: int = Field(
        31 * 2**20,
        ge=1,
        description="Largest uploaded file. HALFLIFE_MAX_BODY_BYTES holds for the whole upload, the form around it included.",
    )
    file_max_unpacked_bytes: int = Field(
        256 * 2**20, ge=1, description="What a .docx or .epub may unpack to."
    )
    file_max_pages: int = Field(5_000, ge=1, description="Pages of one PDF.")
    file_max_rows: int = Field(10_000, ge=1, description="Rows of one uploaded table or line file.")
    file_timeout_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Longest reading of one file; of less than 5 MiB a part: a sixth, and another for each MiB.",
    )
    file_memory_bytes: int = Field(
        2 * 2**30, ge=2**28, description="Address space of a process that reads files."
    )
    file_workers: int = Field(
        2,
        ge=1,
        le=64,
        description="Processes that read files at once; one more serves callers of whom no file is being read.",
    )
    file_queue: int = Field(
        64,
        ge=1,
        le=4096,
        description="Uploads that are read or wait to be; a caller may have half. More get 503.",
    )
    file_wait_s: float = Field(
        20.0, gt=0, le=3600, description="Longest wait for the first file of an upload to be begun; then 503."
    )

    rerank_url: str | None = Field(
        None, description="A reranker (Cohere/Jina/vLLM/Infinity/llama.cpp or TEI form)."
    )
    rerank_model: str | None = Field(None, description="Its model's name, where it wants one.")
    rerank_api_key: SecretStr | None = Field(None, description="Its key.")
    rerank_form: Literal["auto", "cohere", "tei"] = Field("auto", description="How it is spoken to.")
    rerank_scores: Literal["probability", "logit"] = Field(
        "probability",
        description="What its scores are: in [0, 1] (Cohere, Jina, vLLM, Infinity, TEI), or logits (llama.cpp).",
    )
    rerank_timeout_s: float = Field(5.0, gt=0, le=60, description="Longest wait for it in one search.")

    rewrite_url: str | None = Field(
        None,
        description="A chat model that rewrites queries where a search asks for it: any OpenAI-compatible server, up to where `/chat/completions` is appended.",
    )
    rewrite_model: str = Field("", description="Its model's name.")
    rewrite_key: SecretStr | None = Field(None, description="Its key.")
    rewrite_timeout_s: float = Field(3.0, gt=0, le=60, description="Longest wait for one rewriting.")

    host: str = Field("127.0.0.1", description="Address the API listens on.")
    port: int = Field(8080, ge=0, le=65535, description="Port the API listens on.")
    cursor_secret: SecretStr | None = Field(
        None,
        description="Signs cursors; give every process the same. Made up at start if left out: cursors end with it.",
    )
    touch_ahead_s: float = Field(
        366 * 86_400.0,
        ge=0,
        le=1e10,
        description="How far after this clock an `as_of` may lie for `touch` to set it: room for a virtual clock, none for a "
        "slip of the keyboard that would keep a memory fresh for good.",
    )
    auto_create_collections: bool = Field(
        True,
        description="A first upsert makes its collection with the defaults; where there are keys, an admin's.",
    )
    keys: str | None = Field(
        None, description="Bearer keys as JSON (hashes, never tokens); `halflife keys create` writes entries."
    )
    keys_file: str | None = Field(
        None, description="A file of bearer keys instead, read again when it changes."
    )
    metrics_open: bool = Field(
        False,
        description="Answer /metrics without a key, where there are keys; else it needs the scope `metrics`.",
    )
    rate_per_s: float = Field(
        500.0,
        ge=0,
        le=1_000_000,
        description="Requests a second that one key (without keys: one address) may send for long; 0: any number.",
    )
    rate_burst: int = Field(
        1000,
        ge=1,
        le=10_000_000,
        description="Requests that it may send at once; more get 429 with Retry-After.",
    )
    request_timeout_s: float | None = Field(
        None,
        gt=0,
        le=300,
        description="Time budget of a request that reads, embedding and reranking included; as long as one request to the cluster if left out.",
    )
    max_body_bytes: int = Field(32 * 2**20, ge=1024, description="Largest request body.")
    max_held_bytes: int | None = Field(
        None,
        ge=1024,
        description="Bytes of all request bodies that are arriving or being worked on; more get 503. Four largest bodies if left out. Text takes up to four times that in memory.",
    )
    max_body_pause_s: float = Field(
        20.0,
        gt=0,
        le=600,
        description="A sender that pauses longer within a body (408), takes longer for a request's head or for what is left of a "
        "body after the answer, or takes nothing of the answer for so long, is cut off.",
    )
    max_query_chars: int = Field(MAX_QUERY_CHARS, ge=1, le=MAX_QUERY_CHARS, description="Longest query.")
    max_top_k: int = Field(MAX_TOP_K, ge=1, le=MAX_TOP_K, description="Most hits on one page.")
    max_window: int = Field(
        MAX_WINDOW, ge=DEFAULT_WINDOW, le=MAX_WINDOW, description="Widest `fusion.window` of a request."
    )
    max_filter_depth: int = Field(
        MAX_FILTER_DEPTH, ge=1, le=MAX_FILTER_DEPTH, description="Levels of `and`, `or`, `not` in a filter."
    )
    max_filter_values: int = Field(
        MAX_FILTER_TERMS,
        ge=1,
        le=MAX_FILTER_TERMS,
        description="Values in one filter, of at most 256 KiB of names and values.",
    )
    max_queries: int = Field(MAX_QUERIES, ge=1, le=MAX_QUERIES, description="Queries in one batch.")
    max_documents: int = Field(
        MAX_ITEMS, ge=1, le=MAX_ITEMS, description="Documents, changes or ids in one request."
    )
    max_concurrent_requests: int = Field(
        64,
        ge=1,
        description="Requests answered at once, fewer while answers are slow; more get 503 with Retry-After.",
    )
    search_log_rate: float = Field(
        0.0, ge=0, le=1, description="Share of the searches that are logged to `halflife_searches`; 0: none."
    )
    search_log_texts: bool = Field(
        False, description="Log the queries' texts too, and not their keyed hashes alone."
    )
    search_log_days: int = Field(
        30, ge=1, le=3650, description="Days that the search log is kept; older ones the service deletes."
    )
    feedback_days: int = Field(
        180, ge=31, le=3650, description="Days that votes on logged searches are kept."
    )
    drain_s: float = Field(
        1.0, ge=0, le=60, description="Between SIGTERM (`/readyz` turns red) and the end of listening."
    )
    log_format: Literal["text", "json"] = Field("text", description="Log lines as text or as JSON objects.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="From which level on."
    )
    log_queries: bool = Field(False, description="Write the texts of queries into the log.")
    traces_endpoint: str | None = Field(
        None, description="An OTLP collector (http://host:4318): sends traces. Needs the extra `tracing`."
    )
    docs: bool = Field(True, description="Serve /docs and /openapi.json.")

    @field_validator("embedding_models", mode="before")
    @classmethod
    def _read_models(cls, given: object) -> object:
        if not isinstance(given, str):
            return given
        try:
            return json.loads(given)
        except (ValueError, RecursionError):
            raise ValueError('this is not JSON; write {"NAME": {"url": "…"}}') from None

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.elasticsearch_api_key and self.elasticsearch_username:
            raise ValueError("give HALFLIFE_ELASTICSEARCH_API_KEY or a user with password, not both")
        if bool(self.elasticsearch_username) != bool(self.elasticsearch_password):
            raise ValueError("HALFLIFE_ELASTICSEARCH_USERNAME and …_PASSWORD go together")
        if self.embedding_stall_s is not None and self.embedding_stall_s < self.embedding_timeout_s:
            raise ValueError(
                f"HALFLIFE_EMBEDDING_STALL_S ({self.embedding_stall_s:g}) must be at least HALFLIFE_EMBEDDING_TIMEOUT_S "
                f"({self.embedding_timeout_s:g}): else a batch that takes longer always fails, with nothing wrong"
            )
        if self.embedding_send_dimensions and self.embedding_dims is None:
            raise ValueError(
                "HALFLIFE_EMBEDDING_SEND_DIMENSIONS needs HALFLIFE_EMBEDDING_DIMS: it is the number sent"
            )
        if self.max_held_bytes is not None and self.max_held_bytes < self.max_body_bytes:
            raise ValueError("HALFLIFE_MAX_HELD_BYTES must be at least HALFLIFE_MAX_BODY_BYTES")
        if self.keys and self.keys_file:
            raise ValueError("give HALFLIFE_KEYS or HALFLIFE_KEYS_FILE, not both")
        if self.chunk_overlap_tokens * 2 > self.chunk_tokens:
            raise ValueError("HALFLIFE_CHUNK_OVERLAP_TOKENS must be at most half of HALFLIFE_CHUNK_TOKENS")
        return self

    @property
    def unread_chunks(self) -> list[str]:
        """Return a sentence for each model that reads less than a chunk may hold."""
        return [
            f"chunks of up to {self.chunk_tokens} tokens, and the model {name} reads {most}: what is beyond has no vector, "
            "and only words find it"
            for name in dict.fromkeys((self.embedding_model, *self.embedding_models))
            if (most := self.with_model(name).embedding_max_input_tokens) < self.chunk_tokens
        ]

    @property
    def embedder_stall_s(self) -> float:
        """How long the embedding server may answer nobody before a write gives up."""
        return 2 * self.embedding_timeout_s if self.embedding_stall_s is None else self.embedding_stall_s

    @property
    def keyed(self) -> bool:
        """Tell whether keys are configured; a file or list that holds none locks everybody out, and counts."""
        return bool(self.keys or self.keys_file)

    def with_model(self, name: str | None) -> Self:
        """Return the settings with this embedding model in the place of the first one.

        One that is not among `embedding_models` is asked for by its name at the first one's server.
        """
        if name is None or name == self.embedding_model:
            return self
        found = self.embedding_models.get(name)
        if found is None:
            return self.model_copy(update={"embedding_model": name})
        more = (
            {} if found.max_input_tokens is None else {"embedding_max_input_tokens": found.max_input_tokens}
        )
        return self.model_copy(
            update={
                "embedding_model": name,
                "embedding_base_url": found.url,
                "embedding_api_key": found.api_key,
                "embedding_dims": found.dims,
                "embedding_query_prefix": found.query_prefix,
                "embedding_document_prefix": found.document_prefix,
                "embedding_send_dimensions": found.send_dimensions,
                **more,
            }
        )

    @property
    def elasticsearch_urls(self) -> list[str]:
        """The nodes' addresses."""
        return [url.strip() for url in self.elasticsearch_url.split(",") if url.strip()]


def environment_table() -> list[tuple[str, str, str]]:
    """Return (variable, default, meaning) of every setting, in order: the README's table."""
    rows = []
    for name, info in Settings.model_fields.items():
        default = "" if info.default in (None, PydanticUndefined) else str(info.default)
        rows.append((f"HALFLIFE_{name.upper()}", default, info.description or ""))
    return rows
