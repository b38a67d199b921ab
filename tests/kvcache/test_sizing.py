"""How many pages a device gets, and what is refused: numbers worked out by hand."""

from __future__ import annotations

import types

import pytest
import torch

from polyrec.core.errors import ConfigError, HardwareError
from polyrec.hardware.base.attention import AttentionNeeds
from polyrec.hardware.base.runtime import MemoryInfo
from polyrec.kvcache.options import PAGE_SIZE
from polyrec.kvcache.sizing import (
    KVSize,
    bytes_per_token,
    kv_dtype,
    pages_of,
    refuse_too_large,
    room_of,
    size_cache,
)

PER_TOKEN = 64  # bytes
PAGE = 16 * PER_TOKEN  # 1,024 bytes
FP32 = torch.float32


def memory(total: int, free: int) -> MemoryInfo:
    return MemoryInfo(free=free, total=total, peak=0)


def platform(fp8: bool) -> types.SimpleNamespace:
    return types.SimpleNamespace(platform_name="abacus", capabilities=types.SimpleNamespace(fp8=fp8))


def sized(longest: int, wanted: int, fraction: float | None, total: int = 0, free: int = 0) -> KVSize:
    return size_cache(PER_TOKEN, FP32, longest=longest, wanted=wanted, fraction=fraction, memory=memory(total, free))


def too_small(call) -> HardwareError:
    with pytest.raises(HardwareError) as caught:
        call()
    assert caught.value.code == "kv_cache_too_small"
    flags = ("--max-length", "--kv-cache-dtype fp8", "--quantization fp8", "--memory-fraction")
    assert [flag for flag in flags if flag not in caught.value.remedy] == []
    return caught.value


def test_pages_are_of_16_tokens():
    assert PAGE_SIZE == 16
    assert [pages_of(tokens) for tokens in (0, 1, 15, 16, 17, 32, 33, 2455)] == [0, 1, 1, 1, 2, 2, 3, 154]


@pytest.mark.parametrize(
    ("dtype", "layers", "kv_heads", "head_dim", "expected"),
    [
        (torch.bfloat16, 28, 8, 128, 114_688),  # the 1.7B shape: 2 · 8 · 128 · 28 · 2
        (torch.float8_e4m3fn, 28, 8, 128, 57_344),
        (torch.float32, 28, 8, 128, 229_376),
        (torch.float32, 1, 1, 1, 8),
        (torch.bfloat16, 3, 5, 7, 420),
    ],
)
def test_bytes_of_a_token(dtype, layers, kv_heads, head_dim, expected):
    # Query heads, and the dtype of the activations, have no say.
    needs = AttentionNeeds(num_layers=layers, num_heads=40 * kv_heads, num_kv_heads=kv_heads, head_dim=head_dim)
    assert bytes_per_token(needs, dtype) == expected


@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [False, True])
def test_the_cache_dtype_that_is_asked_for(activations, fp8):
    assert kv_dtype("auto", activations, platform(fp8)) == activations
    assert kv_dtype("bf16", activations, platform(fp8)) == torch.bfloat16
    if fp8:
        assert kv_dtype("fp8", activations, platform(fp8)) == torch.float8_e4m3fn
    else:
        with pytest.raises(ConfigError) as caught:
            kv_dtype("fp8", activations, platform(fp8))
        assert caught.value.code == "kv_cache_dtype_unsupported"
        assert "abacus" in caught.value.message
        assert "--kv-cache-dtype" in caught.value.remedy


@pytest.mark.parametrize(
    ("longest", "wanted", "num_pages"),
    [
        (16, 16, 2),  # page 0, which no prompt gets, comes on top
        (17, 16, 3),  # one longest prompt fits, whatever the batches are
        (100, 1000, 64),  # 63 pages hold 1,008 tokens
        (100, 1009, 65),
        (1, 0, 2),
    ],
)
def test_without_a_fraction_there_is_room_for_the_batches(longest, wanted, num_pages):
    size = sized(longest, wanted, None)  # of a device that says it has no memory at all
    assert (size.num_pages, size.page_size, size.bytes_per_token, size.dtype) == (num_pages, 16, PER_TOKEN, FP32)
    assert size.num_tokens == (num_pages - 1) * 16 >= max(longest, wanted)
    assert size.num_bytes == num_pages * PAGE


