#include "matmul.h"

#include <algorithm>
#include <vector>

namespace ft {
namespace {

// Few enough that no thread waits long for another's last task; more only where panels are small.
constexpr int64_t TASK_BYTES = 48 << 10;
constexpr int64_t MOST_PANELS = 8;
constexpr int64_t TOKENS = 16;  // that share one pass over a task's weights

int64_t task_panels(const Packed &w) {
    const int64_t fit = TASK_BYTES / std::max<int64_t>(1, panel_bytes(w.format, w.columns));
    return std::clamp<int64_t>(fit / 2 * 2, 2, MOST_PANELS);
}

int64_t task_count(const Packed &w) { return (panels(w.rows) + task_panels(w) - 1) / task_panels(w); }

// out[t][r] (+)= w[r] . x[t] + bias[r] for the rows r of one task.
void linear_task(const MatmulKernels &k, const Packed &w, int64_t task, const Rows &x, int64_t tokens,
                 const float *bias, float *out, int64_t out_stride, bool add) {
    const int64_t first = task * task_panels(w), last = std::min(first + task_panels(w), panels(w.rows));
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
}

}  // namespace

void linear(Team &team, const MatmulKernels &k, const Packed *parts, int64_t count, const Rows &x, int64_t tokens,
            const float *bias, float *out, int64_t out_stride, bool add) {
    int64_t tasks = 0;
    for (int64_t i = 0; i < count; ++i) tasks += task_count(parts[i]);
    team.sweep(tasks, [&](int64_t task) {
        const Packed *part = parts;
        int64_t row = 0;
        for (; task >= task_count(*part); ++part) {
            task -= task_count(*part);
            row += part->rows;
        }
        linear_task(k, *part, task, x, tokens, bias ? bias + row : nullptr, out + row, out_stride, add);
    });
}

void linear(Team &team, const MatmulKernels &k, const Packed &w, const Rows &x, int64_t tokens, const float *bias,
            float *out, int64_t out_stride, bool add) {
    linear(team, k, &w, 1, x, tokens, bias, out, out_stride, add);
}

}  // namespace ft
