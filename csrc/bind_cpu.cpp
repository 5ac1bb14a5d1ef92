// Python's door to what this processor is and does: its features, its cores.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bandwidth.h"
#include "cores.h"
#include "cpu.h"
#include "kernels.h"

namespace nb = nanobind;

using namespace nb::literals;

namespace {

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const ft::MatmulKernels *kernels : ft::usable_kernels()) names.emplace_back(kernels->name);
    return names;
}

std::pair<std::string, std::string> kernel_choice() {
    const ft::KernelChoice &choice = ft::kernel_choice();
    return {choice.kernels->name, choice.reason};
}

void use_kernels(const std::string &isa, const std::string &reason) {
    if (const ft::MatmulKernels *kernels = ft::kernels_named(isa)) return ft::use_kernels(*kernels, reason);
    throw nb::value_error(("this processor cannot execute the version '" + isa + "'").c_str());
}

double read_seconds(const nb::ndarray<nb::ro, uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> &data, int threads,
                    int64_t ahead) {
    if (threads < 1) throw nb::value_error("threads must be at least 1");
    if (ahead < 0 || ahead > 1 << 20) throw nb::value_error("ahead must be from 0 to 2^20");
    nb::gil_scoped_release release;
    return ft::read_seconds(data.data(), int64_t(data.size()), threads, ahead);
}

}  // namespace

void bind_cpu(nb::module_ &m) {
    m.def("cpu_features", &ft::cpu_feature_names, "Names of the instruction sets that this processor has.");
    m.def("instruction_sets", &instruction_sets, "Versions of the kernels usable here, the best first.");
    m.def("kernel_choice", &kernel_choice, "The version in use, and why; the first call measures, some milliseconds.");
    m.def("use_kernels", &use_kernels, "isa"_a, "reason"_a,
          "Use a version from now on. Raises ValueError for one that is not among instruction_sets().");
    m.def("granted_threads", &ft::granted_threads,
          "The most threads that a kernel runs on: CPUs of the affinity mask, less where a cgroup limits CPU time.");
    m.def("physical_cores", [] { return ft::granted_cores().cpus; },
          "One CPU number of each physical core in the affinity mask; empty where the system does not tell.");
    m.def("read_seconds", &read_seconds, "data"_a.noconvert(), "threads"_a, "ahead"_a = 0,
          "Seconds in which so many threads read `data` (uint8) once; `ahead`: bytes fetched in advance by instruction.");
}
