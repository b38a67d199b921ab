"""The API key: `Authorization: Bearer KEY` or `X-API-Key: KEY`, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac

from fastapi import Request

from ..core.errors import RequestError


class KeyCheck:
    """A FastAPI dependency that refuses requests without the key; with no key set, everyone may ask.

    Digests are compared, not the texts, so that not even the key's length shows in the time taken.
    """

    def __init__(self, api_key: str | None) -> None:
        self._digest = None if api_key is None else _digest(api_key)

    async def __call__(self, request: Request) -> None:
        """Raises RequestError 401 when a key is set and the request does not carry it."""
        if self._digest is None:
            return
        given = _given_key(request)
        if given is None:
            raise RequestError(
                "api_key_missing",
                "This server asks for an API key.",
                "Send 'Authorization: Bearer KEY' or 'X-API-Key: KEY'.",
                status=401,
            )
        if not hmac.compare_digest(_digest(given), self._digest):
            raise RequestError("api_key_wrong", "The API key is not the server's.", "Check the key.", status=401)


def _given_key(request: Request) -> str | None:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("x-api-key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
