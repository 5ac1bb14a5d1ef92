#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ft {
namespace {

#if defined(__x86_64__)

// Bits: Intel SDM volume 2A, CPUID leaves 1 and 7, and volume 1, 13.3 (XCR0).
constexpr bool bit(uint32_t word, int position) { return (word >> position) & 1u; }

uint64_t read_xcr0() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t(high) << 32) | low;
}

CpuFeatures detect() {
    CpuFeatures f;
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
    const bool fma = bit(c, 12), osxsave = bit(c, 27), avx = bit(c, 28), f16c = bit(c, 29);
    if (!osxsave || !avx) return f;
    const uint64_t xcr0 = read_xcr0();
    const bool ymm = (xcr0 & 0x06) == 0x06;
    const bool zmm = (xcr0 & 0xe6) == 0xe6;
    const bool tiles = (xcr0 & 0x60000) == 0x60000;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
    const uint32_t leaves = a;
    f.avx2 = ymm && fma && f16c && bit(b, 5);
    f.avx512 = f.avx2 && zmm && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31) && bit(c, 1);
    f.avx512_vnni = f.avx512 && bit(c, 11);
    f.amx_bf16 = f.avx512 && tiles && bit(d, 22);
    f.amx_int8 = f.avx512 && tiles && bit(d, 25);
    if (leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
        f.avx_vnni = f.avx2 && bit(a, 4);
        f.avx512_bf16 = f.avx512 && bit(a, 5);
    }
    return f;
}

#else

CpuFeatures detect() {
    CpuFeatures f;
#if defined(__aarch64__)
    f.neon = true;  // part of the base architecture
#endif
    return f;
}

#endif

}  // namespace

const CpuFeatures &cpu_features() {
    static const CpuFeatures features = detect();
    return features;
}

bool allow_tiles() {
#if defined(__x86_64__) && defined(__linux__)
    // linux/arch/x86/include/uapi/asm/prctl.h; 18 is XTILEDATA's bit in XCR0. Holds for all threads, also later ones.
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
    return allowed;
#else
    return false;
#endif
}

std::vector<std::string> cpu_feature_names() {
    const CpuFeatures &f = cpu_features();
    std::vector<std::string> names;
    const auto add = [&](bool present, const char *name) {
        if (present) names.emplace_back(name);
    };
    add(f.avx2, "avx2");
    add(f.avx512, "avx512");
    add(f.avx512_bf16, "avx512_bf16");
    add(f.avx512_vnni, "avx512_vnni");
    add(f.avx_vnni, "avx_vnni");
    add(f.amx_bf16, "amx_bf16");
    add(f.amx_int8, "amx_int8");
    add(f.neon, "neon");
    return names;
}

}  // namespace ft
