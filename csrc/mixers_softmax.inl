// The running softmax of attention: scores of a block of keys become weights, sums so far are rescaled
// (https://arxiv.org/abs/1805.02867), and partial results are merged.

namespace ft {
namespace {

// Scores of one row become exp(score - top), zero outside [low, high). Returns what earlier sums are multiplied by.
inline float soften(float *scores, int64_t low, int64_t high, float &top, float &total) {
    const Integers lane = lane_numbers(LaneNumbers{});
    const auto seen = [&](int64_t i) {
        const Integers at = lane + int32_t(i);
        return (at >= int32_t(low)) & (at < int32_t(high));
    };
    Vector best = Vector{} + top;
    for (int64_t i = 0; i < KEY_BLOCK; i += LANES) {
        const Vector s = seen(i) ? load<Vector>(scores + i) : Vector{} - INFINITE;
        best = s > best ? s : best;
    }
    const float now = largest(best);
    const float base = now == -INFINITE ? 0.0f : now;  // all scores -Inf: nothing is added, 0 / 0 in the end
    Vector added = {};
    for (int64_t i = 0; i < KEY_BLOCK; i += LANES) {
        const Vector p = seen(i) ? exponential(load<Vector>(scores + i) - base) : Vector{};
        store(scores + i, p);
        added += p;
    }
    const float kept = now == top ? 1.0f : exponential(top - base);
    total = total * kept + sum(added);
    top = now;
    return kept;
}

inline void scale_row(float *row, int64_t width, float factor) {
    across(width, [&](auto kind, int64_t i) {
        using T = decltype(kind);
        store<T>(row + i, load<T>(row + i) * factor);
    });
}

// The rows' softmax over the block of keys that starts at `start`; sums so far are rescaled.
void soften_block(const AttendTile &t, int64_t start, int64_t count, float *scores, float *sums, float *tops,
                  float *totals) {
    const int64_t group = t.shape->group(), dim = t.shape->head_dim, window = t.shape->window;
    for (int64_t token = 0; token < t.tokens; ++token) {
        const int64_t end = t.position + token + 1 - start;  // first key of the block that the token does not see
        const int64_t high = end < count ? end : count;
        const int64_t low = window > 0 && end > window ? end - window : 0;
        for (int64_t r = token * group; r < (token + 1) * group; ++r) {
            float *row = scores + r * KEY_BLOCK;
            if (low >= high) {
                __builtin_memset(row, 0, KEY_BLOCK * sizeof(float));
                continue;
            }
            const float kept = soften(row, low, high, tops[r], totals[r]);
            if (kept != 1.0f) scale_row(sums + r * dim, dim, kept);
        }
    }
}

void merge_parts(const AttendMerge &m) {
    const int64_t dim = m.head_dim;
    const auto top_of = [&](int64_t part) { return m.partial[part * m.part_stride + m.rows * dim + m.row]; };
    const auto factor = [&](int64_t part) -> float & {
        return m.partial[part * m.part_stride + m.rows * (dim + 1) + m.row];  // first the part's sum
    };
    float top = -INFINITE;
    for (int64_t p = 0; p < m.parts; ++p) top = top_of(p) > top ? top_of(p) : top;
    const float base = top == -INFINITE ? 0.0f : top;
    float total = 0;
    for (int64_t p = 0; p < m.parts; ++p) {
        const float weight = exponential(top_of(p) - base);
        total += factor(p) * weight;
        factor(p) = weight;
    }
    const float scale = 1.0f / total;
    write_row(m.out, m.bf16, dim, [&](auto kind, int64_t i) {
        using T = decltype(kind);
        T acc = {};
        for (int64_t p = 0; p < m.parts; ++p)
            acc += load<T>(m.partial + p * m.part_stride + m.row * dim + i) * factor(p);
        acc *= scale;
        return m.gate == nullptr ? acc : acc * sigmoid(load<T>(m.gate + i));
    });
}

}  // namespace
}  // namespace ft
