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

// The same in two parts. One thread sorts the routes; whatever tells the others of it orders memory. The sorted routes
// are valid until the same thread sorts others. Throws std::bad_alloc.
struct SortedRoutes;
SortedRoutes &sort_routes(const ExpertBank &bank, const Rows &x, int64_t tokens, int64_t top_k, const int32_t *ids,
                          const float *weights);

// How many routes are taken, and how many experts they use.
int64_t route_count(const SortedRoutes &routes);
int64_t expert_count(const SortedRoutes &routes);

// All threads of a team together; ends in a barrier. add: out += instead of out =.
void run_experts(Team &team, const MatmulKernels &k, const ExpertBank &bank, SortedRoutes &routes, float *out,
                 int64_t out_stride, bool add);

}  // namespace ft
