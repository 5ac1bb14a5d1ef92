// The arithmetic of one expert on a block of its weight rows, in one version per instruction set.
//
// Knows nothing of experts, routing or threads. Every version computes the same sums in float32; they differ only in
// vector width, so in the order of additions.
#pragma once

#include <cstdint>

namespace ft {

// Storage of weights; bfloat16 is the upper half of a float32.
enum class Storage { float32 = 0, bfloat16 = 1 };

struct TileKernels {
    const char *name;

    // act[n][r] = silu(gate[r] . x[n]) * (up[r] . x[n])   for r < rows, n < count
    // gate, up: [rows, width] contiguous; x[n]: [width]; act[n]: at least [rows]
    void (*gate_up[2])(const void *gate, const void *up, const float *const *x, float *const *act, int64_t count,
                       int64_t rows, int64_t width);

    // out[n][r] += scale[n] * (down[r] . act[n])   for r < rows, n < count
    // down: [rows, width] contiguous; act[n]: [width]; out[n]: at least [rows]; the same row may stand twice in out
    void (*down[2])(const void *down, const float *const *act, const float *scale, float *const *out, int64_t count,
                    int64_t rows, int64_t width);
};

extern const TileKernels tile_portable;
#if defined(__x86_64__)
extern const TileKernels tile_avx2;
extern const TileKernels tile_avx512;
#endif

}  // namespace ft
