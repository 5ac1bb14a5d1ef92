// Sixteen rows of words made into columns of sixteen, in vector types of the compiler (GCC and Clang, any processor).
#pragma once

#include <cstdint>

namespace ft {

constexpr int VECTOR = 16;  // bytes

template <class Word>
struct VectorOf {
    typedef Word type __attribute__((vector_size(VECTOR)));
};

#if defined(__clang__)
#define FT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype(a){__VA_ARGS__})
#endif

// The words of a and b in turn: a0 b0 a1 b1 ..., in two vectors.
template <class V>
inline void zip(V a, V b, V &low, V &high) {
    if constexpr (sizeof(a[0]) == 1) {
        low = FT_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        high = FT_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    } else if constexpr (sizeof(a[0]) == 2) {
        low = FT_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
        high = FT_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    } else if constexpr (sizeof(a[0]) == 4) {
        low = FT_SHUFFLE(a, b, 0, 4, 1, 5);
        high = FT_SHUFFLE(a, b, 2, 6, 3, 7);
    } else {
        low = FT_SHUFFLE(a, b, 0, 2);
        high = FT_SHUFFLE(a, b, 1, 3);
    }
}

#undef FT_SHUFFLE

// Row r's words b -> word b * 16 + r of the sixteen vectors. With vector and word as the number (r3 r2 r1 r0 b..),
// zipping vectors i and i + 8 moves the leading bit to the end; four times gives (b.. r3 r2 r1 r0).
template <class V>
inline void transpose16(V (&rows)[16]) {
    for (int round = 0; round < 4; ++round) {
        V next[16];
        for (int i = 0; i < 8; ++i) zip(rows[i], rows[i + 8], next[2 * i], next[2 * i + 1]);
        for (int i = 0; i < 16; ++i) rows[i] = next[i];
    }
}

}  // namespace ft
