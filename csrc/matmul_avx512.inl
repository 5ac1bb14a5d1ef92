// AVX-512 (F, BW, DQ, VL, VBMI) arithmetic of matmul.inl. Included by matmul_avx512.cpp and matmul_avx512_bf16.cpp, each
// compiled for its own instruction set and table; FT_BF16 tells whether AVX512_BF16 is part of it.

#if defined(__GNUC__) && !defined(__clang__)
// GCC's own headers begin undefined registers as `x = x` (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include "matmul.h"
#include "matmul_format.h"

#if defined(__clang__)
#define FT_UNROLL _Pragma("unroll")
#else
#define FT_UNROLL _Pragma("GCC unroll 16")
#endif
#define FT_INLINE inline __attribute__((always_inline))
#define FT_INLINE_LAMBDA __attribute__((always_inline))

namespace ft {
namespace {

using Sum = __m512;

// Codes that bfloat16 holds exactly are multiplied by VDPBF16PS where activations are bfloat16, else all by float32.
template <Format F, class X>
constexpr bool DOT = FT_BF16 && sizeof(X) == 2 && F != Format::f32 && F != Format::f16;

FT_INLINE Sum zero() { return _mm512_setzero_ps(); }
FT_INLINE Sum times(Sum a, Sum b) { return _mm512_mul_ps(a, b); }
FT_INLINE Sum multiply_add(Sum a, Sum b, Sum c) { return _mm512_fmadd_ps(a, b, c); }
FT_INLINE void store(float *p, Sum v) { _mm512_storeu_ps(p, v); }

// Two columns as float32, and as bfloat16 side by side in each 32 bits.
struct Floats {
    __m512 even, odd;
};
using Halves = __m512i;

FT_INLINE Floats split(Halves v) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000u))))};
}

FT_INLINE __m512i spread16(const uint16_t (&table)[16]) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(table)));
}

// 4-bit codes as bfloat16, by code.
alignas(64) constexpr uint16_t E2M1[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                           0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
alignas(64) constexpr uint16_t INT4[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                           0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

// bfloat16 of the magnitudes 0..127 of an 8-bit code, low and high bytes apart.
struct ByteTable {
    alignas(64) uint8_t low[128] = {}, high[128] = {};

    constexpr void set(int code, uint16_t value) {
        low[code] = uint8_t(value);
        high[code] = uint8_t(value >> 8);
    }
};

constexpr uint16_t bf16_of_integer(int n) {
    if (n == 0) return 0;
    int exponent = 0;
    while (n >> (exponent + 1)) ++exponent;
    return uint16_t(((127 + exponent) << 7) + ((n << 7 >> exponent) & 0x7f));
}

// OCP 8-bit floating point specification 1.0, E4M3: bias 7, no infinities, NaN at 0x7f.
constexpr uint16_t bf16_of_e4m3(int code) {
    const int exponent = code >> 3, mantissa = code & 7;
    if (code == 0x7f) return 0x7fc0;
    if (exponent > 0) return uint16_t(((exponent + 120) << 7) + (mantissa << 4));
    return mantissa == 0 ? 0 : uint16_t(bf16_of_integer(mantissa) - (9 << 7));
}

constexpr ByteTable e4m3_table() {
    ByteTable t;
    for (int i = 0; i < 128; ++i) t.set(i, bf16_of_e4m3(i));
    return t;
}

constexpr ByteTable int8_table() {
    ByteTable t;
    for (int i = 0; i < 128; ++i) t.set(i, bf16_of_integer(i));
    return t;
}

constexpr ByteTable E4M3_BYTES = e4m3_table(), INT8_BYTES = int8_table();

// ---- codes ----

FT_INLINE __m512i or_sign(__m512i magnitude, __m512i codes) {  // magnitude | (codes & 0x80)
    return _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(char(0x80)), 0xf8);
}

FT_INLINE __m512i look_up(const uint8_t (&table)[128], __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
}

// bfloat16 of 64 8-bit codes, low and high bytes apart, each at its code's place.
struct Bytes {
    __m512i low, high;

    template <int I>
    FT_INLINE Halves pair() const {
        if constexpr (I == 0) return _mm512_mask_mov_epi8(_mm512_slli_epi16(high, 8), 0x5555555555555555, low);
        return _mm512_mask_mov_epi8(_mm512_srli_epi16(low, 8), 0xaaaaaaaaaaaaaaaa, high);
    }
};

FT_INLINE Bytes bytes_of_e4m3(__m512i codes) {
    return {look_up(E4M3_BYTES.low, codes),
            or_sign(look_up(E4M3_BYTES.high, codes), codes)};
}

FT_INLINE Bytes bytes_of_int8(__m512i codes) {
    const __m512i magnitude = _mm512_abs_epi8(codes);
    const __m512i high = or_sign(look_up(INT8_BYTES.high, magnitude), codes);
    // -128 looks up the entry of 0, whose low byte it shares.
    const __mmask64 lowest = _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(-128));
    return {look_up(INT8_BYTES.low, magnitude), _mm512_mask_mov_epi8(high, lowest, _mm512_set1_epi8(char(0xc3)))};
}

