#include "mixers.h"

#include <cstring>

#include "cpu.h"

namespace ft {

std::vector<const MixerKernels *> usable_mixers() {
    std::vector<const MixerKernels *> usable;
    [[maybe_unused]] const CpuFeatures &cpu = cpu_features();
#if defined(FT_HAS_AVX512_BF16)
    if (cpu.avx512_bf16) usable.push_back(&mixers_avx512_bf16);
#endif
#if defined(FT_HAS_AVX512)
    if (cpu.avx512) usable.push_back(&mixers_avx512);
#endif
#if defined(FT_HAS_AVX2)
    if (cpu.avx2) usable.push_back(&mixers_avx2);
#endif
    usable.push_back(&mixers_portable);
    return usable;
}

const MixerKernels &mixers() {
    static const std::vector<const MixerKernels *> usable = usable_mixers();
    const char *name = kernels().name;
    for (const MixerKernels *k : usable)
        if (std::strcmp(name, k->name) == 0) return *k;
    return *usable.front();  // for "amx", which has no mixers of its own
}

void rms_norm(const float *x, const float *weight, float epsilon, int64_t width, Activation type, void *out,
              const MixerKernels &k) {
    k.rms_norm(x, weight, epsilon, width, type == Activation::bf16, out);
    const int64_t size = activation_bytes(type);
    std::memset(static_cast<char *>(out) + width * size, 0, size_t((padded(width) - width) * size));
}

}  // namespace ft
