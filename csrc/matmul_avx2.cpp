// Products for AVX2 with FMA and F16C. AVX-VNNI, which some processors have beside it, multiplies 8-bit integers only:
// of no use while activations stay float32 or bfloat16.
#include <immintrin.h>

#include "matmul.h"

#define FT_VECTOR 8
#define FT_TOKENS 3

namespace ft {
namespace {

constexpr int ROWS = PANEL_ROWS, HALF = 8;  // rows of a panel, and of a vector

inline __m256i load_codes(const uint8_t *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }

// Two vectors with both columns of a row side by side, into a vector a column.
inline void store_columns(float *to, __m256 first_rows, __m256 last_rows) {
    const __m256 even = _mm256_shuffle_ps(first_rows, last_rows, 0x88), odd = _mm256_shuffle_ps(first_rows, last_rows, 0xdd);
    _mm256_storeu_ps(to, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(even), 0xd8)));
    _mm256_storeu_ps(to + ROWS, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(odd), 0xd8)));
}

// The same from float16.
inline void store_halves(float *to, __m256i halves, __m256 scale) {
    store_columns(to, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), scale),
                  _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), scale));
}

// Bytes `at` of 32-bit lanes, signed, times a scale a lane.
template <int AT>
inline void store_byte(float *to, __m256i lanes, __m256 scale) {
    const __m256i top = AT == 3 ? lanes : _mm256_slli_epi32(lanes, 24 - 8 * AT);
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32(top, 24)), scale));
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
inline void store_nibbles(float *to, __m256i lanes, __m256i table, __m256 scale) {
    const __m256i nibble = _mm256_set1_epi8(0x0f);
    const __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(lanes, nibble));
    const __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi32(lanes, 4), nibble));
    store_byte<0>(to + 0 * ROWS, low, scale);
    store_byte<2>(to + 1 * ROWS, low, scale);
    store_byte<0>(to + 2 * ROWS, high, scale);
    store_byte<2>(to + 3 * ROWS, high, scale);
    store_byte<1>(to + 4 * ROWS, low, scale);
    store_byte<3>(to + 5 * ROWS, low, scale);
    store_byte<1>(to + 6 * ROWS, high, scale);
    store_byte<3>(to + 7 * ROWS, high, scale);
}

// What the codes of 8 rows from column k of a group on are multiplied by.
template <Format F>
inline __m256 scale_of(const uint8_t *scales, int64_t k, int rows) {
    if constexpr (F == Format::nvfp4) {
        return _mm256_mul_ps(e4m3_scales(scales + k / 16 * ROWS + rows), _mm256_set1_ps(0.5f * HALF_OF_E4M3));
    } else if constexpr (F == Format::mxfp4) {
        return _mm256_mul_ps(e8m0_scales(scales + rows), _mm256_set1_ps(0.5f));
    } else if constexpr (F == Format::q8_0 || F == Format::q4_0) {
        return half_scales(scales + 2 * rows);
    } else if constexpr (F == Format::fp8_block) {
        float block;
        __builtin_memcpy(&block, scales, sizeof block);
        return _mm256_set1_ps(block * HALF_OF_E4M3);
    } else {
        return _mm256_set1_ps(F == Format::fp8 ? HALF_OF_E4M3 : 1.0f);
    }
}

template <Format F>
inline void decode(const uint8_t *codes, const uint8_t *scales, float *to) {
    constexpr int64_t STEP = F == Format::f32 ? 2 : 32 / code_bits(F);  // columns of 8 rows' codes in a load, or two
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_load_si128(reinterpret_cast<const __m128i *>(F == Format::q4_0 ? INT4 : E2M1_DOUBLED)));
    for (int rows = 0; rows < ROWS; rows += HALF, to += HALF) {
        __m256 scale = scale_of<F>(scales, 0, rows);
        for (int64_t k = 0; k < K_ALIGN; k += STEP) {
            const uint8_t *from = codes + (k / STEP * ROWS + rows) * (F == Format::f32 ? 8 : 4);
            float *column = to + k * ROWS;
            const __m256i lanes = load_codes(from);
            if constexpr (F == Format::f32) {
                store_columns(column, _mm256_castsi256_ps(lanes), _mm256_castsi256_ps(load_codes(from + 32)));
            } else if constexpr (F == Format::f16) {
                store_halves(column, lanes, scale);
            } else if constexpr (F == Format::bf16) {
                const __m256i odd = _mm256_and_si256(lanes, _mm256_set1_epi32(int(0xffff0000u)));
                _mm256_storeu_ps(column, _mm256_castsi256_ps(_mm256_slli_epi32(lanes, 16)));
                _mm256_storeu_ps(column + ROWS, _mm256_castsi256_ps(odd));
            } else if constexpr (F == Format::fp8 || F == Format::fp8_block) {
                const __m256i upper = _mm256_and_si256(lanes, _mm256_set1_epi16(short(0xff00)));
                store_halves(column, halves_of_e4m3(_mm256_slli_epi16(lanes, 8)), scale);
                store_halves(column + 2 * ROWS, halves_of_e4m3(upper), scale);
            } else if constexpr (F == Format::q8_0) {
                store_byte<0>(column, lanes, scale);
                store_byte<2>(column + ROWS, lanes, scale);
                store_byte<1>(column + 2 * ROWS, lanes, scale);
                store_byte<3>(column + 3 * ROWS, lanes, scale);
            } else {
                if (F == Format::nvfp4 && k == 16) scale = scale_of<F>(scales, k, rows);
                store_nibbles(column, lanes, table, scale);
            }
        }
    }
}

}  // namespace
}  // namespace ft

#include "matmul_decoded.inl"

namespace ft {
const MatmulKernels matmul_avx2 = {"avx2", multiply_panels, multiply_gated};
}
