// Products for AVX2 with FMA and F16C. AVX-VNNI, which some processors have beside it, multiplies 8-bit integers only:
// of no use while activations stay float32 or bfloat16.
#include <immintrin.h>

#include "matmul.h"

#define FT_VECTOR 8
#define FT_TOKENS 3
#define FT_FUSED
#define FT_INLINE inline __attribute__((always_inline))

namespace ft {
namespace {

constexpr int ROWS = PANEL_ROWS, HALF = 8;  // rows of a panel, and of a vector

inline __m256i load_codes(const uint8_t *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }

// What a group's numbers are handed to, as vectors of 8 rows of one column: a Sink has take<COLUMN>(column, vector),
// where COLUMN is odd exactly if `column` is.

// Two vectors with both columns of a row side by side, as a vector a column.
template <int COLUMN, class Sink>
FT_INLINE void take_columns(Sink &sink, int64_t column, __m256 first_rows, __m256 last_rows) {
    const __m256 even = _mm256_shuffle_ps(first_rows, last_rows, 0x88);
    const __m256 odd = _mm256_shuffle_ps(first_rows, last_rows, 0xdd);
    sink.template take<COLUMN>(column, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(even), 0xd8)));
    sink.template take<COLUMN + 1>(column + 1, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(odd), 0xd8)));
}

// The same from float16.
template <int COLUMN, class Sink>
FT_INLINE void take_halves(Sink &sink, int64_t column, __m256i halves, __m256 scale) {
    take_columns<COLUMN>(sink, column, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), scale),
                         _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), scale));
}

// Bytes AT of 32-bit lanes, signed, times a scale a lane, which is 2^-24 of its own: a byte is moved to the top of its
// lane, which one shuffle does where two shifts would, and shifts have but one port on some processors.
constexpr float TOP = 0x1p-24f;

// SMALL: the scale is half of what E2M1_DOUBLED would need it to be, and not 2^-24 of that.
template <int AT, int COLUMN, bool SMALL = false, class Sink>
FT_INLINE void take_byte(Sink &sink, int64_t column, __m256i lanes, __m256 scale) {
    __m256i top;
    if constexpr (AT == 3) {
        top = _mm256_and_si256(lanes, _mm256_set1_epi32(int(0xff000000u)));
    } else {
        constexpr int Z = 0x80 << 16 | 0x80 << 8 | 0x80;  // three bytes of zeros below
        top = _mm256_shuffle_epi8(lanes, _mm256_setr_epi32(Z | AT << 24, Z | (AT + 4) << 24, Z | (AT + 8) << 24,
                                                           Z | (AT + 12) << 24, Z | AT << 24, Z | (AT + 4) << 24,
                                                           Z | (AT + 8) << 24, Z | (AT + 12) << 24));
    }
    __m256 number = _mm256_cvtepi32_ps(top);
    if constexpr (SMALL) number = _mm256_mul_ps(number, _mm256_set1_ps(0.5f * TOP));
    sink.template take<COLUMN>(column, _mm256_mul_ps(number, scale));
}

// e4m3 in the upper byte of each 16 bits, the lower one zero, as float16 of 2^-8 the value: its exponent is biased by 8
// more. Subnormals come out right; NaN, which float16 codes otherwise, is put in.
constexpr float HALF_OF_E4M3 = 256.0f;

inline __m256i halves_of_e4m3(__m256i upper) {
    const __m256i moved = _mm256_and_si256(_mm256_srai_epi16(upper, 1), _mm256_set1_epi16(short(0xbfff)));
    const __m256i magnitude = _mm256_and_si256(moved, _mm256_set1_epi16(0x7fff));
    return _mm256_or_si256(moved, _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f << 7)));
}

// Scales of 8 rows.
inline __m256 half_scales(const uint8_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}

inline __m256i bytes_to_lanes(const uint8_t *p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
}

inline __m256 e4m3_scales(const uint8_t *p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
    const __m256i upper = _mm256_castsi128_si256(_mm_unpacklo_epi8(_mm_setzero_si128(), bytes));
    return _mm256_cvtph_ps(_mm256_castsi256_si128(halves_of_e4m3(upper)));
}

// 2^(byte - 127), 255 is NaN; 2^-127 is a subnormal float32.
inline __m256 e8m0_scales(const uint8_t *p) {
    const __m256i bytes = bytes_to_lanes(p);
    const __m256i power = _mm256_max_epi32(_mm256_slli_epi32(bytes, 23), _mm256_set1_epi32(0x00400000));
    const __m256i nan = _mm256_cmpeq_epi32(bytes, _mm256_set1_epi32(255));
    return _mm256_castsi256_ps(_mm256_or_si256(power, _mm256_and_si256(nan, _mm256_set1_epi32(0x7fc00000))));
}

