"""Kernels by class."""

from __future__ import annotations

import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from titanyaml import optim
from titanyaml.config import schema
from titanyaml.runner import breakdown as module
from titanyaml.runner.breakdown import breakdown, classify

KERNELS = {
    "gemm": [
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n",
        "aten::mm",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...>>",
        "aten::addmm",
        "aten::_scaled_mm",
        "triton_tem_fused_mm_5",
        "aten::_grouped_mm",
    ],
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7",
        "triton_tem_fused_flex_attention_0",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
    ],
    "optimizer": [
        "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor>",
        "aten::_foreach_norm",
        "adamw_kernel",
    ],
    "communication": ["ncclDevKernel_AllGather_RING_LL", "gloo:all_reduce", "c10d::_reduce_scatter_base_"],
    "casts": [
        "triton_red_fused__to_copy_abs_amax_clamp_1",
        "bfloat16_copy_kernel_cuda",
        "aten::copy_",
        "Memcpy DtoD (Device -> Device)",
        "float8_maxima_kernel",
        "float8_cast_kernel",
        "aten::_foreach_copy_",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "TensorListMetadata<2>, at::native::(anonymous namespace)::CopyFunctor<c10::BFloat16, float, 2, 1, 1>, "
        "at::native::Copy<float, float> >",
        "void multi_tensor_apply_kernel<TensorListMetadata<2>, UnaryOpFunctor<c10::BFloat16, 2, 1, 1>, "
        "at::native::Copy<float, float> >",
        "void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>",
        "at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel",
    ],
    "elementwise": [
        "triton_poi_fused_mul_silu_3",
        "triton_per_fused_add_mean_mul_pow_rsqrt_0",
        "aten::mul",
        "aten::mul_",
        "aten::embedding",
        "Memset (Device)",
        "aten::sum",
        "aten::rsqrt",
        "aten::silu_backward",
        "cross_entropy_kernel",
    ],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KERNELS.items() for name in names])
def test_classes(kind, name):
    assert classify(name) == kind


def test_overlapping_kernels_count_once():
    assert module._covered([(5, 7), (0, 3), (1, 2), (2, 4)]) == 6
    assert module._covered([]) == 0


def test_communication_that_hides_is_not_exposed(monkeypatch):
    spans = [("nvjet", 40.0, 0.0, 40.0), ("ncclDevKernel", 50.0, 20.0, 70.0), ("nvjet", 10.0, 80.0, 90.0)]
    monkeypatch.setattr(module, "_device_spans", lambda trace: [module.Span(*span) for span in spans])
    monkeypatch.setattr(module, "_updates", lambda trace, device: [])
    record = breakdown(None, steps=2, wall_s=100e-6, device=torch.device("cuda"))
    assert record["ms"]["gemm"] == pytest.approx(0.025) and record["ms"]["communication"] == pytest.approx(0.025)
    assert record["ms"]["exposed_communication"] == pytest.approx(0.015) and record["ms"]["idle"] == pytest.approx(
        0.010
    )
    assert record["top"][0] == {"name": "nvjet", "class": "gemm", "ms": pytest.approx(0.025), "calls": 1}
    total = sum(ms for kind, ms in record["ms"].items() if kind != "communication")
    assert total == pytest.approx(record["step_ms"])


def test_a_cpu_step_adds_up():
    x = torch.randn(512, 512)
    begin = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        begin = time.perf_counter()
        for _ in range(8):
            (x @ x).relu_()
        time.sleep(0.05)
        wall = time.perf_counter() - begin
    ms = breakdown(trace, steps=4, wall_s=wall, device=torch.device("cpu"))["ms"]
    assert ms["gemm"] > ms["elementwise"] > 0
    assert ms["idle"] > 0.8 * 50 / 4
    assert sum(ms.values()) == pytest.approx(1e3 * wall / 4, rel=0.05)


def test_the_eager_update_in_8_bits_is_the_optimizers():
    weight = torch.nn.Parameter(torch.randn(256, 256))
    update = optim.build(schema.Optim(name="adamw_8bit"), {"weight": weight}, masters={"weight": weight}, device="cpu")
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        weight.grad = torch.mul(weight.detach(), 0.5)
        with record_function(module.UPDATE):
            update.step(1e-3)
    ms = breakdown(trace, steps=1, wall_s=1.0, device=torch.device("cpu"))["ms"]
    assert ms["optimizer"] > 5 * (ms["elementwise"] + ms["casts"]) > 0
