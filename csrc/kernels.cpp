#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <mutex>

#include "cpu.h"

namespace ft {
namespace {

// A piece of an expert in the format of most large models, within the second-level cache: what differs between versions
// is arithmetic, memory is the same for all. One row of activations stands for decoding, several for prefill.
constexpr int64_t ROWS = 128, COLUMNS = 1024, BATCH = 16;
constexpr int REPEATS = 5;
constexpr double CLEARLY = 0.95;

class Sample {
public:
    Sample() : codes_(matrix_bytes(Format::nvfp4, ROWS, COLUMNS) + PANEL_ALIGN), x_(BATCH * COLUMNS, 0x3f80) {
        for (size_t i = 0; i < codes_.size(); ++i) codes_[i] = uint8_t(i * 37 % 113);  // no NaN among the scales
        for (std::vector<float> &row : out_) row.resize(ROWS);
        const uintptr_t start = reinterpret_cast<uintptr_t>(codes_.data());
        w_ = {Format::nvfp4, ROWS, COLUMNS, codes_.data() + (aligned(int64_t(start), PANEL_ALIGN) - int64_t(start))};
    }

    // Microseconds of the fastest of some calls.
    double time(const MatmulKernels &kernels, int64_t count) {
        const void *x[BATCH];
        float *out[BATCH];
        for (int64_t i = 0; i < BATCH; ++i) x[i] = x_.data() + i * COLUMNS, out[i] = out_[i].data();
        double fastest = std::numeric_limits<double>::infinity();
        for (int i = 0; i <= REPEATS; ++i) {  // the first fills the caches
            const auto start = std::chrono::steady_clock::now();
            kernels.panels(w_, 0, panels(ROWS), Activation::bf16, x, count, out);
            const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
            if (i > 0) fastest = std::min(fastest, took.count());
        }
        return fastest;
    }

private:
    std::vector<uint8_t> codes_;
    std::vector<uint16_t> x_;
    std::vector<float> out_[BATCH];
    Packed w_;
};

std::mutex guard;
std::atomic<const KernelChoice *> in_force{nullptr};  // never freed: who reads it holds no lock

}  // namespace

std::vector<const MatmulKernels *> usable_kernels() {
    std::vector<const MatmulKernels *> usable;
    [[maybe_unused]] const CpuFeatures &f = cpu_features();
#if defined(FT_HAS_AMX)
    if (f.amx_bf16 && f.avx512_bf16 && allow_tiles()) usable.push_back(&matmul_amx);
#endif
#if defined(FT_HAS_AVX512_BF16)
    if (f.avx512_bf16) usable.push_back(&matmul_avx512_bf16);
#endif
#if defined(FT_HAS_AVX512)
    if (f.avx512) usable.push_back(&matmul_avx512);
#endif
#if defined(FT_HAS_AVX2)
    if (f.avx2) usable.push_back(&matmul_avx2);
#endif
    usable.push_back(&matmul_portable);
    return usable;
}

KernelChoice measure_kernels() {
    std::vector<const MatmulKernels *> candidates = usable_kernels();
    if (candidates.size() == 1) return {candidates[0], "runs on any processor"};
    candidates.pop_back();  // portable, in no case the fastest where there is another
    if (candidates.size() == 1) return {candidates[0], "the only one with vector instructions that this processor has"};
    Sample sample;
    const MatmulKernels *best = nullptr;
    double least = 0;
    std::string times;
    for (const MatmulKernels *kernels : candidates) {
        const double one = sample.time(*kernels, 1), batch = sample.time(*kernels, BATCH), cost = std::sqrt(one * batch);
        if (best == nullptr || cost < CLEARLY * least) best = kernels, least = cost;
        char text[96];
        std::snprintf(text, sizeof text, "%s%s %.0f and %.0f us", times.empty() ? "" : ", ", kernels->name, one, batch);
        times += text;
    }
    return {best, "measured on a small matrix with 1 and " + std::to_string(BATCH) + " rows: " + times};
}

const MatmulKernels *kernels_named(const std::string &name) {
    for (const MatmulKernels *kernels : usable_kernels())
        if (name == kernels->name) return kernels;
    return nullptr;
}

const KernelChoice &kernel_choice() {
    if (const KernelChoice *choice = in_force.load(std::memory_order_acquire)) return *choice;
    std::lock_guard lock(guard);
    if (in_force.load() == nullptr) in_force.store(new KernelChoice(measure_kernels()), std::memory_order_release);
    return *in_force.load();
}

void use_kernels(const MatmulKernels &kernels, const std::string &reason) {
    std::lock_guard lock(guard);
    in_force.store(new KernelChoice{&kernels, reason}, std::memory_order_release);
}

const MatmulKernels &kernels() { return *kernel_choice().kernels; }

}  // namespace ft
