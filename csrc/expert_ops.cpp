#include "expert_ops.h"

#include <algorithm>
#include <cstring>

namespace ft {

void SortedRoutes::reserve(const ExpertBank &bank, Activation type, int64_t tokens, int64_t top_k) {
    const size_t routes = size_t(tokens * top_k), most = std::min(routes, size_t(bank.experts));
    next_ = blocks_[0].get<int32_t>(size_t(bank.experts));
    experts = blocks_[1].get<int32_t>(most);
    first = blocks_[2].get<int64_t>(most + 1);
    token = blocks_[3].get<int64_t>(routes);
    weight = blocks_[4].get<float>(routes);
    x = blocks_[5].get<const void *>(routes);
    act = blocks_[6].get<void *>(routes);
    activations_ = blocks_[7].get<char>(routes * size_t(padded(bank.layout.intermediate) * activation_bytes(type)));
}

void SortedRoutes::sort(const ExpertBank &bank, const Rows &rows, int64_t all_tokens, int64_t top_k,
                        const int32_t *ids, const float *weights) {
    reserve(bank, rows.type, all_tokens, top_k);
    type = rows.type, tokens = all_tokens;
    std::fill_n(next_, bank.experts, 0);
    for (int64_t i = 0; i < tokens * top_k; ++i)
        if (ids[i] >= 0) ++next_[ids[i]];
    used_ = first[0] = 0;
    for (int32_t e = 0; e < bank.experts; ++e) {
        if (next_[e] == 0) continue;
        experts[used_++] = e;
        first[used_] = first[used_ - 1] + next_[e];
        next_[e] = int32_t(first[used_ - 1]);
    }
    const int64_t row_bytes = padded(bank.layout.intermediate) * activation_bytes(type);
    for (int64_t i = 0; i < tokens * top_k; ++i) {
        if (ids[i] < 0) continue;
        const int64_t place = next_[ids[i]]++;
        token[place] = i / top_k;
        weight[place] = weights[i];
        x[place] = rows.row(i / top_k);
        act[place] = activations_ + place * row_bytes;
    }
}

size_t SortedRoutes::size() const {
    size_t bytes = 0;
    for (const Block &block : blocks_) bytes += block.size();
    return bytes;
}

void SortedRoutes::release() {
    for (Block &block : blocks_) block.release();
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
void gated_task(const MatmulKernels &k, const ExpertBank &bank, const SortedRoutes &routes, int64_t i, int64_t first,
                int64_t last) {
    const ExpertLayout &layout = bank.layout;
    const uint8_t *block = bank.blocks + routes.experts[i] * bank.stride;
    const Packed w{layout.gate_up, layout.intermediate, layout.hidden, block};
    GatedUnit unit;
    unit.clamped = bank.clamped, unit.alpha = bank.alpha, unit.limit = bank.limit;
    if (layout.bias) {
        unit.gate_bias = reinterpret_cast<const float *>(block + layout.bias_offset());
        unit.up_bias = unit.gate_bias + layout.intermediate;
    }
    const int64_t begin = routes.first[i], end = routes.first[i + 1];
    const Activation type = routes.type;
    const int64_t size = activation_bytes(type), width = padded(layout.intermediate);
    for (int64_t t = begin; t < end; t += TOKENS) {
        const int64_t count = std::min(TOKENS, end - t);
        void *act[TOKENS];
        for (int64_t n = 0; n < count; ++n)
            act[n] = static_cast<char *>(routes.act[t + n]) + first * PANEL_ROWS * size;
        k.gated(w, first, last, type, &routes.x[t], count, unit, act);
        // Where the last panel ends before the padded width, the rest is multiplied too and must be zero.
        const int64_t filled = last * PANEL_ROWS;
        if (last == panels(layout.intermediate) && filled < width)
            for (int64_t n = 0; n < count; ++n)
                std::memset(static_cast<char *>(routes.act[t + n]) + filled * size, 0, (width - filled) * size);
    }
}

// Some panels of down, of all experts in order: no two tasks add to the same element, and the order of additions is fixed.
void down_task(const MatmulKernels &k, const ExpertBank &bank, const SortedRoutes &routes, int64_t first, int64_t last,
               float *out, int64_t out_stride, bool add) {
    const ExpertLayout &layout = bank.layout;
    const int64_t row = first * PANEL_ROWS, rows = std::min(last * PANEL_ROWS, layout.hidden) - row;
    alignas(64) float sums[TOKENS][DOWN_PANELS * PANEL_ROWS];
    float *to[TOKENS];
    for (int64_t n = 0; n < TOKENS; ++n) to[n] = sums[n];
    if (!add)
        for (int64_t t = 0; t < routes.tokens; ++t) std::fill_n(out + t * out_stride + row, rows, 0.0f);
    for (int64_t i = 0; i < routes.used(); ++i) {
        const uint8_t *block = bank.blocks + routes.experts[i] * bank.stride;
        const Packed w{layout.down, layout.hidden, layout.intermediate, block + layout.down_offset()};
        const float *bias = layout.bias ? reinterpret_cast<const float *>(block + layout.bias_offset()) +
                                              2 * layout.intermediate + row
                                        : nullptr;
        const int64_t begin = routes.first[i], end = routes.first[i + 1];
        for (int64_t t = begin; t < end; t += TOKENS) {
            const int64_t count = std::min(TOKENS, end - t);
            k.panels(w, first, last, routes.type, &routes.act[t], count, to);
            for (int64_t n = 0; n < count; ++n) {
                float *target = out + routes.token[t + n] * out_stride + row;
                const float weight = routes.weight[t + n];
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
        const uint8_t *block = bank_.blocks + routes_.experts[expert_] * bank_.stride;
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

void run_experts(Team &team, const MatmulKernels &k, const ExpertBank &bank, const SortedRoutes &routes, float *out,
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

}  // namespace ft
