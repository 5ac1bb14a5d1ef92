// Which processors this process was given: affinity mask, physical cores, CPU time of its cgroups.
#pragma once

#include <vector>

namespace ft {

struct Cores {
    std::vector<int> cpus;  // one CPU of each physical core in the affinity mask; empty where the system does not tell
    int threads = 1;        // CPUs in the mask, or less where a cgroup limits CPU time
};

// Asked again at each call.
Cores find_cores();

// As they were when the process first asked.
const Cores &granted_cores();
inline int granted_threads() { return granted_cores().threads; }

}  // namespace ft
