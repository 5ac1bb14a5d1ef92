// Single rows of packed matrices as float32: what an embedding needs.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "decoder.h"

namespace ft {
namespace {

// `bits` of exponent and mantissa; `bias` as the format has it; e4m3 has NaN where others have infinities.
float small_float(int code, int exponent_bits, int mantissa_bits, int bias) {
    const int magnitude = code & ((1 << (exponent_bits + mantissa_bits)) - 1);
    const int exponent = magnitude >> mantissa_bits, mantissa = magnitude & ((1 << mantissa_bits) - 1);
    const float scaled = exponent ? float((1 << mantissa_bits) + mantissa) : float(mantissa);
    const float value = std::ldexp(scaled, (exponent ? exponent : 1) - bias - mantissa_bits);
    return code >> (exponent_bits + mantissa_bits) & 1 ? -value : value;
}

float e4m3(int code) {
    if ((code & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
    return small_float(code, 4, 3, 7);
}

float e8m0(int code) { return code == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, code - 127); }

float half(uint16_t code) {
    if ((code & 0x7c00) != 0x7c00) return small_float(code, 5, 10, 15);
    const float special = code & 0x3ff ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    return code & 0x8000 ? -special : special;
}

struct Tables {
    float e4m3_of[256], e2m1_of[16];

    Tables() {
        for (int i = 0; i < 256; ++i) e4m3_of[i] = e4m3(i);
        for (int i = 0; i < 16; ++i) e2m1_of[i] = small_float(i, 2, 1, 1);
    }
};

const Tables &tables() {
    static const Tables made;
    return made;
}

template <class T>
T load(const uint8_t *at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

float bf16(uint16_t code) {
    const uint32_t bits = uint32_t(code) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The code of column `c` in lane `r` of a panel: formats/format.py has the order.
template <int bits>
uint32_t code_at(const uint8_t *codes, int64_t r, int64_t c) {
    const int64_t pair = c & 1;
    if constexpr (bits == 32) {
        return load<uint32_t>(codes + 4 * ((c / 2 * PANEL_ROWS + r) * 2 + pair));
    } else {
        constexpr int64_t block = 32 / bits;  // columns whose codes share a row's two u16
        const uint32_t word = load<uint16_t>(codes + 2 * ((c / block * PANEL_ROWS + r) * 2 + pair));
        return word >> (c % block / 2 * bits) & ((1u << bits) - 1);
    }
}

template <int bits, class Value>
void expand(const Packed &w, int64_t row, float *out, Value &&value) {
    const uint8_t *panel = w.panel(row / PANEL_ROWS);
    const int64_t lane = row % PANEL_ROWS;
    for (int64_t c = 0; c < w.columns; ++c) out[c] = value(code_at<bits>(panel, lane, c));
}

// Multiplies runs of `group` columns by scale(g).
template <class Scale>
void scale_groups(float *out, int64_t columns, int64_t group, Scale &&scale) {
    for (int64_t first = 0; first < columns; first += group) {
        const float factor = scale(first / group);
        for (int64_t c = first; c < std::min(columns, first + group); ++c) out[c] *= factor;
    }
}

}  // namespace

void dequantize_row(const Packed &w, int64_t row, float *out) {
    const Tables &t = tables();
    const int64_t lane = row % PANEL_ROWS, width = padded(w.columns);
    const uint8_t *scales = w.panel(row / PANEL_ROWS) + code_bytes(w.format, w.columns);
    const auto e4m3_value = [&](uint32_t code) { return t.e4m3_of[code]; };
    const auto e2m1_value = [&](uint32_t code) { return t.e2m1_of[code]; };
    const auto half_scale = [&](int64_t g) { return half(load<uint16_t>(scales + 2 * (g * PANEL_ROWS + lane))); };
    switch (w.format) {
        case Format::f32:
            return expand<32>(w, row, out, [](uint32_t code) {
                float value;
                std::memcpy(&value, &code, sizeof value);
                return value;
            });
        case Format::f16: return expand<16>(w, row, out, [](uint32_t code) { return half(uint16_t(code)); });
        case Format::bf16: return expand<16>(w, row, out, [](uint32_t code) { return bf16(uint16_t(code)); });
        case Format::fp8:
            expand<8>(w, row, out, e4m3_value);
            return scale_groups(out, w.columns, w.columns, [&](int64_t) { return load<float>(scales + 4 * lane); });
        case Format::fp8_block:
            expand<8>(w, row, out, e4m3_value);
            return scale_groups(out, w.columns, 128, [&](int64_t g) { return load<float>(scales + 4 * g); });
        case Format::nvfp4: {
            const float second = load<float>(scales + width / 16 * PANEL_ROWS + 4 * lane);
            expand<4>(w, row, out, e2m1_value);
            return scale_groups(out, w.columns, 16,
                                [&](int64_t g) { return t.e4m3_of[scales[g * PANEL_ROWS + lane]] * second; });
        }
        case Format::mxfp4:
            expand<4>(w, row, out, e2m1_value);
            return scale_groups(out, w.columns, 32, [&](int64_t g) { return e8m0(scales[g * PANEL_ROWS + lane]); });
        case Format::q8_0:
            expand<8>(w, row, out, [](uint32_t code) { return float(int8_t(code)); });
            return scale_groups(out, w.columns, 32, half_scale);
        case Format::q4_0:
            expand<4>(w, row, out, [](uint32_t code) { return float(int(code) - 8); });
            return scale_groups(out, w.columns, 32, half_scale);
    }
}

}  // namespace ft
