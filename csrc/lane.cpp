#include "lane.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace ft {
namespace {

constexpr int64_t MICROSECOND = 1'000, MILLISECOND = 1'000'000, SECOND = 1'000'000'000;

constexpr int64_t POLITE = 100 * MICROSECOND;  // of spinning; from then on another thread may have the core

// How often a sleeping lane looks at the bell: a wake() may be followed by seconds of other work on the GPU before the
// first request comes. Later than the GPU waits for an answer nothing comes without another wake().
constexpr int64_t SHORTEST_DOZE = 50 * MICROSECOND, LONGEST_DOZE = 10 * MILLISECOND, DEEP_SLEEP = 60 * SECOND;

int32_t load(const int32_t *number) { return __atomic_load_n(number, __ATOMIC_ACQUIRE); }
void store(int32_t *number, int32_t value) { __atomic_store_n(number, value, __ATOMIC_RELEASE); }

void add(std::atomic<int64_t> &count, int64_t more) { count.fetch_add(more, std::memory_order_relaxed); }

constexpr int64_t MOST_COUNT = UINT16_MAX, MOST_TIME = UINT32_MAX;  // of an entry of the log: 4.3 s

}  // namespace

// An entry is a number and two counts in 64 bits, and two times in 64.
void LaneLog::add(const LaneRecord &record) {
    const auto fit = [](int64_t value, int64_t most) { return uint64_t(std::clamp<int64_t>(value, 0, most)); };
    const int64_t count = count_.load(std::memory_order_relaxed);
    Entry &entry = entries_[size_t(count % SIZE)];
    const uint64_t counts = fit(record.experts, MOST_COUNT) << 16 | fit(record.routes, MOST_COUNT);
    // Released, each of them: where copy() sees any of the new entry, it sees that one is being overwritten.
    count_.store(count + 1, std::memory_order_relaxed);
    entry.what.store(uint64_t(uint32_t(record.number)) << 32 | counts, std::memory_order_release);
    entry.times.store(fit(record.idle, MOST_TIME) << 32 | fit(record.nanoseconds, MOST_TIME),
                      std::memory_order_release);
    done_.store(count + 1, std::memory_order_release);
}

int64_t LaneLog::copy(LaneRecord *out, int64_t most) const {
    const int64_t done = done_.load(std::memory_order_acquire);
    int64_t first = std::max<int64_t>(0, done - std::min(most, SIZE));
    for (int64_t i = first; i < done; ++i) {
        const Entry &entry = entries_[size_t(i % SIZE)];
        const uint64_t what = entry.what.load(std::memory_order_acquire);
        const uint64_t times = entry.times.load(std::memory_order_acquire);
        out[i - first] = {int32_t(what >> 32), int32_t(what >> 16 & MOST_COUNT), int32_t(what & MOST_COUNT),
                          int64_t(times & MOST_TIME), int64_t(times >> 32)};
    }
    const int64_t lost = std::clamp<int64_t>(count_.load(std::memory_order_relaxed) - SIZE - first, 0, done - first);
    std::copy(out + lost, out + (done - first), out);
    return done - first - lost;
}

Lane::Lane(std::vector<ExpertBank> banks, const Mail &mail, const MatmulKernels &kernels, int threads, int64_t patience)
    : banks_(std::move(banks)), mail_(mail), kernels_(kernels), threads_(threads), patience_(patience),
      process_(int(getpid())), served_(load(mail.bell)), layer_nanoseconds_(banks_.size()) {
    answered_ = busy_until_ = now_ns();
    run_team(threads_, [](Team &) {});  // the pool's threads inherit the mask of who calls for them first: not work()'s
    thread_ = std::thread(&Lane::work, this);
}

void Lane::wake() {
    if (!open()) return;
    step_off_cores(threads_);
    alarm_.advance();
}

void Lane::close() {
    if (!thread_.joinable()) return;
    if (int(getpid()) != process_) {
        thread_.detach();
        return;
    }
    closing_.store(true);
    alarm_.advance();
    thread_.join();
}

double Lane::request(int64_t layer, int64_t tokens, double limit) {
    const int32_t number = load(mail_.reply) + 1;
    mail_.bell[1] = int32_t(layer), mail_.bell[2] = int32_t(tokens), mail_.bell[3] = int32_t(mail_.top_k);
    const int64_t begin = now_ns();
    store(mail_.bell, number);
    while (load(mail_.reply) != number) {
        const int64_t spent = now_ns() - begin;
        if (double(spent) > limit * 1e9) return -1;
        if (spent > POLITE / 4) give_way();
        relax();
    }
    return double(now_ns() - begin) * 1e-9;
}

bool Lane::open() const { return thread_.joinable() && int(getpid()) == process_; }

LaneCounts Lane::counts() const {
    const auto of = [](const std::atomic<int64_t> &count) { return count.load(std::memory_order_relaxed); };
    LaneCounts counts{of(requests_), of(routes_), of(experts_), of(nanoseconds_), of(awakenings_), {}};
    for (const auto &layer : layer_nanoseconds_) counts.layer_nanoseconds.push_back(of(layer));
    return counts;
}

