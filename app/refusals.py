"""What refused values are told: which field, what is wrong with it and what to do about it, in our words.

Turns pydantic's faults into `InvalidRequest`. Knows the forms that a union is read by (`_TAGS`), and no model by name.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from app.errors import InvalidRequest
from app.times import Misread, parse_duration

Model = TypeVar("Model", bound=BaseModel)


def invalid(problem: str, remedy: str) -> PydanticCustomError:
    """Return an error that tells the caller both, unchanged: what is wrong, and what to do about it."""
    return PydanticCustomError("value_error", "{problem}: {remedy}", {"problem": problem, "remedy": remedy})


def described(value: Any) -> str:
    """Return what a JSON value is, without repeating it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return "text"
    if isinstance(value, float) and not math.isfinite(value):
        return "one that a double can't hold"
    return "a number" if isinstance(value, int | float) else "something else"


_JSON_TYPES = {
    "int_type": ("a whole number", "write it without quotes and without a fraction"),
    "int_from_float": ("a whole number", "round it"),
    "float_type": ("a number", "write it without quotes"),
    "bool_type": ("true or false", "write true or false, without quotes"),
    "string_type": ("text", "put it in quotes"),
    "list_type": ("a list", "write a JSON list, of one member where there is one"),
    "dict_type": ("an object", "write a JSON object"),
    "model_type": ("an object", "write a JSON object"),
    "model_attributes_type": ("an object", "write a JSON object"),
    "string_unicode": ("well-formed Unicode", "send UTF-8 without lone surrogates"),
    "int_parsing": ("a whole number", "write digits alone"),
    "bool_parsing": ("true or false", "write true or false"),
    "float_parsing": ("a number", "write digits alone"),
    "finite_number": ("a finite number", "write one of a magnitude that a double can hold"),
}

_OBJECTS = {
    "fusion": '{"method": "rrf"}',
    "routes": '{"kind": "text"}',
    "mmr": '{"lambda": 0.7}',
    "filter": '{"lang": "en"}',
    "decay": '{"half_life": "180d"}',
    "metadata": '{"team": "search"}',
}
"""An object of a field, where people tend to write something else."""

_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}
NAME_PATTERN = r"^[a-z][a-z0-9_]*$"
PROFILE_PATTERN = r"^[a-z][a-z0-9_-]*$"
KEY_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"
INTERVAL_PATTERN = r"^(-1|[1-9][0-9]{0,5}(ms|s|m))$"


_PATTERNS = {
    NAME_PATTERN: "begin with a small letter; small letters, digits and '_' may follow",
    PROFILE_PATTERN: "begin with a small letter; small letters, digits, '_' and '-' may follow",
    KEY_PATTERN: "use 1 to 64 letters, digits and '_', a digit not first",
    INTERVAL_PATTERN: "write a whole number with its unit, such as '1s' or '500ms', or '-1' for never",
}
"""How to write what a pattern asks for."""


def explained(fault: Mapping[str, Any]) -> tuple[str, str]:
    """Return what is wrong with a value and the remedy, of one entry of pydantic's `errors()`, its context included.

    What the caller sent is not repeated, but for what checks of ours say of it.
    """
    kind, value, told = fault["type"], fault["input"], fault.get("ctx") or {}
    if kind == "value_error":
        return _told(fault["msg"], told)
    if kind in _JSON_TYPES:
        wanted, remedy = _JSON_TYPES[kind]
        if wanted == "an object":
            # A member of a list is one of what the list is called.
            named = [part for part in fault.get("loc", ()) if isinstance(part, str) and part not in _TAGS]
            if named and named[-1] in _OBJECTS:
                remedy = f"{remedy}, such as {_OBJECTS[named[-1]]}"
        return f"must be {wanted}, not {described(value)}", remedy
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        bound = f"{words} {_number(told[name])}"
        return f"must be {bound}", f"write a number {'of ' if words.startswith('at ') else ''}{bound}"
    if kind in ("too_short", "string_too_short"):
        least, unit = told["min_length"], "character" if isinstance(value, str) else "member"
        return (
            "is empty" if least == 1 else "is too short"
        ), f"give it at least {least} {unit}{'s' * (least > 1)}"
    if kind in ("too_long", "string_too_long"):
        # Where a check of ours comes before the bound, pydantic no longer knows that it bounds a text.
        most, unit = told["max_length"], "characters" if isinstance(value, str) else "members"
        return f"has more than {most} {unit}", f"shorten it to {most} {unit}"
    if kind in ("literal_error", "enum"):
        names = re.findall(r"'([^']*)'", told["expected"])
        close = difflib.get_close_matches(value[:64], names, n=1) if isinstance(value, str) else []
        return f"must be {told['expected']}", f"did you mean '{close[0]}'?" if close else "write one of them"
    if kind == "string_pattern_mismatch":
        pattern = told["pattern"]
        return f"does not fit the pattern {pattern}", _PATTERNS.get(
            pattern, "write it as that pattern has it"
        )
    return fault["msg"], "see what /docs says of this field"


