// linear() and experts() for Python. What is checked here is not checked again behind it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "expert_ops.h"
#include "kernels.h"
#include "matmul.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Activations = nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>;
using Bytes = nb::ndarray<nb::ro, uint8_t, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<nb::ro, float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<nb::ro, int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Weights = nb::ndarray<nb::ro, float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;

void want(bool condition, const std::string &otherwise) {
    if (!condition) throw nb::value_error(otherwise.c_str());
}

const ft::MatmulKernels &version(const std::string &isa) {
    if (isa.empty()) return ft::kernels();
    if (const ft::MatmulKernels *kernels = ft::kernels_named(isa)) return *kernels;
    throw nb::value_error(("this processor cannot execute the version '" + isa + "'").c_str());
}

ft::Format format_of(int number, const char *name) {
    want(number >= 0 && number < ft::FORMATS,
         std::string(name) + " " + std::to_string(number) + " is not the number of a format");
    return ft::Format(number);
}

template <class Element>
bool filled_with_zeros(const ft::Rows &x, int64_t tokens, int64_t columns, int64_t width) {
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = columns; i < width; ++i)
            if (static_cast<const Element *>(x.row(t))[i] != 0) return false;
    return true;
}

ft::Rows rows_of(const Activations &x, int64_t columns, const char *name) {
    const nb::dlpack::dtype type = x.dtype();
    const bool bf16 = type == nb::dlpack::dtype{uint8_t(nb::dlpack::dtype_code::Bfloat), 16, 1};
    if (!bf16 && type != nb::dtype<float>())
        throw nb::type_error((std::string(name) + " must be float32 or bfloat16").c_str());
    const int64_t width = ft::padded(columns);
    want(int64_t(x.shape(1)) == width && (x.stride(1) == 1 || width <= 1) && x.stride(0) >= 0,
         std::string(name) + " must have rows of " + std::to_string(width) + " elements side by side");
    const ft::Rows rows{bf16 ? ft::Activation::bf16 : ft::Activation::f32, x.data(), x.stride(0)};
    const bool filled = bf16 ? filled_with_zeros<uint16_t>(rows, int64_t(x.shape(0)), columns, width)
                             : filled_with_zeros<float>(rows, int64_t(x.shape(0)), columns, width);
    want(filled, std::string(name) + " must be zero from column " + std::to_string(columns) + " on");
    return rows;
}

void want_output(const Output &out, int64_t tokens, int64_t columns) {
    want(int64_t(out.shape(0)) == tokens && int64_t(out.shape(1)) == columns &&
             (out.stride(1) == 1 || columns <= 1) && (out.stride(0) >= columns || tokens <= 1),
         "out must be [" + std::to_string(tokens) + ", " + std::to_string(columns) + "], a row's elements side by side");
}

constexpr int64_t MOST = int64_t(1) << 31;  // rows or columns: sizes in bytes stay far from overflow

void want_size(int64_t size, const char *name) {
    want(size >= 0 && size <= MOST, std::string(name) + " must be from 0 to 2^31, not " + std::to_string(size));
}

void linear_packed(const Activations &x, const Bytes &data, int64_t rows, int64_t columns, int format,
                   const Output &out, const std::optional<Floats> &bias, bool add, int threads,
                   const std::string &isa) {
    want_size(rows, "rows");
    want_size(columns, "columns");
    const ft::Packed w{format_of(format, "format"), rows, columns, data.data()};
    const int64_t bytes = ft::matrix_bytes(w.format, rows, columns), tokens = int64_t(x.shape(0));
    want(int64_t(data.size()) == bytes,
         "data must have " + std::to_string(bytes) + " bytes, not " + std::to_string(data.size()));
    const ft::Rows in = rows_of(x, columns, "x");
    want_output(out, tokens, rows);
    want(!bias || int64_t(bias->size()) == rows, "bias must have " + std::to_string(rows) + " elements");
    want(threads >= 1, "threads must be at least 1");
    const ft::MatmulKernels &kernels = version(isa);
    const float *added = bias ? bias->data() : nullptr;
    nb::gil_scoped_release release;
    ft::run_team(threads, [&](ft::Team &team) {
        ft::linear(team, kernels, w, in, tokens, added, out.data(), out.stride(0), add);
    });
}

