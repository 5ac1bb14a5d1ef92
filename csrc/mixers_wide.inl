// Attention of many query rows: blocks of keys and values are brought into the order that a product wants, in float32.

namespace ft {
namespace {

// Lines of the next block of keys and values, asked for in the order of their addresses while the block before is
// worked on. The processor's own prefetching follows that order, and no farther than the end of a page of the cache.
struct Fetch {
    const char *keys, *values;
    const int64_t *at;
    int64_t count, size, row_bytes;
    int64_t lines;  // at a time: so many that the last is asked for when the block before is almost done
    int64_t row = 0, offset = 0;

    Fetch(const AttendTile &t, const int64_t *at, int64_t count)
        : keys(static_cast<const char *>(t.keys)),
          values(static_cast<const char *>(t.values)),
          at(at),
          count(count),
          size(t.bf16 ? 2 : 4),
          row_bytes(t.heads * t.shape->head_dim * size),
          lines(t.tokens * t.shape->group() > 4 ? 2 : 4) {}

    // The next lines, into the second-level cache: a block does not fit into the first.
    void some() {
        if (row >= 2 * count) return;
        const char *line = (row < count ? keys + at[row] * size : values + at[row - count] * size) + offset;
        for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(line + 64 * i, 0, 2);
        offset += 64 * lines;
        if (offset >= row_bytes) {
            offset = 0;
            ++row;
        }
    }
};

// Rows of a cache of W, as float32.
template <class W>
struct Cached;
template <>
struct Cached<float> {
    template <class T>
    static T get(const float *p) {
        return load<T>(p);
    }
};
template <>
struct Cached<uint16_t> {
    template <class T>
    static T get(const uint16_t *p) {
        return load_bf16<T>(p);
    }
};

// Keys -> [dim][KEY_BLOCK]; columns from count on are zeros.
template <class W>
void transpose_keys(const W *keys, const int64_t *at, int64_t count, int64_t dim, float *out) {
    for (int64_t k = 0; k < KEY_BLOCK; k += LANES) {
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) {
            Vector v[LANES];
            for (int i = 0; i < LANES; ++i)
                v[i] = k + i < count ? Cached<W>::template get<Vector>(keys + at[k + i] + d) : Vector{};
            transpose(v);
            for (int i = 0; i < LANES; ++i) store(out + (d + i) * KEY_BLOCK + k, v[i]);
        }
        for (; d < dim; ++d)
            for (int i = 0; i < LANES; ++i)
                out[d * KEY_BLOCK + k + i] =
                    k + i < count ? Cached<W>::template get<float>(keys + at[k + i] + d) : 0.0f;
    }
}

template <class W>
void gather_values(const W *values, const int64_t *at, int64_t count, int64_t dim, float *out) {
    for (int64_t k = 0; k < count; ++k)
        across(dim, [&](auto kind, int64_t i) {
            using T = decltype(kind);
            store<T>(out + k * dim + i, Cached<W>::template get<T>(values + at[k] + i));
        });
}

template <class W>
struct Wide {
    const W *keys, *values;
    int64_t rows, dim;
    float *query, *block;  // [rows][dim], and room for KEY_BLOCK keys or values

    Wide(const AttendTile &t, int64_t head, float *query, int64_t rows, float *scratch)
        : keys(static_cast<const W *>(t.keys) + head * t.shape->head_dim),
          values(static_cast<const W *>(t.values) + head * t.shape->head_dim),
          rows(rows),
          dim(t.shape->head_dim),
          query(query),
          block(scratch) {}

    static void prepare(float *, int64_t) {}

    void score(const int64_t *at, int64_t count, float *scores, Fetch &) const {
        transpose_keys(keys, at, count, dim, block);
        product(rows, KEY_BLOCK, dim, {query, dim, 1}, block, KEY_BLOCK, 0, scores, KEY_BLOCK);
    }

    void add(const int64_t *at, int64_t count, float *weights, float *sums, Fetch &) const {
        gather_values(values, at, count, dim, block);
        product(rows, dim, count, {weights, KEY_BLOCK, 1}, block, dim, 1, sums, dim);
    }
};

}  // namespace
}  // namespace ft
