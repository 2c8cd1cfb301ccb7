"""Cursors come back as sealed, and nothing else comes back at all."""

import base64
import hashlib
import hmac
import json
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cursor import (
    MAX_CURSOR_CHARS,
    MAX_PAYLOAD_BYTES,
    CursorPayload,
    seal,
    unseal,
)
from app.errors import CursorExpired, CursorInvalid, InvalidRequest

OLD, NEW = b"an older secret of this service", b"the present secret of this service"
REQUEST = {
    "collection": "handbook",
    "query": "假期可以结转多久?",
    "filter": {"lang": ["en", "zh"]},
    "top_k": 5,
}
PAYLOAD = CursorPayload(
    kind="search",
    collection="handbook",
    caller="a1b2",
    origin_ms=1_769_817_600_000,
    pit_id="46ToAwMDaWR5BXV1aWQy",
    offset=5,
    request=REQUEST,
    expires_ms=1_769_817_900_000,
)
LIVE = PAYLOAD.expires_ms - 1


def opened(
    text: str, *, secrets=(NEW,), now_ms: int = LIVE, kind="search", caller: str = "a1b2", collection=None
):
    return unseal(text, secrets=secrets, now_ms=now_ms, kind=kind, caller=caller, collection=collection)


def signed(plain: bytes, *, version: int = 1) -> str:
    """Return a text as the service would sign it, whatever is in it."""
    packed = zlib.compress(plain)
    mac = hmac.new(NEW, b"halflife cursor\0" + bytes([version]) + packed, hashlib.sha256).digest()
    return base64.urlsafe_b64encode(bytes([version]) + mac + packed).rstrip(b"=").decode()


def test_a_cursor_comes_back_as_sealed():
    text = seal(PAYLOAD, secrets=[NEW])

    assert opened(text) == PAYLOAD
    assert opened(text, collection="handbook") == PAYLOAD
    assert text == seal(PAYLOAD, secrets=[NEW])
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def test_a_list_cursor_carries_sort_values():
    payload = PAYLOAD.model_copy(update={"kind": "list", "after": [1769817600000, "leave-2026", None, 0.5]})

    assert opened(seal(payload, secrets=[NEW]), kind="list").after == [1769817600000, "leave-2026", None, 0.5]


def test_secrets_rotate():
    before = seal(PAYLOAD, secrets=[OLD])

    assert opened(before, secrets=[NEW, OLD]) == PAYLOAD
    assert opened(seal(PAYLOAD, secrets=[NEW, OLD]), secrets=[NEW]) == PAYLOAD
    with pytest.raises(CursorInvalid, match="not issued here"):
        opened(before, secrets=[NEW])


@pytest.mark.parametrize("secrets", [[], [b""], [NEW, b""]])
def test_secrets_are_required(secrets: list[bytes]):
    with pytest.raises(ValueError, match="secret"):
        seal(PAYLOAD, secrets=secrets)
    with pytest.raises(ValueError, match="secret"):
        opened("AA", secrets=secrets)


@pytest.mark.parametrize(
    "late, error",
    [(-1, None), (0, CursorExpired), (10**12, CursorExpired)],
)
def test_expiry_is_decided_by_the_time_given(late: int, error):
    text = seal(PAYLOAD, secrets=[NEW])
    if error is None:
        assert opened(text, now_ms=PAYLOAD.expires_ms + late) == PAYLOAD
    else:
        with pytest.raises(error) as caught:
            opened(text, now_ms=PAYLOAD.expires_ms + late)
        assert caught.value.status == 410
        assert caught.value.remedy == "start again without a cursor"


@pytest.mark.parametrize(
    "use, message",
    [
        ({"caller": "other"}, "another key"),
        ({"caller": ""}, "another key"),
        ({"kind": "list"}, "continues a search, not a list"),
        ({"collection": "other"}, "another collection"),
        # A foreign cursor is called foreign, expired or not.
        ({"caller": "other", "now_ms": PAYLOAD.expires_ms}, "another key"),
    ],
)
def test_a_foreign_cursor_is_refused(use: dict, message: str):
    text = seal(PAYLOAD, secrets=[NEW])
    with pytest.raises(CursorInvalid, match=message) as caught:
        opened(text, **use)
    assert caught.value.field == "cursor"
    assert caught.value.remedy


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A",
        "AAAA",
        "====",
        "!!!!",
        "ж" * 80,
        "\ud800" * 80,
        "\0" * 80,
        "A" * MAX_CURSOR_CHARS,
        "A" * (MAX_CURSOR_CHARS + 1),
        "A" * 10_000_000,
    ],
    ids=lambda text: f"{len(text)}-{text[:2]!a}",
)
def test_other_texts_are_refused(text: str):
    with pytest.raises(CursorInvalid):
        opened(text)


