// Included by matmul_portable.cpp and matmul_avx2.cpp, which are products by way of float32: a piece of a panel is
// decoded into a buffer that stays in the first-level cache, then multiplied with every row of activations. The
// including file defines FT_VECTOR (floats of a vector register), FT_TOKENS (activation rows of one register tile) and
//     template <Format F> void decode(const uint8_t *codes, const uint8_t *scales, float *to)
// for `K_ALIGN` columns: to[K_ALIGN][PANEL_ROWS]. `scales` points to the group's; row scales are applied here.
// It may define FT_FUSED: one and two rows of activations are then multiplied without that buffer, by
//     template <Format F, int N> void fused(const uint8_t *codes, const uint8_t *scales, int64_t groups,
//                                           int64_t code_stride, int64_t scale_stride, const float *const *x,
//                                           float (*out)[PANEL_ROWS])
// for so many groups of K_ALIGN columns, whose codes and scales lie that many bytes apart: the same sums, bit by bit.
// Includes no standard header with inline functions: the linker keeps one copy of such a function, and that copy could
// be the one compiled for a processor that the machine does not have.

namespace ft {
namespace {

typedef float Vec __attribute__((vector_size(FT_VECTOR * 4), may_alias));
constexpr int VECS = PANEL_ROWS / FT_VECTOR;  // vectors of one column of a panel
constexpr int64_t PIECE = 128;                // columns decoded at a time, the height of an FP8 block
constexpr int64_t GATED_ROWS = 32;            // activation rows joined at a time

inline Vec load(const float *p) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float *p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

inline float from_bits(uint32_t bits) {
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
}

inline uint16_t round_to_bf16(float f) {
    uint32_t bits;
    __builtin_memcpy(&bits, &f, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16) | 0x40;  // NaN stays NaN
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Bytes of the codes of K_ALIGN columns, of a group of scales, and columns that share one.
template <Format F>
struct Layout {
    static constexpr int64_t codes = PANEL_ROWS * K_ALIGN * code_bits(F) / 8;
    static constexpr int64_t scales = F == Format::nvfp4  ? 2 * PANEL_ROWS
                                      : F == Format::mxfp4 ? PANEL_ROWS
                                      : F == Format::q8_0 || F == Format::q4_0 ? 2 * PANEL_ROWS
                                                                               : 0;
    static constexpr bool row_scaled = F == Format::fp8 || F == Format::nvfp4;
};

// sums[n][r] (+)= sum over k < columns of weights[k][r] * x[n][k]. Even and odd columns are summed apart, whatever N:
// a token's result does not depend on the others of its batch, and two chains of additions hide the latency of one.
template <int N>
inline void multiply(const float *weights, int64_t columns, const float *const *x, float *const *out, int64_t row,
                     bool add) {
    Vec sums[2][N][VECS] = {};
    for (int64_t j = 0; j < columns; j += 2)
        for (int odd = 0; odd < 2; ++odd) {
            Vec w[VECS];
            for (int v = 0; v < VECS; ++v) w[v] = load(weights + (j + odd) * PANEL_ROWS + v * FT_VECTOR);
            for (int n = 0; n < N; ++n) {
                const float value = x[n][j + odd];
                for (int v = 0; v < VECS; ++v) sums[odd][n][v] += w[v] * value;
            }
        }
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < VECS; ++v) {
            const Vec sum = sums[0][n][v] + sums[1][n][v];
            float *to = out[n] + row + v * FT_VECTOR;
            store(to, add ? load(to) + sum : sum);
        }
}

// N tokens' activations from column k on, as float32: in a buffer, columns [k, k + columns), where they are bfloat16.
template <int N>
struct Floats {
    alignas(64) float buffer[N * PIECE];
    const float *rows[N];

    Floats(const float *const *x, int64_t k, int64_t) {
        for (int n = 0; n < N; ++n) rows[n] = x[n] + k;
    }

