/* An NVIDIA management library for tests: two cards, as FAKE_NVML in the environment tells. Types: nvml.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned pid; u64 used; unsigned gpu, compute; } Process;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;

enum { UNKNOWN = 999, NOT_SUPPORTED = 3, TOO_SMALL = 7, NOT_LOADED = 9, MISMATCH = 18 };
#define GIB (1ull << 30)

static int is(const char *word) {
    const char *wanted = getenv("FAKE_NVML");
    return wanted != NULL && strcmp(wanted, word) == 0;
}
static long number(void *handle) { return (long)handle - 1; }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (is("hangs")) sleep(600);
    if (is("crashes")) abort();
    if (is("garbles")) { puts("{\"id\": 1}\nnonsense"); fflush(stdout); }
    return is("mismatch") ? MISMATCH : is("unloaded") ? NOT_LOADED : 0;
}
const char *nvmlErrorString(int status) {
    return status == MISMATCH ? "Driver/library version mismatch"
         : status == NOT_LOADED ? "Driver Not Loaded" : "Not Supported";
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    strncpy(text, is("old") ? "535.183.01" : "580.65.06", size);
    return 0;
}
int nvmlSystemGetCudaDriverVersion(int *version) { *version = is("old") ? 12020 : 13000; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    if (is("hangs later")) sleep(600);
    *count = 2;
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    strncpy(text, number(handle) ? "Fake 3060" : "Fake 4060", size);
    return 0;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    snprintf(text, size, "GPU-%ld", number(handle));
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    memory->total = (number(handle) ? 12 : 8) * GIB;
    memory->free = is("held") && !number(handle) ? 2 * GIB : memory->total;
    memory->used = memory->total - memory->free;
    return 0;
}
int nvmlDeviceGetPciInfo_v3(void *handle, Pci *pci) {
    /* In a PCI domain that no machine has: one of the machine's own cards may be anywhere else. */
    snprintf(pci->bus_id, sizeof pci->bus_id, "0000FA4E:%02lX:00.0", 10 + number(handle));
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = is("ancient") ? 7 : 8;
    *minor = number(handle) ? 6 : is("ancient") ? 5 : 9;
    return 0;
}
int nvmlDeviceGetCurrPcieLinkGeneration(void *handle, unsigned *value) { (void)handle; *value = is("wsl") ? 0 : 1; return is("wsl") ? NOT_SUPPORTED : 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *handle, unsigned *value) { (void)handle; *value = 4; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(void *handle, unsigned *value) { *value = is("narrow") && !number(handle) ? 4 : 8; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *handle, unsigned *value) { (void)handle; *value = 8; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, u64 *reasons) {
    *reasons = is("hot") && !number(handle) ? 0x40 : 0x1;
    return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *value) { (void)handle; *value = is("capped") ? 60000 : 115000; return 0; }
int nvmlDeviceGetMaxClockInfo(void *handle, int clock, unsigned *value) { (void)handle; *value = clock == 2 ? 8501 : 0; return 0; }
int nvmlDeviceGetMemoryBusWidth(void *handle, unsigned *value) { (void)handle; *value = 128; return 0; }
int nvmlDeviceGetPowerManagementDefaultLimit(void *handle, unsigned *value) { (void)handle; *value = 115000; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *found) {
    const char *pid = getenv("FAKE_NVML_PID");
    if (is("wsl")) return NOT_SUPPORTED;
    unsigned room = *count, holders = is("held") && !number(handle) && pid != NULL;
    *count = holders;
    if (holders > room) return TOO_SMALL;
    if (holders) found[0] = (Process){(unsigned)atoi(pid), 5 * GIB, 0, 0};
    return 0;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, Process *found) {
    (void)handle, (void)found;
    *count = 0;
    return is("wsl") ? NOT_SUPPORTED : 0;
}