bool Lane::rung() const { return load(mail_.bell) != served_; }

void Lane::work() {
    stay_on_first_core();
    for (;;) {
        doze();
        if (closing_.load()) return;
        const uint32_t seen = go_.value();
        const auto job = [&](Team &team) { team.index() == 0 ? lead(team) : follow(team, seen); };
        awake_.store(true, std::memory_order_relaxed);
        add(awakenings_, 1);
        // Not run_team: close() must not wait until another caller's job is done.
        while (!try_run_team(threads_, job) && !closing_.load()) alarm_.sleep(alarm_.value(), SHORTEST_DOZE);
        awake_.store(false, std::memory_order_relaxed);
    }
}

// Until there is something to do. Counts what it slept, not what passed: while the process is stopped, the request that
// it was woken for may still be on its way.
void Lane::doze() {
    for (int64_t slept = 0; !closing_.load() && !called() && !rung();) {
        if (slept > DEEP_SLEEP) {
            alarm_.sleep(heard_);
            continue;
        }
        const int64_t next = std::clamp(slept / 32, SHORTEST_DOZE, LONGEST_DOZE);
        alarm_.sleep(heard_, next);
        slept += next;
    }
}

void Lane::lead(Team &team) {
    leave_ = false;
    team.spin_at_least(patience_);
    busy_until_ = now_ns();
    for (int64_t looks = 0; !closing_.load(std::memory_order_relaxed); ++looks) {
        if (const int32_t number = load(mail_.bell); number != served_) {
            serve(team, number);
            continue;
        }
        if (called()) {
            heard_ = alarm_.value();
            busy_until_ = now_ns();
        }
        relax();
        if (looks % SPINS_A_LOOK != 0) continue;
        const int64_t idle = now_ns() - busy_until_;
        if (idle > patience_ || team.wanted()) break;
        if (idle > POLITE) give_way();
    }
    leave_ = true;
    go_.advance();
}

void Lane::follow(Team &team, uint32_t seen) {
    for (;; ++seen) {
        while (!go_.spin(seen, SECOND, POLITE)) {}
        if (leave_) return;
        compute(team);
    }
}

void Lane::serve(Team &team, int32_t number) {
    const int64_t begin = now_ns();
    const LaneError error = prepare();
    LaneRecord record{.number = number, .idle = begin - answered_};
    if (error == LaneError::none) {
        go_.advance();
        compute(team);
        record.routes = int32_t(sorted_.total());
        record.experts = int32_t(sorted_.used());
    } else {
        refuse(error);
    }
    served_ = number;
    store(mail_.reply, number);
    answered_ = busy_until_ = now_ns();
    record.nanoseconds = answered_ - begin;
    add(requests_, 1);
    add(routes_, record.routes);
    add(experts_, record.experts);
    add(nanoseconds_, record.nanoseconds);
    if (error == LaneError::none) add(layer_nanoseconds_[size_t(bank_ - banks_.data())], record.nanoseconds);
    log_.add(record);
}

// What the other side wrote may be anything: nothing of it is used unchecked.
LaneError Lane::prepare() {
    const int64_t layer = mail_.bell[1], tokens = mail_.bell[2], top_k = mail_.bell[3];
    if (layer < 0 || layer >= int64_t(banks_.size())) return LaneError::layer;
    if (tokens < 0 || tokens > mail_.most_tokens || top_k != mail_.top_k) return LaneError::shape;
    const ExpertBank &bank = banks_[size_t(layer)];
    for (int64_t i = 0; i < tokens * top_k; ++i)
        if (mail_.ids[i] >= bank.experts) return LaneError::expert;
    try {
        const Rows rows = padded(mail_.hidden) == mail_.hidden ? mail_.rows : filled_up(tokens);
        sorted_.sort(bank, rows, tokens, top_k, mail_.ids, mail_.weights);
    } catch (const std::bad_alloc &) {
        return LaneError::memory;
    }
    bank_ = &bank;
    return LaneError::none;
}

// Zeros are the answer to a request that is refused; the first reason stays.
void Lane::refuse(LaneError error) {
    const int64_t tokens = std::clamp<int64_t>(mail_.bell[2], 0, mail_.most_tokens);
    std::fill_n(mail_.out, tokens * mail_.hidden, 0.0f);
    if (load(mail_.error) == 0) store(mail_.error, int32_t(error));
}

// A copy of the rows that ends in zeros, as kernels read them.
Rows Lane::filled_up(int64_t tokens) {
    const int64_t size = activation_bytes(mail_.rows.type), width = padded(mail_.hidden);
    char *copy = filled_.get<char>(size_t(mail_.most_tokens * width * size));
    for (int64_t t = 0; t < tokens; ++t) {
        std::memcpy(copy + t * width * size, mail_.rows.row(t), size_t(mail_.hidden * size));
        std::memset(copy + (t * width + mail_.hidden) * size, 0, size_t((width - mail_.hidden) * size));
    }
    return {mail_.rows.type, copy, width};
}

void Lane::compute(Team &team) {
    run_experts(team, kernels_, *bank_, sorted_, mail_.out, mail_.hidden, false);
}

}  // namespace ft
