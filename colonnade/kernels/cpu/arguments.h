// Constants and structures shared by the kernels' arguments; kernels/cpu/calls.py mirrors them.

#pragma once

#include <cstdint>

namespace {

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1 };
enum Kind : int64_t { PLAIN = 0, INT8 = 1, INT4 = 2, INT8_BLOCKS = 3, INT4_BLOCKS = 4 };
enum Activation : int64_t { NONE = 0, SILU = 1, GELU_TANH = 2, GELU = 3, RELU = 4 };
enum Error : int64_t { OK = 0, BAD_TOKEN = 1, BAD_SLOT = 2, BAD_LENGTH = 3, BAD_PAGE = 4, NO_MEMORY = 5 };

// A weight, stored by row (skinny_gemm.h) or in blocks (skinny_gemm_blocked.h).
struct Matrix {
    const void* values;  // null: no matrix
    const void* scales;
    const void* bias;  // null: none
    int64_t kind, outputs, inputs, group;
};

struct NormWeights {
    const void* weight;  // null: no norm
    const void* bias;    // null: RMSNorm, else LayerNorm
    double eps;
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace
