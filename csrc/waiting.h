// A number that threads wait on until it changes: spinning for a while, then asleep.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#include <thread>
#endif

namespace ft {

constexpr int SPINS_A_LOOK = 16;  // between two looks at the clock

inline int64_t now_ns() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // `yield` is a no-op on most cores
#endif
}

// Lets another thread have the core, if one waits for it.
inline void give_way() {
#if defined(__linux__)
    sched_yield();
#else
    std::this_thread::yield();
#endif
}

class alignas(64) Signal {
public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

    // What follows is sequentially consistent: either the waker sees the sleeper, or the sleeper the new value.
    void advance() {
        value_.fetch_add(1);
        if (sleepers_.load() > 0) wake();
    }

    // True if the value is not `old` within `patience` ns. After `polite` ns of it whoever waits for the core gets it.
    bool spin(uint32_t old, int64_t patience, int64_t polite = INT64_MAX) const {
        const int64_t begin = now_ns();
        for (int64_t spent = 0; spent < patience || spent == 0; spent = now_ns() - begin) {
            for (int i = 0; i < SPINS_A_LOOK; ++i) {
                if (value() != old) return true;
                relax();
            }
            if (spent > polite) give_way();
        }
        return false;
    }

    // Returns once the value is not `old`.
    void sleep(uint32_t old) {
        sleepers_.fetch_add(1);
        while (value_.load() == old) doze(old, 0);
        sleepers_.fetch_sub(1);
    }

    // Returns once the value is not `old`, at the latest after `patience` > 0 ns, and sometimes sooner.
    void sleep(uint32_t old, int64_t patience) {
        sleepers_.fetch_add(1);
        if (value_.load() == old) doze(old, patience);
        sleepers_.fetch_sub(1);
    }

private:
#if defined(__linux__)
    void doze(uint32_t old, int64_t patience) {
        const timespec limit{time_t(patience / 1'000'000'000), long(patience % 1'000'000'000)};
        syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, patience > 0 ? &limit : nullptr, nullptr, 0);
    }
    void wake() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    void doze(uint32_t old, int64_t patience) {
        std::unique_lock lock(mutex_);
        const auto changed = [&] { return value_.load() != old; };
        if (patience > 0)
            changed_.wait_for(lock, std::chrono::nanoseconds(patience), changed);
        else
            changed_.wait(lock, changed);
    }
    void wake() {
        { std::lock_guard lock(mutex_); }  // a thread about to wait has either seen the value or waits by now
        changed_.notify_all();
    }
    std::mutex mutex_;
    std::condition_variable changed_;
#endif

    std::atomic<uint32_t> value_{0}, sleepers_{0};
};

}  // namespace ft
