#include "quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "small_floats.h"
#include "team.h"

namespace ft {
namespace {

constexpr int64_t BLOCK = 128;
constexpr int64_t TASK_ROWS = BLOCK;  // a band of fp8_block's blocks
constexpr float SMALLEST_SCALE = 0x1p-126f, E4M3_MAX = 448.0f, E2M1_MAX = 6.0f;

// Largest magnitude. Finite floats without their sign compare as integers do, and that the compiler vectorizes.
inline float largest(const float *values, int64_t count) {
    int32_t most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, int32_t(bits_of(values[i]) & 0x7fffffff));
    return of_bits(uint32_t(most));
}

void to_e4m3(const float *values, int64_t count, float scale, uint8_t *codes) {
    for (int64_t i = 0; i < count; ++i) codes[i] = nearest_e4m3(values[i] / scale);
}

// WIDTH columns as codes, two in a byte, the even column in the low half.
template <int WIDTH>
void to_e2m1(const float *values, float step, uint8_t *bytes) {
    uint32_t codes[WIDTH];
    for (int i = 0; i < WIDTH; ++i) codes[i] = nearest_e2m1(values[i] / step);
    for (int i = 0; i < WIDTH / 2; ++i) bytes[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
}

// Calls group(values, bytes, number of the group) for each WIDTH columns, the last ones filled up with zeros.
template <int WIDTH, class F>
void in_groups(const float *values, int64_t columns, uint8_t *codes, F &&group) {
    const int64_t whole = columns / WIDTH;
    for (int64_t g = 0; g < whole; ++g) group(values + g * WIDTH, codes + g * (WIDTH / 2), g);
    const int64_t rest = columns - whole * WIDTH;
    if (rest == 0) return;
    float filled[WIDTH] = {};
    uint8_t bytes[WIDTH / 2];
    std::copy_n(values + whole * WIDTH, rest, filled);
    group(filled, bytes, whole);
    std::copy_n(bytes, (rest + 1) / 2, codes + whole * (WIDTH / 2));
}

void fp8_row(const float *values, int64_t columns, uint8_t *codes, float *scale) {
    *scale = std::max(largest(values, columns) / E4M3_MAX, SMALLEST_SCALE);
    to_e4m3(values, columns, *scale, codes);
}

void nvfp4_row(const float *values, int64_t columns, float second, uint8_t *codes, uint8_t *scales) {
    const float *table = e4m3_table();
    const float range = E2M1_MAX * second;
    in_groups<16>(values, columns, codes, [=](const float *group, uint8_t *bytes, int64_t g) {
        scales[g] = nearest_e4m3(largest(group, 16) / range);
        const float step = table[scales[g]] * second;
        if (step > 0) to_e2m1<16>(group, step, bytes);
        else std::memset(bytes, 0, 8);
    });
}

void mxfp4_row(const float *values, int64_t columns, uint8_t *codes, uint8_t *scales) {
    const float *table = e8m0_table();
    in_groups<32>(values, columns, codes, [=](const float *group, uint8_t *bytes, int64_t g) {
        const float most = largest(group, 32);
        scales[g] = most > 0 ? uint8_t(std::clamp(std::ilogb(most) - 2 + 127, 0, 254)) : 127;
        to_e2m1<32>(group, table[scales[g]], bytes);
    });
}

// Rows [first, last) of one band of blocks.
void fp8_band(const float *values, int64_t first, int64_t last, const Quantized &to) {
    float *scales = reinterpret_cast<float *>(to.scales + first / BLOCK * to.scale_stride);
    for (int64_t start = 0; start < to.columns; start += BLOCK) {
        const int64_t count = std::min(BLOCK, to.columns - start);
        float most = 0;
        for (int64_t r = first; r < last; ++r) most = std::max(most, largest(values + r * to.columns + start, count));
        const float scale = scales[start / BLOCK] = std::max(most / E4M3_MAX, SMALLEST_SCALE);
        for (int64_t r = first; r < last; ++r)
            to_e4m3(values + r * to.columns + start, count, scale, to.codes + r * to.row_stride + start);
    }
}

void quantize_rows(const float *values, float second, const Quantized &to, int64_t first, int64_t last) {
    if (to.format == Format::fp8_block) return fp8_band(values, first, last, to);
    for (int64_t r = first; r < last; ++r) {
        const float *row = values + r * to.columns;
        uint8_t *codes = to.codes + r * to.row_stride, *scales = to.scales + r * to.scale_stride;
        if (to.format == Format::fp8) fp8_row(row, to.columns, codes, reinterpret_cast<float *>(scales));
        else if (to.format == Format::nvfp4) nvfp4_row(row, to.columns, second, codes, scales);
        else mxfp4_row(row, to.columns, codes, scales);
    }
}

// What the codes of a format are, before scales; null where they are integers.
template <Format F>
const float *table_of() {
    if (F == Format::fp8 || F == Format::fp8_block) return e4m3_table();
    return F == Format::nvfp4 || F == Format::mxfp4 ? e2m1_table() : nullptr;
}

template <Format F>
float number(const float *table, const uint8_t *codes, int64_t column) {
    if constexpr (F == Format::fp8 || F == Format::fp8_block) return table[codes[column]];
    if constexpr (F == Format::q8_0) return float(int8_t(codes[column]));
    const int nibble = codes[column / 2] >> 4 * (column % 2) & 15;
    return F == Format::q4_0 ? float(nibble - 8) : table[nibble];
}

// The scale of a group of columns, and how wide groups are.
template <Format F>
constexpr int64_t GROUP = F == Format::fp8_block ? BLOCK : F == Format::nvfp4 ? 16 : 32;

template <Format F>
float group_scale(const uint8_t *scales, int64_t group) {
    if constexpr (F == Format::nvfp4) return e4m3_table()[scales[group]];
    if constexpr (F == Format::mxfp4) return e8m0_table()[scales[group]];
    if constexpr (F == Format::fp8_block) return reinterpret_cast<const float *>(scales)[group];
    uint16_t half;
    std::memcpy(&half, scales + 2 * group, sizeof half);
    return from_half(half);
}

template <Format F>
void dequantize_row(const Natural &from, int64_t r, float *out) {
    const uint8_t *codes = from.codes + r * from.row_stride;
    const float *table = table_of<F>();
    if constexpr (F == Format::fp8) {
        const float scale = reinterpret_cast<const float *>(from.scales)[r];
        for (int64_t c = 0; c < from.columns; ++c) out[c] = number<F>(table, codes, c) * scale;
        return;
    }
    const float second = F == Format::nvfp4 ? from.row_scales[r] : 1.0f;
    const uint8_t *scales = from.scales + (F == Format::fp8_block ? r / BLOCK : r) * from.scale_stride;
    for (int64_t start = 0; start < from.columns; start += GROUP<F>) {
        const float scale = group_scale<F>(scales, start / GROUP<F>);
        const int64_t end = std::min(start + GROUP<F>, from.columns);
        for (int64_t c = start; c < end; ++c) {
            const float value = number<F>(table, codes, c) * scale;
            out[c] = F == Format::nvfp4 ? value * second : value;
        }
    }
}

void dequantize_one(const Natural &from, int64_t r, float *out) {
    switch (from.format) {
        case Format::fp8: return dequantize_row<Format::fp8>(from, r, out);
        case Format::fp8_block: return dequantize_row<Format::fp8_block>(from, r, out);
        case Format::nvfp4: return dequantize_row<Format::nvfp4>(from, r, out);
        case Format::mxfp4: return dequantize_row<Format::mxfp4>(from, r, out);
        case Format::q8_0: return dequantize_row<Format::q8_0>(from, r, out);
        default: return dequantize_row<Format::q4_0>(from, r, out);
    }
}

template <class F>
void in_bands(int64_t rows, int threads, F &&f) {
    const int64_t bands = (rows + TASK_ROWS - 1) / TASK_ROWS;
    const auto band = [&](int64_t i) { f(i * TASK_ROWS, std::min(rows, (i + 1) * TASK_ROWS)); };
    if (threads <= 1 || bands < 2) {
        for (int64_t i = 0; i < bands; ++i) band(i);
        return;
    }
    run_team(threads, [&](Team &team) { team.each(bands, band); });
}

}  // namespace

void quantize(const float *values, float second, const Quantized &to, int threads) {
    in_bands(to.rows, threads,
             [&](int64_t first, int64_t last) { quantize_rows(values, second, to, first, last); });
}

void dequantize(const Natural &from, float *out, int threads) {
    in_bands(from.rows, threads, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) dequantize_one(from, r, out + r * from.columns);
    });
}

}  // namespace ft
