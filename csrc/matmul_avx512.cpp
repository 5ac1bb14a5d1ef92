#define FT_BF16 0
#include "matmul_avx512.inl"

namespace ft {

const MatmulKernels matmul_avx512 = {"avx512", panels, gated};

}  // namespace ft
