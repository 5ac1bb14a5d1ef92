/* A CUDA driver for tests: says what FAKE_DRIVER in the environment tells, in memory/driver.py's order of calls. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is(const char *word) {
    const char *wanted = getenv("FAKE_DRIVER");
    return wanted != NULL && strcmp(wanted, word) == 0;
}

int cuInit(unsigned flags) {
    (void)flags;
    if (is("hangs")) sleep(600);
    if (is("crashes")) abort();
    if (is("garbles")) { ssize_t written = write(1, "\xff{", 2); (void)written; _exit(0); }
    return is("mismatch") ? 803 : is("none") ? 100 : 0;
}
int cuGetErrorString(int status, const char **text) {
    *text = status == 803 ? "system has unsupported display driver / cuda driver combination" : "out of memory";
    return status == 803 || status == 2 ? 0 : 1;
}
int cuDeviceGetCount(int *count) { *count = is("hidden") ? 0 : 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { (void)device; strncpy(name, "Fake 4060", size); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 75 ? (is("old") ? 7 : 8) : is("old") ? 5 : 9;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    *context = &free;
    return is("full") ? 2 : 0;
}
int cuCtxSetCurrent(void *context) { (void)context; return 0; }
int cuMemGetInfo_v2(size_t *available, size_t *total) {
    const char *bytes = getenv("FAKE_DRIVER_FREE");
    *available = bytes == NULL ? 7ul << 30 : strtoul(bytes, NULL, 10);
    *total = 8ul << 30;
    return 0;
}
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
