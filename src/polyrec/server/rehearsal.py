"""A worker's work on a request, done over and over while it waits for the engine's answer to a lone one.

On a machine that others share, and where memory is far away, a core that has waited for some milliseconds does its next work
at half its pace or less: code and tables have left its caches. A worker that does not sleep anyway can keep them there.
"""

from __future__ import annotations

import orjson

from ..core.request import Recommendation
from .channel import Ask, packed
from .schema import RecommendBody, encode_answer, parse_body
from .state import Front


class Rehearsal:
    """Each call does one half of the work, the way in or the way out, on a sample of the front's; its results go nowhere."""

    def __init__(self, front: Front) -> None:
        self._front = front
        history, n, self._found = front.sample()
        self._body = orjson.dumps({"history": history, "n": n})
        self._n = n
        self._is_in = False
        prepared = front.prepare(parse_body(RecommendBody, self._body).to_request(n))
        assert not isinstance(prepared, Recommendation), "a history of known items needs a search"
        self._prepared = prepared

    def __call__(self) -> None:
        """Half as long as the work on a request, so that an answer that comes meanwhile waits for no more."""
        self._is_in = not self._is_in
        if self._is_in:
            prepared = self._front.prepare(parse_body(RecommendBody, self._body).to_request(self._n))
            packed(Ask(0, prepared, None))
        else:
            encode_answer(self._front.finish(self._prepared, self._found), request_id="rehearsal", timing_ms=0.0)
