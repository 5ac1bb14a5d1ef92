// Loops shared by the versions of MatmulKernels. A version's file includes this after defining, in namespace ft and an
// unnamed namespace:
//
//   Sum                        16 float32, one a row of a panel
//   load<F, X>(codes)          CODE_COLUMNS<F> columns of a panel's 16 rows, from 64 bytes (128 of float32)
//   pair<F, X, I>(loaded)      columns 2 I and 2 I + 1 of them, ready to multiply
//   input<F, X>(x)             x[0] and x[1], ready to multiply; X: float, or uint16_t for bfloat16
//   multiply<F, X>(sum, pair, input)  sum + both columns' products
//   zero(), times(a, b), multiply_add(a, b, c) = a * b + c, store(float *, Sum)
//   group_scale<F>(scales, k)        Sum of the 16 rows' scales of the group that column k begins (see GROUP)
//   row_scale<F>(scales, width)      Sum of the 16 rows' own scales (only where ROW_SCALED)
//   gated_product(unit, row, rows, gate, up)  GatedUnit's function of 16 rows from row `row` on, of which `rows` exist
//   store_activation(X *, Sum)
//   MAX_TOKENS<F, X>           activation rows of one register tile, at most 8
//   SIDE_BY_SIDE<P, M>         groups of columns that P panels and M rows are to be summed in at the same time
//   prefetch(p)                asks for a cache line
//
// Includes no standard header with inline functions: the linker keeps one copy of such a function, and that copy could
// be the one compiled for a processor that the machine does not have.
//
// Each output is one sum in order of columns, whatever the tile: a token's result does not depend on the others of its
// batch.

