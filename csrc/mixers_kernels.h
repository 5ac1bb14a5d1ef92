// The arithmetic of the mixers on one head, tile or row, in one version per instruction set. Knows nothing of threads
// and batches. `bf16` says of a pointer to void that it points to bfloat16, not to float32.
#pragma once

#include "mixers_shapes.h"

namespace ft {

constexpr int64_t KEY_BLOCK = 64;    // keys whose scores exist at a time
constexpr int64_t DELTA_CHUNK = 64;  // tokens whose corrections are solved together

// Query rows over keys [first, last) of one sequence: `heads` key/value heads that follow each other, for each of them
// `tokens` x group rows.
struct AttendTile {
    const AttentionShape *shape;
    const float *query;  // first token's first query head; heads follow each other
    int64_t query_stride, tokens, heads;
    int64_t position;  // of the first query token; row r sees the keys up to position + r / group, and in its window
    const int64_t *pages;
    const void *keys, *values;  // of the whole cache, at the first head
    bool bf16;
    int64_t first, last;
    // partial_floats() of each head: sums of exp(score - top) * value [rows][head_dim], tops [rows], sums [rows]
    float *partial;
    int64_t partial_stride;
    float *scratch;  // tile_floats()
};

constexpr int64_t partial_floats(int64_t rows, int64_t head_dim) { return rows * (head_dim + 2); }

// Queries of all heads, scores of one, one block of keys or values; row counts may be rounded up to multiples of 4.
constexpr int64_t tile_floats(int64_t heads, int64_t rows, int64_t head_dim) {
    return heads * (rows + 3) * head_dim + (rows + 3) * KEY_BLOCK + KEY_BLOCK * (head_dim + 1);
}

// Joins the partial results of query row `row` into one output row; the row's tops and sums are used up.
struct AttendMerge {
    float *partial;
    int64_t parts, part_stride;  // floats from part to part
    int64_t rows, row, head_dim;
    const float *gate;  // [head_dim] or null
    bool bf16;
    void *out;
};

// One key head of one sequence, with the value heads that share it.
struct DeltaHead {
    DeltaNetDims dims;
    int64_t head, length;
    bool fresh;  // state and window count as zeros
    const float *projected;
    int64_t stride;
    const float *taps, *decay_scale, *decay_bias, *norm;
    float norm_epsilon;
    float *window, *state;  // of the sequence's slot
    float *windows, *states;  // of all slots, for captures
    const CaptureOf *captures;
    int64_t capture_count;
    bool bf16;
    void *out;  // first row, all heads
    int64_t out_stride;
    float *scratch;  // delta_floats()
};

constexpr int64_t delta_floats(const DeltaNetDims &d) {
    return DELTA_CHUNK * (4 * DELTA_CHUNK + 3 * d.key_dim + 4 * d.value_dim + 4 + 32) + 3 * 16 * 16;
}

struct MixerKernels {
    const char *name;

    void (*rms_norm)(const float *x, const float *weight, float epsilon, int64_t width, bool bf16, void *out);

    // Normalises (norm [count][dim], or null) and turns `count` heads in place; cosine, sine [rotary / 2].
    void (*turn)(float *heads, int64_t count, int64_t dim, const float *norm, float epsilon, const float *cosine,
                 const float *sine, int64_t rotary);

    void (*convert)(const float *x, int64_t count, bool bf16, void *out);
    void (*attend)(const AttendTile &tile);
    void (*merge)(const AttendMerge &merge);
    void (*delta_net)(const DeltaHead &head);

    // out[i] = exp(x[i] - top); returns the sum.
    float (*exponentials)(const float *x, int64_t count, float top, float *out);
};

extern const MixerKernels mixers_portable;
#if defined(__x86_64__)
extern const MixerKernels mixers_avx2;
extern const MixerKernels mixers_avx512;
extern const MixerKernels mixers_avx512_bf16;
#endif

}  // namespace ft
