// Python's door to packing, quantizing and dequantizing: every argument is checked here.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <optional>
#include <string>

#include "pack.h"
#include "quantize.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Grid = nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>;
using Scales = nb::ndarray<nb::ro, nb::device::cpu>;
using RowScales = nb::ndarray<nb::ro, float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Panels = nb::ndarray<uint8_t, nb::ndim<2>, nb::device::cpu>;
using Values = nb::ndarray<nb::ro, float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using NewCodes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using NewScales = nb::ndarray<nb::c_contig, nb::device::cpu>;

void want(bool holds, const std::string &sentence) {
    if (!holds) throw nb::value_error(sentence.c_str());
}

int64_t scale_bits(ft::Format format) {
    switch (format) {
        case ft::Format::fp8:
        case ft::Format::fp8_block: return 32;
        case ft::Format::q8_0:
        case ft::Format::q4_0: return 16;
        case ft::Format::nvfp4:
        case ft::Format::mxfp4: return 8;
        default: return 0;
    }
}

void take_codes(ft::Natural &natural, const Grid &codes) {
    const int64_t bits = ft::code_bits(natural.format), item = codes.itemsize();
    want(item == std::max<int64_t>(1, bits / 8), "codes have elements of " + std::to_string(item) + " bytes");
    const int64_t width = bits == 4 ? (natural.columns + 1) / 2 : natural.columns;
    want(int64_t(codes.shape(0)) == natural.rows && int64_t(codes.shape(1)) == width,
         "codes do not have the shape that rows and columns say");
    natural.codes = static_cast<const uint8_t *>(codes.data());
    natural.row_stride = codes.stride(0) * item;
    natural.column_stride = codes.shape(1) == 1 ? item : codes.stride(1) * item;
    want(bits >= 16 || natural.column_stride == 1, "codes of 8 bits and fewer must lie side by side in a row");
}

void take_scales(ft::Natural &natural, const std::optional<Scales> &scales,
                 const std::optional<RowScales> &row_scales) {
    const int64_t bits = scale_bits(natural.format);
    want(scales.has_value() == (bits != 0), "scales must be given exactly for the formats that have them");
    want(row_scales.has_value() == (natural.format == ft::Format::nvfp4), "row_scales are nvfp4's alone");
    if (row_scales) {
        want(int64_t(row_scales->shape(0)) == natural.rows, "row_scales must have the shape [rows]");
        natural.row_scales = row_scales->data();
    }
    if (!scales) return;
    want(int64_t(scales->itemsize()) * 8 == bits, "scales have the wrong dtype");
    natural.scales = static_cast<const uint8_t *>(scales->data());
    if (natural.format == ft::Format::fp8) {
        want(scales->ndim() == 1 && int64_t(scales->shape(0)) == natural.rows &&
                 (natural.rows == 1 || scales->stride(0) == 1),
             "scales must be contiguous, of the shape [rows]");
        return;
    }
    const int64_t rows = natural.format == ft::Format::fp8_block ? (natural.rows + 127) / 128 : natural.rows;
    const int64_t columns = ft::scale_columns(natural.format, natural.columns);
    want(scales->ndim() == 2 && int64_t(scales->shape(0)) == rows && int64_t(scales->shape(1)) == columns,
         "scales must have the shape [" + std::to_string(rows) + ", " + std::to_string(columns) + "]");
    want(columns == 1 || scales->stride(1) == 1, "scales must lie side by side in a row");
    natural.scale_stride = scales->stride(0) * int64_t(scales->itemsize());
}

ft::Natural take_matrix(int format, int64_t rows, int64_t columns, const Grid &codes,
                        const std::optional<Scales> &scales, const std::optional<RowScales> &row_scales, int threads) {
    want(format >= 0 && format < ft::FORMATS, "there is no format " + std::to_string(format));
    want(rows > 0 && columns > 0, "a matrix has rows and columns");
    want(threads >= 1, "threads must be at least 1");
    ft::Natural natural;
    natural.format = ft::Format(format);
    natural.rows = rows;
    natural.columns = columns;
    take_codes(natural, codes);
    take_scales(natural, scales, row_scales);
    return natural;
}

