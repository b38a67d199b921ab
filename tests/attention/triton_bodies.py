"""The conformance suite on our Triton attention: on a device, and in Triton's interpreter (see `test_triton.py`)."""

from __future__ import annotations

import dataclasses
import os

from polyrec.attention.triton import TritonAttention
from polyrec.testing.conformance import AttentionConformance


class Interpreted(TritonAttention):
    """The interpreter runs on the host."""

    support = dataclasses.replace(TritonAttention.support, platforms=None)


class TestTriton(AttentionConformance):
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    platform = "cpu" if interpreted else "nvidia"
    attention = Interpreted if interpreted else "triton"