void experts_packed(const Activations &hidden, const Ids &ids, const Weights &weights, const Bytes &blocks,
                    int64_t hidden_size, int64_t intermediate, int gate_up_format, int down_format, bool bias,
                    bool clamped, float alpha, float limit, const Output &out, int threads, const std::string &isa) {
    want_size(hidden_size, "hidden_size");
    want_size(intermediate, "intermediate");
    ft::ExpertBank bank;
    bank.layout = {hidden_size, intermediate, format_of(gate_up_format, "gate_up_format"),
                   format_of(down_format, "down_format"), bias};
    bank.clamped = clamped, bank.alpha = alpha, bank.limit = limit;
    bank.stride = bank.layout.block_bytes();
    want(blocks.ndim() == 2 && (int64_t(blocks.shape(1)) == bank.stride),
         "blocks must be [experts, " + std::to_string(bank.stride) + "] bytes");
    bank.experts = int64_t(blocks.shape(0));
    bank.blocks = blocks.data();
    const int64_t tokens = int64_t(hidden.shape(0)), top_k = int64_t(ids.shape(1));
    const ft::Rows in = rows_of(hidden, hidden_size, "hidden");
    want(int64_t(ids.shape(0)) == tokens, "expert_ids must have a row for each of hidden");
    want(weights.shape(0) == ids.shape(0) && weights.shape(1) == ids.shape(1),
         "weights must have the shape of expert_ids");
    want_output(out, tokens, hidden_size);
    want(threads >= 1, "threads must be at least 1");
    for (size_t i = 0; i < ids.size(); ++i)
        want(ids.data()[i] < bank.experts, "expert id " + std::to_string(ids.data()[i]) + " is out of range, there are " +
                                               std::to_string(bank.experts) + " experts");
    const ft::MatmulKernels &kernels = version(isa);
    nb::gil_scoped_release release;
    ft::SortedRoutes routes;
    routes.sort(bank, in, tokens, top_k, ids.data(), weights.data());
    ft::run_team(threads, [&](ft::Team &team) {
        ft::run_experts(team, kernels, bank, routes, out.data(), out.stride(0), true);
    });
}

}  // namespace

void bind_matmul(nb::module_ &m) {
    // noconvert: a converted copy of `out` would take the result with it, and the others must not be copied either.
    m.def("linear_packed", &linear_packed, "x"_a.noconvert(), "data"_a.noconvert(), "rows"_a, "columns"_a, "format"_a,
          "out"_a.noconvert(), "bias"_a.noconvert().none() = nb::none(), "add"_a = false, "threads"_a = 1,
          "isa"_a = "",
          "out[t] (+)= w x[t] + bias for a matrix w [rows, columns] in panel order.\n\n"
          "x [T, columns filled up to a multiple of 32 with zeros] float32 or bfloat16; data uint8, `format` the number\n"
          "of its format; out [T, rows] float32; bias [rows] float32. Sums are float32.\n"
          "Raises ValueError for a shape, size or version that does not fit, TypeError for a dtype.");
    m.def("experts_packed", &experts_packed, "hidden"_a.noconvert(), "expert_ids"_a.noconvert(),
          "weights"_a.noconvert(), "blocks"_a.noconvert(), "hidden_size"_a, "intermediate"_a, "gate_up_format"_a,
          "down_format"_a, "bias"_a, "clamped"_a, "alpha"_a, "limit"_a, "out"_a.noconvert(), "threads"_a = 1,
          "isa"_a = "",
          "Add the routed experts' weighted outputs to `out`.\n\n"
          "hidden [T, hidden_size filled up to a multiple of 32 with zeros] float32 or bfloat16; expert_ids [T, K] int32,\n"
          "negative: route not taken; weights [T, K] float32; blocks [E, block_bytes] uint8 (ExpertLayout); out\n"
          "[T, hidden_size] float32.\n"
          "Raises ValueError for a shape that does not fit or an expert id >= E, TypeError for a dtype,\n"
          "MemoryError where the routes cannot be sorted: `out` is then as it was.");
}