    Floats(const uint16_t *const *x, int64_t k, int64_t columns) {
        for (int n = 0; n < N; ++n) {
            float *to = buffer + n * PIECE;
            for (int64_t j = 0; j < columns; ++j) to[j] = from_bits(uint32_t(x[n][k + j]) << 16);
            rows[n] = to;
        }
    }
};

template <class X>
void multiply_all(const float *weights, int64_t columns, const X *const *x, int64_t count, int64_t k, float *const *out,
                  int64_t row, bool add) {
    int64_t n = 0;
    for (; n + FT_TOKENS <= count; n += FT_TOKENS)
        multiply<FT_TOKENS>(weights, columns, Floats<FT_TOKENS>(x + n, k, columns).rows, out + n, row, add);
    for (; n < count; ++n) multiply<1>(weights, columns, Floats<1>(x + n, k, columns).rows, out + n, row, add);
}

// Of a group of K_ALIGN columns; an FP8 block has one for all groups of a piece.
template <Format F>
inline const uint8_t *group_scales(const uint8_t *scales, int64_t group) {
    return F == Format::fp8_block ? scales + 4 * (group * K_ALIGN / PIECE) : scales + group * Layout<F>::scales;
}

template <Format F>
inline void decode_piece(const uint8_t *panel, const uint8_t *scales, int64_t k, int64_t columns, float *to) {
    for (int64_t j = 0; j < columns; j += K_ALIGN) {
        const int64_t group = (k + j) / K_ALIGN;
        decode<F>(panel + group * Layout<F>::codes, group_scales<F>(scales, group), to + j * PANEL_ROWS);
    }
}

#ifdef FT_FUSED
template <Format F, int N, class X>
inline void multiply_fused(const uint8_t *panel, const uint8_t *scales, int64_t k, int64_t columns, const X *const *x,
                           float *const *out, int64_t row) {
    float sums[N][PANEL_ROWS];
    const int64_t group = k / K_ALIGN;
    fused<F, N>(panel + group * Layout<F>::codes, group_scales<F>(scales, group), columns / K_ALIGN, Layout<F>::codes,
                Layout<F>::scales, Floats<N>(x, k, columns).rows, sums);
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < VECS; ++v) {
            float *to = out[n] + row + v * FT_VECTOR;
            const Vec sum = load(sums[n] + v * FT_VECTOR);
            store(to, k > 0 ? load(to) + sum : sum);
        }
}
#endif

template <Format F, class X>
void panels_of(const Packed &w, int64_t first, int64_t last, const X *const *x, int64_t count, float *const *out) {
    alignas(64) float buffer[PIECE * PANEL_ROWS];
    const int64_t width = padded(w.columns), codes = code_bytes(F, w.columns);
    for (int64_t p = first; p < last; ++p) {
        const uint8_t *panel = w.panel(p), *scales = panel + codes;
        const int64_t row = (p - first) * PANEL_ROWS;
        for (int64_t k = 0; k < width; k += PIECE) {
            const int64_t columns = width - k < PIECE ? width - k : PIECE;
#ifdef FT_FUSED
            if (count == 1) {
                multiply_fused<F, 1>(panel, scales, k, columns, x, out, row);
                continue;
            }
            if (count == 2) {
                multiply_fused<F, 2>(panel, scales, k, columns, x, out, row);
                continue;
            }
#endif
            decode_piece<F>(panel, scales, k, columns, buffer);
            multiply_all(buffer, columns, x, count, k, out, row, k > 0);
        }
        if (!Layout<F>::row_scaled) continue;
        const uint8_t *row_scales = scales + scale_bytes(F, w.columns) - 4 * PANEL_ROWS;
        for (int v = 0; v < VECS; ++v) {
            Vec scale;
            __builtin_memcpy(&scale, row_scales + v * sizeof scale, sizeof scale);
            for (int64_t n = 0; n < count; ++n) {
                float *sum = out[n] + row + v * FT_VECTOR;
                store(sum, load(sum) * scale);
            }
        }
    }
}

template <class X>
void panels_by_format(const Packed &w, int64_t first, int64_t last, const X *const *x, int64_t count,
                      float *const *out) {
    switch (w.format) {
        case Format::f32: return panels_of<Format::f32>(w, first, last, x, count, out);
        case Format::f16: return panels_of<Format::f16>(w, first, last, x, count, out);
        case Format::bf16: return panels_of<Format::bf16>(w, first, last, x, count, out);
        case Format::fp8: return panels_of<Format::fp8>(w, first, last, x, count, out);
        case Format::fp8_block: return panels_of<Format::fp8_block>(w, first, last, x, count, out);
        case Format::nvfp4: return panels_of<Format::nvfp4>(w, first, last, x, count, out);
        case Format::mxfp4: return panels_of<Format::mxfp4>(w, first, last, x, count, out);
        case Format::q8_0: return panels_of<Format::q8_0>(w, first, last, x, count, out);
        case Format::q4_0: return panels_of<Format::q4_0>(w, first, last, x, count, out);
    }
}

void multiply_panels(const Packed &w, int64_t first, int64_t last, Activation type, const void *const *x, int64_t count,
                     float *const *out) {
    if (type == Activation::f32)
        panels_by_format(w, first, last, reinterpret_cast<const float *const *>(x), count, out);
    else
        panels_by_format(w, first, last, reinterpret_cast<const uint16_t *const *>(x), count, out);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }

// std::min and std::max, but a NaN stays one.
inline float at_most(float x, float limit) { return x > limit ? limit : x; }
inline float at_least(float x, float limit) { return x < limit ? limit : x; }

inline float join(float gate, float up, int64_t neuron, const GatedUnit &unit) {
    if (unit.gate_bias != nullptr) gate += unit.gate_bias[neuron];
    if (unit.up_bias != nullptr) up += unit.up_bias[neuron];
    if (!unit.clamped) return gate / (1.0f + __builtin_expf(-gate)) * up;
    gate = at_most(gate, unit.limit);
    up = at_least(at_most(up, unit.limit), -unit.limit);
    return gate * sigmoid(unit.alpha * gate) * (up + 1.0f);
}

void multiply_gated(const Packed &gate_up, int64_t first, int64_t last, Activation type, const void *const *x,
                    int64_t count, const GatedUnit &unit, void *const *act) {
    float sums[GATED_ROWS][2 * PANEL_ROWS];
    float *out[GATED_ROWS];
    for (int64_t n = 0; n < GATED_ROWS; ++n) out[n] = sums[n];
    for (int64_t pair = first; pair < last; ++pair)
        for (int64_t n = 0; n < count; n += GATED_ROWS) {
            const int64_t rows = count - n < GATED_ROWS ? count - n : GATED_ROWS;
            multiply_panels(gate_up, 2 * pair, 2 * pair + 2, type, x + n, rows, out);
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t r = 0; r < PANEL_ROWS; ++r) {
                    const int64_t at = (pair - first) * PANEL_ROWS + r, neuron = pair * PANEL_ROWS + r;
                    // What fills up the last panel stays zero, whatever x is.
                    const float value =
                        neuron < gate_up.rows ? join(sums[i][r], sums[i][PANEL_ROWS + r], neuron, unit) : 0.0f;
                    if (type == Activation::f32)
                        static_cast<float *>(act[n + i])[at] = value;
                    else
                        static_cast<uint16_t *>(act[n + i])[at] = round_to_bf16(value);
                }
        }
}

}  // namespace
}  // namespace ft
