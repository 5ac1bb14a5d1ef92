// One Mixture-of-Experts feed-forward layer on the CPU: routed experts only, weights where they lie.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tile.h"

namespace ft {

struct MoeShape {
    int64_t tokens, hidden, top_k, experts, intermediate;
};

struct MoeArguments {
    MoeShape shape;
    Storage hidden_storage, weight_storage;
    const void *hidden;        // [tokens, hidden]
    const int64_t *expert_ids; // [tokens, top_k]; a negative id is a route not taken
    const float *weights;      // [tokens, top_k]
    const void *gate_up;       // [experts, 2 * intermediate, hidden], gate rows first
    const void *down;          // [experts, hidden, intermediate]
    float *out;                // [tokens, hidden], added to
};

// Versions of the arithmetic that this processor can execute, the best first.
std::vector<const TileKernels *> usable_kernels();

// out[t] += sum over k of weights[t, k] * down[e] (silu(gate[e] x[t]) * (up[e] x[t])),  e = expert_ids[t, k]
// All sums in float32. The result does not depend on the number of threads. Ids must be below `experts`.
void moe_experts(const MoeArguments &arguments, int threads, const TileKernels &kernels);

}  // namespace ft
