// Which version of the kernels runs, and why.
#pragma once

#include <string>

#include "matmul.h"

namespace ft {

struct KernelChoice {
    const MatmulKernels *kernels;
    std::string reason;  // a few words for the log
};

// The choice in force. The first call measures, some milliseconds, unless use_kernels() came before it.
const KernelChoice &kernel_choice();

// One of usable_kernels() by name; null for any other name.
const MatmulKernels *kernels_named(const std::string &name);

// Replaces the choice from now on; calls that run keep theirs.
void use_kernels(const MatmulKernels &kernels, const std::string &reason);

// Times the usable versions on a small matrix. The first of usable_kernels() stays unless another one is clearly faster.
KernelChoice measure_kernels();

}  // namespace ft