def test_every_changed_character_is_noticed():
    text = seal(PAYLOAD, secrets=[NEW])
    rng = random.Random(3)
    alphabet = "ABab01-_+/= \n~é\ud800"
    for at in range(len(text)):
        changed = rng.choice([char for char in alphabet if char != text[at]])
        # The last character has spare bits that a decoder would ignore; each of its neighbours is tried.
        options = (
            [changed]
            if at < len(text) - 1
            else list("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
        )
        for option in options:
            if option != text[at]:
                with pytest.raises(CursorInvalid):
                    opened(text[:at] + option + text[at + 1 :])
        with pytest.raises(CursorInvalid):
            opened(text[:at])
        with pytest.raises(CursorInvalid):
            opened(text[:at] + changed + text[at:])
    for padding in ("=", "==", "===", "\n", " "):
        with pytest.raises(CursorInvalid):
            opened(text + padding)


@given(st.data())
def test_mutations_raise_nothing_but_cursor_invalid(data: st.DataObject):
    raw = bytearray(base64.urlsafe_b64decode(seal(PAYLOAD, secrets=[NEW]) + "==="))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        how = data.draw(st.sampled_from(["flip", "cut", "insert", "swap"]))
        if how == "flip":
            raw[at] ^= data.draw(st.integers(1, 255))
        elif how == "cut":
            del raw[at : at + data.draw(st.integers(1, 8))]
        elif how == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        else:
            raw[at:] = reversed(raw[at:])
        if not raw:
            break
    text = base64.urlsafe_b64encode(bytes(raw)).rstrip(b"=").decode()
    if text != seal(PAYLOAD, secrets=[NEW]):
        with pytest.raises(CursorInvalid):
            opened(text)


@given(
    st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: base64.urlsafe_b64encode(raw).decode())
)
def test_random_texts_raise_nothing_but_cursor_invalid(text: str):
    with pytest.raises(CursorInvalid):
        opened(text)


@pytest.mark.parametrize(
    "plain",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b'{"kind": "search"}',
        json.dumps({**PAYLOAD.model_dump(mode="json"), "more": 1}).encode(),
        json.dumps({**PAYLOAD.model_dump(mode="json"), "offset": -1}).encode(),
        json.dumps({**PAYLOAD.model_dump(mode="json"), "kind": "purge"}).encode(),
        b"[" * 100_000,
        b'{"kind": "' + b"0" * (MAX_PAYLOAD_BYTES + 1) + b'"}',
        b"0" * 40_000_000,
    ],
    ids=range(11),
)
def test_a_signed_payload_of_another_form_is_refused(plain: bytes):
    with pytest.raises(CursorInvalid, match="another release"):
        opened(signed(plain))


@pytest.mark.parametrize("cut", [1, 4, 6], ids=["checksum", "all-of-the-checksum", "json"])
def test_a_cut_but_signed_stream_is_refused(cut: int):
    packed = zlib.compress(PAYLOAD.model_dump_json().encode())[:-cut]
    mac = hmac.new(NEW, b"halflife cursor\0\x01" + packed, hashlib.sha256).digest()
    with pytest.raises(CursorInvalid, match="another release"):
        opened(base64.urlsafe_b64encode(b"\x01" + mac + packed).rstrip(b"=").decode())


def test_another_version_is_refused_though_signed():
    plain = PAYLOAD.model_dump_json().encode()

    assert opened(signed(plain)) == PAYLOAD
    with pytest.raises(CursorInvalid):
        opened(signed(plain, version=2))


def test_a_request_with_a_long_vector_fits():
    rng = random.Random(5)
    vector = [rng.gauss(0, 0.02) for _ in range(4096)]
    payload = PAYLOAD.model_copy(update={"request": {**REQUEST, "query_vector": vector}})
    text = seal(payload, secrets=[NEW])

    assert len(text) < MAX_CURSOR_CHARS
    assert opened(text).request["query_vector"] == vector


@pytest.mark.parametrize(
    "query",
    [
        pytest.param("".join(random.Random(1).choices("0123456789abcdefghijklmnopqrstuvwxyz", k=90_000)), id="incompressible"),
        pytest.param("x" * (MAX_PAYLOAD_BYTES + 1), id="compressible"),
    ],
)  # fmt: skip
def test_a_request_too_large_is_refused_with_a_remedy(query: str):
    payload = PAYLOAD.model_copy(update={"request": {"query": query}})
    with pytest.raises(InvalidRequest) as caught:
        seal(payload, secrets=[NEW])
    assert caught.value.field == "paging"
    assert "`paging`: false" in (caught.value.remedy or "")
