#include "team.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <iterator>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "cores.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#endif

namespace ft {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

// A sleeping thread costs its waker a system call and starts some 5-50 us late; a spinning one takes its core from
// whoever could use it, in the worst case from the very thread that it waits for. So threads spin for a while, then
// sleep: see TeamState::meet.
constexpr int64_t SHORTEST_SPIN = 2'000, LONGEST_SPIN = 100'000;  // ns, at a barrier
constexpr int64_t IDLE_SPIN = 20'000;                             // ns, between two jobs
constexpr int SPINS_A_LOOK = 16;                                  // between two looks at the clock

inline int64_t now() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // `yield` is a no-op on most cores
#endif
}

// A number that threads wait on until it changes.
class alignas(64) Signal {
public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

    // What follows is sequentially consistent: either the waker sees the sleeper, or the sleeper the new value.
    void advance() {
        value_.fetch_add(1);
        if (sleepers_.load() > 0) wake();
    }

    // True if the value is not `old` within `patience` ns.
    bool spin(uint32_t old, int64_t patience) const {
        const int64_t end = now() + patience;
        do {
            for (int i = 0; i < SPINS_A_LOOK; ++i) {
                if (value() != old) return true;
                relax();
            }
        } while (now() < end);
        return false;
    }

    // Returns once the value is not `old`.
    void sleep(uint32_t old) {
        sleepers_.fetch_add(1);
        while (value_.load() == old) doze(old);
        sleepers_.fetch_sub(1);
    }

private:
#if defined(__linux__)
    void doze(uint32_t old) { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    void doze(uint32_t old) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return value_.load() != old; });
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

}  // namespace

struct TeamState {
    alignas(64) std::atomic<int64_t> next{0};
    // How many tasks of a thread's run are taken: in the current sweep, and zero for the next one. A sweep begins with
    // resetting the counter of the one before, which nobody uses any more.
    struct alignas(64) Run {
        std::atomic<int64_t> taken[2]{};
    };
    Run runs[Team::MOST_RUNS];
    alignas(64) std::atomic<int> arrived{0};
    std::atomic<int64_t> met{0};  // when the last to arrive came, ns
    Signal meeting;
    alignas(64) std::atomic<int64_t> patience{LONGEST_SPIN};

    void arrive(int size) {
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < size) return;
        arrived.store(0, std::memory_order_relaxed);
        next.store(0, std::memory_order_relaxed);
        met.store(now(), std::memory_order_relaxed);
        meeting.advance();
    }

    // Spins for as long as it paid of late. A meeting that came within LONGEST_SPIN was worth spinning for; one that
    // took longer was held up by a thread that had lost its core, or by a long piece of work: sleep sooner next time.
    void meet(int size) {
        const uint32_t before = meeting.value();
        arrive(size);
        if (meeting.value() != before) return;
        const int64_t came = now(), patient = patience.load(std::memory_order_relaxed);
        if (meeting.spin(before, patient)) return;
        meeting.sleep(before);
        const bool soon = met.load(std::memory_order_relaxed) - came < LONGEST_SPIN;
        patience.store(soon ? std::min(2 * patient, LONGEST_SPIN) : std::max(patient / 2, SHORTEST_SPIN),
                       std::memory_order_relaxed);
    }
};

void Team::barrier() {
    if (size_ > 1) state_.meet(size_);
}

int64_t Team::next() { return state_.next.fetch_add(1, std::memory_order_relaxed); }

void Team::finish_each() { state_.meet(size_); }

void Team::begin_sweep() {
    sweep_ ^= 1;
    state_.runs[index_].taken[sweep_ ^ 1].store(0, std::memory_order_relaxed);
}

int64_t Team::next_of(int owner) {
    return state_.runs[owner].taken[sweep_].fetch_add(1, std::memory_order_relaxed);
}

