// Sizes that the mixers' public interface and their versions per instruction set share. No standard header with inline
// functions may come in from here: see mixers_vector.inl.
#pragma once

#include <cstdint>

namespace ft {

struct AttentionShape {
    int64_t heads, kv_heads, head_dim, rotary_dim, page_size;
    int64_t window;  // keys that a query sees, itself included; 0: all before it
    bool gated;      // the projection ends with a gate a head; outputs are multiplied by its sigmoid
    float scale;     // of the scores

    int64_t group() const { return heads / kv_heads; }
};

struct DeltaNetDims {
    int64_t key_heads, value_heads, key_dim, value_dim, kernel;

    int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
    int64_t repeats() const { return value_heads / key_heads; }

    // Of one slot.
    int64_t window_floats() const { return (kernel - 1) * channels(); }
    int64_t state_floats() const { return value_heads * key_dim * value_dim; }
};

// Once `tokens` query tokens of a span are computed, its recurrent state is written to `slot`, too.
struct CaptureOf {
    int64_t tokens, slot;
};

}  // namespace ft
