#include "cores.h"

#include <algorithm>
#include <thread>

#if defined(__linux__)
#include <sched.h>

#include <cstdio>
#include <set>
#include <string>
#endif

namespace ft {
namespace {

#if defined(__linux__)

// The lines of a small text file; none where it cannot be read. C's functions, not C++ streams: where this library
// carries its own libstdc++, a stream takes its locale from the one that torch brought, and the two do not fit together.
std::vector<std::string> lines_of(const std::string &path) {
    std::vector<std::string> lines;
    std::FILE *file = std::fopen(path.c_str(), "re");
    if (file == nullptr) return lines;
    std::string line;
    for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) {
        if (c != '\n') {
            line.push_back(char(c));
            continue;
        }
        lines.push_back(line);
        line.clear();
    }
    if (!line.empty()) lines.push_back(line);
    std::fclose(file);
    return lines;
}

std::string line_of(const std::string &path) {
    const std::vector<std::string> lines = lines_of(path);
    return lines.empty() ? std::string() : lines.front();
}

// CPUs of the calling thread's affinity mask, also on machines with more of them than a cpu_set_t holds.
std::vector<int> allowed_cpus() {
    std::vector<int> cpus;
    for (int room = 1024; room <= 1 << 20; room *= 2) {
        cpu_set_t *set = CPU_ALLOC(room);
        const size_t size = CPU_ALLOC_SIZE(room);
        const bool known = set != nullptr && sched_getaffinity(0, size, set) == 0;
        for (int cpu = 0; known && cpu < room; ++cpu)
            if (CPU_ISSET_S(cpu, size, set)) cpus.push_back(cpu);
        CPU_FREE(set);
        if (known) break;
    }
    return cpus;
}

// The first of `cpus` on each physical core. Linux lists the CPUs of a core in one file, the same for each of them.
std::vector<int> one_a_core(const std::vector<int> &cpus) {
    std::vector<int> chosen;
    std::set<std::string> seen;
    for (const int cpu : cpus) {
        const std::string siblings =
            line_of("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
        if (siblings.empty()) return {};
        if (seen.insert(siblings).second) chosen.push_back(cpu);
    }
    return chosen;
}

// CPUs of time that a cgroup folder grants, rounded up; 0 without a limit. Version 2: "max 100000" or "150000 100000" in
// cpu.max; version 1: one number a file, -1 for no limit.
int quota_of(const std::string &folder) {
    std::string text = line_of(folder + "/cpu.max");
    if (text.empty()) text = line_of(folder + "/cpu.cfs_quota_us") + " " + line_of(folder + "/cpu.cfs_period_us");
    long quota = 0, period = 0;
    if (std::sscanf(text.c_str(), "%ld %ld", &quota, &period) != 2 || quota <= 0 || period <= 0) return 0;
    return int(std::min<long>((quota + period - 1) / period, 1 << 20));
}

// The tightest limit of this process's cgroups and their parents; 0 without one.
int cgroup_quota() {
    int tightest = 0;
    for (const std::string &line : lines_of("/proc/self/cgroup")) {  // hierarchy:controllers:path
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const bool cpu = ("," + controllers + ",").find(",cpu,") != std::string::npos;
        if (!controllers.empty() && !cpu) continue;
        const std::vector<std::string> roots =
            cpu ? std::vector<std::string>{"/sys/fs/cgroup/" + controllers, "/sys/fs/cgroup/cpu"}
                : std::vector<std::string>{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"};
        for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
            for (const std::string &root : roots)
                if (const int quota = quota_of(root + path); quota > 0)
                    tightest = tightest == 0 ? quota : std::min(tightest, quota);
            if (path.empty() || path.rfind('/') == std::string::npos) break;
        }
    }
    return tightest;
}

#endif

}  // namespace

Cores find_cores() {
    Cores found;
#if defined(__linux__)
    const std::vector<int> allowed = allowed_cpus();
    found.cpus = one_a_core(allowed);
    found.threads = int(allowed.size());
    if (const int quota = cgroup_quota(); quota > 0) found.threads = std::min(found.threads, quota);
#else
    found.threads = int(std::thread::hardware_concurrency());
#endif
    found.threads = std::max(found.threads, 1);
    return found;
}

const Cores &granted_cores() {
    static const Cores *const cores = new Cores(find_cores());  // threads may ask while the process ends
    return *cores;
}

}  // namespace ft
