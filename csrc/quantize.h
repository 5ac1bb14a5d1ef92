// Codes and scales from float32 numbers, and back: formats/reference.py and dequantize.py, bit for bit. Rows are in
// natural order, as QuantMatrix in Python has them.
#pragma once

#include "pack.h"

namespace ft {

// Where quantized rows go; strides are bytes.
struct Quantized {
    Format format = Format::f32;
    int64_t rows = 0, columns = 0;
    uint8_t *codes = nullptr;
    int64_t row_stride = 0;
    uint8_t *scales = nullptr;  // fp8: float32 [rows]
    int64_t scale_stride = 0;
};

// fp8, fp8_block, nvfp4 and mxfp4. values [rows][columns], all finite. second: nvfp4's scale of the whole matrix.
void quantize(const float *values, float second, const Quantized &to, int threads);

// Every format with scales. out [rows][columns].
void dequantize(const Natural &from, float *out, int threads);

}  // namespace ft
