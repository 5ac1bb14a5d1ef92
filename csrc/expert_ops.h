// One layer of routed experts on packed blocks, all threads of a team together.
#pragma once

#include <array>

#include "block.h"
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

// Routes sorted by expert, in order of tokens within one: those of the i-th expert that is used are
// [first[i], first[i + 1]). What it points to is its own, kept from one sorting to the next.
class SortedRoutes {
public:
    // Room for so many tokens in such a bank, and for fewer. Throws std::bad_alloc. What was sorted is lost.
    void reserve(const ExpertBank &bank, Activation type, int64_t tokens, int64_t top_k);

    // Allocates, and can throw std::bad_alloc, only where reserve() was asked for less. A negative id is a route not
    // taken. x outlives what is made of the routes. ids [tokens][top_k] int32; weights the same, float32.
    void sort(const ExpertBank &bank, const Rows &x, int64_t tokens, int64_t top_k, const int32_t *ids,
              const float *weights);

    int64_t used() const { return used_; }          // experts
    int64_t total() const { return first[used_]; }  // routes that are taken

    size_t size() const;  // bytes
    void release();

    int32_t *experts = nullptr;  // [used()]
    int64_t *first = nullptr;    // [used() + 1]
    int64_t *token = nullptr;    // [total()], like all below
    float *weight = nullptr;
    const void **x = nullptr;  // the token's activations
    void **act = nullptr;      // what the gated unit makes of them
    Activation type = Activation::f32;
    int64_t tokens = 0;

private:
    int32_t *next_ = nullptr;  // [experts of the bank]: how many routes it has, then where its next one goes
    char *activations_ = nullptr;
    int64_t used_ = 0;
    std::array<Block, 8> blocks_;
};

// out[t] (+)= sum over k of weights[t, k] * expert ids[t, k] of x[t]. Routes that share an expert read its weights
// once. Does not depend on the number of threads. out [tokens][out_stride] float32; add: out += instead of out =.
// All threads of a team together; ends in a barrier. add: out += instead of out =.
void run_experts(Team &team, const MatmulKernels &k, const ExpertBank &bank, const SortedRoutes &routes, float *out,
                 int64_t out_stride, bool add);

}  // namespace ft
