"""The models that a server lists. It is asked for them first, so a wrong address shows here."""

import asyncio
from dataclasses import dataclass

import httpx2

from scripts.conformance.address import Address
from scripts.conformance.wires import http_client

_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "RECORD LAYER FAILURE")
"""What OpenSSL says of an answer that is not encrypted."""
_BREAKS = (httpx2.RemoteProtocolError, httpx2.ReadError)
"""What a server that expects TLS does with a request that is not encrypted."""
_MAX_CHARACTERS = 100


class UnreachableError(Exception):
    """Nobody answers at the address; the message is for a person."""


@dataclass(frozen=True)
class Listing:
    """What came of asking for the models."""

    first: str | None = None
    """The id of the first model that is listed; None if there is none."""
    note: str = ""
    """What a person should know who has typed the address, where no model is listed."""


async def listing_of(address: Address, patience_seconds: float) -> Listing:
    """Ask a server for its models.

    Raises:
        UnreachableError: nobody is there who speaks HTTP.
    """
    url = f"{address.url}/models"
    try:
        # As long to connect, which has a limit of its own, and to answer, which comes in pieces.
        async with (
            asyncio.timeout(2 * patience_seconds),
            http_client(address, patience_seconds) as http,
        ):
            answer = await http.get(url)
    except (TimeoutError, httpx2.ReadTimeout):
        return Listing(note=f"{url} lists no models: no answer in {patience_seconds:g} s")
    except httpx2.DecodingError as error:
        return Listing(note=f"{url} lists no models: its body cannot be decoded: {error}")
    except (httpx2.RequestError, httpx2.InvalidURL) as error:
        raise UnreachableError(_told(address, error)) from None
    first = _first_id(answer)
    return Listing(first, "" if first else f"{url} lists no models: {_instead(answer)}")


def _told(address: Address, error: Exception) -> str:
    told = f"cannot connect to {address.url}: {str(error) or type(error).__name__}"
    if address.url.startswith("https:") and any(name in told.upper() for name in _NO_TLS):
        return f"{told}; does it speak http?"
    if address.url.startswith("http:") and isinstance(error, _BREAKS):
        return f"{told}; does it speak https?"
    return told


def _first_id(answer: httpx2.Response) -> str | None:
    try:
        found = answer.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _instead(answer: httpx2.Response) -> str:
    """Return what came in place of a list, and what that may mean."""
    status = f"{answer.status_code} {answer.reason_phrase}".rstrip()
    if answer.status_code in (401, 403):
        return f"{status}. The key is missing, wrong, or not for this"
    if answer.has_redirect_location:
        return f"{status}, to {answer.headers['location']}. Is the API there?"
    kind = answer.headers.get("content-type", "no type")
    if kind.startswith("application/json"):
        return f"{status}, with {answer.content[:_MAX_CHARACTERS].decode(errors='replace')}"
    return f"{status}, with {kind} instead of JSON. Is the API below another path?"
