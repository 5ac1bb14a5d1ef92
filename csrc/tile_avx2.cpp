#define FT_ISA avx2
#define FT_LANES 8
#define FT_TOKENS 2
#include "tile.inl"
