// From the natural order of a matrix to the panel order of formats.h. Speed of memory: conversion and loading use it.
#pragma once

#include "formats.h"

namespace ft {

// A matrix [rows, columns] as QuantMatrix in Python has it. Strides are bytes.
struct Natural {
    Format format = Format::f32;
    int64_t rows = 0, columns = 0;
    const uint8_t *codes = nullptr;
    int64_t row_stride = 0;
    int64_t column_stride = 0;  // 16 and 32 bits: of one element; others: contiguous, not looked at
    const uint8_t *scales = nullptr;  // float32 [rows], or a grid of blocks or groups of columns
    int64_t scale_stride = 0;         // of the grid's rows
    const float *row_scales = nullptr;  // nvfp4
};

// Columns of a grid of scales in natural order: groups or blocks of the matrix's columns.
constexpr int64_t scale_columns(Format f, int64_t columns) {
    const int64_t width = f == Format::fp8_block ? 128 : f == Format::nvfp4 ? 16 : 32;
    return (columns + width - 1) / width;
}

// Writes panel number `panel`, all panel_bytes() of it; rows and columns that the matrix lacks are zero.
void pack_panel(const Natural &matrix, int64_t panel, uint8_t *out);

// Writes all panels, `panel_stride` bytes apart, on at most `threads` threads.
void pack(const Natural &matrix, uint8_t *out, int64_t panel_stride, int threads);

}  // namespace ft
