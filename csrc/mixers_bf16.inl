// Attention with bfloat16 products (AVX512_BF16: a pair of products is added to each float32 sum). Queries and weights
// are rounded to bfloat16, softmax and sums are float32.
#include <immintrin.h>

namespace ft {
namespace {

inline __m512i load_512(const void *p) { return _mm512_loadu_si512(p); }

inline void add_pairs(Vector &acc, __m512i a, __m512i b) {
    acc = (Vector)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}

inline __m512i broadcast_pair(const uint16_t *p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
}

// In place: [rows][width] float32 become [rows][width] bfloat16 from the same address on. width: a multiple of 32.
inline uint16_t *narrow_in_place(float *data, int64_t count) {
    uint16_t *out = reinterpret_cast<uint16_t *>(data);
    for (int64_t i = 0; i < count; i += 32) {
        const __m512 low = _mm512_loadu_ps(data + i), high = _mm512_loadu_ps(data + i + 16);
        const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
        __builtin_memcpy(out + i, &both, sizeof both);
    }
    return out;
}

// c [rows][columns] = (add ? c : 0) + a [rows][2 pairs] * b [pairs][columns][2]
template <int R, int V>
inline void pair_tile(int64_t pairs, const uint16_t *a, int64_t a_stride, const uint16_t *b, int64_t b_stride, bool add,
                      float *c, int64_t c_stride) {
    Vector acc[R][V] = {};
    for (int64_t k = 0; k < pairs; ++k, a += 2, b += b_stride) {
        __m512i row[V];
        for (int v = 0; v < V; ++v) row[v] = load_512(b + v * 32);
        for (int r = 0; r < R; ++r) {
            const __m512i x = broadcast_pair(a + r * a_stride);
            for (int v = 0; v < V; ++v) add_pairs(acc[r][v], x, row[v]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) {
            float *at = c + r * c_stride + v * LANES;
            store(at, add ? load<Vector>(at) + acc[r][v] : acc[r][v]);
        }
}

template <int V>
void pair_columns(int64_t rows, int64_t pairs, const uint16_t *a, int64_t a_stride, const uint16_t *b, int64_t b_stride,
                  bool add, float *c, int64_t c_stride) {
    int64_t r = 0;
    for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
        pair_tile<TILE_ROWS, V>(pairs, a + r * a_stride, a_stride, b, b_stride, add, c + r * c_stride, c_stride);
    for (; r + 2 <= rows; r += 2)
        pair_tile<2, V>(pairs, a + r * a_stride, a_stride, b, b_stride, add, c + r * c_stride, c_stride);
    for (; r < rows; ++r)
        pair_tile<1, V>(pairs, a + r * a_stride, a_stride, b, b_stride, add, c + r * c_stride, c_stride);
}

// columns: a multiple of 32.
void pair_product(int64_t rows, int64_t columns, int64_t pairs, const uint16_t *a, int64_t a_stride, const uint16_t *b,
                  bool add, float *c, int64_t c_stride) {
    int64_t n = 0;
    for (; n + 64 <= columns; n += 64)
        pair_columns<4>(rows, pairs, a, a_stride, b + 2 * n, 2 * columns, add, c + n, c_stride);
    for (; n < columns; n += 32)
        pair_columns<2>(rows, pairs, a, a_stride, b + 2 * n, 2 * columns, add, c + n, c_stride);
}

// Many query rows: keys are brought into the order [dim / 2][KEY_BLOCK][2], values into [KEY_BLOCK / 2][dim][2].
struct WideBf16 {
    const uint16_t *keys, *values;
    int64_t rows, dim;
    uint16_t *query, *block;

    WideBf16(const AttendTile &t, int64_t head, float *query, int64_t rows, float *scratch)
        : keys(static_cast<const uint16_t *>(t.keys) + head * t.shape->head_dim),
          values(static_cast<const uint16_t *>(t.values) + head * t.shape->head_dim),
          rows(rows),
          dim(t.shape->head_dim),
          query(reinterpret_cast<uint16_t *>(query)),
          block(reinterpret_cast<uint16_t *>(scratch)) {}

    static void prepare(float *query, int64_t count) { narrow_in_place(query, count); }

    void score(const int64_t *at, int64_t count, float *scores, Fetch &) const {
        for (int64_t k = 0; k < KEY_BLOCK; k += LANES)
            for (int64_t d = 0; d < dim; d += 32) {
                Integers v[LANES];
                for (int i = 0; i < LANES; ++i)
                    v[i] = k + i < count ? (Integers)load_512(keys + at[k + i] + d) : Integers{};
                transpose(v);
                for (int i = 0; i < LANES; ++i)
                    __builtin_memcpy(block + (d / 2 + i) * KEY_BLOCK * 2 + k * 2, &v[i], sizeof v[i]);
            }
        pair_product(rows, KEY_BLOCK, dim / 2, query, dim, block, false, scores, KEY_BLOCK);
    }

    // Turns the weights into bfloat16 where they are.
    void add(const int64_t *at, int64_t count, float *weights, float *sums, Fetch &) const {
        const uint16_t *rounded = narrow_in_place(weights, rows * KEY_BLOCK);
        const int64_t pairs = (count + 1) / 2;
        for (int64_t k = 0; k < pairs; ++k) {
            const bool two = 2 * k + 1 < count;
            const uint16_t *first = values + at[2 * k], *second = two ? values + at[2 * k + 1] : first;
            for (int64_t d = 0; d < dim; d += 32) pair_up(first + d, second + d, two, block + (k * dim + d) * 2);
        }
        pair_product(rows, dim, pairs, rounded, KEY_BLOCK, block, true, sums, dim);
    }

    // out [32][2]; the second is zeros where there is none.
    static void pair_up(const uint16_t *first, const uint16_t *second, bool two, uint16_t *out) {
        const __m512i a = load_512(first), b = two ? load_512(second) : _mm512_setzero_si512();
        const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
        const __m512i front = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        const __m512i back = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        _mm512_storeu_si512(out, _mm512_permutex2var_epi64(low, front, high));
        _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi64(low, back, high));
    }
};

// Few query rows: mixers_narrow.inl.
struct NarrowBf16 {
    const uint16_t *keys, *values;
    int64_t rows, dim;
    const uint16_t *query;

    NarrowBf16(const AttendTile &t, int64_t head, float *query, int64_t rows, float *)
        : keys(static_cast<const uint16_t *>(t.keys) + head * t.shape->head_dim),
          values(static_cast<const uint16_t *>(t.values) + head * t.shape->head_dim),
          rows(rows),
          dim(t.shape->head_dim),
          query(reinterpret_cast<uint16_t *>(query)) {}

    static void prepare(float *query, int64_t count) { narrow_in_place(query, count); }

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
        for (int64_t d = 0; d < dim; d += 32) {
            __m512i part[KEYS_TOGETHER];
            for (int j = 0; j < KEYS_TOGETHER; ++j) part[j] = load_512(keys + address[j] + d);
            fetch.some();
            for (int i = 0; i < ROWS_TOGETHER; ++i) {
                const __m512i q = load_512(query + (row + i) * dim + d);
                for (int j = 0; j < KEYS_TOGETHER; ++j) add_pairs(acc[i * KEYS_TOGETHER + j], q, part[j]);
            }
        }
        store_scores(sums_by_lane(acc), scores);
    }

    void add(const int64_t *at, int64_t count, float *weights, float *sums, Fetch &fetch) const {
        const uint16_t *rounded = narrow_in_place(weights, rows * KEY_BLOCK);
        int64_t r = 0;
        for (; r + 8 <= rows; r += 8)
            add_rows<8>(at, count, rounded + r * KEY_BLOCK, sums + r * dim, fetch);
        for (; r + 4 <= rows; r += 4)
            add_rows<4>(at, count, rounded + r * KEY_BLOCK, sums + r * dim, fetch);
        for (; r < rows; ++r)
            add_rows<1>(at, count, rounded + r * KEY_BLOCK, sums + r * dim, fetch);
    }

    template <int R>
    void add_rows(const int64_t *at, int64_t count, const uint16_t *weights, float *sums, Fetch &fetch) const {
        for (int64_t d = 0; d < dim; d += 32) {
            Vector low[R] = {}, high[R] = {};  // columns 0-3, 8-11, .. and 4-7, 12-15, ..: as unpacking leaves them
            const uint16_t *column = values + d;
            int64_t k = 0;
            for (; k + 2 <= count; k += 2) {
                fetch.some();
                add_two(load_512(column + at[k]), load_512(column + at[k + 1]), weights + k, low, high);
            }
            if (k < count) add_two(load_512(column + at[k]), _mm512_setzero_si512(), weights + k, low, high);
            const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
            const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
            for (int r = 0; r < R; ++r) {
                float *out = sums + r * dim + d;
                const __m512 a = (__m512)low[r], b = (__m512)high[r];
                store(out, load<Vector>(out) + (Vector)_mm512_permutex2var_ps(a, front, b));
                store(out + 16, load<Vector>(out + 16) + (Vector)_mm512_permutex2var_ps(a, back, b));
            }
        }
    }

    template <int R>
    static void add_two(__m512i first, __m512i second, const uint16_t *weights, Vector (&low)[R], Vector (&high)[R]) {
        const __m512i a = _mm512_unpacklo_epi16(first, second), b = _mm512_unpackhi_epi16(first, second);
        for (int r = 0; r < R; ++r) {
            const __m512i weight = broadcast_pair(weights + r * KEY_BLOCK);
            add_pairs(low[r], weight, a);
            add_pairs(high[r], weight, b);
        }
    }
};

}  // namespace
}  // namespace ft
