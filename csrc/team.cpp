#include "team.h"

#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "cores.h"
#include "waiting.h"

namespace ft {
namespace {

// A sleeping thread costs its waker a system call and starts some 5-50 us late; a spinning one takes its core from
// whoever could use it, in the worst case from the very thread that it waits for. So threads spin for a while, then
// sleep: see TeamState::meet.
constexpr int64_t SHORTEST_SPIN = 2'000, LONGEST_SPIN = 100'000;  // ns, at a barrier
constexpr int64_t IDLE_SPIN = 20'000;                             // ns, between two jobs

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
    std::atomic<int64_t> least{0};  // spin_at_least()'s
    std::atomic<int> waiting{0};    // callers that have no turn yet

    void arrive(int size) {
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < size) return;
        arrived.store(0, std::memory_order_relaxed);
        next.store(0, std::memory_order_relaxed);
        met.store(now_ns(), std::memory_order_relaxed);
        meeting.advance();
    }

    // Spins for as long as it paid of late. A meeting that came within LONGEST_SPIN was worth spinning for; one that
    // took longer was held up by a thread that had lost its core, or by a long piece of work: sleep sooner next time.
    void await(uint32_t before) {
        if (meeting.value() != before) return;
        const int64_t came = now_ns(), patient = patience.load(std::memory_order_relaxed);
        const int64_t floor = least.load(std::memory_order_relaxed);
        if (meeting.spin(before, std::max(patient, floor), LONGEST_SPIN)) return;
        meeting.sleep(before);
        const bool soon = met.load(std::memory_order_relaxed) - came < LONGEST_SPIN;
        patience.store(soon ? std::min(2 * patient, LONGEST_SPIN) : std::max(patient / 2, SHORTEST_SPIN),
                       std::memory_order_relaxed);
    }

    void meet(int size) {
        const uint32_t before = meeting.value();
        arrive(size);
        await(before);
    }
};

void Team::barrier() {
    if (size_ > 1) state_.meet(size_);
}

uint32_t Team::arrive() {
    const uint32_t before = state_.meeting.value();
    state_.arrive(size_);
    return before;
}

bool Team::met(uint32_t meeting) const { return state_.meeting.value() != meeting; }

void Team::await(uint32_t meeting) { state_.await(meeting); }

void Team::spin_at_least(int64_t nanoseconds) { state_.least.store(nanoseconds, std::memory_order_relaxed); }

bool Team::wanted() const { return state_.waiting.load(std::memory_order_relaxed) > 0; }

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

// Moves the caller to that core. Its mask is as before afterwards, so that threads which it starts inherit nothing.
void move_to(int cpu) {
    cpu_set_t before;
    if (sched_getaffinity(0, sizeof before, &before) != 0) return;
    pin(cpu);
    sched_setaffinity(0, sizeof before, &before);
}

// Moves the caller off its helpers' cores: where all cores are busy the scheduler would leave it there for long.
void step_aside(const Cores &cores) {
    if (pinned(cores) && sched_getcpu() != cores.cpus[0]) move_to(cores.cpus[0]);
}

#else

bool pinned(const Cores &) { return false; }
void pin(int) {}
void move_to(int) {}
int sched_getcpu() { return -1; }
void step_aside(const Cores &) {}

#endif

thread_local bool inside = false;  // this thread is in a team now

// noexcept: without a thread that left by an exception the others would wait at a barrier for good.
void take_part(TeamState &state, int index, int size, const std::function<void(Team &)> &f) noexcept {
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
        state_.waiting.fetch_add(1, std::memory_order_relaxed);
        std::lock_guard turn(callers_);
        state_.waiting.fetch_sub(1, std::memory_order_relaxed);
        take_turn(threads, f);
    }

    bool try_run(int threads, const std::function<void(Team &)> &f) {
        std::unique_lock turn(callers_, std::try_to_lock);
        if (turn.owns_lock()) take_turn(threads, f);
        return turn.owns_lock();
    }

private:
    // One helper's; its number counts the jobs that it has been called to.
    using Seat = std::unique_ptr<Signal>;

    void take_turn(int threads, const std::function<void(Team &)> &f) {
        hire(threads - 1);
        step_aside(granted_cores());
        state_.least.store(0, std::memory_order_relaxed);
        job_ = &f;
        size_ = std::min(threads, 1 + int(seats_.size()));
        for (int i = 1; i < size_; ++i) seats_[i - 1]->advance();
        take_part(state_, 0, size_, f);
        if (size_ > 1) state_.meet(size_);
    }

    void hire(int helpers) {
        if (helpers > int(seats_.size())) seats_.reserve(size_t(helpers));  // a thread that runs must get its seat
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

void run_alone(const std::function<void(Team &)> &f) {
    TeamState alone;
    Team team(alone, 0, 1);
    f(team);
}

}  // namespace

void run_team(int threads, const std::function<void(Team &)> &f) {
    threads = std::min(threads, granted_threads());
    if (threads > 1 && !inside) return Pool::shared().run(threads, f);
    run_alone(f);
}

bool try_run_team(int threads, const std::function<void(Team &)> &f) {
    threads = std::min(threads, granted_threads());
    if (threads > 1 && !inside) return Pool::shared().try_run(threads, f);
    run_alone(f);
    return true;
}

void stay_on_first_core() {
    if (const Cores &cores = granted_cores(); pinned(cores)) pin(cores.cpus[0]);
}

void step_off_cores(int threads) {
    const Cores &cores = granted_cores();
    if (!pinned(cores) || threads < 1 || threads >= int(cores.cpus.size())) return;
    const auto end = cores.cpus.begin() + threads;
    if (std::find(cores.cpus.begin(), end, sched_getcpu()) != end) move_to(*end);
}

}  // namespace ft
