// A test of csrc/team.cpp for the sanitizers, and a stopwatch for its barriers. tests/native/test_team.py builds it.
//
//     team_stress              every check below, on more threads than most test machines have cores; exit status 0 if all hold
//     team_stress time N       nanoseconds of a barrier of N threads
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
#include "team.h"

namespace ft {
const Cores &granted_cores() {
    static const Cores *const cores = new Cores{{}, 6};
    return *cores;
}
}  // namespace ft

namespace {

void require(bool holds, const char *what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::_Exit(1);
}

// Every thread writes its own plain cell, and after the barrier reads all others: a barrier that lets one through too
// early gives a wrong number, and a data race to the thread sanitizer.
void barriers_order_plain_memory(int threads, int rounds) {
    std::vector<int> cells(threads);
    ft::run_team(threads, [&](ft::Team &team) {
        for (int round = 1; round <= rounds; ++round) {
            cells[team.index()] = round;
            team.barrier();
            for (int i = 0; i < team.size(); ++i) require(cells[i] == round, "a barrier let a thread pass early");
            team.barrier();
        }
    });
}

// Tasks of very different length, and back-to-back each() without anything between them.
void each_does_every_task_once(int threads, int rounds) {
    std::vector<int> done(257);
    ft::run_team(threads, [&](ft::Team &team) {
        for (int round = 1; round <= rounds; ++round) {
            const int64_t tasks = round % int(done.size() + 1);
            team.each(tasks, [&](int64_t i) {
                for (volatile int spin = 0; spin < (i % 7) * 50; spin = spin + 1) {}
                ++done[i];
            });
            team.each(tasks, [&](int64_t i) { --done[i]; });
        }
    });
    for (const int left : done) require(left == 0, "each() left a task out or did one twice");
}

// The same of sweep(), whose short runs are finished by others; in many jobs, since each begins with fresh counters.
void sweep_does_every_task_once(int threads, int jobs) {
    std::vector<int> done(101);
    for (int job = 1; job <= jobs; ++job) {
        ft::run_team(1 + job % threads, [&](ft::Team &team) {
            for (int round = 0; round < 1 + job % 4; ++round) {
                const int64_t tasks = (job + round) % int(done.size() + 1);
                team.sweep(tasks, [&](int64_t i) {
                    for (volatile int spin = 0; spin < (i < tasks / 4 ? 400 : 10); spin = spin + 1) {}
                    ++done[i];
                });
                team.sweep(tasks, [&](int64_t i) { --done[i]; });
            }
        });
        for (const int left : done) require(left == 0, "sweep() left a task out or did one twice");
    }
}

void team_sizes_change_from_job_to_job() {
    for (int round = 0; round < 300; ++round) {
        const int threads = 1 + round * 5 % 9;
        std::vector<int> came(16);
        int size = 0;
        ft::run_team(threads, [&](ft::Team &team) {
            ++came[team.index()];
            if (team.index() == 0) size = team.size();
        });
        require(size == std::min(threads, ft::granted_threads()), "a team has another size than was asked for");
        for (int i = 0; i < 16; ++i) require(came[i] == (i < size), "a thread did not come once");
    }
}

void concurrent_callers_take_turns() {
    std::vector<std::thread> callers;
    int inside = 0;  // plain: only one job at a time may touch it
    for (int c = 0; c < 3; ++c)
        callers.emplace_back([&, c] {
            for (int round = 0; round < 100; ++round)
                ft::run_team(2 + c, [&](ft::Team &team) {
                    if (team.index() == 0) require(++inside == 1, "two jobs at once");
                    team.barrier();
                    if (team.index() == 0) --inside;
                });
        });
    for (std::thread &caller : callers) caller.join();
}

void a_team_within_a_team_is_one_thread() {
    ft::run_team(3, [](ft::Team &) {
        ft::run_team(3, [](ft::Team &inner) {
            require(inner.size() == 1 && inner.index() == 0, "a nested team has threads of its own");
            inner.barrier();
        });
    });
}

// Sleeping and waking, not only spinning: threads come later than any barrier spins.
void late_threads_are_waited_for() {
    std::vector<int> cells(3);
    for (int round = 1; round <= 20; ++round) {
        ft::run_team(3, [&](ft::Team &team) {
            if (team.index() == round % 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));
            cells[team.index()] = round;
            team.barrier();
            for (const int cell : cells) require(cell == round, "a late thread was not waited for");
        });
        if (round % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // helpers go to sleep too
    }
}

void a_forked_child_has_threads_of_its_own() {
    const pid_t child = fork();
    require(child >= 0, "fork");
    if (child == 0) {
        barriers_order_plain_memory(3, 50);
        std::_Exit(0);
    }
    barriers_order_plain_memory(3, 50);
    int status = -1;
    waitpid(child, &status, 0);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child cannot use its team");
}

void a_process_ends_while_a_team_works() {
    const pid_t child = fork();
    require(child >= 0, "fork");
    if (child == 0) {
        std::thread([] {
            for (;;) barriers_order_plain_memory(3, 50);
        }).detach();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        std::exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a process cannot end while its team works");
}

void time_barriers(int threads) {
    constexpr int ROUNDS = 200'000;
    const auto start = std::chrono::steady_clock::now();
    ft::run_team(threads, [](ft::Team &team) {
        for (int i = 0; i < ROUNDS; ++i) team.barrier();
    });
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    std::printf("%.0f ns a barrier of %d threads\n", took.count() / ROUNDS, threads);
}

}  // namespace

int main(int count, char **words) {
    if (count == 3 && std::strcmp(words[1], "time") == 0) {
        time_barriers(std::atoi(words[2]));
        return 0;
    }
    for (const int threads : {1, 2, 3, 6}) {
        barriers_order_plain_memory(threads, 300);
        each_does_every_task_once(threads, 300);
        sweep_does_every_task_once(threads, 300);
    }
    team_sizes_change_from_job_to_job();
    concurrent_callers_take_turns();
    a_team_within_a_team_is_one_thread();
    late_threads_are_waited_for();
    a_forked_child_has_threads_of_its_own();
    a_process_ends_while_a_team_works();
    std::puts("all checks hold");
}
