// Included by tile_*.cpp, each compiled for its own instruction set after defining
//   FT_ISA      portable, avx2 or avx512; the table is named tile_ and this
//   FT_LANES    floats in a vector register
//   FT_TOKENS   activation rows of one register tile
// Includes no standard header with inline functions: the linker keeps one copy of such a function, and that copy could
// be the one compiled for a processor that the machine does not have.

#include "tile.h"

namespace ft {
namespace {

constexpr int LANES = FT_LANES;
constexpr int ROWS = 4;  // weight rows of one register tile: ROWS * FT_TOKENS accumulators

template <int L>
struct Lanes {
    typedef float Vec __attribute__((vector_size(L * 4)));
    typedef uint32_t Bits __attribute__((vector_size(L * 4)));
    typedef uint16_t Half __attribute__((vector_size(L * 2)));
};

template <int L>
inline typename Lanes<L>::Vec load(const float *p) {
    typename Lanes<L>::Vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

template <int L>
inline typename Lanes<L>::Vec load(const uint16_t *p) {
    typename Lanes<L>::Half h;
    __builtin_memcpy(&h, p, sizeof h);
    return (typename Lanes<L>::Vec)(__builtin_convertvector(h, typename Lanes<L>::Bits) << 16);
}

inline float scalar(const float *p) { return *p; }

inline float scalar(const uint16_t *p) {
    const uint32_t bits = uint32_t(*p) << 16;
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
}

template <class Vec>
inline float sum(Vec v) {
    typename Lanes<4>::Vec parts[sizeof v / 16];
    __builtin_memcpy(parts, &v, sizeof v);
    for (unsigned i = 1; i < sizeof v / 16; ++i) parts[0] += parts[i];
    return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

inline float silu(float x) { return x / (1.0f + __builtin_expf(-x)); }

// row . x, the row read in one straight run: with a single token the weights come from memory once, and memory serves
// one stream faster than ROWS in turn.
template <class W>
inline float dot(const W *row, const float *x, int64_t width) {
    // Loads of a half cache line, of float32 or bfloat16: whole lines were slower from memory (10-25 % on Zen 4).
    constexpr int L = LANES * sizeof(W) > 32 ? LANES / 2 : LANES;
    constexpr int CHAINS = 4;  // independent sums hide the latency of an addition
    typename Lanes<L>::Vec acc[CHAINS] = {};
    int64_t k = 0;
    for (; k + CHAINS * L <= width; k += CHAINS * L)
        for (int c = 0; c < CHAINS; ++c) acc[c] += load<L>(row + k + c * L) * load<L>(x + k + c * L);
    for (; k + L <= width; k += L) acc[0] += load<L>(row + k) * load<L>(x + k);
    float s = sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
    for (; k < width; ++k) s += scalar(row + k) * x[k];
    return s;
}

// dots[r][n] = row[r] . x[n]
template <int N, class W>
inline void tile(const W *const (&row)[ROWS], const float *const *x, int64_t width, float (&dots)[ROWS][N]) {
    if constexpr (N == 1) {
        for (int r = 0; r < ROWS; ++r) dots[r][0] = dot(row[r], x[0], width);
        return;
    }
    using Vec = Lanes<LANES>::Vec;
    Vec acc[ROWS][N] = {};
    int64_t k = 0;
    for (; k + LANES <= width; k += LANES) {
        Vec xs[N];
        for (int n = 0; n < N; ++n) xs[n] = load<LANES>(x[n] + k);
        for (int r = 0; r < ROWS; ++r) {
            const Vec w = load<LANES>(row[r] + k);
            for (int n = 0; n < N; ++n) acc[r][n] += w * xs[n];
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int n = 0; n < N; ++n) {
            dots[r][n] = sum(acc[r][n]);
            for (int64_t j = k; j < width; ++j) dots[r][n] += scalar(row[r] + j) * x[n][j];
        }
}

// Two gate rows and the two up rows that belong to them make one tile. An odd last row is computed twice.
template <int N, class W>
void gate_up_tokens(const W *gate, const W *up, const float *const *x, float *const *act, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r += 2) {
        const int64_t second = r + 1 < rows ? r + 1 : r;
        const W *const row[ROWS] = {gate + r * width, gate + second * width, up + r * width, up + second * width};
        float dots[ROWS][N];
        tile<N>(row, x, width, dots);
        for (int n = 0; n < N; ++n) {
            act[n][r] = silu(dots[0][n]) * dots[2][n];
            act[n][second] = silu(dots[1][n]) * dots[3][n];
        }
    }
}

template <int N, class W>
void down_tokens(const W *down, const float *const *act, const float *scale, float *const *out, int64_t rows,
                 int64_t width) {
    for (int64_t r = 0; r < rows; r += ROWS) {
        const int64_t left = rows - r < ROWS ? rows - r : ROWS;
        const W *row[ROWS];
        for (int i = 0; i < ROWS; ++i) row[i] = down + (r + (i < left ? i : 0)) * width;
        float dots[ROWS][N];
        tile<N>(row, act, width, dots);
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < left; ++i) out[n][r + i] += scale[n] * dots[i][n];
    }
}

template <class W>
void gate_up(const void *gate, const void *up, const float *const *x, float *const *act, int64_t count, int64_t rows,
             int64_t width) {
    const W *g = static_cast<const W *>(gate), *u = static_cast<const W *>(up);
    int64_t n = 0;
    for (; n + FT_TOKENS <= count; n += FT_TOKENS) gate_up_tokens<FT_TOKENS>(g, u, x + n, act + n, rows, width);
    for (; n < count; ++n) gate_up_tokens<1>(g, u, x + n, act + n, rows, width);
}

template <class W>
void down(const void *weights, const float *const *act, const float *scale, float *const *out, int64_t count,
          int64_t rows, int64_t width) {
    const W *w = static_cast<const W *>(weights);
    int64_t n = 0;
    for (; n + FT_TOKENS <= count; n += FT_TOKENS)
        down_tokens<FT_TOKENS>(w, act + n, scale + n, out + n, rows, width);
    for (; n < count; ++n) down_tokens<1>(w, act + n, scale + n, out + n, rows, width);
}

}  // namespace

#define FT_TABLE(isa) FT_TABLE_OF(isa)
#define FT_TABLE_OF(isa) \
    const TileKernels tile_##isa = {#isa, {gate_up<float>, gate_up<uint16_t>}, {down<float>, down<uint16_t>}}

FT_TABLE(FT_ISA);

}  // namespace ft
