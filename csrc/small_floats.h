// Numbers of 4, 8 and 16 bits. Sources: OCP 8-bit Floating Point (OFP8) 1.0, OCP Microscaling Formats (MX) 1.0.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace ft {

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Nearest, ties to even, beyond 448 saturating. Of finite values.
inline uint8_t nearest_e4m3(float value) {
    const uint32_t bits = bits_of(value), sign = bits >> 24 & 0x80;
    uint32_t magnitude = bits & 0x7fffffff;
    magnitude = magnitude > 0x43e00000 ? 0x43e00000 : magnitude;  // 448
    const uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    // Below 2 ** -6 codes are multiples of 2 ** -9; added to 1.5 * 2 ** 23, a number loses what lies below one.
    const uint32_t small = bits_of(of_bits(magnitude) * 512.0f + 12582912.0f) & 0xf;
    return uint8_t(sign | (magnitude < 0x3c800000 ? small : normal));
}

// Nearest, ties to the even code, beyond 6 saturating.
inline uint8_t nearest_e2m1(float value) {
    const uint32_t sign = bits_of(value) >> 28 & 8;
    const float m = std::fabs(value);
    const uint32_t small = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f);
    const uint32_t code = small + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
    return uint8_t(sign | code);
}

inline const float *e2m1_table() {
    static const float table[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return table;
}

struct Table256 {
    float values[256];

    template <class F>
    explicit Table256(F &&value) {
        for (int byte = 0; byte < 256; ++byte) values[byte] = value(byte);
    }
};

inline const float *e4m3_table() {
    static const Table256 table([](int byte) {
        const int exponent = byte >> 3 & 15, mantissa = byte & 7;
        const float sign = byte & 0x80 ? -1.0f : 1.0f;
        if ((byte & 0x7f) == 0x7f) return sign * NAN;
        return sign * (exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9));
    });
    return table.values;
}

inline const float *e8m0_table() {
    static const Table256 table([](int byte) { return byte == 255 ? NAN : std::ldexp(1.0f, byte - 127); });
    return table.values;
}

inline float from_half(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    if (exponent == 31) return of_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) return of_bits(sign | bits_of(float(mantissa) * 0x1p-24f));
    return of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

}  // namespace ft
