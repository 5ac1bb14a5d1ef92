#include "expert_ops.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "block.h"

namespace ft {

// Routes sorted by expert, in order of tokens within one: those of the i-th expert that is used are
// [first[i], first[i + 1]).
struct SortedRoutes {
    std::vector<int32_t> count, experts;
    std::vector<int64_t> first, token;
    std::vector<float> weight;
    std::vector<const void *> x;  // the token's activations
    std::vector<void *> act;      // what the gated unit makes of them
    Block activations;
    Activation type = Activation::f32;
    int64_t tokens = 0;

    int64_t used() const { return int64_t(experts.size()); }
    int64_t total() const { return first.back(); }
    void build(const ExpertBank &bank, const Rows &rows, int64_t all_tokens, int64_t top_k, const int32_t *ids,
               const float *weights);
};

void SortedRoutes::build(const ExpertBank &bank, const Rows &rows, int64_t all_tokens, int64_t top_k,
                         const int32_t *ids, const float *weights) {
    type = rows.type, tokens = all_tokens;
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

namespace {

constexpr int64_t TASKS_A_THREAD = 8;  // at least, where there are so many panels: else threads end far apart
constexpr int64_t GATED_PAIRS = 2;     // of a task, at most
constexpr int64_t DOWN_PANELS = 16;    // of a task, at most
constexpr int64_t TOKENS = 32;         // that share a buffer of outputs
constexpr int64_t FETCHED_AHEAD = 128 << 10;  // bytes of down that a waiting thread asks for: they fit the L2 cache

// Panels of a task: an even number or 1.
int64_t task_panels(int64_t all, int threads, int64_t most) {
    const int64_t share = all / (TASKS_A_THREAD * threads);
    return share < 2 ? 1 : std::min(share / 2 * 2, most);
}

// Some pairs of gate and up panels of the i-th expert in use.
void gated_task(const MatmulKernels &k, const ExpertBank &bank, SortedRoutes &routes, int64_t i, int64_t first,
                int64_t last) {
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
    const Activation type = routes.type;
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
void down_task(const MatmulKernels &k, const ExpertBank &bank, SortedRoutes &routes, int64_t first, int64_t last,
               float *out, int64_t out_stride, bool add) {
    const ExpertLayout &layout = bank.layout;
    const int64_t row = first * PANEL_ROWS, rows = std::min(last * PANEL_ROWS, layout.hidden) - row;
    alignas(64) float sums[TOKENS][DOWN_PANELS * PANEL_ROWS];
    float *to[TOKENS];
    for (int64_t n = 0; n < TOKENS; ++n) to[n] = sums[n];
    if (!add)
        for (int64_t t = 0; t < routes.tokens; ++t) std::fill_n(out + t * out_stride + row, rows, 0.0f);
    for (int64_t i = 0; i < routes.used(); ++i) {
        const uint8_t *block = bank.blocks + routes.experts[size_t(i)] * bank.stride;
        const Packed w{layout.down, layout.hidden, layout.intermediate, block + layout.down_offset()};
        const float *bias = layout.bias ? reinterpret_cast<const float *>(block + layout.bias_offset()) +
                                              2 * layout.intermediate + row
                                        : nullptr;
        const int64_t begin = routes.first[size_t(i)], end = routes.first[size_t(i) + 1];
        for (int64_t t = begin; t < end; t += TOKENS) {
            const int64_t count = std::min(TOKENS, end - t);
            k.panels(w, first, last, routes.type, &routes.act[size_t(t)], count, to);
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

// Asks for the panels of down that a thread will begin with, a few lines a call, in the order of down_task.
class DownAhead {
public:
    DownAhead(const ExpertBank &bank, const SortedRoutes &routes, int64_t first, int64_t last, int64_t step)
        : bank_(bank), routes_(routes), panel_(first), last_(last), step_(step),
          panel_bytes_(panel_bytes(bank.layout.down, bank.layout.intermediate)) {}

    bool operator()() {
        if (panel_ >= last_ || asked_ >= FETCHED_AHEAD || routes_.used() == 0) return false;
        const int64_t size = std::min(step_, last_ - panel_) * panel_bytes_;
        const uint8_t *block = bank_.blocks + routes_.experts[size_t(expert_)] * bank_.stride;
        const uint8_t *from = block + bank_.layout.down_offset() + panel_ * panel_bytes_ + offset_;
        const int64_t bytes = std::min(LINES * PANEL_ALIGN, size - offset_);
        for (int64_t i = 0; i < bytes; i += PANEL_ALIGN) __builtin_prefetch(from + i, 0, 2);
        asked_ += bytes;
        if ((offset_ += bytes) < size) return true;
        offset_ = 0;
        if (++expert_ == routes_.used()) expert_ = 0, panel_ += step_;
        return true;
    }

private:
    static constexpr int64_t LINES = 8;
    const ExpertBank &bank_;
    const SortedRoutes &routes_;
    int64_t panel_, last_, step_, panel_bytes_;
    int64_t expert_ = 0, offset_ = 0, asked_ = 0;
};

}  // namespace

SortedRoutes &sort_routes(const ExpertBank &bank, const Rows &x, int64_t tokens, int64_t top_k, const int32_t *ids,
                          const float *weights) {
    thread_local SortedRoutes routes;
    routes.build(bank, x, tokens, top_k, ids, weights);
    return routes;
}

int64_t route_count(const SortedRoutes &routes) { return routes.total(); }
int64_t expert_count(const SortedRoutes &routes) { return routes.used(); }

void run_experts(Team &team, const MatmulKernels &k, const ExpertBank &bank, SortedRoutes &routes, float *out,
                 int64_t out_stride, bool add) {
    const int64_t all = panels(bank.layout.hidden), step = task_panels(all, team.size(), DOWN_PANELS);
    const int64_t down_tasks = (all + step - 1) / step;
    DownAhead ahead(bank, routes, team.first_task(down_tasks) * step, team.end_task(down_tasks) * step, step);
    const int64_t pairs = panels(bank.layout.intermediate);
    const int64_t few = task_panels(pairs * routes.used(), team.size(), GATED_PAIRS), steps = (pairs + few - 1) / few;
    team.sweep(
        routes.used() * steps,
        [&](int64_t task) {
            const int64_t first = task % steps * few;
            gated_task(k, bank, routes, task / steps, first, std::min(first + few, pairs));
        },
        ahead);
    team.sweep(down_tasks, [&](int64_t task) {
        const int64_t first = task * step;
        down_task(k, bank, routes, first, std::min(first + step, all), out, out_stride, add);
    });
}

void experts(Team &team, const MatmulKernels &k, const ExpertBank &bank, const Rows &x, int64_t tokens, int64_t top_k,
             const int32_t *ids, const float *weights, float *out, int64_t out_stride) {
    if (team.index() == 0) team.share(&sort_routes(bank, x, tokens, top_k, ids, weights));
    team.barrier();
    run_experts(team, k, bank, *static_cast<SortedRoutes *>(team.shared()), out, out_stride, true);
}

}  // namespace ft
