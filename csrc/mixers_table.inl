// One version of the mixers: see mixers_vector.inl for what is defined before.

#include "mixers_vector.inl"

#include "mixers_norm.inl"

#include "mixers_softmax.inl"

#include "mixers_wide.inl"

#include "mixers_narrow.inl"

#if defined(__AVX512BF16__)
#include "mixers_bf16.inl"
#endif

#include "mixers_attention.inl"
#include "mixers_delta_net.inl"

namespace ft {

#define FT_TABLE(isa) FT_TABLE_OF(isa)
#define FT_TABLE_OF(isa)                                                                                  \
    const MixerKernels mixers_##isa = {#isa,        rms_norm_row, turn_heads,     convert_row,            \
                                       attend_tile, merge_parts,  delta_net_head, exponentials_row}

FT_TABLE(FT_ISA);

}  // namespace ft
