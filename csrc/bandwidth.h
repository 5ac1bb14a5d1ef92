// The machine's own ceiling: how fast memory can be read.
#pragma once

#include <cstdint>

namespace ft {

// Seconds in which `threads` threads read `bytes` bytes at `data` once. `ahead`: bytes that each fetches in advance by
// instruction, 0 to leave that to the processor.
double read_seconds(const uint8_t *data, int64_t bytes, int threads, int64_t ahead);

}  // namespace ft
