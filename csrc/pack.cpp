#include "pack.h"

#include <algorithm>
#include <cstring>

#include "team.h"
#include "transpose16.h"

namespace ft {
namespace {

constexpr int ROWS = int(PANEL_ROWS);
constexpr int64_t LINE = 64;  // bytes of a row that are taken at once: a cache line

// How a word of one row's codes lies in the panel (formats/format.py): a word of 32 bits is 4 or 8 columns.
struct Keep {
    template <class V>
    static V turn(V words) { return words; }
};
struct TurnBytes {  // bytes 0 1 2 3 -> 0 2 1 3
    template <class V>
    static V turn(V words) {
        const V other = (words ^ words >> 8) & 0x0000ff00;
        return words ^ other ^ other << 8;
    }
};
struct TurnNibbles {  // nibbles 0 .. 7 -> 0 2 1 3 4 6 5 7 -> 0 2 4 6 1 3 5 7
    template <class V>
    static V turn(V words) {
        const V other = (words ^ words >> 4) & 0x00f000f0;
        return TurnBytes::turn(words ^ other ^ other << 4);
    }
};

// One line of each row -> words [LINE / sizeof(Word)][ROWS]. `lines` may be unaligned, `out` too.
template <class Word, class Order>
void turn_line(const uint8_t *const *lines, uint8_t *out) {
    using V = typename VectorOf<Word>::type;
    for (int64_t part = 0; part < LINE; part += VECTOR) {
        V words[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            std::memcpy(&words[r], lines[r] + part, VECTOR);
            words[r] = Order::turn(words[r]);
        }
        transpose16(words);
        std::memcpy(out + part * ROWS, words, sizeof words);
    }
}

// `count` rows of `bytes` bytes -> words [width / sizeof(Word)][ROWS], zeros where rows or bytes of a row are missing.
template <class Word, class Order>
void turn_rows(const uint8_t *const *rows, int count, int64_t bytes, int64_t width, uint8_t *out) {
    const int64_t whole = bytes / LINE * LINE;
    static const uint8_t zeros[LINE] = {};
    const uint8_t *lines[ROWS];
    for (int64_t start = 0; start < whole; start += LINE) {
        for (int r = 0; r < ROWS; ++r) lines[r] = r < count ? rows[r] + start : zeros;
        turn_line<Word, Order>(lines, out + start * ROWS);
    }
    for (int64_t start = whole; start < width; start += LINE) {
        uint8_t tails[ROWS][LINE] = {}, turned[ROWS * LINE];
        const int64_t present = std::clamp<int64_t>(bytes - start, 0, LINE);
        for (int r = 0; r < count; ++r) std::memcpy(tails[r], rows[r] + start, size_t(present));
        for (int r = 0; r < ROWS; ++r) lines[r] = tails[r];
        turn_line<Word, Order>(lines, turned);
        std::memcpy(out + start * ROWS, turned, size_t(std::min(LINE, width - start) * ROWS));
    }
}

// 16 and 32 bits from any strides, pairs of columns row by row.
template <class Element>
void turn_strided(const Natural &m, int64_t first, int count, uint8_t *out) {
    Element *target = reinterpret_cast<Element *>(out);
    const int64_t width = padded(m.columns);
    if (count < ROWS || m.columns < width) std::memset(out, 0, size_t(code_bytes(m.format, m.columns)));
    for (int64_t column = 0; column < m.columns; ++column) {
        const uint8_t *source = m.codes + first * m.row_stride + column * m.column_stride;
        Element *pair = target + column / 2 * ROWS * 2 + column % 2;
        for (int r = 0; r < count; ++r) std::memcpy(pair + 2 * r, source + r * m.row_stride, sizeof(Element));
    }
}

void pack_codes(const Natural &m, int64_t first, int count, uint8_t *out) {
    const int bits = code_bits(m.format);
    if (bits >= 16 && m.column_stride != bits / 8) {
        if (bits == 16) turn_strided<uint16_t>(m, first, count, out);
        else turn_strided<uint32_t>(m, first, count, out);
        return;
    }
    const uint8_t *rows[ROWS];
    for (int r = 0; r < count; ++r) rows[r] = m.codes + (first + r) * m.row_stride;
    const int64_t bytes = (m.columns * bits + 7) / 8, width = padded(m.columns) * bits / 8;
    switch (bits) {
        case 32: return turn_rows<uint64_t, Keep>(rows, count, bytes, width, out);
        case 16: return turn_rows<uint32_t, Keep>(rows, count, bytes, width, out);
        case 8: return turn_rows<uint32_t, TurnBytes>(rows, count, bytes, width, out);
        default: return turn_rows<uint32_t, TurnNibbles>(rows, count, bytes, width, out);
    }
}

// A grid's rows of this panel -> [groups of padded columns][ROWS].
template <class Scale>
void turn_grid(const Natural &m, int64_t first, int count, int64_t group, uint8_t *out) {
    const uint8_t *rows[ROWS];
    for (int r = 0; r < count; ++r) rows[r] = m.scales + (first + r) * m.scale_stride;
    const int64_t size = sizeof(Scale);
    const int64_t bytes = scale_columns(m.format, m.columns) * size, width = padded(m.columns) / group * size;
    turn_rows<Scale, Keep>(rows, count, bytes, width, out);
}

void row_values(const float *values, int64_t first, int count, uint8_t *out) {
    std::memset(out, 0, sizeof(float) * ROWS);
    std::memcpy(out, values + first, sizeof(float) * size_t(count));
}

void pack_scales(const Natural &m, int64_t first, int count, uint8_t *out) {
    switch (m.format) {
        case Format::fp8:
            return row_values(reinterpret_cast<const float *>(m.scales), first, count, out);
        case Format::fp8_block:
            std::memcpy(out, m.scales + first / 128 * m.scale_stride, size_t(scale_bytes(m.format, m.columns)));
            return;
        case Format::nvfp4:
            turn_grid<uint8_t>(m, first, count, 16, out);
            return row_values(m.row_scales, first, count, out + padded(m.columns) / 16 * ROWS);
        case Format::mxfp4: return turn_grid<uint8_t>(m, first, count, 32, out);
        case Format::q8_0:
        case Format::q4_0: return turn_grid<uint16_t>(m, first, count, 32, out);
        default: return;
    }
}

}  // namespace

void pack_panel(const Natural &m, int64_t panel, uint8_t *out) {
    const int64_t first = panel * PANEL_ROWS;
    const int count = int(std::min(PANEL_ROWS, m.rows - first));
    const int64_t codes = code_bytes(m.format, m.columns), scales = scale_bytes(m.format, m.columns);
    pack_codes(m, first, count, out);
    pack_scales(m, first, count, out + codes);
    std::memset(out + codes + scales, 0, size_t(panel_bytes(m.format, m.columns) - codes - scales));
}

void pack(const Natural &m, uint8_t *out, int64_t panel_stride, int threads) {
    const int64_t count = panels(m.rows);
    if (threads <= 1 || count < 2) {
        for (int64_t panel = 0; panel < count; ++panel) pack_panel(m, panel, out + panel * panel_stride);
        return;
    }
    run_team(threads, [&](Team &team) {
        team.each(count, [&](int64_t panel) { pack_panel(m, panel, out + panel * panel_stride); });
    });
}

}  // namespace ft
