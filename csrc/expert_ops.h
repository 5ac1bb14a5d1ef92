// One layer of routed experts on packed blocks, all threads of a team together.
#pragma once

#include "matmul.h"

namespace ft {

struct ExpertBank {
    ExpertLayout layout;
    int64_t experts = 0;
    const uint8_t *blocks = nullptr;  // [experts][stride]
    int64_t stride = 0;               // bytes; layout.block_bytes() unless said otherwise
    bool clamped = false;             // GatedUnit's
    float alpha = 1.702f, limit = 7.0f;
};

// out[t] += sum over k of weights[t, k] * expert ids[t, k] of x[t]. A negative id is a route not taken. Routes that
// share an expert read its weights once. Does not depend on the number of threads. Ends in a barrier.
// ids [tokens][top_k] int32; weights the same, float32; out [tokens][out_stride] float32.
void experts(Team &team, const MatmulKernels &k, const ExpertBank &bank, const Rows &x, int64_t tokens, int64_t top_k,
             const int32_t *ids, const float *weights, float *out, int64_t out_stride);

}  // namespace ft
