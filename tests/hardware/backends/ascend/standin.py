"""A stand-in for torch_npu: records what is called, refuses what torch_npu's documentation refuses, computes in plain torch.

Every call is bound to the published signature (`published.py`). Memory is the host's. `Npu` below is `torch_npu.npu`; its
graphs freeze what the host knew at capture, and only a task update changes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .npu import Npu
from .published import published, signature

VERSION = "2.14.0"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
MASK_SIZE = 2048


def require(condition: bool, text: str) -> None:
    """The stand-in's own refusals, told apart from the platform's errors."""
    if not condition:
        raise RuntimeError(f"stand-in: {text}")


def bound(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their published names, defaults left out."""
    return dict(signature(published()[VERSION][name]).bind(*args, **kwargs).arguments)


class Library:
    """`torch_npu`. calls: (function, its arguments by name), in order."""

    def __init__(self, num_devices: int = 2) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.npu = Npu(self.calls, num_devices)
        self.profiler = SimpleNamespace(ProfilerActivity=SimpleNamespace(CPU="CPU", NPU="NPU"))
        self.__version__ = torch.__version__
        for kernel in (rms_norm, add_rms_norm, swiglu, rotary_mul, scatter_pa_kv_cache, grouped_matmul, workspace):
            name = (
                "_npu_fused_infer_attention_score_get_max_workspace"
                if kernel is workspace
                else f"npu_{kernel.__name__}"
            )
            setattr(self, name, self._function(name, kernel))
        attention = self._function("npu_fused_infer_attention_score", fused_infer_attention_score)
        attention.out = self._function("npu_fused_infer_attention_score.out", attention_out)  # type: ignore[attr-defined]
        self.npu_fused_infer_attention_score = attention

    def names(self) -> list[str]:
        """The functions called so far."""
        return [name for name, _ in self.calls]

    def _function(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        positional = [p for p in inspect.signature(kernel).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]

        def function(*args: Any, **kwargs: Any) -> Any:
            given = bound(name, args, kwargs)
            self.calls.append((name, given))
            first = [given.pop(key) for key in list(given)[: len(positional)]]
            return self.npu.launch(name, kernel, first, given)

        return function


def rms_norm(x: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    require(2 <= x.dim() <= 8, f"{x.dim()} dims")
    require(x.dtype in FLOATS and gamma.dtype == x.dtype, f"x is {x.dtype}, gamma {gamma.dtype}")
    require(gamma.shape == x.shape[-gamma.dim() :], f"gamma {list(gamma.shape)} for x {list(x.shape)}")
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd.detach()


@torch.no_grad()
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    require(x1.shape == x2.shape and x1.dtype == x2.dtype, "x1 and x2 differ in shape or dtype")
    total = x1.float() + x2.float()
    normed, rstd = rms_norm(total, gamma.float(), epsilon=epsilon)
    require(x1.dtype in FLOATS and gamma.dtype == x1.dtype, f"x1 is {x1.dtype}, gamma {gamma.dtype}")
    return normed.to(x1.dtype), rstd, total.to(x1.dtype)


def swiglu(x: Tensor, *, dim: int = -1) -> Tensor:
    require(x.dtype in FLOATS and x.shape[dim] % 2 == 0, f"{x.dtype} {list(x.shape)}")
    gate, up = x.float().chunk(2, dim)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, *, rotary_mode: str = "half") -> Tensor:
    require(rotary_mode == "half", rotary_mode)
    require(x.dim() == r1.dim() == r2.dim() == 4 and r1.shape == r2.shape, "x, r1 and r2 have 4 dims")
    batch, tokens, heads, dim = x.shape
    require(batch < 1000 and heads < 1000 and dim < 896 and dim % 2 == 0, f"x {list(x.shape)}")
    allowed = [(1, tokens, 1, dim), (batch, tokens, 1, dim), tuple(x.shape)]
    require(tuple(r1.shape) in allowed, f"r1 {list(r1.shape)} for x {list(x.shape)} of layout BSND")
    require(x.dtype in FLOATS and x.dtype == r1.dtype == r2.dtype, f"{x.dtype}, {r1.dtype}, {r2.dtype}")
    first, second = x.float().chunk(2, -1)
    return (r1.float() * x.float() + r2.float() * torch.cat((-second, first), -1)).to(x.dtype)


def scatter_pa_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *, cache_mode: str = "PA_NZ"
) -> None:
    require(cache_mode == "Norm", f"the caches of this test are no tiles, as {cache_mode} wants them")
    everything = (key, value, key_cache, value_cache, slots)
    require(all(tensor.is_contiguous() for tensor in everything), "contiguous tensors only")
    require(len({tensor.dtype for tensor in everything[:4]}) == 1, "key, value and caches have one dtype")
    require(slots.dtype in (torch.int32, torch.int64) and slots.shape == key.shape[:1], f"slots {slots.dtype}")
    for new, cache in ((key, key_cache), (value, value_cache)):
        require(
            new.dim() == 3 and cache.dim() == 4 and cache.shape[2:] == new.shape[1:], "caches [blocks, size, KV, D]"
        )
        rows = cache.view(-1, *cache.shape[2:])
        rows[slots.long()] = new


