// Attention of a tile of query rows over one block of keys after the other (https://arxiv.org/abs/2205.14135).

namespace ft {
namespace {

// Addresses of keys [first, first + count) in elements from the cache's start.
void find_keys(const AttendTile &t, int64_t first, int64_t count, int64_t *at) {
    const AttentionShape &s = *t.shape;
    const int64_t step = s.kv_heads * s.head_dim;
    int64_t page = first / s.page_size, offset = first % s.page_size;
    for (int64_t i = 0; i < count; ++i) {
        at[i] = (t.pages[page] * s.page_size + offset) * step;
        if (++offset == s.page_size) offset = 0, ++page;
    }
}

// One head's scaled query rows in order, and rows of zeros up to `room` rows.
void gather_queries(const AttendTile &t, int64_t head, int64_t rows, int64_t room, float *query) {
    const int64_t group = t.shape->group(), dim = t.shape->head_dim;
    for (int64_t r = 0; r < rows; ++r) {
        const float *from = t.query + r / group * t.query_stride + (head * group + r % group) * dim;
        across(dim, [&](auto kind, int64_t i) {
            using T = decltype(kind);
            store<T>(query + r * dim + i, load<T>(from + i) * t.shape->scale);
        });
    }
    __builtin_memset(query + rows * dim, 0, (room - rows) * dim * sizeof(float));
}

// Heads take turns on a block of keys: side by side in the cache, they come from memory together.
template <class Path>
void attend_by(const AttendTile &t) {
    const int64_t dim = t.shape->head_dim, rows = t.tokens * t.shape->group();
    const int64_t room = (rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER * ROWS_TOGETHER;
    float *queries = t.scratch, *scores = queries + t.heads * room * dim, *rest = scores + room * KEY_BLOCK;
    for (int64_t h = 0; h < t.heads; ++h) {
        gather_queries(t, h, rows, room, queries + h * room * dim);
        Path::prepare(queries + h * room * dim, room * dim);
        float *sums = t.partial + h * t.partial_stride, *tops = sums + rows * dim;
        __builtin_memset(sums, 0, partial_floats(rows, dim) * sizeof(float));
        for (int64_t r = 0; r < rows; ++r) tops[r] = -INFINITE;
    }
    const auto count_at = [&](int64_t start) {
        const int64_t left = t.last - start;
        return left < 0 ? 0 : left < KEY_BLOCK ? left : KEY_BLOCK;
    };
    int64_t addresses[2][KEY_BLOCK], *now = addresses[0], *next = addresses[1];
    find_keys(t, t.first, count_at(t.first), now);
    for (int64_t start = t.first; start < t.last; start += KEY_BLOCK) {
        const int64_t count = count_at(start), following = count_at(start + KEY_BLOCK);
        find_keys(t, start + KEY_BLOCK, following, next);
        Fetch fetch(t, next, following);
        for (int64_t h = 0; h < t.heads; ++h) {
            const Path path(t, h, queries + h * room * dim, rows, rest);
            float *sums = t.partial + h * t.partial_stride, *tops = sums + rows * dim, *totals = tops + rows;
            path.score(now, count, scores, fetch);
            soften_block(t, start, count, scores, sums, tops, totals);
            path.add(now, count, scores, sums, fetch);
        }
        int64_t *const done = now;
        now = next;
        next = done;
    }
}

void attend_tile(const AttendTile &t) {
    const bool narrow = t.tokens * t.shape->group() <= NARROW_ROWS;
#if defined(__AVX512BF16__)
    if (t.bf16 && t.shape->head_dim % 32 == 0) return narrow ? attend_by<NarrowBf16>(t) : attend_by<WideBf16>(t);
#endif
    if (t.bf16) return narrow ? attend_by<Narrow<uint16_t>>(t) : attend_by<Wide<uint16_t>>(t);
    return narrow ? attend_by<Narrow<float>>(t) : attend_by<Wide<float>>(t);
}

}  // namespace
}  // namespace ft
