#define FT_ISA avx512
#define FT_LANES 16
#include "mixers_table.inl"
