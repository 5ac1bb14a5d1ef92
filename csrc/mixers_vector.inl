// Vectors, conversions, exponentials and the small matrix product of the mixers.
//
// Included by mixers_*.cpp, each compiled for its own instruction set after defining
//   FT_ISA    portable, avx2, avx512 or avx512_bf16; the table is named mixers_ and this
//   FT_LANES  floats in a vector register
// Includes no standard header with inline functions: the linker keeps one copy of such a function, and that copy could
// be the one compiled for a processor that the machine does not have.

#include "mixers_kernels.h"

namespace ft {
namespace {

constexpr int LANES = FT_LANES;
constexpr int TILE_ROWS = 6, TILE_VECTORS = LANES == 16 ? 4 : 2;  // accumulators of a product, within the registers

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

constexpr float INFINITE = __builtin_inff();

// T is Vector, or float for what is left over at a row's end.
template <class T>
inline T load(const float *p) {
    T v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

template <class T>
inline void store(float *p, T v) {
    __builtin_memcpy(p, &v, sizeof v);
}

template <class T>
inline T load_bf16(const uint16_t *p);

template <>
inline Vector load_bf16<Vector>(const uint16_t *p) {
    Halves h;
    __builtin_memcpy(&h, p, sizeof h);
    return (Vector)(__builtin_convertvector(h, Bits) << 16);
}

template <>
inline float load_bf16<float>(const uint16_t *p) {
    const uint32_t bits = uint32_t(*p) << 16;
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
}

// Round to nearest, ties to even; a NaN stays one.
inline void store_bf16(uint16_t *p, Vector v) {
    const Bits bits = (Bits)v;
    const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Halves h = __builtin_convertvector(v != v ? (bits >> 16) | 0x40u : rounded, Halves);
    __builtin_memcpy(p, &h, sizeof h);
}

inline void store_bf16(uint16_t *p, float f) {
    uint32_t bits;
    __builtin_memcpy(&bits, &f, sizeof bits);
    *p = uint16_t(f != f ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// f(T{}, i) for i in steps of T's width.
template <class F>
inline void across(int64_t count, F &&f) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) f(Vector{}, i);
    for (; i < count; ++i) f(0.0f, i);
}

// Writes `width` values value(T{}, i) as bfloat16 or float32.
template <class F>
inline void write_row(void *out, bool bf16, int64_t width, F &&value) {
    if (bf16)
        across(width, [&](auto kind, int64_t i) { store_bf16(static_cast<uint16_t *>(out) + i, value(kind, i)); });
    else
        across(width, [&](auto kind, int64_t i) { store(static_cast<float *>(out) + i, value(kind, i)); });
}

inline float sum(Vector v) {
    typedef float Four __attribute__((vector_size(16)));
    Four parts[LANES / 4];
    __builtin_memcpy(parts, &v, sizeof v);
    for (int i = 1; i < LANES / 4; ++i) parts[0] += parts[i];
    return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

// NaN is passed over, unless nothing else is there.
inline float largest(Vector v) {
    typedef float Four __attribute__((vector_size(16)));
    Four parts[LANES / 4];
    __builtin_memcpy(parts, &v, sizeof v);
    for (int i = 1; i < LANES / 4; ++i) parts[0] = parts[i] > parts[0] ? parts[i] : parts[0];
    float top = parts[0][0];
    for (int i = 1; i < 4; ++i) top = parts[0][i] > top ? parts[0][i] : top;
    return top;
}

// Lane numbers 0 .. LANES - 1 as template arguments, for shuffles whose pattern is a constant.
template <int... I>
struct Numbers {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
    using type = Numbers<I...>;
};
using LaneNumbers = Count<LANES>::type;

template <int... I>
inline Integers lane_numbers(Numbers<I...>) {
    return Integers{I...};
}

// Lane i of the result: a[i ^ A] where bit S of i is clear, b[i ^ B] where it is set.
template <int S, int A, int B, class V, int... I>
inline V interleave(V a, V b, Numbers<I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (I & S ? LANES + (I ^ B) : (I ^ A))...);
#else
    return __builtin_shuffle(a, b, Integers{(I & S ? LANES + (I ^ B) : (I ^ A))...});
#endif
}

// Lane i becomes the sum of vector i.
template <int S = 1>
inline Vector sums_by_lane(Vector (&v)[LANES]) {
    for (int i = 0; i < LANES; i += 2 * S)
        v[i] = interleave<S, 0, 0>(v[i], v[i + S], LaneNumbers{}) + interleave<S, S, S>(v[i], v[i + S], LaneNumbers{});
    if constexpr (2 * S < LANES)
        return sums_by_lane<2 * S>(v);
    else
        return v[0];
}

template <int S = 1, class V>
inline void transpose(V (&v)[LANES]) {
    for (int i = 0; i < LANES; ++i) {
        if (i & S) continue;
        const V a = v[i], b = v[i + S];
        v[i] = interleave<S, 0, S>(a, b, LaneNumbers{});
        v[i + S] = interleave<S, S, 0>(a, b, LaneNumbers{});
    }
    if constexpr (2 * S < LANES) transpose<2 * S>(v);
}

inline float dot(const float *a, const float *b, int64_t count) {
    Vector acc = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) acc += load<Vector>(a + i) * load<Vector>(b + i);
    for (; i < count; ++i) rest += a[i] * b[i];
    return sum(acc) + rest;
}

// exp to 2 units in the last place; below exp(-87) it is 0. Coefficients: Cephes, expf.c.
inline Vector exponential(Vector x) {
    constexpr float LOWEST = -87.0f, HIGHEST = 88.37f;
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Vector shifted = x * 1.44269504088896341f + SHIFT;
    const Vector n = shifted - SHIFT;
    const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    // shifted's low bits hold n
    const Vector power = (Vector)(((Integers)shifted - 0x4b400000 + 127) << 23);
    p *= power;  // a NaN stays one, whatever power is
    p = x < LOWEST ? Vector{} : p;
    return x > HIGHEST ? Vector{} + INFINITE : p;
}

inline float exponential(float x) { return exponential(Vector{} + x)[0]; }

template <class T>
inline T sigmoid(T x) {
    return 1.0f / (1.0f + exponential(-x));
}

template <class T>
inline T silu(T x) {
    return x / (1.0f + exponential(-x));
}

// 1 / root(mean(x^2) + epsilon)
inline float inverse_root_mean(const float *x, int64_t width, float epsilon) {
    return 1.0f / __builtin_sqrtf(dot(x, x, width) / float(width) + epsilon);
}

// A matrix whose element (r, k) is data[r * row + k * column].
struct Strided {
    const float *data;
    int64_t row, column;
};

template <class T, int R, int V>
inline void product_tile(int64_t depth, const Strided &a, const float *b, int64_t b_stride, float beta, float *c,
                         int64_t c_stride) {
    constexpr int WIDTH = sizeof(T) / 4;
    T acc[R][V] = {};
    const float *x = a.data;
    for (int64_t k = 0; k < depth; ++k, x += a.column, b += b_stride) {
        T row[V];
        for (int v = 0; v < V; ++v) row[v] = load<T>(b + v * WIDTH);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) acc[r][v] += x[r * a.row] * row[v];
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) {
            float *at = c + r * c_stride + v * WIDTH;
            store(at, beta == 0 ? acc[r][v] : beta * load<T>(at) + acc[r][v]);
        }
}

template <class T, int V>
inline void product_columns(int64_t rows, int64_t depth, Strided a, const float *b, int64_t b_stride, float beta,
                            float *c, int64_t c_stride) {
    const auto advance = [&](int count) {
        rows -= count;
        a.data += count * a.row;
        c += count * c_stride;
    };
    for (; rows >= TILE_ROWS; advance(TILE_ROWS))
        product_tile<T, TILE_ROWS, V>(depth, a, b, b_stride, beta, c, c_stride);
    for (; rows >= 4; advance(4)) product_tile<T, 4, V>(depth, a, b, b_stride, beta, c, c_stride);
    for (; rows >= 2; advance(2)) product_tile<T, 2, V>(depth, a, b, b_stride, beta, c, c_stride);
    for (; rows >= 1; advance(1)) product_tile<T, 1, V>(depth, a, b, b_stride, beta, c, c_stride);
}

// c [rows, columns] = beta * c + a [rows, depth] * b [depth, columns]; with beta 0, c is not read.
void product(int64_t rows, int64_t columns, int64_t depth, const Strided &a, const float *b, int64_t b_stride,
             float beta, float *c, int64_t c_stride) {
    constexpr int WIDE = TILE_VECTORS * LANES;
    int64_t n = 0;
    for (; n + WIDE <= columns; n += WIDE)
        product_columns<Vector, TILE_VECTORS>(rows, depth, a, b + n, b_stride, beta, c + n, c_stride);
    for (; n + LANES <= columns; n += LANES)
        product_columns<Vector, 1>(rows, depth, a, b + n, b_stride, beta, c + n, c_stride);
    for (; n < columns; ++n) product_columns<float, 1>(rows, depth, a, b + n, b_stride, beta, c + n, c_stride);
}

}  // namespace
}  // namespace ft
