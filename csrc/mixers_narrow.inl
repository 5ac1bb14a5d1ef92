// Attention of few query rows, as in decoding: keys and values are used as they lie in the cache, which has to deliver
// them once.

namespace ft {
namespace {

constexpr int64_t NARROW_ROWS = 16;  // query rows up to which bringing keys into another order does not pay
constexpr int KEYS_TOGETHER = 4, ROWS_TOGETHER = LANES / KEYS_TOGETHER;

// A tile of ROWS_TOGETHER x KEYS_TOGETHER scores from its sums by lane.
inline void store_scores(Vector tile, float *scores) {
    for (int i = 0; i < ROWS_TOGETHER; ++i)
        __builtin_memcpy(scores + i * KEY_BLOCK, reinterpret_cast<const char *>(&tile) + i * KEYS_TOGETHER * 4,
                         KEYS_TOGETHER * 4);
}

// sums [R][V vectors] += weights [R][count] * values.
template <class T, int R, int V, class W>
inline void add_columns(const W *values, const int64_t *at, int64_t count, const float *weights, float *sums,
                        int64_t dim, Fetch &fetch) {
    constexpr int WIDTH = sizeof(T) / 4;
    T acc[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) acc[r][v] = load<T>(sums + r * dim + v * WIDTH);
    for (int64_t k = 0; k < count; ++k) {
        if (V > 1) fetch.some();
        T row[V];
        for (int v = 0; v < V; ++v) row[v] = Cached<W>::template get<T>(values + at[k] + v * WIDTH);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) acc[r][v] += weights[r * KEY_BLOCK + k] * row[v];
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(sums + r * dim + v * WIDTH, acc[r][v]);
}

template <int R, class W>
inline void add_rows(const W *values, const int64_t *at, int64_t count, const float *weights, float *sums, int64_t dim,
                     Fetch &fetch) {
    int64_t d = 0;
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
        add_columns<Vector, R, 2>(values + d, at, count, weights, sums + d, dim, fetch);
    for (; d + LANES <= dim; d += LANES)
        add_columns<Vector, R, 1>(values + d, at, count, weights, sums + d, dim, fetch);
    for (; d < dim; ++d) add_columns<float, R, 1>(values + d, at, count, weights, sums + d, dim, fetch);
}

template <class W>
struct Narrow {
    const W *keys, *values;
    int64_t rows, dim;
    const float *query;  // [rows, up to a multiple of ROWS_TOGETHER][dim]

    Narrow(const AttendTile &t, int64_t head, float *query, int64_t rows, float *)
        : keys(static_cast<const W *>(t.keys) + head * t.shape->head_dim),
          values(static_cast<const W *>(t.values) + head * t.shape->head_dim),
          rows(rows),
          dim(t.shape->head_dim),
          query(query) {}

    static void prepare(float *, int64_t) {}

    void score(const int64_t *at, int64_t count, float *scores, Fetch &fetch) const {
        for (int64_t k = 0; k < count; k += KEYS_TOGETHER) {
            int64_t address[KEYS_TOGETHER];
            for (int j = 0; j < KEYS_TOGETHER; ++j) address[j] = at[k + j < count ? k + j : count - 1];
            for (int64_t r = 0; r < rows; r += ROWS_TOGETHER)
                score_tile(address, r, scores + r * KEY_BLOCK + k, fetch);
        }
    }

    void score_tile(const int64_t (&address)[KEYS_TOGETHER], int64_t row, float *scores, Fetch &fetch) const {
        Vector acc[LANES] = {};
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) {
            Vector part[KEYS_TOGETHER];
            for (int j = 0; j < KEYS_TOGETHER; ++j) part[j] = Cached<W>::template get<Vector>(keys + address[j] + d);
            fetch.some();
            for (int i = 0; i < ROWS_TOGETHER; ++i) {
                const Vector q = load<Vector>(query + (row + i) * dim + d);
                for (int j = 0; j < KEYS_TOGETHER; ++j) acc[i * KEYS_TOGETHER + j] += q * part[j];
            }
        }
        store_scores(sums_by_lane(acc), scores);
        for (; d < dim; ++d)
            for (int i = 0; i < ROWS_TOGETHER; ++i)
                for (int j = 0; j < KEYS_TOGETHER; ++j)
                    scores[i * KEY_BLOCK + j] +=
                        query[(row + i) * dim + d] * Cached<W>::template get<float>(keys + address[j] + d);
    }

    void add(const int64_t *at, int64_t count, float *weights, float *sums, Fetch &fetch) const {
        constexpr int WIDE = LANES == 16 ? 8 : 4;
        int64_t r = 0;
        for (; r + WIDE <= rows; r += WIDE)
            add_rows<WIDE>(values, at, count, weights + r * KEY_BLOCK, sums + r * dim, dim, fetch);
        for (; r + 2 <= rows; r += 2)
            add_rows<2>(values, at, count, weights + r * KEY_BLOCK, sums + r * dim, dim, fetch);
        for (; r < rows; ++r)
            add_rows<1>(values, at, count, weights + r * KEY_BLOCK, sums + r * dim, dim, fetch);
    }
};

}  // namespace
}  // namespace ft
