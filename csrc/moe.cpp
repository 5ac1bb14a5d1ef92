#include "moe.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu.h"
#include "pool.h"

namespace ft {
namespace {

// Rows of one task: large enough to outweigh taking it, small enough that a task's weights stay in the second-level
// cache while every token of the expert passes over them.
constexpr int64_t BLOCK_BYTES = 128 << 10;
constexpr int64_t MIN_ROWS = 4, MAX_ROWS = 64;

int64_t block_rows(int64_t row_bytes) {
    return std::clamp(BLOCK_BYTES / std::max<int64_t>(row_bytes, 1) / 4 * 4, MIN_ROWS, MAX_ROWS);
}

int64_t element_size(Storage storage) { return storage == Storage::float32 ? 4 : 2; }

const char *at(const void *base, int64_t elements, Storage storage) {
    return static_cast<const char *>(base) + elements * element_size(storage);
}

// Routes sorted by expert: those of the i-th expert that is used are [first[i], first[i + 1]).
struct Routes {
    std::vector<int64_t> experts, first, token;
    std::vector<float> scale;
};

Routes group_by_expert(const MoeArguments &a) {
    const int64_t all = a.shape.tokens * a.shape.top_k;
    std::vector<int64_t> count(a.shape.experts, 0);
    for (int64_t i = 0; i < all; ++i)
        if (a.expert_ids[i] >= 0) ++count[a.expert_ids[i]];
    Routes routes;
    std::vector<int64_t> next(a.shape.experts, 0);
    int64_t total = 0;
    for (int64_t e = 0; e < a.shape.experts; ++e) {
        next[e] = total;
        if (count[e] == 0) continue;
        routes.experts.push_back(e);
        routes.first.push_back(total);
        total += count[e];
    }
    routes.first.push_back(total);
    routes.token.resize(total);
    routes.scale.resize(total);
    for (int64_t i = 0; i < all; ++i) {
        if (a.expert_ids[i] < 0) continue;
        const int64_t place = next[a.expert_ids[i]]++;
        routes.token[place] = i / a.shape.top_k;
        routes.scale[place] = a.weights[i];
    }
    return routes;
}

// The hidden rows as float32; `owned` holds the copy where one is needed.
const float *as_float32(const MoeArguments &a, std::unique_ptr<float[]> &owned) {
    if (a.hidden_storage == Storage::float32) return static_cast<const float *>(a.hidden);
    const int64_t n = a.shape.tokens * a.shape.hidden;
    const uint16_t *from = static_cast<const uint16_t *>(a.hidden);
    owned.reset(new float[n]);
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = uint32_t(from[i]) << 16;
        std::memcpy(&owned[i], &bits, 4);
    }
    return owned.get();
}

}  // namespace

std::vector<const TileKernels *> usable_kernels() {
    std::vector<const TileKernels *> usable;
#if defined(__x86_64__)
    if (cpu_features().avx512) usable.push_back(&tile_avx512);
    if (cpu_features().avx2) usable.push_back(&tile_avx2);
#endif
    usable.push_back(&tile_portable);
    return usable;
}

void moe_experts(const MoeArguments &a, int threads, const TileKernels &kernels) {
    const int64_t hidden = a.shape.hidden, intermediate = a.shape.intermediate;
    const Routes routes = group_by_expert(a);
    const int64_t used = int64_t(routes.experts.size()), total = routes.first.back();
    if (total == 0 || hidden == 0) return;

    std::unique_ptr<float[]> converted;
    const float *rows = as_float32(a, converted);
    const std::unique_ptr<float[]> activations(new float[total * intermediate]);
    std::vector<const float *> x(total);
    std::vector<float *> act(total), out(total);
    for (int64_t i = 0; i < total; ++i) {
        x[i] = rows + routes.token[i] * hidden;
        act[i] = activations.get() + i * intermediate;
        out[i] = a.out + routes.token[i] * hidden;
    }

    const int64_t bytes = element_size(a.weight_storage);
    const int storage = int(a.weight_storage);

    // One task: some gate and up rows of one expert.
    const int64_t up_rows = block_rows(2 * hidden * bytes);
    const int64_t up_blocks = (intermediate + up_rows - 1) / up_rows;
    Pool::shared().run(threads, int(used * up_blocks), [&](int task) {
        const int64_t which = task / up_blocks, row = task % up_blocks * up_rows;
        const int64_t first = routes.first[which], count = routes.first[which + 1] - first;
        const int64_t gate_row = routes.experts[which] * 2 * intermediate + row;
        std::vector<float *> target(act.begin() + first, act.begin() + first + count);
        for (float *&p : target) p += row;
        kernels.gate_up[storage](at(a.gate_up, gate_row * hidden, a.weight_storage),
                                 at(a.gate_up, (gate_row + intermediate) * hidden, a.weight_storage), &x[first],
                                 target.data(), count, std::min(up_rows, intermediate - row), hidden);
    });

    // One task: some rows of `down` of all experts in order, so that no two tasks add to the same element and the
    // order of additions is fixed.
    const int64_t down_rows = block_rows(intermediate * bytes);
    const int64_t down_blocks = (hidden + down_rows - 1) / down_rows;
    Pool::shared().run(threads, int(down_blocks), [&](int task) {
        const int64_t row = task * down_rows;
        std::vector<float *> target(out);
        for (float *&p : target) p += row;
        for (int64_t which = 0; which < used; ++which) {
            const int64_t first = routes.first[which], count = routes.first[which + 1] - first;
            const int64_t down_row = routes.experts[which] * hidden + row;
            kernels.down[storage](at(a.down, down_row * intermediate, a.weight_storage), &act[first],
                                  &routes.scale[first], &target[first], count, std::min(down_rows, hidden - row),
                                  intermediate);
        }
    });
}

}  // namespace ft
