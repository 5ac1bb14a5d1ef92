// What this processor can execute, asked of the processor and of the operating system, not of the compiler.
#pragma once

#include <string>
#include <vector>

namespace ft {

struct CpuFeatures {
    bool avx2 = false;  // with FMA, and ymm registers saved by the operating system
    bool avx512 = false;  // F, BW, DQ and VL, and zmm registers saved by the operating system
    bool avx512_bf16 = false;
    bool avx512_vnni = false;
    bool avx_vnni = false;
    bool amx_bf16 = false;
    bool amx_int8 = false;
    bool neon = false;
};

const CpuFeatures &cpu_features();

// Names of the fields that are set, in the order above.
std::vector<std::string> cpu_feature_names();

}  // namespace ft
