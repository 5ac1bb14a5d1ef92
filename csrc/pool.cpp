#include "pool.h"

#include <algorithm>
#include <pthread.h>

namespace ft {
namespace {

std::atomic<Pool *> instance{nullptr};

}  // namespace

Pool &Pool::shared() {
    // Never destroyed: its threads sleep until the process ends.
    static const int registered = pthread_atfork(nullptr, nullptr, [] { instance.store(nullptr); });
    (void)registered;
    Pool *pool = instance.load();
    if (pool == nullptr) {
        Pool *made = new Pool;
        if (instance.compare_exchange_strong(pool, made)) return *made;
        delete made;
    }
    return *pool;
}

void Pool::drain() {
    for (int i = next_.fetch_add(1); i < tasks_; i = next_.fetch_add(1)) (*task_)(i);
}

void Pool::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [&] { return seats_ > 0; });
        --seats_;
        ++active_;
        lock.unlock();
        drain();
        lock.lock();
        if (--active_ == 0) done_.notify_one();
    }
}

void Pool::run(int threads, int tasks, const Task &task) {
    const int helpers = std::min(threads, tasks) - 1;
    if (helpers <= 0) {
        for (int i = 0; i < tasks; ++i) task(i);
        return;
    }
    std::lock_guard job(one_job_);
    {
        std::lock_guard lock(mutex_);
        while (int(workers_.size()) < helpers) {
            workers_.emplace_back([this] { work(); });
            workers_.back().detach();
        }
        task_ = &task;
        tasks_ = tasks;
        next_ = 0;
        seats_ = helpers;
    }
    helpers == 1 ? wake_.notify_one() : wake_.notify_all();
    drain();
    std::unique_lock lock(mutex_);
    seats_ = 0;  // a worker that wakes only now has nothing left to do
    done_.wait(lock, [&] { return active_ == 0; });
}

}  // namespace ft
