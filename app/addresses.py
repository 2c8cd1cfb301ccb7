"""What a host's name tells; nothing is looked up."""

from functools import lru_cache
from ipaddress import ip_address


@lru_cache(maxsize=256)  # the same few on each request
def is_loopback(host: str) -> bool:
    """Tell whether an address or name is this machine's own loopback; a bracketed or scoped IPv6 address will do."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_unspecified(host: str) -> bool:
    """Tell whether an address stands for all interfaces: one to listen on, not one to ask."""
    try:
        return ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
