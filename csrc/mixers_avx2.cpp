#define FT_ISA avx2
#define FT_LANES 8
#include "mixers_table.inl"