def _told(message: str, told: Mapping[str, Any]) -> tuple[str, str]:
    if "problem" in told:
        return told["problem"], told["remedy"]
    if isinstance(error := told.get("error"), Misread):
        return error.problem, error.remedy
    return message.removeprefix("Value error, "), "write it as /docs says of this field"


def _number(value: float) -> str:
    whole = isinstance(value, int) or (value.is_integer() and abs(value) < 2**53)
    return f"{int(value):d}" if whole else f"{value:g}"


def parse(model: type[Model], value: Any) -> Model:
    """Return the model. Raises InvalidRequest naming each field that does not fit, and the remedy."""
    try:
        return model.model_validate(value)
    except ValidationError as cause:
        raise _invalid_request(cause, model) from cause


def _invalid_request(error: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    """Return the validation failures as one problem, the first of them in front."""
    errors = []
    for item in error.errors(include_url=False)[:20]:
        path = path_of(item["loc"])
        detail, remedy = explained(item)
        if item["type"] == "value_error" and (named := _NAMED.search(detail)):
            # A check over several fields says which one it means.
            path = f"{path}.{named[1]}".removeprefix(".")
        entry = {"field": path or "body", "detail": detail, "remedy": remedy}
        if item["type"] == "extra_forbidden":
            entry["detail"] = "there is no such field"
            entry["remedy"] = _did_you_mean(item["loc"], model)
        elif item["type"] in _NO_FORM and (form := _TAGS.get(str(item["loc"][-1] if item["loc"] else ""))):
            entry["detail"], entry["remedy"] = form(item)
        elif item["type"] == "missing":
            entry["detail"] = "is missing"
            entry["remedy"] = f"give `{path}`"
        errors.append(entry)
    first = errors[0]
    return InvalidRequest(
        f"{first['field']}: {first['detail']}",
        field=first["field"],
        remedy=first.get("remedy"),
        errors=errors,
    )


_NAMED = re.compile(r"`([a-z_]+(?:(?:\[\])?\.[a-z_]+)*)`")


def path_of(location: Sequence[int | str]) -> str:
    """Return a field's path as callers write it, of a location in pydantic's faults."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", part):
            # A tag of a union, or a caller's key: shortened and kept printable.
            shown = part.encode("ascii", "backslashreplace").decode()[:60]
            text += f".{shown}" if not re.search(r"[\[({]", shown) else ""
        elif part not in _TAGS:
            text += f".{part}"
    return text.removeprefix(".")


_NO_FORM = ("model_type", "literal_error")


def _no_decay(item: Mapping[str, Any]) -> tuple[str, str]:
    told = item.get("ctx") or {}
    words = (
        "'auto' nor 'off'"
        if "auto" in told.get("expected", "") or told.get("class_name") == "Decay"
        else "'off'"
    )
    given = item["input"]
    if isinstance(given, str) and _is_duration(given):
        remedy = f'a half-life is written {{"half_life": "{given.strip()}"}}'
    else:
        remedy = f'write an object with its strength, such as {{"half_life": "180d"}}, or {words.replace("nor", "or")}'
    return f"is neither a decay{',' if 'nor' in words else ' nor'} {words}", remedy


def _is_duration(text: str) -> bool:
    try:
        return parse_duration(text) > 0
    except ValueError:
        return False


def _no_votes(item: Mapping[str, Any]) -> tuple[str, str]:
    return "is neither feedback options nor 'off'", "write an object such as {\"strength\": 0.1}, or 'off'"


def _no_word(item: Mapping[str, Any]) -> tuple[str, str]:
    return "is neither true, false nor 'cluster'", "write one of them"


_TAGS: dict[str, Callable[[Mapping[str, Any]], tuple[str, str]] | None] = {
    "_feedback": _no_votes,
    "_feedback_off": _no_votes,
    "_decay": _no_decay,
    "_off": _no_decay,
    "_word": _no_word,
    "_flag": None,
    "_options": None,
}
"""Which form of a value was read: pydantic names it in a location, callers never wrote it. Form -> what is wrong with what
has it by its looks alone, and the remedy."""


_ELSEWHERE = {"decay_rate": "hourly_loss"}
"""What other libraries call a field of ours of the same meaning: LangChain's time-weighted retriever has (1 - decay_rate) ** hours."""


def _did_you_mean(location: Sequence[int | str], model: type[BaseModel]) -> str:
    names = _field_names(
        model, [part for part in location[:-1] if isinstance(part, str) and part not in _TAGS]
    )
    elsewhere = _ELSEWHERE.get(str(location[-1]))
    if elsewhere in names:
        return f"did you mean `{elsewhere}`?"
    close = difflib.get_close_matches(str(location[-1])[:64], names, n=1, cutoff=0.6)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"the fields here are {', '.join(names)}" if names else "drop it"


def _field_names(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    current: type[BaseModel] | None = model
    for part in path:
        if current is None:
            return []
        known = current.model_fields.get(part)
        if known is not None:
            current = _model_in(known.annotation)
    return [info.alias or name for name, info in current.model_fields.items()] if current is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = _model_in(inner)
        if found is not None:
            return found
    return None
