#define FT_ISA portable
#define FT_LANES 4
#define FT_TOKENS 2
#include "tile.inl"
