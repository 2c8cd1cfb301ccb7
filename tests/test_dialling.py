"""Addresses, keys and clients of far ends; that loopback is known whatever its form."""

import httpx2
import pytest

from app.addresses import is_loopback, is_unspecified
from app.dialling import brief, check_key, open_client, parse_url, sendable, shown, with_ending

LOOPBACK = ("localhost", "a.localhost", "127.0.0.1", "127.8.9.1", "::1", "[::1]", "::1%lo")
ELSEWHERE = ("", "localhost.example.org", "0.0.0.0", "10.0.0.1", "::", "example.org")  # noqa: S104


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_is_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ELSEWHERE)
def test_other_hosts_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_all_interfaces_are_told_from_one() -> None:
    assert [host for host in (*LOOPBACK, *ELSEWHERE) if is_unspecified(host)] == [ELSEWHERE[2], "::"]
    assert is_unspecified("[::]")


@pytest.mark.parametrize(
    "text, told",
    [
        ("ftp://a", "the far end's URL must start with http:// or https:// and name a host"),
        ("a:8080/v1", "must start with http://"),
        ("http://", "name a host"),
        ("http://a:0", "the host or port of the far end's URL is not one"),
        ("http://a%20b", "the host or port"),
        ("http://a:99999999", "the host or port"),
        ("http://a:b", "is not a URL"),
    ],
)
def test_a_wrong_address_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        parse_url(text, what="the far end's URL")
    assert "the far end's URL" in str(caught.value)


def test_an_ending_is_added_once_and_secrets_are_not_shown() -> None:
    url = httpx2.URL("http://me:word@a/v1/?key=s")
    ended = with_ending(url, "/rerank", "/reranking")
    assert str(ended) == "http://me:word@a/v1/rerank?key=s"
    assert with_ending(ended, "/rerank") == ended
    assert str(with_ending(httpx2.URL("http://a/reranking"), "/rerank", "/reranking")) == "http://a/reranking"
    assert shown(ended) == "http://a/v1/rerank"


@pytest.mark.parametrize("key", [" ", "", "\n"])
def test_a_blank_key_is_told_as_one(key: str) -> None:
    with pytest.raises(ValueError, match="the key is blank: leave it out"):
        check_key(key, what="the key")


@pytest.mark.parametrize("key", ["a\nb", "schlüssel", "key\n", " key"])
def test_a_key_that_no_header_takes_is_refused_at_once(key: str) -> None:
    with pytest.raises(ValueError, match="the key holds characters that HTTP headers refuse"):
        check_key(key, what="the key")


async def test_a_client_follows_nothing_and_asks_for_no_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with (
        open_client(httpx2.URL("http://127.0.0.1"), timeout_s=2, connect_s=5, places=3) as near,
        open_client(httpx2.URL("http://a.example"), timeout_s=9, connect_s=5, places=3) as far,
    ):
        assert near.headers["accept-encoding"] == "identity"
        assert not near.follow_redirects
        assert (near.timeout.connect, near.timeout.read) == (2, 2)
        assert (far.timeout.connect, far.timeout.read) == (5, 9)
        assert (near.trust_env, far.trust_env) == (False, True)


def test_text_is_made_fit_to_send_and_to_tell() -> None:
    assert sendable("a\ud800b\0c") == "a?b c"
    assert brief("a\n b\ud800") == "a b?"
    assert brief("x" * 9, 4) == "xxx…"
