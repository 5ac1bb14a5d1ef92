// Threads that go through one piece of code together, in step: what every kernel is written for.
//
// run_team(n, f) calls f(team) on n threads of the process's pool, the caller being number 0. Within f all threads
// call the same operations in the same order; barrier() and each() are such operations. A whole forward pass is one
// run_team: between operations threads meet at a spinning barrier, not at a sleeping one.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace ft {

struct TeamState;  // team.cpp

class Team {
public:
    Team(TeamState &state, int index, int size) : state_(state), index_(index), size_(size) {}

    int index() const { return index_; }
    int size() const { return size_; }

    // Returns when every thread of the team has called it; what they wrote before is visible after.
    void barrier();

    // Calls f(i) once for each i < tasks, on whichever thread is free; ends in a barrier. f must not throw.
    template <class F>
    void each(int64_t tasks, F &&f) {
        if (size_ == 1) {
            for (int64_t i = 0; i < tasks; ++i) f(i);
            return;
        }
        for (int64_t i = next(); i < tasks; i = next()) f(i);
        finish_each();
    }

private:
    int64_t next();      // takes a task number of the current each()
    void finish_each();  // a barrier that also resets the counter

    TeamState &state_;
    int index_, size_;
};

// Concurrent callers wait for each other. `f` must not throw. Survives fork: a child gets new threads.
void run_team(int threads, const std::function<void(Team &)> &f);

}  // namespace ft
