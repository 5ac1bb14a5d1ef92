// Python's door to the native code: every argument is checked here, nothing behind it checks again.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cpu.h"
#include "moe.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<nb::ro, float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

ft::Storage storage_of(const Input &array, const char *name) {
    const nb::dlpack::dtype type = array.dtype();
    if (type.lanes == 1 && type.bits == 32 && type.code == uint8_t(nb::dlpack::dtype_code::Float))
        return ft::Storage::float32;
    if (type.lanes == 1 && type.bits == 16 && type.code == uint8_t(nb::dlpack::dtype_code::Bfloat))
        return ft::Storage::bfloat16;
    throw nb::type_error((std::string(name) + " must be float32 or bfloat16").c_str());
}

void want_shape(const Input &array, const char *name, std::initializer_list<int64_t> shape) {
    bool same = array.ndim() == shape.size();
    size_t i = 0;
    for (const int64_t extent : shape) same = same && int64_t(array.shape(i++)) == extent;
    if (same) return;
    std::string text = std::string(name) + " must have the shape [";
    for (const int64_t extent : shape) text += std::to_string(extent) + ", ";
    text.replace(text.size() - 2, 2, "]");
    throw nb::value_error(text.c_str());
}

template <class T>
std::vector<int64_t> checked_ids(const Input &ids, int64_t experts) {
    const T *data = static_cast<const T *>(ids.data());
    std::vector<int64_t> checked(data, data + ids.size());
    for (const int64_t id : checked)
        if (id >= experts)
            throw nb::value_error(("expert id " + std::to_string(id) + " is out of range, there are " +
                                   std::to_string(experts) + " experts")
                                      .c_str());
    return checked;
}

std::vector<int64_t> read_ids(const Input &ids, int64_t experts) {
    if (ids.dtype() == nb::dtype<int64_t>()) return checked_ids<int64_t>(ids, experts);
    if (ids.dtype() == nb::dtype<int32_t>()) return checked_ids<int32_t>(ids, experts);
    throw nb::type_error("expert_ids must be int32 or int64");
}

const ft::TileKernels &choose_kernels(const std::string &isa) {
    const auto usable = ft::usable_kernels();
    if (isa.empty()) return *usable.front();
    for (const ft::TileKernels *kernels : usable)
        if (isa == kernels->name) return *kernels;
    throw nb::value_error(("this processor cannot execute the version '" + isa + "'").c_str());
}

void moe_experts(const Input &hidden, const Input &expert_ids, const Matrix &weights, const Input &gate_up,
                 const Input &down, const Output &out, int threads, const std::string &isa) {
    if (hidden.ndim() != 2) throw nb::value_error("hidden must have the shape [tokens, hidden]");
    if (expert_ids.ndim() != 2) throw nb::value_error("expert_ids must have the shape [tokens, top_k]");
    if (down.ndim() != 3) throw nb::value_error("down must have the shape [experts, hidden, intermediate]");
    if (threads < 1) throw nb::value_error("threads must be at least 1");
    const ft::MoeShape shape{int64_t(hidden.shape(0)), int64_t(hidden.shape(1)), int64_t(expert_ids.shape(1)),
                             int64_t(down.shape(0)), int64_t(down.shape(2))};
    want_shape(expert_ids, "expert_ids", {shape.tokens, shape.top_k});
    want_shape(Input(weights), "weights", {shape.tokens, shape.top_k});
    want_shape(gate_up, "gate_up", {shape.experts, 2 * shape.intermediate, shape.hidden});
    want_shape(down, "down", {shape.experts, shape.hidden, shape.intermediate});
    want_shape(Input(out), "out", {shape.tokens, shape.hidden});
    const ft::Storage weight_storage = storage_of(gate_up, "gate_up");
    if (storage_of(down, "down") != weight_storage) throw nb::type_error("gate_up and down must have the same dtype");
    const ft::TileKernels &kernels = choose_kernels(isa);
    const std::vector<int64_t> ids = read_ids(expert_ids, shape.experts);
    const ft::MoeArguments arguments{shape,         storage_of(hidden, "hidden"), weight_storage, hidden.data(),
                                     ids.data(),    weights.data(),               gate_up.data(), down.data(),
                                     out.data()};
    nb::gil_scoped_release release;
    ft::moe_experts(arguments, threads, kernels);
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const ft::TileKernels *kernels : ft::usable_kernels()) names.emplace_back(kernels->name);
    return names;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native kernels. Arrays come in through DLPack or the buffer protocol; nothing is copied.";
    m.def("cpu_features", &ft::cpu_feature_names, "Names of the instruction sets that this processor has.");
    m.def("instruction_sets", &instruction_sets, "Versions of the kernels usable here, the best first.");
    // noconvert: a converted copy of `out` would take the result with it, and the others must not be copied either.
    m.def("moe_experts", &moe_experts, "hidden"_a.noconvert(), "expert_ids"_a.noconvert(), "weights"_a.noconvert(),
          "gate_up"_a.noconvert(), "down"_a.noconvert(), "out"_a.noconvert(), "threads"_a = 1, "isa"_a = "",
          "Add the routed experts' weighted outputs to `out`.\n\n"
          "hidden [T, H] float32 or bfloat16; expert_ids [T, K] int32 or int64, negative: route not taken;\n"
          "weights [T, K] float32; gate_up [E, 2I, H] (gate rows first) and down [E, H, I] float32 or bfloat16;\n"
          "out [T, H] float32. All C-contiguous. Sums are float32. `isa`: one of instruction_sets(), '' for the best.\n"
          "Raises ValueError for a shape that does not fit or an expert id >= E, TypeError for a dtype.");
}
