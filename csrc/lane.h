// The CPU's lane: threads that serve requests of a GPU for routed experts, through memory that both see.
//
// The lane is a job on the process's pool (team.h), and so uses the cores that all other kernels use. While requests
// come it spins, about 0.1 us away from the next one. Where another caller of run_team waits for the threads, the lane
// leaves them between two requests and comes back for the next one. After `patience` without a request its helpers go
// to sleep, and one thread looks at the bell now and then; wake() makes all of them spin again.
#pragma once

#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "block.h"
#include "expert_ops.h"
#include "waiting.h"

namespace ft {

// Memory of a request and its answer: ftengine/kernels/triton/buffers.py, Mailbox. The other side writes ids, weights
// and rows, then bell[0] = n with release order; the lane writes `out`, then reply[0] = n with release order.
struct Mail {
    int32_t *bell = nullptr;         // number of the request, MoE layer, tokens, experts a token
    const int32_t *ids = nullptr;    // [tokens][top_k], negative: not for the lane
    const float *weights = nullptr;  // the same
    Rows rows;                       // [tokens], side by side
    int32_t *reply = nullptr;        // number of the request that is done
    float *out = nullptr;            // [tokens][hidden]
    int32_t *error = nullptr;        // a LaneError, the first one stays
    int64_t most_tokens = 0, top_k = 0, hidden = 0;
};

// Values of mailbox.error; 1 is the GPU's, which has waited in vain. ftengine/experts/mailbox.py has the sentences.
enum class LaneError : int32_t { none = 0, layer = 2, shape = 3, expert = 4, memory = 5 };

// Of all requests so far.
struct LaneCounts {
    int64_t requests = 0, routes = 0;
    int64_t experts = 0;      // distinct ones a request, summed
    int64_t nanoseconds = 0;  // from the bell to the reply
    int64_t awakenings = 0;   // times that the threads were asleep and began to spin
    std::vector<int64_t> layer_nanoseconds;  // by MoE layer; a request that was refused is of none
};

// A request as the lane saw it.
struct LaneRecord {
    int32_t number = 0;
    int32_t experts = 0, routes = 0;  // distinct experts; (row, expert) pairs
    int64_t nanoseconds = 0;          // from the bell to the reply
    int64_t idle = 0;                 // from the reply before to the bell, ns
};

// The last requests. One thread writes, any thread reads: what is overwritten while it is read is left out.
class LaneLog {
public:
    static constexpr int64_t SIZE = 4096;  // requests of some tens of decode steps

    void add(const LaneRecord &record);

    // The newest `most` of those kept, oldest first. Returns how many.
    int64_t copy(LaneRecord *out, int64_t most) const;

private:
    struct Entry {
        std::atomic<uint64_t> what{0}, times{0};
    };
    std::array<Entry, SIZE> entries_;
    std::atomic<int64_t> count_{0}, done_{0};  // entries begun and entries that are whole
};

class Lane {
public:
    // banks[i] belongs to MoE layer i. patience: ns. Banks and mail outlive the lane.
    Lane(std::vector<ExpertBank> banks, const Mail &mail, const MatmulKernels &kernels, int threads, int64_t patience);
    ~Lane() { close(); }
    Lane(const Lane &) = delete;
    Lane &operator=(const Lane &) = delete;

    // Before requests come. Costs less than a microsecond where the threads are awake.
    void wake();

    // Plays the other side's part, for tests and measurements: rings for the rows that lie in the mailbox and waits for
    // the reply. Seconds from the one to the other; negative if none came within `limit`.
    double request(int64_t layer, int64_t tokens, double limit);

    // Ends the thread after the request under way. In a forked child, which has no such thread, does nothing.
    void close();

    bool open() const;
    bool awake() const { return awake_.load(std::memory_order_relaxed); }
    LaneCounts counts() const;
    const LaneLog &log() const { return log_; }

private:
    void work();
    void lead(Team &team);
    void follow(Team &team, uint32_t seen);
    void serve(Team &team, int32_t number);
    LaneError prepare();
    Rows filled_up(int64_t tokens);
    void refuse(LaneError error);
    void compute(Team &team);
    void doze();
    bool rung() const;
    bool called() const { return alarm_.value() != heard_; }

    const std::vector<ExpertBank> banks_;
    const Mail mail_;
    const MatmulKernels &kernels_;
    const int threads_;
    const int64_t patience_;
    const int process_;

    // The thread's own.
    int32_t served_ = 0;
    uint32_t heard_ = 0;
    int64_t busy_until_ = 0;  // when the last request was served or wake() heard, ns
    int64_t answered_ = 0;    // when the last request was served, ns
    Block filled_;

    // The request that helpers take part in: written before go_ advances.
    const ExpertBank *bank_ = nullptr;
    SortedRoutes sorted_;
    bool leave_ = false;
    Signal go_;

    Signal alarm_;  // advanced by wake() and close()
    std::atomic<bool> closing_{false}, awake_{false};
    std::atomic<int64_t> requests_{0}, routes_{0}, experts_{0}, nanoseconds_{0}, awakenings_{0};
    std::vector<std::atomic<int64_t>> layer_nanoseconds_;
    LaneLog log_;
    std::thread thread_;
};

}  // namespace ft