@torch.no_grad()
def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor,
    split_item: int,
    group_type: int,
    group_list_type: int,
) -> list[Tensor]:
    require(len(x) == len(weight) == 1 and split_item in (2, 3), "one x, one weight, one result")
    rows, stacked = x[0], weight[0]
    require(rows.dim() == 2 and rows.is_contiguous(), "x is [T, in], not transposed")
    require(
        stacked.dim() == 3 and stacked.shape[1] == rows.shape[1], f"weight {list(stacked.shape)} is no [E, in, out]"
    )
    require(rows.dtype in FLOATS and stacked.dtype == rows.dtype, f"{rows.dtype}, {stacked.dtype}")
    require((group_type, group_list_type) == (0, 1), "rows grouped, sizes given")
    require(group_list.dtype == torch.int64 and group_list.shape == stacked.shape[:1], f"group_list {group_list.dtype}")
    require(1 < len(group_list) <= 1024, f"{len(group_list)} groups")
    group = torch.searchsorted(group_list.cumsum(0), torch.arange(len(rows)), right=True)
    return [torch.einsum("ti,tio->to", rows.float(), stacked[group].float()).to(rows.dtype)]


def workspace(*tensors: Tensor, **options: Any) -> Tensor:
    _check_attention(*tensors, **options)
    return torch.empty(1, dtype=torch.uint8)


def attention_out(
    query: Tensor, key: Tensor, value: Tensor, *, workspace: Tensor, out: list[Tensor], **options: Any
) -> Any:
    require(workspace.dtype == torch.uint8, "no workspace")
    found = fused_infer_attention_score(query, key, value, **options)
    for place, tensor in zip(out, found, strict=True):
        require(place.shape == tensor.shape and place.dtype == tensor.dtype, f"out {list(place.shape)}")
        place.copy_(tensor)
    return out


@torch.no_grad()
def fused_infer_attention_score(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """By request and head, in float64. What the documentation leaves undefined (queries behind their length) is NaN."""
    _check_attention(query, key, value, **options)
    requests, num_queries, heads, _ = query.shape
    group = heads // options["num_key_value_heads"]
    out = torch.full_like(query, float("nan"))
    lse = torch.full((requests, heads, num_queries, 1), float("nan"))
    of_queries = options["actual_seq_lengths"] or [num_queries] * requests
    for request, (end, length) in enumerate(zip(of_queries, options["actual_seq_lengths_kv"], strict=True)):
        for head in range(heads):
            keys, values = (part[request, :length, head // group].double() for part in (key, value))
            scores = query[request, :end, head].double() @ keys.T * options["scale"]
            if options["atten_mask"] is not None:
                mask = options["atten_mask"] if options["sparse_mode"] == 2 else options["atten_mask"][request, 0]
                scores = scores.masked_fill(mask[:end, :length], float("-inf"))
            out[request, :end, head] = (torch.softmax(scores, -1) @ values).to(out.dtype)
            lse[request, head, :end, 0] = torch.logsumexp(scores, -1).float()
    return out, lse if options["softmax_lse_flag"] else torch.zeros(1)


def _check_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
    require(options["input_layout"] == "BSND", options["input_layout"])
    require(all(part.is_contiguous() for part in (query, key, value)), "contiguous tensors only")
    require(query.dtype in HALVES and query.dtype == key.dtype == value.dtype, f"{query.dtype}")
    requests, num_queries, heads, dim = query.shape
    require(key.shape == value.shape and len(key) == requests and key.shape[3] == dim, f"key {list(key.shape)}")
    require(dim % 16 == 0 and dim <= 512, f"head size {dim}")
    require(heads == options["num_heads"] and key.shape[2] == options["num_key_value_heads"], "numbers of heads")
    require(heads % key.shape[2] == 0 and heads // key.shape[2] <= 64, "queries a key head")
    mask = options["atten_mask"]
    if options["sparse_mode"] == 2:
        require(num_queries > 1, "a single query has another kernel, without these masks")
        require(mask.shape == (MASK_SIZE, MASK_SIZE) and mask.dtype == torch.bool, "mask [2048, 2048]")
        require(bool(mask[0, 1]) and not bool(mask[1, 0]) and not bool(mask[1, 1]), "True hides, above the diagonal")
    else:
        require(options["sparse_mode"] == 0, f"sparse_mode {options['sparse_mode']}")
        whole = (requests, 1, num_queries, key.shape[1])
        require(mask is None or (mask.dtype == torch.bool and tuple(mask.shape) == whole), f"mask, not {whole}")
    for lengths, longest in (
        (options["actual_seq_lengths"], num_queries),
        (options["actual_seq_lengths_kv"], key.shape[1]),
    ):
        if lengths is not None:
            require(isinstance(lengths, list) and all(type(length) is int for length in lengths), "host integers")
            require(len(lengths) == requests and min(lengths) > 0 and max(lengths) <= longest, f"lengths {lengths}")
