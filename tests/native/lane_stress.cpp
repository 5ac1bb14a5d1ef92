// A test of csrc/lane.cpp for the sanitizers; tests/native/test_lane.py builds it. Exit status 0 if all checks hold.
//
// It is linked with its own granted_cores(): a test wants more threads than the machine may have cores.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "cores.h"
#include "lane.h"

namespace ft {
const Cores &granted_cores() {
    static const Cores *const cores = new Cores{{}, 5};
    return *cores;
}
}  // namespace ft

namespace {

constexpr int64_t HIDDEN = 32, INTERMEDIATE = 64, EXPERTS = 5, TOP_K = 3, TOKENS = 4, LAYERS = 2;
constexpr int64_t PATIENT = 10'000'000'000, HASTY = 200'000;  // ns
constexpr double LIMIT = 60;                                  // seconds: sanitizers are slow
constexpr float FAR = 4096;                                   // of the values below: sums of products stay finite

// Kernels of float32 blocks, whose panels hold element (row r, column 2 b + p) at [b][r][p].
float product(const uint8_t *panel, int64_t row, int64_t columns, const void *x) {
    const float *weights = reinterpret_cast<const float *>(panel), *values = static_cast<const float *>(x);
    float sum = 0;
    for (int64_t k = 0; k < columns; ++k)
        sum += weights[(k / 2 * ft::PANEL_ROWS + row) * 2 + k % 2] * values[k];
    return sum;
}

void panels(const ft::Packed &w, int64_t first, int64_t last, ft::Activation, const void *const *x, int64_t count,
            float *const *out) {
    for (int64_t i = 0; i < count; ++i)
        for (int64_t row = 0; row < (last - first) * ft::PANEL_ROWS; ++row)
            out[i][row] = product(w.panel(first + row / ft::PANEL_ROWS), row % ft::PANEL_ROWS, w.columns, x[i]);
}

void gated(const ft::Packed &w, int64_t first, int64_t last, ft::Activation, const void *const *x, int64_t count,
           const ft::GatedUnit &, void *const *act) {
    for (int64_t i = 0; i < count; ++i)
        for (int64_t row = 0; row < (last - first) * ft::PANEL_ROWS; ++row) {
            const int64_t pair = first + row / ft::PANEL_ROWS, r = row % ft::PANEL_ROWS;
            static_cast<float *>(act[i])[row] =
                product(w.panel(2 * pair), r, w.columns, x[i]) * product(w.panel(2 * pair + 1), r, w.columns, x[i]);
        }
}

const ft::MatmulKernels KERNELS{"plain", panels, gated};

void require(bool holds, const char *what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::_Exit(1);
}

// Two layers of float32 experts, and a mailbox, in plain memory.
struct Place {
    uint32_t seed = 7;
    std::vector<std::vector<float>> weights;
    std::vector<ft::ExpertBank> banks;
    alignas(64) int32_t bell[16]{}, reply[16]{}, error[16]{};
    std::vector<int32_t> ids = std::vector<int32_t>(TOKENS * TOP_K);
    std::vector<float> shares = std::vector<float>(TOKENS * TOP_K), rows = std::vector<float>(TOKENS * HIDDEN),
                       out = std::vector<float>(TOKENS * HIDDEN);

    Place() {
        for (int64_t layer = 0; layer < LAYERS; ++layer) {
            ft::ExpertBank bank;
            bank.layout = {HIDDEN, INTERMEDIATE, ft::Format::f32, ft::Format::f32, false};
            bank.stride = bank.layout.block_bytes(), bank.experts = EXPERTS;
            weights.emplace_back(size_t(bank.stride * EXPERTS) / sizeof(float));
            for (float &weight : weights.back()) weight = number();
            bank.blocks = reinterpret_cast<const uint8_t *>(weights.back().data());
            banks.push_back(bank);
        }
    }

    // A linear congruential generator; its low bits are poor.
    int64_t random(int64_t below) { return int64_t((seed = seed * 1664525 + 1013904223) >> 16) % below; }
    float number() { return (float(random(2001)) - 1000) / FAR; }

    ft::Mail mail() {
        ft::Mail mail;
        mail.bell = bell, mail.ids = ids.data(), mail.weights = shares.data();
        mail.rows = {ft::Activation::f32, rows.data(), HIDDEN};
        mail.reply = reply, mail.out = out.data(), mail.error = error;
        mail.most_tokens = TOKENS, mail.top_k = TOP_K, mail.hidden = HIDDEN;
        return mail;
    }

