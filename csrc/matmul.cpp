#include "matmul.h"

#include <algorithm>
#include <vector>

namespace ft {
namespace {

// A task's weights are enough to outweigh taking it, and stay in the second-level cache while the tokens pass over them.
constexpr int64_t TASK_BYTES = 128 << 10;
constexpr int64_t MOST_PANELS = 8;
constexpr int64_t TOKENS = 16;  // that share one pass over a task's weights

int64_t task_panels(const Packed &w, int threads) {
    const int64_t bytes = std::max<int64_t>(1, TASK_BYTES / std::max<int64_t>(1, panel_bytes(w.format, w.columns)));
    const int64_t even = panels(w.rows) / (4 * threads);  // some tasks for each thread
    return std::clamp<int64_t>(std::min(bytes, even) / 2 * 2, 2, MOST_PANELS);
}

}  // namespace

void linear(Team &team, const MatmulKernels &k, const Packed &w, const Rows &x, int64_t tokens, const float *bias,
            float *out, int64_t out_stride, bool add) {
    const int64_t all = panels(w.rows), step = task_panels(w, team.size());
    team.each((all + step - 1) / step, [&](int64_t task) {
        const int64_t first = task * step, last = std::min(first + step, all);
        const int64_t row = first * PANEL_ROWS, rows = std::min(last * PANEL_ROWS, w.rows) - row;
        const bool direct = !add && !bias && rows == (last - first) * PANEL_ROWS;
        alignas(64) float sums[TOKENS][MOST_PANELS * PANEL_ROWS];
        for (int64_t t = 0; t < tokens; t += TOKENS) {
            const int64_t count = std::min(TOKENS, tokens - t);
            const void *in[TOKENS];
            float *to[TOKENS];
            for (int64_t i = 0; i < count; ++i) {
                in[i] = x.row(t + i);
                to[i] = direct ? out + (t + i) * out_stride + row : sums[i];
            }
            k.panels(w, first, last, x.type, in, count, to);
            if (direct) continue;
            for (int64_t i = 0; i < count; ++i) {
                float *target = out + (t + i) * out_stride + row;
                for (int64_t r = 0; r < rows; ++r)
                    target[r] = (add ? target[r] : 0.0f) + (sums[i][r] + (bias ? bias[row + r] : 0.0f));
            }
        }
    });
}

}  // namespace ft
