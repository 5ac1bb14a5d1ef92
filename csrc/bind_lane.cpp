// The CPU's lane for Python. What is checked here is not checked again behind it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "lane.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// No nb::device: pinned host memory may come as a kind of its own.
using Line = nb::ndarray<int32_t, nb::shape<16>, nb::c_contig>;
using Ids = nb::ndarray<nb::ro, int32_t, nb::ndim<2>, nb::c_contig>;
using Weights = nb::ndarray<nb::ro, float, nb::ndim<2>, nb::c_contig>;
using Activations = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig>;
using Output = nb::ndarray<float, nb::ndim<2>, nb::c_contig>;
using Log = nb::ndarray<nb::numpy, int64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;
using Blocks = nb::ndarray<nb::ro, uint8_t, nb::ndim<2>, nb::c_contig>;
// blocks, hidden, intermediate, formats of gate_up and down, bias
using Bank = std::tuple<Blocks, int64_t, int64_t, int, int, bool>;

constexpr int64_t MOST = int64_t(1) << 31;  // rows or columns: sizes in bytes stay far from overflow

void want(bool condition, const std::string &otherwise) {
    if (!condition) throw nb::value_error(otherwise.c_str());
}

template <class Array>
void want_host(const Array &array, const std::string &name) {
    const int kind = array.device_type();
    want(kind == nb::device::cpu::value || kind == nb::device::cuda_host::value, name + " must be in host memory");
}

ft::ExpertBank bank_of(const Bank &given, size_t layer, int64_t hidden) {
    const auto &[blocks, columns, intermediate, gate_up, down, bias] = given;
    const std::string name = "bank " + std::to_string(layer);
    want_host(blocks, name);
    want(columns == hidden, name + " must have rows of " + std::to_string(hidden) + ", as the mailbox has");
    want(intermediate >= 0 && intermediate <= MOST, name + ": intermediate must be from 0 to 2^31");
    want(gate_up >= 0 && gate_up < ft::FORMATS && down >= 0 && down < ft::FORMATS, name + ": no such format");
    ft::ExpertBank bank;
    bank.layout = {hidden, intermediate, ft::Format(gate_up), ft::Format(down), bias};
    bank.stride = bank.layout.block_bytes();
    want(int64_t(blocks.shape(1)) == bank.stride,
         name + " must be [experts, " + std::to_string(bank.stride) + "] bytes");
    bank.experts = int64_t(blocks.shape(0)), bank.blocks = blocks.data();
    return bank;
}

// A lane, and the arrays that it must not outlive.
class PythonLane {
public:
    PythonLane(std::vector<Bank> banks, const Line &bell, const Ids &ids, const Weights &weights,
               const Activations &rows, const Line &reply, const Output &out, const Line &error, int threads,
               double patience, const std::string &isa)
        : banks_(std::move(banks)), bell_(bell), ids_(ids), weights_(weights), rows_(rows), reply_(reply), out_(out),
          error_(error) {
        for (const Line &line : {bell, reply, error}) want_host(line, "the mailbox");
        want_host(ids, "ids");
        want_host(weights, "weights");
        want_host(rows, "rows");
        want_host(out, "out");
        const size_t tokens = rows.shape(0), hidden = rows.shape(1);
        want(int64_t(hidden) <= MOST, "rows must have at most 2^31 columns");
        want(ids.shape(0) == tokens && weights.shape(0) == tokens && weights.shape(1) == ids.shape(1),
             "ids and weights must have a row for each of rows, of equal length");
        want(out.shape(0) == tokens && out.shape(1) == hidden, "out must have the shape of rows");
        want(threads >= 1, "threads must be at least 1");
        want(patience >= 0 && patience <= 10, "patience must be from 0 to 10 seconds");
        const bool bf16 = rows.dtype() == nb::dlpack::dtype{uint8_t(nb::dlpack::dtype_code::Bfloat), 16, 1};
        if (!bf16 && rows.dtype() != nb::dtype<float>()) throw nb::type_error("rows must be float32 or bfloat16");
        const ft::MatmulKernels *kernels = isa.empty() ? &ft::kernels() : ft::kernels_named(isa);
        want(kernels != nullptr, "this processor cannot execute the version '" + isa + "'");
        std::vector<ft::ExpertBank> all;
        for (size_t i = 0; i < banks_.size(); ++i) all.push_back(bank_of(banks_[i], i, int64_t(hidden)));
        ft::Mail mail;
        mail.bell = bell_.data(), mail.ids = ids_.data(), mail.weights = weights_.data();
        mail.rows = {bf16 ? ft::Activation::bf16 : ft::Activation::f32, rows_.data(), int64_t(hidden)};
        mail.reply = reply_.data(), mail.out = out_.data(), mail.error = error_.data();
        mail.most_tokens = int64_t(tokens), mail.top_k = int64_t(ids.shape(1)), mail.hidden = int64_t(hidden);
        lane_ = std::make_unique<ft::Lane>(std::move(all), mail, *kernels, threads, int64_t(patience * 1e9));
    }

