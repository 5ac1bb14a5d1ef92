// Persistent worker threads that share the numbered tasks of one job.
//
// Not OpenMP: torch brings its own OpenMP runtime, a second one in the process doubles the threads, and GNU's
// hangs in a child forked after first use. Idle workers sleep; a job costs one wake-up, tens of microseconds.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace ft {

class Pool {
public:
    using Task = std::function<void(int)>;

    // The process's pool. A forked child gets a new one: the parent's threads do not exist there.
    static Pool &shared();

    // Calls task(0) .. task(tasks - 1), each once, on at most `threads` threads, the caller among them. Returns when
    // all are done. Tasks must not throw. Concurrent callers wait for each other.
    void run(int threads, int tasks, const Task &task);

private:
    void work();
    void drain();

    std::mutex one_job_;
    std::mutex mutex_;  // guards what follows, up to next_
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    int seats_ = 0;   // workers that may still join this job
    int active_ = 0;  // workers inside it
    const Task *task_ = nullptr;
    int tasks_ = 0;
    std::atomic<int> next_{0};
};

}  // namespace ft