@pytest.mark.parametrize(
    ("total", "free", "fraction", "num_pages"),
    [
        (100 * PAGE, 100 * PAGE, 1.0, 100),
        (100 * PAGE, 100 * PAGE, 0.5, 50),
        (100 * PAGE, 70 * PAGE, 0.5, 20),  # 50 pages are the share, 30 pages of it are in use
        (100 * PAGE, 70 * PAGE, 1.0, 70),
        (100 * PAGE, 70 * PAGE + PAGE - 1, 1.0, 70),  # pages are whole
        (100 * PAGE, 52 * PAGE, 0.5, 2),  # as many as one prompt needs
    ],
)
@pytest.mark.parametrize("wanted", [0, 16, 10_000])  # with a fraction the batches have no say
def test_a_fraction_gets_all_of_its_share_that_is_free(total, free, fraction, num_pages, wanted):
    assert sized(16, wanted, fraction, total, free).num_pages == num_pages


@pytest.mark.parametrize(
    ("free", "fraction", "least", "taken"),
    [
        (70 * PAGE, 0.5, 22 * PAGE, 20 * PAGE),
        (51 * PAGE, 0.5, 22 * PAGE, PAGE),
        (10 * PAGE, 0.5, 22 * PAGE, 0),  # others use more than the share: never a negative number
        (21 * PAGE, 1.0, 22 * PAGE, 21 * PAGE),
    ],
)
def test_a_longest_prompt_that_does_not_fit_is_refused(free, fraction, least, taken):
    message = too_small(lambda: sized(21 * 16, 0, fraction, 100 * PAGE, free)).message
    assert "336 tokens" in message
    assert f"need {least:,} bytes" in message
    assert f"{free:,} are free" in message
    assert f"the device's {100 * PAGE:,}" in message
    assert f"and {taken:,} of them may be taken at --memory-fraction {fraction:g}" in message
    assert sized(21 * 16, 0, 1.0, 100 * PAGE, 22 * PAGE).num_pages == 22


@pytest.mark.parametrize(
    ("total", "free", "fraction", "room"),
    [(1000, 1000, 0.9, 900), (1000, 400, 0.9, 300), (1000, 100, 0.9, 0), (1000, 50, 0.9, -50), (999, 999, 0.5, 499)],
)
def test_room_is_what_the_share_has_left(total, free, fraction, room):
    assert room_of(memory(total, free), fraction) == room


def test_what_would_not_fit_is_refused_before_it_is_loaded():
    weights, needed = 50 * PAGE + 7, 50 * PAGE + 7 + 3 * PAGE  # two pages of a prompt, and page 0

    def check(free: int, fraction: float | None) -> None:
        refuse_too_large(weights, PER_TOKEN, longest=17, fraction=fraction, memory=memory(100 * PAGE, free))

    check(needed, None)
    check(needed, 1.0)
    check(100 * PAGE, 0.9)
    for free, fraction, taken in ((needed - 1, None, needed - 1), (100 * PAGE, 0.5, 50 * PAGE), (needed, 0.9, 44_039)):
        message = too_small(lambda free=free, fraction=fraction: check(free, fraction)).message
        assert f"Weights ({weights:,} bytes)" in message
        assert f"17 tokens need {needed:,} bytes" in message
        assert f"{free:,} are free" in message
        assert f"and {taken:,} of them may be taken at --memory-fraction {fraction or 1:g}" in message


def test_a_size_tells_itself():
    size = KVSize(114_688, 65_537, 16, torch.bfloat16)
    assert str(size) == "114,688 bytes a token (bfloat16), 65,537 pages of 16, 1,048,576 tokens, 112.00 GiB"
    assert "bytes a token (float8_e4m3fn)" in str(KVSize(57_344, 2, 16, torch.float8_e4m3fn))
