#define FT_ISA avx512_bf16
#define FT_LANES 16
#include "mixers_table.inl"
