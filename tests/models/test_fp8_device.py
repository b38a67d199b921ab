"""An fp8 model on a device: what a trace of its kernels shows, and its results beside the decomposed path and the CPU's."""

from __future__ import annotations

import itertools

import pytest
import torch

from polyrec.attention.layout import packed_layout
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.hardware.backends.cuda_like.ops.linear import is_tuned
from polyrec.hardware.ops import REFERENCE_OPS
from polyrec.models import quantization
from polyrec.models.checkpoint import hf_views, load_model, save_model
from polyrec.models.options import ModelOptions
from polyrec.models.qwen3 import SPEC, Qwen3, Qwen3Config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device that torch shows as cuda"),
]
LAYERS, TOKENS = 3, 200
SWITCHES = ("enable_fused_rms_fp8", "enable_fused_silu_fp8", "enable_fused_qk_rope_kv")


@pytest.fixture(scope="module")
def backend():
    built = build_hardware_backend(HardwareConfig())
    if not built.capabilities.fp8:
        pytest.skip(f"{built.runtime.device_name()} has no e4m3 products")
    return built


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model, wide enough for the kernels' usual tiles, saved in fp32; its stream grows by a part in each layer, as in
    trained ones."""
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        initializer_range=0.03,
    )
    model = Qwen3(config, REFERENCE_OPS)
    model.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.embed_tokens.weight *= 20
    path = tmp_path_factory.mktemp("model")
    save_model(model, SPEC, path)
    return path


def forward(model, backend, lengths=(TOKENS - 61, 61)):
    """Hidden states of packed prompts on the model's device."""
    device = backend.runtime.device
    tokens, lengths = sum(lengths), torch.tensor(lengths)
    attention = backend.attention.build(model.attention_needs(model.head_weight.dtype), backend.ops)
    plan = attention.packed(packed_layout(lengths, to_device=backend.runtime.to_device))
    ids = torch.randint(0, 512, (tokens,), generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()]).to(device)
    with torch.inference_mode():
        return model(ids, positions, plan)


def kernel_names(model, backend, *lengths):
    """The device's kernels of one forward pass, in the order in which they ran."""
    forward(model, backend, *lengths)  # compiles
    backend.runtime.synchronize()
    with torch.profiler.profile(activities=backend.runtime.profiler_activities()) as trace:
        forward(model, backend, *lengths)
        backend.runtime.synchronize()
    device = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in sorted(device, key=lambda event: event.time_range.start)]


def is_product(name):
    return any(word in name.lower() for word in ("gemm", "nvjet", "cutlass", "scaled_mm"))


def followers(names, kind):
    """What runs right after each kernel whose name starts with `kind`."""
    return [after for name, after in itertools.pairwise(names) if name.startswith(kind)]


def load(folder, backend, **options):
    return load_model(folder, backend, options=ModelOptions(quantization="fp8", **options))


def test_no_quantiser_runs_between_a_norm_or_swiglu_and_the_product(folder, backend):
    names = kernel_names(load(folder, backend), backend)
    norms, activations = followers(names, "_rms_norm"), followers(names, "_silu_and_mul_fp8")
    assert len(norms) in (2 * LAYERS, 2 * LAYERS + 1)  # what follows the last norm, if anything, is no layer's
    assert len(activations) == LAYERS
    assert all(is_product(name) for name in (*norms[: 2 * LAYERS], *activations))
    quantisers = followers(names, "_quantize")
    assert len(quantisers) == LAYERS  # of attention's result, before the output product
    assert all(is_product(name) for name in quantisers)


def test_with_the_fused_operations_off_a_quantiser_runs_before_every_product(folder, backend):
    """So that the test above can fail: the same trace shows them where they are."""
    off = dict.fromkeys(SWITCHES[:2], False)
    names = kernel_names(load(folder, backend, **off), backend)
    assert len(followers(names, "_quantize")) == 4 * LAYERS
    assert sum(is_product(name) for name in followers(names, "_rms_norm")) == 0


def test_norms_add_up_the_parts_of_the_products_before_them(tmp_path, backend, monkeypatch):
    """In a pass of few rows no kernel adds up parts but the one of the last layer, whose norm does not quantise; with the fused
    operation off, one a layer. Every bit is the same."""
    if not is_tuned(backend.runtime.device):
        pytest.skip("the kernel for few rows is for Hopper")
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=4096,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
    )
    model = Qwen3(config, REFERENCE_OPS)
    model.init_weights(torch.Generator().manual_seed(0))
    save_model(model, SPEC, tmp_path)
    fused = load(tmp_path, backend)
    monkeypatch.setattr(quantization, "fuses", lambda table, field: False)
    apart = load(tmp_path, backend)
    sums = [sum("mm_sum" in name for name in kernel_names(model, backend, (70, 30))) for model in (fused, apart)]
    assert sums == [1, LAYERS]
    assert torch.equal(forward(fused, backend, (70, 30)), forward(apart, backend, (70, 30)))


def distance(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def exact(folder):
    """Without quantisation, in fp32, on the CPU."""
    cpu = build_hardware_backend(HardwareConfig(hardware_platform="cpu"))
    return forward(load_model(folder, cpu), cpu).double()


@pytest.mark.parametrize("off", SWITCHES)
def test_each_decomposed_path_is_as_near_to_the_exact_model(folder, backend, exact, off):
    """The paths round at other places, and what falls to the other side of an e4m3 step differs by the whole step: they agree
    within what quantising costs, and cost the same."""
    fused, apart = (forward(load(folder, backend, **own), backend).cpu().double() for own in ({}, {off: False}))
    cost = distance(fused, exact)
    assert 0.01 < cost < 0.1
    assert distance(apart, exact) == pytest.approx(cost, rel=0.1)
    assert 0 < distance(apart, fused) < cost


def test_the_device_quantises_as_the_cpu_does(folder, backend, exact):
    cpu = build_hardware_backend(HardwareConfig(hardware_platform="cpu"))
    there, here = load(folder, backend), load(folder, cpu)
    assert there.head_weight.dtype == torch.bfloat16
    expected = hf_views(here, SPEC)
    for name, found in hf_views(there, SPEC).items():
        if name.endswith("_scale"):
            torch.testing.assert_close(found.cpu(), expected[name], rtol=1e-6, atol=0)
        elif found.dtype == torch.float8_e4m3fn:
            # Numbers between two e4m3 ones may go either way.
            assert (found.cpu().float() != expected[name].float()).float().mean() < 1e-3
    device, host = forward(there, backend).cpu().double(), forward(here, cpu).double()
    assert distance(device, host) < distance(host, exact)
