#include "bandwidth.h"

#include <algorithm>
#include <atomic>

#include "team.h"
#include "waiting.h"

namespace ft {
namespace {

// Of a size that every processor has registers for: compilers keep sums of larger ones in memory, which is what would
// then be measured.
typedef uint64_t Vector __attribute__((vector_size(16)));
constexpr int64_t PIECE = 1 << 20;  // taken by whichever thread is free
constexpr int64_t LINE = 64;
constexpr int SUMS = 8;  // independent ones: an addition must not be what is waited for
constexpr int64_t STEP = SUMS * int64_t(sizeof(Vector));

uint64_t sum(const uint8_t *data, int64_t bytes, int64_t ahead) {
    Vector sums[SUMS] = {};
    for (int64_t i = 0; i + STEP <= bytes; i += STEP) {
        if (ahead > 0)
            for (int64_t line = 0; line < STEP; line += LINE) __builtin_prefetch(data + i + line + ahead, 0, 3);
        for (int s = 0; s < SUMS; ++s) {
            Vector v;
            __builtin_memcpy(&v, data + i + s * sizeof v, sizeof v);
            sums[s] += v;
        }
    }
    uint64_t total = 0;
    for (const Vector &v : sums) total += v[0] + v[1];
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
