#include "bandwidth.h"

#include <algorithm>
#include <atomic>

#include "team.h"
#include "waiting.h"

namespace ft {
namespace {

typedef uint64_t Line __attribute__((vector_size(64)));
constexpr int64_t PIECE = 1 << 20;  // taken by whichever thread is free
constexpr int STREAMS = 4;          // independent sums: an addition must not be what is waited for

uint64_t sum(const uint8_t *data, int64_t bytes, int64_t ahead) {
    Line sums[STREAMS] = {};
    for (int64_t i = 0; i + STREAMS * 64 <= bytes; i += STREAMS * 64)
        for (int s = 0; s < STREAMS; ++s) {
            const uint8_t *line = data + i + s * 64;
            if (ahead > 0) __builtin_prefetch(line + ahead, 0, 3);
            Line v;
            __builtin_memcpy(&v, line, sizeof v);
            sums[s] += v;
        }
    uint64_t total = 0;
    for (const Line &v : sums)
        for (int i = 0; i < 8; ++i) total += v[i];
    return total;
}

}  // namespace

double read_seconds(const uint8_t *data, int64_t bytes, int threads, int64_t ahead) {
    std::atomic<uint64_t> kept{0};  // or the compiler leaves the reading out
    // One that loses its core right after the barrier may come when others have read everything: the first one counts.
    std::atomic<int64_t> first{INT64_MAX};
    double seconds = 0;
    run_team(threads, [&](Team &team) {
        team.barrier();  // all are awake
        const int64_t start = now_ns();
        for (int64_t seen = first; start < seen && !first.compare_exchange_weak(seen, start);) {}
        team.each((bytes + PIECE - 1) / PIECE, [&](int64_t i) {
            kept += sum(data + i * PIECE, std::min(PIECE, bytes - i * PIECE), ahead);
        });
        if (team.index() == 0) seconds = double(now_ns() - first) * 1e-9;
    });
    return seconds;
}

}  // namespace ft
