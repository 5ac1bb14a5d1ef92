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
    int64_t first_capture = 0, captures = 0;  // which of the captures beside the spans are its own, by tokens
};

// What attention and Gated DeltaNet have in common. Each thread of a team has a share of `scratch`.
struct MixerArguments {
    const SpanOf *spans;
    int64_t span_count, tokens;
    float *projected;  // [tokens][stride] float32; changed in place
    int64_t stride;
    const float *norm;
    float norm_epsilon;
    Activation type;
    void *out;  // rows [tokens][out_stride] of `type`, zero-filled to padded()
    int64_t out_stride;
    float *scratch;
    const MixerKernels *kernels = nullptr;  // null: mixers()
};

// projected: query heads, key heads, value heads (, gates). Query and key heads are normalised
// (norm [heads + kv_heads][head_dim] float32 or null), turned (cosine, sine [T][rotary_dim / 2]), keys and values
// stored in the cache (keys, values: [pages][page_size][kv_heads][head_dim], of `cache`), and attended.
// out: heads * head_dim wide. scratch: attention_scratch() floats.
struct AttentionArguments : MixerArguments {
    AttentionShape shape;
    const int64_t *slots;  // [T] page * page_size + offset of each query token's key
    const float *cosine, *sine;
    Activation cache;
    void *keys, *values;
};
int64_t attention_scratch(const AttentionShape &shape, int threads);
void attention(Team &team, const AttentionArguments &a);

// projected: channels (queries, keys, values), gate [value_heads * value_dim], rate, decay input [value_heads] each:
// layers/gated_delta_net.py. norm [value_dim]. window [slots][kernel - 1][channels] and state
// [slots][value_heads][key_dim][value_dim], float32, are read and written at the spans' slots; a span whose context is 0
// starts from zeros. Captures are written to slots of no span. A span goes on after a capture as if it began there: one
// token takes the recurrent step, more of them the chunked form.
// out: value_heads * value_dim wide. scratch: delta_net_scratch() floats.
struct DeltaNetArguments : MixerArguments {
    DeltaNetDims dims;
    const float *taps;                      // [kernel][channels], oldest first
    const float *decay_scale, *decay_bias;  // [value_heads]
    float *window, *state;
    const CaptureOf *captures = nullptr;
};
int64_t delta_net_scratch(const DeltaNetDims &dims, int threads);
void delta_net(Team &team, const DeltaNetArguments &a);

// rows: softmax over `experts` logits, the top_k most probable (ties: the lower id first), scaled to sum to one if
// `normalize`. ids, weights [top_k].
void route(const float *logits, int64_t experts, int64_t top_k, bool normalize, int32_t *ids, float *weights,
           const MixerKernels &k = mixers());

}  // namespace ft
