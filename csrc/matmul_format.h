// What the loops of matmul.inl and a version's arithmetic need to know of a format at compile time.
#pragma once

#include "formats.h"

namespace ft {

// Columns that share a scale; 0: none, or a scale a row.
template <Format F>
constexpr int GROUP = F == Format::nvfp4                                                 ? 16
                      : F == Format::fp8_block                                           ? 128
                      : F == Format::mxfp4 || F == Format::q8_0 || F == Format::q4_0 ? 32
                                                                                         : 0;
// Of a panel's scales for one such group.
template <Format F>
constexpr int SCALE_BYTES = F == Format::fp8_block                          ? 4
                            : F == Format::q8_0 || F == Format::q4_0 ? 2 * PANEL_ROWS
                                                                            : PANEL_ROWS;

template <Format F>
constexpr bool ROW_SCALED = F == Format::fp8 || F == Format::nvfp4;

// Columns of one load of codes: 64 bytes, 128 of float32.
template <Format F>
constexpr int CODE_COLUMNS = F == Format::f32 ? 2 : 32 / code_bits(F);

template <Format F>
constexpr int COLUMN_BYTES = PANEL_ROWS * code_bits(F) / 8;

}  // namespace ft
