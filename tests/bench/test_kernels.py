"""Families of kernels, their times, and the least work of a search."""

from dataclasses import dataclass

import numpy as np
import pytest
from torch.autograd import DeviceType

from polyrec.bench.kernels import Kernel, by_family, family_of, kernels_of
from polyrec.bench.make_model import make_model, weight_shapes
from polyrec.bench.roofline import Ceilings, Phase, measure_ceilings, phases
from polyrec.engine.folder import read_folder
from polyrec.hardware import HardwareConfig
from polyrec.hardware.process import build_hardware_backend
from polyrec.models.checkpoint import load_model
from polyrec.models.options import ModelOptions


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...e4m3...>>", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("prompt_kernel", "attention"),
        ("qk_norm_rotary_kernel", "rotary and cache"),
        ("add_rms_norm_fp8_kernel", "norms"),
        ("silu_and_mul_fp8_kernel", "activation"),
        ("quantize_rows_kernel", "quantise"),
        ("select_kernel", "search"),
        ("select_in_groups_kernel", "search"),
        ("select_of_splits_kernel", "search"),
        ("merge_kernel", "attention"),
        ("join_own_kernel", "attention"),
        ("next_rows_kernel", "search"),
        ("_rotate", "rotary and cache"),
        ("_rotate_backward", "rotary and cache"),
        ("_angles", "rotary and cache"),
        ("_locate", "rotary and cache"),
        ("count_kernel", "search"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("aten::mm", "products"),
        ("aten::embedding", "embedding and gather"),
        ("aten::index_select", "embedding and gather"),
        ("void at::native::indexSelectLargeIndex<c10::BFloat16, long, ...>", "embedding and gather"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, ...)", "embedding and gather"),
        ("void at::native::elementwise_kernel<128, 2, ...>", "other"),
    ],
)
def test_names_belong_to_families(name, family):
    assert family_of(name) == family


@dataclass
class Range:
    start: float
    end: float


@dataclass
class Event:
    name: str
    device_type: DeviceType
    time_range: Range
    self_cpu_time_total: float = 0.0


def on_device(name, start, end):
    return Event(name, DeviceType.CUDA, Range(start, end))


def test_a_devices_kernels_count_and_the_hosts_operations_only_without_one():
    host = [Event("aten::mm", DeviceType.CPU, Range(0, 99), 7), Event("aten::mm", DeviceType.CPU, Range(0, 99), 5)]
    device = [on_device("gemm", 10, 40), on_device("gemm", 50, 100), on_device("sync", 45, 45)]
    assert kernels_of(host) == [Kernel("aten::mm", 2, 12)]
    assert kernels_of([*host, *device]) == [Kernel("gemm", 2, 80)]


def test_time_that_two_kernels_share_is_the_earlier_ones():
    events = [
        on_device("late", 8, 30),
        on_device("first", 0, 10),
        on_device("within", 12, 20),
        on_device("next", 35, 40),
    ]
    found = {kernel.name: kernel.microseconds for kernel in kernels_of(events)}
    assert found == {"first": 10, "late": 20, "next": 5}


def test_what_kernels_fill_is_what_they_cover():
    random = np.random.default_rng(4)
    starts = random.integers(0, 300, 40)
    events = [on_device(f"k{place % 5}", start, start + random.integers(1, 30)) for place, start in enumerate(starts)]
    covered = {tick for event in events for tick in range(int(event.time_range.start), int(event.time_range.end))}
    assert sum(kernel.microseconds for kernel in kernels_of(events)) == len(covered)


def test_families_share_the_time_of_a_batch():
    kernels = [Kernel("gemm_a", 10, 4000.0), Kernel("gemm_b", 2, 2000.0), Kernel("rms_norm", 4, 1000.0)]
    assert by_family(kernels, batches=2, wall_ms=10.0) == [
        {"family": "products", "ms": 3.0, "launches": 6.0, "share": 0.3},
        {"family": "norms", "ms": 0.5, "launches": 2.0, "share": 0.05},
    ]


def test_a_phase_takes_the_longer_of_arithmetic_and_traffic():
    ceilings = Ceilings(tflops=2.0, fp8_tflops=4.0, tb_per_s=0.5)
    assert Phase("a", 1, flops=4e12, fp8_flops=2e12, bytes=1e9).seconds(ceilings) == pytest.approx(2.5)
    assert Phase("b", 1, flops=1e9, fp8_flops=0, bytes=2e12).seconds(ceilings) == pytest.approx(4)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_the_least_work_is_counted_product_by_product(tmp_path, quantization):
    """Against sums over the checkpoint's own matrices: 2 flops a weight and row, 4 · head size a head, query and key."""
    backend = build_hardware_backend(HardwareConfig())
    folder = make_model(tmp_path / "model", "tiny", backend, num_items=500)
    options = ModelOptions(quantization=quantization)
    model, layout = load_model(folder, backend, options=options), read_folder(folder).layout
    config = model.config
    tokens, n, batch = 41, 6, 3
    weights = sum(a * b for name, (a, *rest) in weight_shapes(config) if "layers" in name for b in rest)
    bytes_each = model.head_weight.element_size()
    heads, layers = config.num_attention_heads * config.head_dim, config.num_hidden_layers
    kv = 2 * config.num_key_value_heads * config.head_dim * layers * bytes_each
    head = 64 * config.hidden_size
    prefill, first, second = phases(model, layout, tokens, n, batch)
    fp8 = quantization == "fp8"
    outputs = sum(sizes[0] for name, sizes in weight_shapes(config) if "layers" in name and len(sizes) == 2)
    stored = weights + 4 * outputs if fp8 else weights * bytes_each  # e4m3, and an fp32 scale an output
    causal = sum(query + 1 for query in range(tokens))
    # In the last layer's attention, and after it, each prompt's last row alone.
    last = [
        (name, sizes) for name, sizes in weight_shapes(config) if f"layers.{layers - 1}." in name and len(sizes) == 2
    ]
    ends = sum(a * b for name, (a, b) in last if name.split(".")[-2] in ("o_proj", "gate_proj", "up_proj", "down_proj"))
    assert 0 < ends < weights / layers
    products = 2 * ((weights - ends) * batch * tokens + ends * batch)
    assert prefill.rows == batch * tokens
    assert prefill.fp8_flops == (products if fp8 else 0)
    assert prefill.flops + prefill.fp8_flops == pytest.approx(
        products + 4 * heads * batch * ((layers - 1) * causal + tokens) + 2 * head * batch
    )
    assert prefill.bytes == pytest.approx(stored + head * bytes_each + kv * batch * tokens)
    for level, phase in ((1, first), (2, second)):
        keys = tokens + level
        assert phase.rows == batch * n
        assert phase.fp8_flops == (2 * weights * batch * n if fp8 else 0)
        flops = phase.flops + phase.fp8_flops
        assert flops == pytest.approx(batch * n * (2 * weights + 4 * heads * layers * keys + 2 * head))
        read = batch * (tokens + n * (level - 1))
        assert phase.bytes == pytest.approx(stored + head * bytes_each + kv * read)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_ceilings_are_measured_on_the_device(tmp_path, quantization):
    backend = build_hardware_backend(HardwareConfig())
    folder = make_model(tmp_path / "model", "tiny", backend, num_items=500)
    model = load_model(folder, backend, options=ModelOptions(quantization=quantization))
    found = measure_ceilings(backend, model, size=128, repeats=3)
    assert min(found.tflops, found.fp8_tflops, found.tb_per_s) > 0
    assert (found.fp8_tflops != found.tflops) == (quantization == "fp8")
