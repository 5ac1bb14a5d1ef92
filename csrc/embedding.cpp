// Single rows of packed matrices as float32: what an embedding needs.

#include <algorithm>
#include <cstring>

#include "decoder.h"
#include "small_floats.h"

namespace ft {
namespace {

template <class T>
T load(const uint8_t *at) {
    T value;
    std::memcpy(&value, at, sizeof value);
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
    const float *e4m3 = e4m3_table(), *e2m1 = e2m1_table(), *e8m0 = e8m0_table();
    const int64_t lane = row % PANEL_ROWS, width = padded(w.columns);
    const uint8_t *scales = w.panel(row / PANEL_ROWS) + code_bytes(w.format, w.columns);
    const auto e4m3_value = [&](uint32_t code) { return e4m3[code]; };
    const auto e2m1_value = [&](uint32_t code) { return e2m1[code]; };
    const auto half_scale = [&](int64_t g) { return from_half(load<uint16_t>(scales + 2 * (g * PANEL_ROWS + lane))); };
    switch (w.format) {
        case Format::f32:
            return expand<32>(w, row, out, of_bits);
        case Format::f16: return expand<16>(w, row, out, [](uint32_t code) { return from_half(uint16_t(code)); });
        case Format::bf16: return expand<16>(w, row, out, [](uint32_t code) { return of_bits(code << 16); });
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
                                [&](int64_t g) { return e4m3[scales[g * PANEL_ROWS + lane]] * second; });
        }
        case Format::mxfp4:
            expand<4>(w, row, out, e2m1_value);
            return scale_groups(out, w.columns, 32, [&](int64_t g) { return e8m0[scales[g * PANEL_ROWS + lane]]; });
        case Format::q8_0:
            expand<8>(w, row, out, [](uint32_t code) { return float(int8_t(code)); });
            return scale_groups(out, w.columns, 32, half_scale);
        case Format::q4_0:
            expand<4>(w, row, out, [](uint32_t code) { return float(int(code) - 8); });
            return scale_groups(out, w.columns, 32, half_scale);
    }
}

}  // namespace ft
