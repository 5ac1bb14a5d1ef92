#define FT_ISA avx512
#define FT_LANES 16
#define FT_TOKENS 4
#include "tile.inl"
