// What this processor can execute, asked of the processor and of the operating system, not of the compiler.
#pragma once

#include <string>
#include <vector>

namespace ft {

struct CpuFeatures {
    bool avx2 = false;  // with FMA and F16C, and ymm registers saved by the operating system
    bool avx512 = false;  // F, BW, DQ, VL and VBMI (Ice Lake, Zen 4), and zmm registers saved by the operating system
    bool avx512_bf16 = false;
    bool avx512_vnni = false;
    bool avx_vnni = false;
    bool amx_bf16 = false;
    bool amx_int8 = false;
    bool neon = false;
};

const CpuFeatures &cpu_features();

// Asks the operating system for the tile registers, which a process gets on request only (Linux 5.16). False: refused.
bool allow_tiles();

// Names of the fields that are set, in the order above.
std::vector<std::string> cpu_feature_names();

}  // namespace ft
