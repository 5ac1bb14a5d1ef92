// Products of packed matrices with rows of activations, in one version per instruction set.
//
// Activations of one call are all bfloat16 or all float32; sums are float32. With bfloat16 activations, codes of 16 bits
// and fewer are multiplied as bfloat16 (exact products); with float32 ones everything is float32.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats.h"
#include "team.h"

namespace ft {

enum class Activation : int { f32 = 0, bf16 = 1 };

constexpr int64_t activation_bytes(Activation type) { return type == Activation::f32 ? 4 : 2; }

// Rows of activations: row t starts at data + t * stride elements; `columns` of the matrix are read, and the elements
// from there up to padded(columns) exist and are zero.
struct Rows {
    Activation type = Activation::f32;
    const void *data = nullptr;
    int64_t stride = 0;  // elements

    const void *row(int64_t t) const {
        return static_cast<const char *>(data) + t * stride * activation_bytes(type);
    }
};

struct MatmulKernels {
    const char *name;  // "portable", "avx2", "avx512", "avx512_bf16", "amx"

    // For panels [first, last) of w and `count` activation rows x[i]:  out[i][r] = w[r] . x[i], r counted from panel
    // `first`'s first row; every out[i] has room for PANEL_ROWS * (last - first) floats. x[i] of `type`.
    void (*panels)(const Packed &w, int64_t first, int64_t last, Activation type, const void *const *x, int64_t count,
                   float *const *out);

    // Gate and up panels in turn at `gate_up`, pairs [first, last): act[i][r] = silu-style product, see GatedUnit.
    void (*gated)(const Packed &gate_up, int64_t first, int64_t last, Activation type, const void *const *x,
                  int64_t count, const struct GatedUnit &unit, void *const *act);
};

// What joins gate and up. silu: silu(g) * u. clamped (gpt-oss): g = min(g, limit), u = clamp(u, -limit, limit),
// g * sigmoid(alpha * g) * (u + 1). Biases are added first where there are any. `act` rows get Activation `type`.
struct GatedUnit {
    bool clamped = false;
    float alpha = 1.702f, limit = 7.0f;
    const float *gate_bias = nullptr, *up_bias = nullptr;  // [intermediate]
};

// One a file, matmul_NAME.cpp. FT_HAS_NAME is defined where it is built.
extern const MatmulKernels matmul_portable, matmul_avx2, matmul_avx512, matmul_avx512_bf16, matmul_amx;

// Versions that this processor can execute, best first; and the one in use (FT_ISA or the measured best).
std::vector<const MatmulKernels *> usable_kernels();
const MatmulKernels &kernels();

// out[t][n] (+)= w[n] . x[t] + bias[n], all threads of the team together; ends in a barrier. out: float32, `out_stride`
// floats a row, at least w.rows of them.
// The first form takes `count` matrices of equal width as one, one's rows after the other's.
void linear(Team &team, const MatmulKernels &k, const Packed *parts, int64_t count, const Rows &x, int64_t tokens,
            const float *bias, float *out, int64_t out_stride, bool add = false);
void linear(Team &team, const MatmulKernels &k, const Packed &w, const Rows &x, int64_t tokens, const float *bias,
            float *out, int64_t out_stride, bool add = false);

}  // namespace ft
