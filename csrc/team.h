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

    // The same; a thread that has to wait calls meanwhile() until all have come or it returns false.
    template <class F>
    void barrier(F &&meanwhile) {
        if (size_ == 1) return;
        const uint32_t meeting = arrive();
        while (!met(meeting) && meanwhile()) {}
        await(meeting);
    }

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

    // The same for tasks that stream through memory: each thread goes through a run of consecutive ones, so that what
    // it fetches ahead is its own, and takes from the others' runs once its own is done.
    template <class F>
    void sweep(int64_t tasks, F &&f) {
        sweep(tasks, f, [] { return false; });
    }

    // Threads that have no task left call meanwhile() until the last one is done or it returns false.
    template <class F, class G>
    void sweep(int64_t tasks, F &&f, G &&meanwhile) {
        if (size_ == 1 || size_ > MOST_RUNS) return each(tasks, f);
        begin_sweep();
        for (int i = 0; i < size_; ++i) {
            const int owner = (index_ + i) % size_;
            const int64_t begin = tasks * owner / size_, end = tasks * (owner + 1) / size_;
            for (int64_t task = begin + next_of(owner); task < end; task = begin + next_of(owner)) f(task);
        }
        barrier(meanwhile);
    }

    // The share of a sweep over so many tasks that this thread begins with.
    int64_t first_task(int64_t tasks) const { return tasks * index_ / size_; }
    int64_t end_task(int64_t tasks) const { return tasks * (index_ + 1) / size_; }

    // From the next meeting to the end of this job, no thread sleeps at a barrier before it has spun for so long.
    void spin_at_least(int64_t nanoseconds);

    // Others want the pool's threads: a job without an end should make one.
    bool wanted() const;

private:
    static constexpr int MOST_RUNS = 128;
    friend struct TeamState;

    uint32_t arrive();                // this thread is at the barrier
    bool met(uint32_t meeting) const;  // all are
    void await(uint32_t meeting);

    int64_t next();      // takes a task number of the current each()
    void finish_each();  // a barrier that also resets the counter
    void begin_sweep();
    int64_t next_of(int owner);  // takes a task number of that thread's run in the current sweep()

    TeamState &state_;
    int index_, size_;
    int sweep_ = 0;  // which of a run's two counters the current sweep() uses
};

// Concurrent callers wait for each other. `f` must not throw: on threads of the pool that ends the process. What the
// start takes may be refused: throws std::bad_alloc before any thread calls f. Survives fork: a child gets new threads.
void run_team(int threads, const std::function<void(Team &)> &f);

// The same unless another caller has the threads now: then does nothing and returns false.
bool try_run_team(int threads, const std::function<void(Team &)> &f);

// For a thread that calls run_team all the time: keeps it on the core that number 0 of a team gets, where teams are
// given cores at all.
void stay_on_first_core();

// Moves the caller off the cores of a team of so many threads, if there is another one. The scheduler would leave it
// beside a thread that spins.
void step_off_cores(int threads);

}  // namespace ft
