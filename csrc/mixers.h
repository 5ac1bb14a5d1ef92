// Everything of a decoder that is not a product with a weight matrix: norms, rotary embedding, attention over pages,
// Gated DeltaNet, routing. Each is called by all threads of a team together and ends in a barrier, unless it says
// "rows": such a function works on given rows, and callers divide them.
#pragma once

#include <cstdint>
#include <vector>

#include "matmul.h"
#include "mixers_kernels.h"

namespace ft {

// Versions that this processor can execute, best first; and the one in use, which goes with kernels(). Functions below
// take another where they are given one: results of two versions differ in their last bits.
std::vector<const MixerKernels *> usable_mixers();
const MixerKernels &mixers();

// rows: out = x / sqrt(mean(x^2) + epsilon) * weight over `width`; out as Activation, filled with zeros to
// padded(width). weight [width] float32.
void rms_norm(const float *x, const float *weight, float epsilon, int64_t width, Activation type, void *out,
              const MixerKernels &k = mixers());

// One sequence's part of a packed batch.
struct SpanOf {
    int64_t row, length, context;  // first query row, query tokens, tokens before this step
    const int64_t *pages;          // page ids in token order
    int64_t state_slot;            // -1 where there is none
};

// projected [T][stride] float32: query heads, key heads, value heads (, gates). Query and key heads are normalised
// (norm [heads + kv_heads][head_dim] float32 or null), turned (cosine, sine [T][rotary_dim / 2]), keys and values
// stored in the cache (keys, values: [pages][page_size][kv_heads][head_dim], of `cache`), and attended.
// out: Activation rows [T][out_stride], heads * head_dim wide, zero-filled to padded().
struct AttentionArguments {
    AttentionShape shape;
    const SpanOf *spans;
    int64_t span_count, tokens;
    const int64_t *slots;  // [T] page * page_size + offset of each query token's key
    float *projected;      // changed in place
    int64_t stride;
    const float *norm;
    float norm_epsilon;
    const float *cosine, *sine;
    Activation cache;
    void *keys, *values;
    Activation type;
    void *out;
    int64_t out_stride;
    float *scratch;  // attention_scratch() floats
    const MixerKernels *kernels = nullptr;
};
// Depends on shape and threads alone so far; longest_context: tokens of the longest sequence, this step's included.
int64_t attention_scratch(const AttentionShape &shape, int64_t tokens, int64_t longest_context, int threads);
void attention(Team &team, const AttentionArguments &a);

// projected [T][stride] float32: channels (queries, keys, values), gate [value_heads * value_dim], rate, decay input
// [value_heads] each: layers/gated_delta_net.py. window [slots][kernel - 1][channels] and state
// [slots][value_heads][key_dim][value_dim], float32, are read and written at the spans' slots; a span whose context is 0
// starts from zeros. Spans of one token take the recurrent step, longer ones the chunked form.
struct DeltaNetArguments {
    DeltaNetDims dims;
    const SpanOf *spans;
    int64_t span_count, tokens;
    float *projected;  // changed in place
    int64_t stride;
    const float *taps;                       // [kernel][channels], oldest first
    const float *decay_scale, *decay_bias;   // [value_heads]
    const float *norm;                       // [value_dim]
    float norm_epsilon;
    float *window, *state;
    Activation type;
    void *out;  // rows [T][out_stride], value_heads * value_dim wide, zero-filled to padded()
    int64_t out_stride;
    float *scratch;  // delta_net_scratch() floats
    const MixerKernels *kernels = nullptr;
};
int64_t delta_net_scratch(const DeltaNetDims &dims, int64_t tokens, int threads);
void delta_net(Team &team, const DeltaNetArguments &a);

// rows: softmax over `experts` logits, the top_k most probable (ties: the lower id first), scaled to sum to one if
// `normalize`. ids, weights [top_k].
void route(const float *logits, int64_t experts, int64_t top_k, bool normalize, int32_t *ids, float *weights,
           const MixerKernels &k = mixers());

}  // namespace ft
