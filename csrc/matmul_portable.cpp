// Products for any processor: plain loops over a panel's 16 rows, which compilers turn into whatever vectors there are
// (NEON on arm64, SSE2 on x86).
#include "matmul.h"

#define FT_VECTOR 4
#define FT_TOKENS 2

namespace ft {
namespace {

constexpr int ROWS = PANEL_ROWS;

inline float bits_to_float(uint32_t bits) {
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
}

template <class T>
inline T read(const uint8_t *from, int64_t i) {
    T value;
    __builtin_memcpy(&value, from + i * sizeof value, sizeof value);
    return value;
}

inline float half_to_float(uint32_t h) {
    const uint32_t sign = (h & 0x8000) << 16, magnitude = h & 0x7fff;
    const float subnormal = float(int32_t(magnitude)) * 0x1p-24f;
    const uint32_t wide = (magnitude << 13) + (magnitude >= 0x7c00 ? 0x70000000u : 0x38000000u);
    const float value = magnitude < 0x400 ? subnormal : bits_to_float(wide);
    return sign ? -value : value;
}

inline float e4m3_to_float(uint32_t code) {
    const uint32_t magnitude = code & 0x7f;
    const float subnormal = float(int32_t(magnitude)) * 0x1p-9f;
    const uint32_t wide = magnitude == 0x7f ? 0x7fc00000u : (magnitude << 20) + (120u << 23);
    const float value = magnitude < 8 ? subnormal : bits_to_float(wide);
    return code & 0x80 ? -value : value;
}

// 2^(code - 127); 255 is NaN.
inline float e8m0_to_float(uint32_t code) {
    return bits_to_float(code == 255 ? 0x7fc00000u : code == 0 ? 0x00400000u : code << 23);
}

// Twice the number: 0, 1, 2, 3, 4, 6, 8, 12.
inline int32_t e2m1_doubled(uint32_t code) {
    const int32_t m = code & 7;
    const int32_t doubled = m + (m > 4) + (m > 5) + 3 * (m > 6);
    return code & 8 ? -doubled : doubled;
}

// Calls f(column, row, code) for the K_ALIGN columns of a group; the order of codes is ftengine/formats/format.py's.
template <int BITS, class F>
inline void each_code(const uint8_t *codes, F &&f) {
    constexpr int STEP = 32 / BITS;  // columns of one u32
    for (int b = 0; b < K_ALIGN / STEP; ++b)
        for (int p = 0; p < 2; ++p)
            for (int j = 0; j < STEP / 2; ++j)
                for (int r = 0; r < ROWS; ++r) {
                    const uint32_t word = read<uint32_t>(codes, b * ROWS + r);
                    f(b * STEP + 2 * j + p, r, (word >> (16 * p + BITS * j)) & ((1u << BITS) - 1));
                }
}

template <Format F>
void decode(const uint8_t *codes, const uint8_t *scales, float *to) {
    if constexpr (F == Format::f32) {
        for (int b = 0; b < K_ALIGN / 2; ++b)
            for (int p = 0; p < 2; ++p)
                for (int r = 0; r < ROWS; ++r) to[(2 * b + p) * ROWS + r] = read<float>(codes, (b * ROWS + r) * 2 + p);
    } else if constexpr (F == Format::f16) {
        each_code<16>(codes, [&](int k, int r, uint32_t code) { to[k * ROWS + r] = half_to_float(code); });
    } else if constexpr (F == Format::bf16) {
        each_code<16>(codes, [&](int k, int r, uint32_t code) { to[k * ROWS + r] = bits_to_float(code << 16); });
    } else if constexpr (F == Format::fp8) {
        each_code<8>(codes, [&](int k, int r, uint32_t code) { to[k * ROWS + r] = e4m3_to_float(code); });
    } else if constexpr (F == Format::fp8_block) {
        const float scale = read<float>(scales, 0);
        each_code<8>(codes, [&](int k, int r, uint32_t code) { to[k * ROWS + r] = e4m3_to_float(code) * scale; });
    } else if constexpr (F == Format::nvfp4) {
        float scale[2 * ROWS];
        for (int i = 0; i < 2 * ROWS; ++i) scale[i] = 0.5f * e4m3_to_float(scales[i]);
        each_code<4>(codes, [&](int k, int r, uint32_t code) {
            to[k * ROWS + r] = float(e2m1_doubled(code)) * scale[k / 16 * ROWS + r];
        });
    } else if constexpr (F == Format::mxfp4) {
        float scale[ROWS];
        for (int r = 0; r < ROWS; ++r) scale[r] = e8m0_to_float(scales[r]);
        each_code<4>(codes, [&](int k, int r, uint32_t code) {
            to[k * ROWS + r] = 0.5f * float(e2m1_doubled(code)) * scale[r];
        });
    } else {
        float scale[ROWS];
        for (int r = 0; r < ROWS; ++r) scale[r] = half_to_float(read<uint16_t>(scales, r));
        if constexpr (F == Format::q8_0)
            each_code<8>(codes, [&](int k, int r, uint32_t code) { to[k * ROWS + r] = float(int8_t(code)) * scale[r]; });
        else
            each_code<4>(codes, [&](int k, int r, uint32_t code) {
                to[k * ROWS + r] = float(int32_t(code) - 8) * scale[r];
            });
    }
}

}  // namespace
}  // namespace ft

#include "matmul_decoded.inl"

namespace ft {
const MatmulKernels matmul_portable = {"portable", multiply_panels, multiply_gated};
}