template <Format F, class X>
FT_INLINE auto load(const uint8_t *codes) {
    __m512i raw = _mm512_loadu_si512(codes);
    __asm__("" : "+v"(raw));  // else each of the shifts reads memory again, and fewer loads can be under way
    if constexpr (F == Format::f32) {
        // Rows 0 to 7 and 8 to 15 with both columns side by side.
        const __m512 low = _mm512_castsi512_ps(raw), high = _mm512_loadu_ps(codes + 64);
        const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i odds = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        return Floats{_mm512_permutex2var_ps(low, evens, high), _mm512_permutex2var_ps(low, odds, high)};
    } else if constexpr (F == Format::fp8 || F == Format::fp8_block) {
        return bytes_of_e4m3(raw);
    } else if constexpr (DOT<F, X> && F == Format::q8_0) {
        return bytes_of_int8(raw);
    } else {
        return raw;
    }
}

template <Format F, class X, int I, class Loaded>
FT_INLINE auto pair(const Loaded &loaded) {
    if constexpr (F == Format::f32) {
        return loaded;
    } else if constexpr (F == Format::f16) {
        return Floats{_mm512_cvtph_ps(_mm512_cvtepi32_epi16(loaded)),
                      _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(loaded, 16)))};
    } else if constexpr (F == Format::q8_0 && !DOT<F, X>) {
        return Floats{_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(loaded, 24 - 8 * I), 24)),
                      _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(loaded, 8 - 8 * I), 24))};
    } else {
        Halves halves;
        if constexpr (F == Format::bf16) {
            halves = loaded;
        } else if constexpr (F == Format::fp8 || F == Format::fp8_block || F == Format::q8_0) {
            halves = loaded.template pair<I>();
        } else {
            // VPERMW uses the five low bits of an index: its own nibble and a bit that the doubled table ignores.
            halves = _mm512_permutexvar_epi16(I == 0 ? loaded : _mm512_srli_epi16(loaded, 4 * I),
                                              spread16(F == Format::q4_0 ? INT4 : E2M1));
        }
        if constexpr (DOT<F, X>)
            return halves;
        else
            return split(halves);
    }
}

// ---- products ----

template <Format F, class X>
FT_INLINE auto input(const X *x) {
    if constexpr (sizeof(X) == 4) {
        return Floats{_mm512_set1_ps(x[0]), _mm512_set1_ps(x[1])};
    } else {
        int32_t both;
        __builtin_memcpy(&both, x, sizeof both);
        const Halves halves = _mm512_set1_epi32(both);
        if constexpr (DOT<F, X>)
            return halves;
        else
            return split(halves);
    }
}

template <Format F, class X, class Operand>
FT_INLINE Sum multiply(Sum sum, const Operand &weights, const Operand &x) {
#if FT_BF16
    if constexpr (DOT<F, X>)
        return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)x);
    else
#endif
        return _mm512_fmadd_ps(weights.odd, x.odd, _mm512_fmadd_ps(weights.even, x.even, sum));
}

// ---- scales ----

// e4m3 scales are read as float16, whose exponent is biased by 8 more: 2^-8 of the value, subnormals included.
// row_scale() makes up for it.
constexpr float E4M3_AS_HALF = 256.0f;

FT_INLINE Sum nan() { return _mm512_set1_ps(__builtin_nanf("")); }

