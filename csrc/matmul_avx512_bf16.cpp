#define FT_BF16 1
#include "matmul_avx512.inl"

namespace ft {

const MatmulKernels matmul_avx512_bf16 = {"avx512_bf16", panels, gated};

}  // namespace ft
