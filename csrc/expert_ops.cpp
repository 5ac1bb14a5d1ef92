#include "expert_ops.h"

#include <algorithm>
#include <cstring>

#include "block.h"

namespace ft {
namespace {

// Routes sorted by expert, in order of tokens within one: those of the i-th expert that is used are
// [first[i], first[i + 1]).
struct Routes {
    std::vector<int32_t> count, experts;
    std::vector<int64_t> first, token;
    std::vector<float> weight;
    std::vector<const void *> x;  // the token's activations
    std::vector<void *> act;      // what the gated unit makes of them
    Block activations;

    int64_t used() const { return int64_t(experts.size()); }
    int64_t total() const { return first.back(); }
    void build(const ExpertBank &bank, const Rows &rows, int64_t tokens, int64_t top_k, const int32_t *ids,
               const float *weights);
};

void Routes::build(const ExpertBank &bank, const Rows &rows, int64_t tokens, int64_t top_k, const int32_t *ids,
                   const float *weights) {
    count.assign(size_t(bank.experts), 0);
    for (int64_t i = 0; i < tokens * top_k; ++i)
        if (ids[i] >= 0) ++count[size_t(ids[i])];
    experts.clear();
    first.assign(1, 0);
    for (int32_t e = 0; e < bank.experts; ++e) {
        if (count[size_t(e)] == 0) continue;
        experts.push_back(e);
        first.push_back(first.back() + count[size_t(e)]);
        count[size_t(e)] = int32_t(first[first.size() - 2]);  // from here on: where the next route goes
    }
    const size_t all = size_t(total());
    token.resize(all), weight.resize(all), x.resize(all), act.resize(all);
    const int64_t width = padded(bank.layout.intermediate), size = activation_bytes(rows.type);
    char *activation = activations.get<char>(all * size_t(width * size));
    for (int64_t i = 0; i < tokens * top_k; ++i) {
        if (ids[i] < 0) continue;
        const size_t place = size_t(count[size_t(ids[i])]++);
        token[place] = i / top_k;
        weight[place] = weights[i];
        x[place] = rows.row(i / top_k);
        act[place] = activation + int64_t(place) * width * size;
    }
}

// Callers of run_team wait for each other, so one is enough.
Routes &routes_of_process() {
    static Routes *const routes = new Routes;
    return *routes;
}

constexpr int64_t GATED_PAIRS = 2;   // of a task
constexpr int64_t DOWN_PANELS = 16;  // of a task, at most
constexpr int64_t TOKENS = 32;       // that share a buffer of outputs

// Some pairs of gate and up panels of the i-th expert in use.
void gated_task(const MatmulKernels &k, const ExpertBank &bank, Activation type, Routes &routes, int64_t i,
                int64_t first, int64_t last) {
    const ExpertLayout &layout = bank.layout;
    const uint8_t *block = bank.blocks + routes.experts[size_t(i)] * bank.stride;
    const Packed w{layout.gate_up, layout.intermediate, layout.hidden, block};
    GatedUnit unit;
    unit.clamped = bank.clamped, unit.alpha = bank.alpha, unit.limit = bank.limit;
    if (layout.bias) {
        unit.gate_bias = reinterpret_cast<const float *>(block + layout.bias_offset());
        unit.up_bias = unit.gate_bias + layout.intermediate;
    }
    const int64_t begin = routes.first[size_t(i)], end = routes.first[size_t(i) + 1];
    const int64_t size = activation_bytes(type), width = padded(layout.intermediate);
    for (int64_t t = begin; t < end; t += TOKENS) {
        const int64_t count = std::min(TOKENS, end - t);
        void *act[TOKENS];
        for (int64_t n = 0; n < count; ++n)
            act[n] = static_cast<char *>(routes.act[size_t(t + n)]) + first * PANEL_ROWS * size;
        k.gated(w, first, last, type, &routes.x[size_t(t)], count, unit, act);
        // Where the last panel ends before the padded width, the rest is multiplied too and must be zero.
        const int64_t filled = last * PANEL_ROWS;
        if (last == panels(layout.intermediate) && filled < width)
            for (int64_t n = 0; n < count; ++n)
                std::memset(static_cast<char *>(routes.act[size_t(t + n)]) + filled * size, 0, (width - filled) * size);
    }
}

// Some panels of down, of all experts in order: no two tasks add to the same element, and the order of additions is fixed.
void down_task(const MatmulKernels &k, const ExpertBank &bank, Activation type, Routes &routes, int64_t first,
               int64_t last, float *out, int64_t out_stride) {
    const ExpertLayout &layout = bank.layout;
    const int64_t row = first * PANEL_ROWS, rows = std::min(last * PANEL_ROWS, layout.hidden) - row;
    alignas(64) float sums[TOKENS][DOWN_PANELS * PANEL_ROWS];
    float *to[TOKENS];
    for (int64_t n = 0; n < TOKENS; ++n) to[n] = sums[n];
    for (int64_t i = 0; i < routes.used(); ++i) {
        const uint8_t *block = bank.blocks + routes.experts[size_t(i)] * bank.stride;
        const Packed w{layout.down, layout.hidden, layout.intermediate, block + layout.down_offset()};
        const float *bias = layout.bias ? reinterpret_cast<const float *>(block + layout.bias_offset()) +
                                              2 * layout.intermediate + row
                                        : nullptr;
        const int64_t begin = routes.first[size_t(i)], end = routes.first[size_t(i) + 1];
        for (int64_t t = begin; t < end; t += TOKENS) {
            const int64_t count = std::min(TOKENS, end - t);
            k.panels(w, first, last, type, &routes.act[size_t(t)], count, to);
            for (int64_t n = 0; n < count; ++n) {
                float *target = out + routes.token[size_t(t + n)] * out_stride + row;
                const float weight = routes.weight[size_t(t + n)];
                if (bias)
                    for (int64_t r = 0; r < rows; ++r) sums[n][r] += bias[r];
                for (int64_t r = 0; r < rows; ++r) target[r] += weight * sums[n][r];
            }
        }
    }
}

}  // namespace

void experts(Team &team, const MatmulKernels &k, const ExpertBank &bank, const Rows &x, int64_t tokens, int64_t top_k,
             const int32_t *ids, const float *weights, float *out, int64_t out_stride) {
    Routes &routes = routes_of_process();
    if (team.index() == 0) routes.build(bank, x, tokens, top_k, ids, weights);
    team.barrier();
    const int64_t pairs = panels(bank.layout.intermediate), steps = (pairs + GATED_PAIRS - 1) / GATED_PAIRS;
    team.sweep(routes.used() * steps, [&](int64_t task) {
        const int64_t first = task % steps * GATED_PAIRS;
        gated_task(k, bank, x.type, routes, task / steps, first, std::min(first + GATED_PAIRS, pairs));
    });
    const int64_t all = panels(bank.layout.hidden);
    const int64_t step = std::clamp<int64_t>(all / (8 * team.size()) / 2 * 2, 2, DOWN_PANELS);
    team.sweep((all + step - 1) / step, [&](int64_t task) {
        const int64_t first = task * step;
        down_task(k, bank, x.type, routes, first, std::min(first + step, all), out, out_stride);
    });
}

}  // namespace ft