void pack(int format, int64_t rows, int64_t columns, const Grid &codes, const std::optional<Scales> &scales,
          const std::optional<RowScales> &row_scales, const Panels &out, int threads) {
    const ft::Natural natural = take_matrix(format, rows, columns, codes, scales, row_scales, threads);
    const int64_t bytes = ft::panel_bytes(natural.format, columns), count = ft::panels(rows);
    want(int64_t(out.shape(0)) == count && int64_t(out.shape(1)) == bytes && out.stride(1) == 1,
         "out must have the shape [" + std::to_string(count) + ", " + std::to_string(bytes) + "]");
    const int64_t stride = count == 1 ? bytes : out.stride(0);
    want(stride >= bytes, "panels in out must not overlap");
    uint8_t *data = out.data();
    nb::gil_scoped_release release;
    ft::pack(natural, data, stride, threads);
}

void dequantize(int format, int64_t rows, int64_t columns, const Grid &codes, const std::optional<Scales> &scales,
                const std::optional<RowScales> &row_scales, const Numbers &out, int threads) {
    const ft::Natural natural = take_matrix(format, rows, columns, codes, scales, row_scales, threads);
    want(scale_bits(natural.format) != 0, "format has no scales");
    want(int64_t(out.shape(0)) == rows && int64_t(out.shape(1)) == columns, "out must have the shape [rows, columns]");
    float *data = out.data();
    nb::gil_scoped_release release;
    ft::dequantize(natural, data, threads);
}

void quantize(int format, const Values &values, float second, const NewCodes &codes, const NewScales &scales,
              int threads) {
    ft::Quantized to;
    to.format = ft::Format(format);
    to.rows = int64_t(values.shape(0));
    to.columns = int64_t(values.shape(1));
    const bool four = to.format == ft::Format::nvfp4 || to.format == ft::Format::mxfp4;
    want(four || to.format == ft::Format::fp8 || to.format == ft::Format::fp8_block,
         "format " + std::to_string(format) + " is not quantized here");
    want(to.rows > 0 && to.columns > 0, "a matrix has rows and columns");
    want(threads >= 1, "threads must be at least 1");
    const int64_t width = four ? (to.columns + 1) / 2 : to.columns;
    want(int64_t(codes.shape(0)) == to.rows && int64_t(codes.shape(1)) == width, "codes do not have values' shape");
    const int64_t groups = to.format == ft::Format::fp8 ? 1 : ft::scale_columns(to.format, to.columns);
    const int64_t bands = to.format == ft::Format::fp8_block ? (to.rows + 127) / 128 : to.rows;
    want(int64_t(scales.itemsize()) * 8 == scale_bits(to.format), "scales have the wrong dtype");
    want(int64_t(scales.size()) == bands * groups && int64_t(scales.shape(0)) == bands,
         "scales must have the shape [" + std::to_string(bands) + ", " + std::to_string(groups) + "]");
    to.codes = codes.data();
    to.row_stride = width;
    to.scales = static_cast<uint8_t *>(scales.data());
    to.scale_stride = groups * int64_t(scales.itemsize());
    nb::gil_scoped_release release;
    ft::quantize(values.data(), second, to, threads);
}

}  // namespace

void bind_pack(nb::module_ &m) {
    m.def("pack", &pack, "format"_a, "rows"_a, "columns"_a, "codes"_a.noconvert(), "scales"_a.noconvert().none(),
          "row_scales"_a.noconvert().none(), "out"_a.noconvert(), "threads"_a = 1,
          "Write a matrix [rows, columns] in panel order.\n\n"
          "format: Format.number. codes, scales, row_scales: QuantMatrix's; codes of 16 and 32 bits with any strides,\n"
          "others contiguous in a row. out: uint8 [panels, panel_bytes], rows of any stride that is a multiple of 8.\n"
          "Raises ValueError for what does not fit together.");
    m.def("quantize", &quantize, "format"_a, "values"_a.noconvert(), "second"_a, "codes"_a.noconvert(),
          "scales"_a.noconvert(), "threads"_a = 1,
          "Write codes and scales of values [rows, columns] float32, which must be finite.\n\n"
          "format: Format.number of fp8, fp8_block, nvfp4 or mxfp4.\n"
          "second: nvfp4's scale of the whole matrix, else not looked at. codes, scales: QuantMatrix's, contiguous.\n"
          "Raises ValueError for what does not fit together.");
    m.def("dequantize", &dequantize, "format"_a, "rows"_a, "columns"_a, "codes"_a.noconvert(),
          "scales"_a.noconvert().none(), "row_scales"_a.noconvert().none(), "out"_a.noconvert(), "threads"_a = 1,
          "Write a matrix with scales as float32 [rows, columns]. Arguments as pack's.\n"
          "Raises ValueError for what does not fit together.");
}