    ft::Lane &lane() { return *lane_; }

private:
    std::vector<Bank> banks_;
    Line bell_;
    Ids ids_;
    Weights weights_;
    Activations rows_;
    Line reply_;
    Output out_;
    Line error_;
    std::unique_ptr<ft::Lane> lane_;  // the first to be destroyed
};

nb::dict counts(PythonLane &lane) {
    const ft::LaneCounts counts = lane.lane().counts();
    nb::dict named;
    named["requests"] = counts.requests;
    named["routes"] = counts.routes;
    named["experts"] = counts.experts;
    named["seconds"] = double(counts.nanoseconds) * 1e-9;
    named["awakenings"] = counts.awakenings;
    nb::list layers;
    for (const int64_t nanoseconds : counts.layer_nanoseconds) layers.append(double(nanoseconds) * 1e-9);
    named["layer_seconds"] = nb::tuple(layers);
    return named;
}

int64_t copy_log(PythonLane &lane, const Log &out) {
    std::vector<ft::LaneRecord> found(std::min<size_t>(out.shape(0), ft::LaneLog::SIZE));
    const int64_t count = lane.lane().log().copy(found.data(), int64_t(found.size()));
    for (int64_t i = 0; i < count; ++i) {
        const ft::LaneRecord &one = found[size_t(i)];
        const int64_t line[] = {one.number, one.experts, one.routes, one.nanoseconds, one.idle};
        std::copy(std::begin(line), std::end(line), out.data() + i * int64_t(std::size(line)));
    }
    return count;
}

double request(PythonLane &lane, int32_t layer, int32_t tokens, double limit) {
    want(lane.lane().open(), "the lane is closed");
    double seconds = 0;
    {
        nb::gil_scoped_release release;
        seconds = lane.lane().request(layer, tokens, limit);
    }
    if (seconds < 0) {
        PyErr_SetString(PyExc_TimeoutError, "no reply came");
        throw nb::python_error();
    }
    return seconds;
}

}  // namespace

void bind_lane(nb::module_ &m) {
    nb::class_<PythonLane>(m, "Lane",
                           "Threads that serve a mailbox: csrc/lane.h. Holds the arrays that it is given.")
        .def(nb::init<std::vector<Bank>, const Line &, const Ids &, const Weights &, const Activations &, const Line &,
                      const Output &, const Line &, int, double, const std::string &>(),
             "banks"_a, "bell"_a.noconvert(), "ids"_a.noconvert(), "weights"_a.noconvert(), "rows"_a.noconvert(),
             "reply"_a.noconvert(), "out"_a.noconvert(), "error"_a.noconvert(), "threads"_a, "patience"_a = 0.003,
             "isa"_a = "",
             "banks: (blocks uint8 [E, block_bytes], hidden, intermediate, format of gate_up, of down, bias) by MoE\n"
             "layer; the mailbox's tensors; patience: seconds without a request until the threads sleep.\n"
             "Raises ValueError for a shape, format or version that does not fit, TypeError for a dtype.")
        .def("wake", [](PythonLane &lane) { lane.lane().wake(); })
        .def("request", &request, "layer"_a, "tokens"_a, "limit"_a = 20.0,
             "Rings for the rows, ids and weights in the mailbox, as a GPU would; seconds until the reply.\n\n"
             "Raises TimeoutError if none comes within `limit` seconds, ValueError where the lane is closed.")
        .def("close", [](PythonLane &lane) { lane.lane().close(); }, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("open", [](PythonLane &lane) { return lane.lane().open(); })
        .def_prop_ro("awake", [](PythonLane &lane) { return lane.lane().awake(); })
        .def("counts", &counts)
        .def("copy_log", &copy_log, "out"_a.noconvert(),
             "The newest requests into rows of out int64 [N, 5], oldest first: number, distinct experts, routes, ns from\n"
             "the bell to the reply, ns from the reply before to the bell. Returns how many there are.");
}