    // One random request, against the same kernels on one thread.
    void ask(ft::Lane &lane) {
        const int64_t layer = random(LAYERS), tokens = 1 + random(TOKENS);
        for (int32_t &id : ids) id = int32_t(random(EXPERTS + 1)) - 1;
        for (float &share : shares) share = number();
        for (float &value : rows) value = number();
        std::vector<float> expected(size_t(tokens * HIDDEN));
        const ft::ExpertBank &bank = banks[size_t(layer)];
        ft::SortedRoutes routes;
        routes.sort(bank, {ft::Activation::f32, rows.data(), HIDDEN}, tokens, TOP_K, ids.data(), shares.data());
        ft::run_team(1, [&](ft::Team &team) {
            ft::run_experts(team, KERNELS, bank, routes, expected.data(), HIDDEN, false);
        });
        require(lane.request(layer, tokens, LIMIT) >= 0, "no reply");
        require(std::memcmp(expected.data(), out.data(), expected.size() * sizeof(float)) == 0, "a reply is wrong");
        require(error[0] == 0, "an error where there is none");
    }
};

void requests_are_answered(int threads, int64_t patience) {
    Place place;
    ft::Lane lane(place.banks, place.mail(), KERNELS, threads, patience);
    for (int i = 0; i < 60; ++i) {
        if (i % 3 == 0) lane.wake();
        if (i % 10 == 9) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the hasty one falls asleep
        place.ask(lane);
    }
    lane.close();  // what comes behind the last reply is done
    const ft::LaneCounts counts = lane.counts();
    require(counts.requests == 60, "requests are miscounted");
    int64_t nanoseconds = 0;
    for (const int64_t layer : counts.layer_nanoseconds) nanoseconds += layer;
    require(counts.layer_nanoseconds.size() == LAYERS && nanoseconds == counts.nanoseconds, "a layer's time is lost");
}

void others_get_the_pool_meanwhile() {
    Place place;
    ft::Lane lane(place.banks, place.mail(), KERNELS, 4, PATIENT);
    std::atomic<bool> done{false};
    std::thread other([&] {
        std::vector<int> cells(5);
        for (int round = 1; round <= 60; ++round)
            ft::run_team(5, [&](ft::Team &team) {
                cells[size_t(team.index())] = round;
                team.barrier();
                for (int i = 0; i < team.size(); ++i) require(cells[size_t(i)] == round, "another's job is disturbed");
            });
        done = true;
    });
    while (!done) place.ask(lane);
    other.join();
}

void it_ends_whatever_it_does() {
    Place place;
    for (int i = 0; i < 30; ++i) {
        ft::Lane lane(place.banks, place.mail(), KERNELS, 1 + i % 5, i % 2 ? PATIENT : HASTY);
        if (i % 3 > 0) lane.wake();
        if (i % 5 > 2) std::this_thread::sleep_for(std::chrono::microseconds(300 * i));
        if (i % 4 == 0) place.ask(lane);
    }
}

void it_ends_while_another_has_the_pool() {
    Place place;
    std::atomic<bool> there{false}, leave{false};
    std::thread other([&] {
        ft::run_team(3, [&](ft::Team &team) {
            if (team.index() == 0) there = true;
            while (!leave) std::this_thread::yield();
        });
    });
    while (!there) std::this_thread::yield();
    std::thread owner([&] {
        // One thread needs no helpers: it is made although they are taken, and cannot wait for them.
        ft::Lane lane(place.banks, place.mail(), KERNELS, 1, PATIENT);
        place.ask(lane);
    });
    owner.join();
    leave = true;
    other.join();
}

void a_forked_child_has_no_lane_and_may_make_one() {
    Place place;
    ft::Lane lane(place.banks, place.mail(), KERNELS, 3, PATIENT);
    place.ask(lane);
    const pid_t child = fork();
    require(child >= 0, "fork");
    if (child == 0) {
        lane.wake();
        lane.close();
        require(!lane.open(), "a child has its parent's lane");
        Place own;
        {
            ft::Lane another(own.banks, own.mail(), KERNELS, 3, PATIENT);
            own.ask(another);
        }
        std::_Exit(0);
    }
    place.ask(lane);
    int status = -1;
    waitpid(child, &status, 0);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child cannot have a lane");
}

void waiting_threads_do_something_meanwhile() {
    for (int round = 0; round < 50; ++round) {
        std::vector<int> calls(5), done(40);
        ft::run_team(5, [&](ft::Team &team) {
            team.sweep(
                40, [&](int64_t task) { ++done[size_t(task)]; },
                [&] { return ++calls[size_t(team.index())] < 3; });
            for (const int times : done) require(times == 1, "a sweep let a thread pass early");
            require(calls[size_t(team.index())] <= 3, "called again after it had no more to do");
            team.barrier();
        });
    }
}

void a_busy_pool_is_not_waited_for() {
    std::atomic<bool> there{false}, leave{false};
    std::thread other([&] {
        ft::run_team(2, [&](ft::Team &team) {
            if (team.index() == 0) there = true;
            while (!leave) std::this_thread::yield();
        });
    });
    while (!there) std::this_thread::yield();
    require(!ft::try_run_team(2, [](ft::Team &) { require(false, "two jobs at once"); }), "a busy pool was had");
    leave = true;
    other.join();
    int size = 0;
    require(ft::try_run_team(2, [&](ft::Team &team) { if (team.index() == 0) size = team.size(); }), "a free one not");
    require(size == 2, "a team has another size than was asked for");
}

}  // namespace

int main() {
    for (const int threads : {1, 2, 5})
        for (const int64_t patience : {HASTY, PATIENT}) requests_are_answered(threads, patience);
    waiting_threads_do_something_meanwhile();
    a_busy_pool_is_not_waited_for();
    others_get_the_pool_meanwhile();
    it_ends_whatever_it_does();
    it_ends_while_another_has_the_pool();
    a_forked_child_has_no_lane_and_may_make_one();
    std::puts("all checks hold");
}