// Numbers of 4-bit codes as bytes: E2M1's doubled.
alignas(16) constexpr int8_t E2M1_DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
alignas(16) constexpr int8_t INT4[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

// 8 columns of 8 rows. A 32-bit lane is a row's: nibbles 0, 2 (even columns 0, 4) and 4, 6 (odd columns 1, 5) in one
// look-up, the others in a second.
template <bool SMALL, class Sink>
FT_INLINE void take_nibbles(Sink &sink, int64_t column, __m256i lanes, __m256i table, __m256 scale) {
    const __m256i nibble = _mm256_set1_epi8(0x0f);
    const __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(lanes, nibble));
    const __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi32(lanes, 4), nibble));
    take_byte<0, 0, SMALL>(sink, column + 0, low, scale);
    take_byte<2, 1, SMALL>(sink, column + 1, low, scale);
    take_byte<0, 2, SMALL>(sink, column + 2, high, scale);
    take_byte<2, 3, SMALL>(sink, column + 3, high, scale);
    take_byte<1, 4, SMALL>(sink, column + 4, low, scale);
    take_byte<3, 5, SMALL>(sink, column + 5, low, scale);
    take_byte<1, 6, SMALL>(sink, column + 6, high, scale);
    take_byte<3, 7, SMALL>(sink, column + 7, high, scale);
}

// Whether one of a group's 16 scales is too small for 2^-25 of it to be a float32 of full precision: below 2^-101, which
// no model has, but a file may.
template <Format F>
FT_INLINE bool small_scales(const uint8_t *scales) {
    if constexpr (F != Format::mxfp4) return false;
    const __m128i least = _mm_set1_epi8(26), bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(scales));
    return _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_min_epu8(bytes, least), least)) != 0xffff;
}

// What the codes of 8 rows from column k of a group on are multiplied by. SMALL: see small_scales.
template <Format F, bool SMALL>
FT_INLINE __m256 scale_of(const uint8_t *scales, int64_t k, int rows) {
    if constexpr (F == Format::nvfp4) {
        return _mm256_mul_ps(e4m3_scales(scales + k / 16 * ROWS + rows), _mm256_set1_ps(0.5f * HALF_OF_E4M3 * TOP));
    } else if constexpr (F == Format::mxfp4) {
        const __m256 scale = e8m0_scales(scales + rows);
        return SMALL ? scale : _mm256_mul_ps(scale, _mm256_set1_ps(0.5f * TOP));
    } else if constexpr (F == Format::q8_0 || F == Format::q4_0) {
        return _mm256_mul_ps(half_scales(scales + 2 * rows), _mm256_set1_ps(TOP));
    } else if constexpr (F == Format::fp8_block) {
        float block;
        __builtin_memcpy(&block, scales, sizeof block);
        return _mm256_set1_ps(block * HALF_OF_E4M3);
    } else {
        return _mm256_set1_ps(F == Format::fp8 ? HALF_OF_E4M3 : 1.0f);
    }
}

// Columns [k, k + STEP) of 8 rows of a group, `rows` the first of them, to `sink`.
template <Format F>
constexpr int64_t STEP = F == Format::f32 ? 2 : 32 / code_bits(F);  // columns of 8 rows' codes in a load, or two

template <Format F, bool SMALL, class Sink>
FT_INLINE void step(Sink &sink, const uint8_t *codes, int64_t k, int rows, __m256i table, __m256 scale) {
    const uint8_t *from = codes + (k / STEP<F> * ROWS + rows) * (F == Format::f32 ? 8 : 4);
    const __m256i lanes = load_codes(from);
    if constexpr (F == Format::f32) {
        take_columns<0>(sink, k, _mm256_castsi256_ps(lanes), _mm256_castsi256_ps(load_codes(from + 32)));
    } else if constexpr (F == Format::f16) {
        take_halves<0>(sink, k, lanes, scale);
    } else if constexpr (F == Format::bf16) {
        const __m256i odd = _mm256_and_si256(lanes, _mm256_set1_epi32(int(0xffff0000u)));
        sink.template take<0>(k, _mm256_castsi256_ps(_mm256_slli_epi32(lanes, 16)));
        sink.template take<1>(k + 1, _mm256_castsi256_ps(odd));
    } else if constexpr (F == Format::fp8 || F == Format::fp8_block) {
        const __m256i upper = _mm256_and_si256(lanes, _mm256_set1_epi16(short(0xff00)));
        take_halves<0>(sink, k, halves_of_e4m3(_mm256_slli_epi16(lanes, 8)), scale);
        take_halves<2>(sink, k + 2, halves_of_e4m3(upper), scale);
    } else if constexpr (F == Format::q8_0) {
        take_byte<0, 0>(sink, k, lanes, scale);
        take_byte<2, 1>(sink, k + 1, lanes, scale);
        take_byte<1, 2>(sink, k + 2, lanes, scale);
        take_byte<3, 3>(sink, k + 3, lanes, scale);
    } else {
        take_nibbles<SMALL>(sink, k, lanes, table, scale);
    }
}