template <Format F>
FT_INLINE Sum group_scale(const uint8_t *scales, int64_t k) {
    const int64_t group = k / GROUP<F>;
    if constexpr (F == Format::fp8_block) {
        return _mm512_set1_ps(reinterpret_cast<const float *>(scales)[group]);
    } else if constexpr (F == Format::q8_0 || F == Format::q4_0) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(scales + 32 * group)));
    } else {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(scales + 16 * group));
        if constexpr (F == Format::nvfp4) {
            const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);  // the sign to bits 14 and 15
            const Sum v = _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16(short(0xbfff))));
            const __m128i magnitude = _mm_and_si128(bytes, _mm_set1_epi8(0x7f));
            return _mm512_mask_mov_ps(v, _mm_cmpeq_epi8_mask(magnitude, _mm_set1_epi8(0x7f)), nan());
        } else {
            // OCP E8M0: 2^(byte - 127), 255 is NaN; 2^-127 is a subnormal float32.
            const __m512i exponent = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
            const __m512i v = _mm512_max_epi32(exponent, _mm512_set1_epi32(0x00400000));
            return _mm512_mask_mov_ps(_mm512_castsi512_ps(v), _mm_cmpeq_epi8_mask(bytes, _mm_set1_epi8(-1)), nan());
        }
    }
}

template <Format F>
FT_INLINE Sum row_scale(const uint8_t *scales, int64_t width) {
    if constexpr (F == Format::fp8) return _mm512_loadu_ps(scales);
    return _mm512_mul_ps(_mm512_loadu_ps(scales + width), _mm512_set1_ps(E4M3_AS_HALF));
}

// ---- the gated unit ----

// e^x to about 2 ulp: x = n ln 2 + r, a polynomial of r (Cephes expf), times 2^n.
FT_INLINE Sum exp(Sum x) {
    x = _mm512_min_ps(_mm512_set1_ps(128.0f), _mm512_max_ps(_mm512_set1_ps(-128.0f), x));  // second operand if NaN
    const Sum n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    Sum r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    Sum p = _mm512_set1_ps(1.9875691500e-4f);
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

FT_INLINE Sum sigmoid(Sum x) {
    const Sum one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, exp(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

FT_INLINE Sum gated_product(const GatedUnit &unit, int64_t row, int64_t rows, Sum gate, Sum up) {
    const __mmask16 exist = rows >= PANEL_ROWS ? 0xffff : __mmask16((1u << rows) - 1);
    if (unit.gate_bias) gate = _mm512_add_ps(gate, _mm512_maskz_loadu_ps(exist, unit.gate_bias + row));
    if (unit.up_bias) up = _mm512_add_ps(up, _mm512_maskz_loadu_ps(exist, unit.up_bias + row));
    if (!unit.clamped) {
        const Sum one = _mm512_set1_ps(1.0f);
        const Sum silu = _mm512_div_ps(gate, _mm512_add_ps(one, exp(_mm512_sub_ps(_mm512_setzero_ps(), gate))));
        return _mm512_maskz_mul_ps(exist, silu, up);
    }
    const Sum limit = _mm512_set1_ps(unit.limit), least = _mm512_set1_ps(-unit.limit);
    gate = _mm512_min_ps(limit, gate);
    up = _mm512_max_ps(least, _mm512_min_ps(limit, up));
    const Sum glu = _mm512_mul_ps(gate, sigmoid(_mm512_mul_ps(gate, _mm512_set1_ps(unit.alpha))));
    return _mm512_maskz_mul_ps(exist, _mm512_add_ps(up, _mm512_set1_ps(1.0f)), glu);
}

FT_INLINE void store_activation(float *p, Sum v) { _mm512_storeu_ps(p, v); }

FT_INLINE void store_activation(uint16_t *p, Sum v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));  // to nearest even
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

// What 32 registers hold: a sum for each of two panels and a token, twice where groups are summed apart.
template <Format F, class X>
constexpr int MAX_TOKENS = DOT<F, X> ? 6 : 4;

// VDPBF16PS takes 6 cycles on Zen 4, and its scheduler looks less far ahead than a group is long.
template <int P, int M>
constexpr int SIDE_BY_SIDE = P * M >= 4 ? 1 : 4 / (P * M);

// To the second level, which can wait for more lines than the first.
FT_INLINE void prefetch(const uint8_t *p) { _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T1); }

}  // namespace
}  // namespace ft

#if !defined(FT_ARITHMETIC_ONLY)
#include "matmul.inl"
#endif
