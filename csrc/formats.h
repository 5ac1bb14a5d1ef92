// Number formats and the panel order of weight matrices: docs/ftw.md, ftengine/formats/format.py. Sizes only.
#pragma once

#include <cstdint>

namespace ft {

constexpr int64_t PANEL_ROWS = 16, PANEL_ALIGN = 64, K_ALIGN = 32;

// The values are those of Format.number in Python.
enum class Format : int { f32 = 0, f16 = 1, bf16 = 2, fp8 = 3, fp8_block = 4, nvfp4 = 5, mxfp4 = 6, q8_0 = 7, q4_0 = 8 };
constexpr int FORMATS = 9;

constexpr int64_t aligned(int64_t size, int64_t alignment) { return (size + alignment - 1) / alignment * alignment; }
constexpr int64_t padded(int64_t columns) { return aligned(columns, K_ALIGN); }
constexpr int64_t panels(int64_t rows) { return (rows + PANEL_ROWS - 1) / PANEL_ROWS; }

constexpr int code_bits(Format f) {
    switch (f) {
        case Format::f32: return 32;
        case Format::f16:
        case Format::bf16: return 16;
        case Format::fp8:
        case Format::fp8_block:
        case Format::q8_0: return 8;
        default: return 4;
    }
}

// Bytes of one panel's codes, and of its scales, for a matrix of `columns` columns.
constexpr int64_t code_bytes(Format f, int64_t columns) { return PANEL_ROWS * padded(columns) * code_bits(f) / 8; }
constexpr int64_t scale_bytes(Format f, int64_t columns) {
    const int64_t width = padded(columns);
    switch (f) {
        case Format::fp8: return 4 * PANEL_ROWS;
        case Format::fp8_block: return 4 * ((width + 127) / 128);
        case Format::nvfp4: return width / 16 * PANEL_ROWS + 4 * PANEL_ROWS;
        case Format::mxfp4: return width / 32 * PANEL_ROWS;
        case Format::q8_0:
        case Format::q4_0: return 2 * (width / 32) * PANEL_ROWS;
        default: return 0;
    }
}
constexpr int64_t panel_bytes(Format f, int64_t columns) {
    return aligned(code_bytes(f, columns) + scale_bytes(f, columns), PANEL_ALIGN);
}
constexpr int64_t matrix_bytes(Format f, int64_t rows, int64_t columns) { return panels(rows) * panel_bytes(f, columns); }

// A matrix [rows, columns] in panel order.
struct Packed {
    Format format = Format::f32;
    int64_t rows = 0, columns = 0;
    const uint8_t *data = nullptr;

    const uint8_t *panel(int64_t i) const { return data + i * panel_bytes(format, columns); }
};

// One expert's block: gate and up panels in turn, down's panels, biases (ExpertLayout in Python).
struct ExpertLayout {
    int64_t hidden = 0, intermediate = 0;
    Format gate_up = Format::bf16, down = Format::bf16;
    bool bias = false;

    int64_t down_offset() const { return 2 * matrix_bytes(gate_up, intermediate, hidden); }
    int64_t bias_offset() const { return down_offset() + matrix_bytes(down, hidden, intermediate); }
    int64_t block_bytes() const {
        return aligned(bias_offset() + (bias ? 4 * (2 * intermediate + hidden) : 0), 4096);
    }
};

}  // namespace ft