template <Format F>
FT_INLINE __m256i table_of() {
    return _mm256_broadcastsi128_si256(
        _mm_load_si128(reinterpret_cast<const __m128i *>(F == Format::q4_0 ? INT4 : E2M1_DOUBLED)));
}

// To a buffer of columns of a panel.
struct Stored {
    float *to;

    template <int COLUMN>
    FT_INLINE void take(int64_t column, __m256 numbers) {
        _mm256_storeu_ps(to + column * ROWS, numbers);
    }
};

template <Format F, bool SMALL>
FT_INLINE void decode_group(const uint8_t *codes, const uint8_t *scales, float *to) {
    const __m256i table = table_of<F>();
    for (int rows = 0; rows < ROWS; rows += HALF) {
        Stored sink{to + rows};
        __m256 scale = scale_of<F, SMALL>(scales, 0, rows);
        for (int64_t k = 0; k < K_ALIGN; k += STEP<F>) {
            if (F == Format::nvfp4 && k == 16) scale = scale_of<F, SMALL>(scales, k, rows);
            step<F, SMALL>(sink, codes, k, rows, table, scale);
        }
    }
}

template <Format F>
inline void decode(const uint8_t *codes, const uint8_t *scales, float *to) {
    if (small_scales<F>(scales))
        decode_group<F, true>(codes, scales, to);
    else
        decode_group<F, false>(codes, scales, to);
}

// To sums of 8 rows and N tokens, those of even and of odd columns apart. No arrays: compilers keep those in memory.
template <int N>
struct Summed {
    Summed<N - 1> others;
    const float *x;
    __m256 even = _mm256_setzero_ps(), odd = even;

    FT_INLINE explicit Summed(const float *const *rows) : others(rows), x(rows[N - 1]) {}

    template <int COLUMN>
    FT_INLINE void take(int64_t column, __m256 numbers) {
        __m256 &sum = COLUMN % 2 ? odd : even;
        sum = _mm256_fmadd_ps(numbers, _mm256_broadcast_ss(x + column), sum);
        others.template take<COLUMN>(column, numbers);
    }

    FT_INLINE void forward() {
        x += K_ALIGN;
        others.forward();
    }

    FT_INLINE void store(float (*out)[ROWS], int rows) const {
        _mm256_storeu_ps(out[N - 1] + rows, _mm256_add_ps(even, odd));
        others.store(out, rows);
    }
};

template <>
struct Summed<0> {
    FT_INLINE explicit Summed(const float *const *) {}

    template <int COLUMN>
    FT_INLINE void take(int64_t, __m256) {}
    FT_INLINE void forward() {}
    FT_INLINE void store(float (*)[ROWS], int) const {}
};

// A group of a panel, both halves in turn, so that additions need not wait for each other.
template <Format F, bool SMALL, int N>
FT_INLINE void sum_group(const uint8_t *codes, const uint8_t *scales, __m256i table, Summed<N> &first,
                         Summed<N> &last) {
    __m256 first_scale = scale_of<F, SMALL>(scales, 0, 0), last_scale = scale_of<F, SMALL>(scales, 0, HALF);
    for (int64_t k = 0; k < K_ALIGN; k += STEP<F>) {
        if (F == Format::nvfp4 && k == 16) {
            first_scale = scale_of<F, SMALL>(scales, k, 0);
            last_scale = scale_of<F, SMALL>(scales, k, HALF);
        }
        step<F, SMALL>(first, codes, k, 0, table, first_scale);
        step<F, SMALL>(last, codes, k, HALF, table, last_scale);
    }
}

// See matmul_decoded.inl.
template <Format F, int N>
FT_INLINE void fused(const uint8_t *codes, const uint8_t *scales, int64_t groups, int64_t code_stride,
                     int64_t scale_stride, const float *const *x, float (*out)[ROWS]) {
    const __m256i table = table_of<F>();
    Summed<N> first(x), last(x);
    for (int64_t group = 0; group < groups; ++group, codes += code_stride, scales += scale_stride) {
        if (small_scales<F>(scales))
            sum_group<F, true>(codes, scales, table, first, last);
        else
            sum_group<F, false>(codes, scales, table, first, last);
        first.forward();
        last.forward();
    }
    first.store(out, 0);
    last.store(out, HALF);
}

}  // namespace
}  // namespace ft

#include "matmul_decoded.inl"

namespace ft {
const MatmulKernels matmul_avx2 = {"avx2", multiply_panels, multiply_gated};
}