namespace ft {
namespace {

template <int I>
struct Index {
    static constexpr int value = I;
};

template <int N, int I = 0, class Body>
FT_INLINE void each_pair(Body &&body) {
    body(Index<I>{});
    if constexpr (I + 1 < N) each_pair<N, I + 1>(body);
}

// sums[s][p][m] += columns [begin, end), counted from column s * GROUP<F> of panel p, times those of x[m]. More of them
// side by side than one, where an addition's latency would be waited for. What lies `ahead` bytes on is fetched.
template <Format F, class X, int S, int P, int M>
FT_INLINE void accumulate(const uint8_t *const (&codes)[P], const X *const (&x)[M], int64_t begin, int64_t end,
                          int64_t ahead, Sum (&sums)[S][P][M]) {
    for (int64_t k = begin; k < end; k += CODE_COLUMNS<F>) {
        decltype(load<F, X>(codes[0])) loaded[S][P];
        FT_UNROLL for (int s = 0; s < S; ++s)
            FT_UNROLL for (int p = 0; p < P; ++p) {
                const uint8_t *from = codes[p] + (k + s * GROUP<F>) * COLUMN_BYTES<F>;
                loaded[s][p] = load<F, X>(from);
                prefetch(from + ahead);
            }
        each_pair<CODE_COLUMNS<F> / 2>([&](auto index) FT_INLINE_LAMBDA {
            constexpr int I = decltype(index)::value;
            FT_UNROLL for (int s = 0; s < S; ++s) {
                decltype(pair<F, X, I>(loaded[0][0])) pairs[P];
                FT_UNROLL for (int p = 0; p < P; ++p) pairs[p] = pair<F, X, I>(loaded[s][p]);
                FT_UNROLL for (int m = 0; m < M; ++m) {
                    const auto in = input<F, X>(x[m] + k + s * GROUP<F> + 2 * I);
                    FT_UNROLL for (int p = 0; p < P; ++p)
                        sums[s][p][m] = multiply<F, X>(sums[s][p][m], pairs[p], in);
                }
            }
        });
    }
}

template <int S, int P, int M>
FT_INLINE void clear(Sum (&sums)[S][P][M]) {
    FT_UNROLL for (int s = 0; s < S; ++s)
        FT_UNROLL for (int p = 0; p < P; ++p)
            FT_UNROLL for (int m = 0; m < M; ++m) sums[s][p][m] = zero();
}

// sums += scales times S groups' sums, from column k on
template <Format F, class X, int S, int P, int M>
FT_INLINE void accumulate_groups(const uint8_t *const (&codes)[P], const uint8_t *const (&scales)[P],
                                 const X *const (&x)[M], int64_t k, int64_t width, int64_t ahead,
                                 Sum (&sums)[1][P][M]) {
    Sum groups[S][P][M];
    clear(groups);
    // The width is a multiple of 32: only a group of 128 can be cut short.
    const int64_t end = GROUP<F> <= K_ALIGN || k + GROUP<F> <= width ? k + GROUP<F> : width;
    accumulate<F, X>(codes, x, k, end, ahead, groups);
    FT_UNROLL for (int s = 0; s < S; ++s)
        FT_UNROLL for (int p = 0; p < P; ++p) {
            const Sum scale = group_scale<F>(scales[p], k + s * GROUP<F>);
            if (s == 0) prefetch(scales[p] + ahead + k / GROUP<F> * SCALE_BYTES<F>);
            FT_UNROLL for (int m = 0; m < M; ++m) sums[0][p][m] = multiply_add(groups[s][p][m], scale, sums[0][p][m]);
        }
}

// sums[0][p][m] = the 16 rows of panel p, at panel + p * stride, times x[m]; `width` columns, filled up
template <Format F, class X, int P, int M>
FT_INLINE void tile(const uint8_t *panel, int64_t stride, const void *const *rows, int64_t width,
                    Sum (&sums)[1][P][M]) {
    const uint8_t *codes[P], *scales[P];
    const X *x[M];
    FT_UNROLL for (int p = 0; p < P; ++p) {
        codes[p] = panel + p * stride;
        scales[p] = codes[p] + width * COLUMN_BYTES<F>;
    }
    FT_UNROLL for (int m = 0; m < M; ++m) x[m] = static_cast<const X *>(rows[m]);
    clear(sums);
    // The next panels, byte for byte while these are read: they lie behind them, and a processor's own prefetching
    // neither finds their beginnings nor keeps up with two streams of codes and two of scales.
    const int64_t ahead = P * stride;
    if constexpr (GROUP<F> == 0) {
        accumulate<F, X>(codes, x, 0, width, ahead, sums);
    } else {
        constexpr int SIDE = SIDE_BY_SIDE<P, M>;
        int64_t k = 0;
        for (; k + SIDE * GROUP<F> <= width; k += SIDE * GROUP<F>)
            accumulate_groups<F, X, SIDE>(codes, scales, x, k, width, ahead, sums);
        for (; k < width; k += GROUP<F>) accumulate_groups<F, X, 1>(codes, scales, x, k, width, ahead, sums);
    }
    if constexpr (ROW_SCALED<F>)
        FT_UNROLL for (int p = 0; p < P; ++p) {
            const Sum scale = row_scale<F>(scales[p], width);
            FT_UNROLL for (int m = 0; m < M; ++m) sums[0][p][m] = times(sums[0][p][m], scale);
        }
}

template <Format F, class X, int P, int M>
void product(const uint8_t *panel, int64_t stride, const void *const *x, int64_t width, float *const *out,
             int64_t row) {
    Sum sums[1][P][M];
    tile<F, X>(panel, stride, x, width, sums);
    FT_UNROLL for (int m = 0; m < M; ++m)
        FT_UNROLL for (int p = 0; p < P; ++p) store(out[m] + row + p * PANEL_ROWS, sums[0][p][m]);
}

template <Format F, class X, int M>
void gated_pair(const uint8_t *panel, int64_t stride, const void *const *x, int64_t width, void *const *act,
                int64_t row, const GatedUnit &unit, int64_t bias_row, int64_t rows) {
    Sum sums[1][2][M];
    tile<F, X>(panel, stride, x, width, sums);
    FT_UNROLL for (int m = 0; m < M; ++m)
        store_activation(static_cast<X *>(act[m]) + row, gated_product(unit, bias_row, rows, sums[0][0][m], sums[0][1][m]));
}

// Rows of the next tile when `left` remain: as even as can be, since a tile of one row costs most a row.
constexpr int64_t next_tokens(int64_t left, int64_t most) {
    const int64_t tiles = (left + most - 1) / most;
    return (left + tiles - 1) / tiles;
}

// Calls CALL(M) with M == tokens.
#define FT_BY_TOKENS(tokens, most, CALL)                          \
    switch (tokens) {                                             \
        case 1: CALL(1); break;                                   \
        case 2: if constexpr (most >= 2) { CALL(2); } break;      \
        case 3: if constexpr (most >= 3) { CALL(3); } break;      \
        case 4: if constexpr (most >= 4) { CALL(4); } break;      \
        case 5: if constexpr (most >= 5) { CALL(5); } break;      \
        case 6: if constexpr (most >= 6) { CALL(6); } break;      \
        case 7: if constexpr (most >= 7) { CALL(7); } break;      \
        case 8: if constexpr (most >= 8) { CALL(8); } break;      \
    }

template <Format F, class X>
void format_panels(const Packed &w, int64_t first, int64_t last, const void *const *x, int64_t count,
                   float *const *out) {
    constexpr int MOST = MAX_TOKENS<F, X>;
    const int64_t width = padded(w.columns), stride = panel_bytes(F, w.columns);
    for (int64_t i = first; i < last; i += 2) {
        const uint8_t *panel = w.data + i * stride;
        const int64_t row = (i - first) * PANEL_ROWS;
        for (int64_t t = 0, n; t < count; t += n) {
            n = next_tokens(count - t, MOST);
            if (i + 1 < last) {
#define FT_CALL(M) product<F, X, 2, M>(panel, stride, x + t, width, out + t, row)
                FT_BY_TOKENS(n, MOST, FT_CALL)
#undef FT_CALL
            } else {
#define FT_CALL(M) product<F, X, 1, M>(panel, stride, x + t, width, out + t, row)
                FT_BY_TOKENS(n, MOST, FT_CALL)
#undef FT_CALL
            }
        }
    }
}

template <Format F, class X>
void format_gated(const Packed &w, int64_t first, int64_t last, const void *const *x, int64_t count,
                  const GatedUnit &unit, void *const *act) {
    constexpr int MOST = MAX_TOKENS<F, X>;
    const int64_t width = padded(w.columns), stride = panel_bytes(F, w.columns);
    for (int64_t i = first; i < last; ++i) {
        const uint8_t *panel = w.data + 2 * i * stride;
        for (int64_t t = 0, n; t < count; t += n) {
            n = next_tokens(count - t, MOST);
#define FT_CALL(M)                                                                                           \
    gated_pair<F, X, M>(panel, stride, x + t, width, act + t, (i - first) * PANEL_ROWS, unit, i *PANEL_ROWS, \
                        w.rows - i * PANEL_ROWS)
            FT_BY_TOKENS(n, MOST, FT_CALL)
#undef FT_CALL
        }
    }
}

// Calls CALL(F, X) for the format and activation type.
#define FT_BY_FORMAT(format, type, CALL)                                                        \
    switch (format) {                                                                           \
        case Format::f32: FT_BY_TYPE(type, CALL, Format::f32); break;                           \
        case Format::f16: FT_BY_TYPE(type, CALL, Format::f16); break;                           \
        case Format::bf16: FT_BY_TYPE(type, CALL, Format::bf16); break;                         \
        case Format::fp8: FT_BY_TYPE(type, CALL, Format::fp8); break;                           \
        case Format::fp8_block: FT_BY_TYPE(type, CALL, Format::fp8_block); break;               \
        case Format::nvfp4: FT_BY_TYPE(type, CALL, Format::nvfp4); break;                       \
        case Format::mxfp4: FT_BY_TYPE(type, CALL, Format::mxfp4); break;                       \
        case Format::q8_0: FT_BY_TYPE(type, CALL, Format::q8_0); break;                         \
        case Format::q4_0: FT_BY_TYPE(type, CALL, Format::q4_0); break;                         \
    }
#define FT_BY_TYPE(type, CALL, F)        \
    if (type == Activation::bf16) {      \
        CALL(F, uint16_t);               \
    } else {                             \
        CALL(F, float);                  \
    }

void panels(const Packed &w, int64_t first, int64_t last, Activation type, const void *const *x, int64_t count,
            float *const *out) {
#define FT_CALL(F, X) format_panels<F, X>(w, first, last, x, count, out)
    FT_BY_FORMAT(w.format, type, FT_CALL)
#undef FT_CALL
}

void gated(const Packed &w, int64_t first, int64_t last, Activation type, const void *const *x, int64_t count,
           const GatedUnit &unit, void *const *act) {
#define FT_CALL(F, X) format_gated<F, X>(w, first, last, x, count, unit, act)
    FT_BY_FORMAT(w.format, type, FT_CALL)
#undef FT_CALL
}

}  // namespace
}  // namespace ft