namespace {

#if defined(__linux__)

// A machine given to this process alone is divided by core. Where the team takes only a part of the machine the
// scheduler knows better which cores are free: two processes would pin themselves to the same ones.
bool pinned(const Cores &cores) { return cores.threads >= int(cores.cpus.size()) && cores.cpus.size() > 1; }

void pin(int cpu) {
    cpu_set_t *set = CPU_ALLOC(cpu + 1);
    if (set == nullptr) return;
    const size_t size = CPU_ALLOC_SIZE(cpu + 1);
    CPU_ZERO_S(size, set);
    CPU_SET_S(cpu, size, set);
    sched_setaffinity(0, size, set);  // a refusal leaves the thread where the scheduler puts it
    CPU_FREE(set);
}

// Moves the caller off its helpers' cores: where all cores are busy the scheduler would leave it there for long. Its
// mask is as before afterwards, so that threads which it starts inherit nothing.
void step_aside(const Cores &cores) {
    cpu_set_t before;
    if (!pinned(cores) || sched_getcpu() == cores.cpus[0] || sched_getaffinity(0, sizeof before, &before) != 0) return;
    pin(cores.cpus[0]);
    sched_setaffinity(0, sizeof before, &before);
}

#else

bool pinned(const Cores &) { return false; }
void pin(int) {}
void step_aside(const Cores &) {}

#endif

thread_local bool inside = false;  // this thread is in a team now

void take_part(TeamState &state, int index, int size, const std::function<void(Team &)> &f) {
    Team team(state, index, size);
    inside = true;
    f(team);
    inside = false;
    // Every sweep is over, and the next job's first one begins after the next meeting.
    if (index < int(std::size(state.runs)))
        for (std::atomic<int64_t> &taken : state.runs[index].taken) taken.store(0, std::memory_order_relaxed);
}

class Pool {
public:
    // The process's pool, never destroyed: its threads sleep until the process ends. A forked child, which has none of
    // its parent's threads, gets a new one.
    static Pool &shared() {
        static const int registered = pthread_atfork(nullptr, nullptr, [] { instance.store(nullptr); });
        (void)registered;
        Pool *pool = instance.load();
        if (pool != nullptr) return *pool;
        auto made = std::make_unique<Pool>();
        return instance.compare_exchange_strong(pool, made.get()) ? *made.release() : *pool;
    }

    void run(int threads, const std::function<void(Team &)> &f) {
        std::lock_guard turn(callers_);
        hire(threads - 1);
        step_aside(granted_cores());
        job_ = &f;
        size_ = std::min(threads, 1 + int(seats_.size()));
        for (int i = 1; i < size_; ++i) seats_[i - 1]->advance();
        take_part(state_, 0, size_, f);
        if (size_ > 1) state_.meet(size_);
    }

private:
    // One helper's; its number counts the jobs that it has been called to.
    using Seat = std::unique_ptr<Signal>;

    void hire(int helpers) {
        while (int(seats_.size()) < helpers) {
            auto seat = std::make_unique<Signal>();
            try {
                std::thread(&Pool::work, this, seat.get(), int(seats_.size()) + 1).detach();
            } catch (const std::system_error &) {
                return;  // the system gives no more threads: a smaller team does the same
            }
            seats_.push_back(std::move(seat));
        }
    }

    [[noreturn]] void work(Signal *seat, int index) {
        if (const Cores &cores = granted_cores(); pinned(cores) && index < int(cores.cpus.size())) pin(cores.cpus[index]);
        for (uint32_t jobs = 0;; ++jobs) {
            if (!seat->spin(jobs, IDLE_SPIN)) seat->sleep(jobs);
            take_part(state_, index, size_, *job_);
            state_.arrive(size_);  // only the caller waits: its return ends the life of what the job refers to
        }
    }

    static inline std::atomic<Pool *> instance{nullptr};

    std::mutex callers_;
    std::vector<Seat> seats_;
    TeamState state_;
    const std::function<void(Team &)> *job_ = nullptr;
    int size_ = 0;
};

}  // namespace

void run_team(int threads, const std::function<void(Team &)> &f) {
    threads = std::min(threads, granted_threads());
    if (threads > 1 && !inside) return Pool::shared().run(threads, f);
    TeamState alone;
    Team team(alone, 0, 1);
    f(team);
}

}  // namespace ft
