#define FT_ISA portable
#define FT_LANES 4
#include "mixers_table.inl"
