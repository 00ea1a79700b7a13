"""Profiler breakdowns of hand-written traces whose result is known."""

import pytest

from colonnade.train.profiler import breakdown, subtract, total_length, union


def event(name: str, cat: str, start_us: float, end_us: float) -> dict:
    return {"ph": "X", "name": name, "cat": cat, "ts": start_us, "dur": end_us - start_us}


def steps(*bounds: tuple[float, float]) -> list[dict]:
    return [event(f"ProfilerStep#{i}", "user_annotation", *bound) for i, bound in enumerate(bounds)]


def test_gpu_step_is_divided_by_device_events() -> None:
    events = [
        *steps((0, 1000), (1000, 2000)),
        event("reads samples", "user_annotation", 0, 100),  # the device is busy during 40 of it
        event("nvjet_tst_256x128_64x4_TNT", "kernel", 60, 300),
        event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "kernel", 300, 400),
        event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "kernel", 350, 600),  # 50 + 100 of it hidden
        event("triton_poi_fused_silu_mul_0", "kernel", 500, 600),
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 600, 650),
        event("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "kernel", 1000, 1200),
        event("aten::mm", "cpu_op", 0, 2000),  # with a device, operators of the host do not count
        event("nvjet", "kernel", 2000, 9000),  # outside the steps
    ]
    result = breakdown({"traceEvents": events})
    microseconds = {kind: round(seconds * 1e6 * result.steps, 6) for kind, seconds in result.parts.items()}
    assert microseconds == {
        "matmul": 240, "attention": 100, "optimizer": 200, "elementwise": 100, "copies": 50,
        "communication": 100, "data": 60, "idle": 1150,
    }  # fmt: skip
    assert result.hidden_s == pytest.approx(75e-6)
    assert result.step_s == pytest.approx(1e-3) == pytest.approx(sum(result.parts.values()))
    assert result.row["compute_s"] == pytest.approx((240 + 100 + 200 + 100 + 50) / 2 * 1e-6)
    assert result.row["communication_exposed_s"] == pytest.approx(50e-6)
    table = str(result)
    assert "2 steps traced, 1.000 ms each" in table
    assert "exposed communication" in table and "0.075 ms of communication are overlapped" in table


def test_cpu_step_is_divided_by_operators() -> None:
    events = [
        *steps((0, 1000)),
        event("reads samples", "user_annotation", 0, 100),
        event("aten::stack", "cpu_op", 50, 90),  # nested in reading
        event("aten::mm", "cpu_op", 100, 300),
        event("aten::linear", "cpu_op", 90, 310),
        event("gloo:all_reduce", "user_annotation", 250, 500),
        event("_c10d_functional::wait_tensor", "cpu_op", 310, 480),
        event("aten::_fused_adamw_", "cpu_op", 600, 700),
        event("Optimizer.step#AdamW.step", "user_annotation", 590, 710),
    ]
    result = breakdown({"traceEvents": events})
    assert {kind: round(seconds * 1e6, 6) for kind, seconds in result.parts.items() if seconds} == {
        "data": 100, "matmul": 200, "optimizer": 100, "elementwise": 10, "communication": 190, "idle": 400,
    }  # fmt: skip
    assert result.hidden_s == pytest.approx(60e-6)


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="no ProfilerStep"):
        breakdown({"traceEvents": [event("nvjet", "kernel", 0, 1)]})


def test_union_difference_and_length_of_intervals() -> None:
    assert union([(5, 6), (1, 3), (2, 4), (4, 5), (9, 9)]) == [(1, 6)]
    assert union([]) == []
    assert subtract([(0, 10), (20, 30)], [(-1, 1), (2, 3), (8, 22), (25, 26), (29, 40)]) == [
        (1, 2), (3, 8), (22, 25), (26, 29),
    ]  # fmt: skip
    assert subtract([(0, 1)], []) == [(0, 1)]
    assert subtract([(0, 1), (2, 3)], [(0, 3)]) == []
    assert total_length([(0, 1), (2, 4.5)]) == 3.5
