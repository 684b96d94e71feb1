/* Stand-ins for the functions of CANN that torch_npu needs to be imported, to profile and to allocate on a CPU.
 *
 * cann_stub.py puts the rest behind this file: every other function that the installed torch_npu looks for, each
 * answering 0. What this file has of its own are the functions with results, and a log of the profiling calls.
 *
 *   CANN_STUB_LOG      file to which each profiling call is appended as one line of JSON
 *   CANN_STUB_DEVICES  number of devices (1)
 *   CANN_STUB_PROF     set: aclprofInit leaves a PROF_ folder, as a real device does (empty of device data)
 *   CANN_STUB_FAIL     names of functions, separated by commas, that answer with an error
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int answer; /* 0 is success */
enum { FAILURE = 500001 };

/* The log. */

static size_t quoted(char *out, size_t room, const char *text) {
    size_t used = 0;
    for (; text && *text && used + 8 < room; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            used += (size_t)snprintf(out + used, room - used, "\\%c", c);
        else if (c < 0x20)
            used += (size_t)snprintf(out + used, room - used, "\\u%04x", c);
        else
            out[used++] = (char)c;
    }
    out[used] = 0;
    return used;
}

static void record(const char *call, const char *text, const char *domain, long id) {
    const char *path = getenv("CANN_STUB_LOG");
    if (!path)
        return;
    char line[6144], first[4096], second[1024];
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    quoted(first, sizeof first, text);
    quoted(second, sizeof second, domain);
    int length = snprintf(line, sizeof line,
                          "{\"call\": \"%s\", \"text\": \"%s\", \"domain\": \"%s\", \"id\": %ld, \"pid\": %d, "
                          "\"tid\": %d, \"ns\": %lld}\n",
                          call, first, second, id, getpid(), gettid(),
                          (long long)now.tv_sec * 1000000000LL + now.tv_nsec);
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0644);
    if (file >= 0) {
        if (write(file, line, (size_t)length) < 0) { /* a full disk: the test that reads the log will say so */
        }
        close(file);
    }
}

static answer outcome(const char *call) {
    const char *failing = getenv("CANN_STUB_FAIL");
    size_t length = strlen(call);
    for (const char *at = failing; at && (at = strstr(at, call)); at += length)
        if ((at == failing || at[-1] == ',') && (at[length] == 0 || at[length] == ','))
            return FAILURE;
    return 0;
}

/* Devices, streams and events: numbers that are unequal are all that anybody needs. */

static uintptr_t handle(void) {
    static uintptr_t last = 0x1000;
    return __sync_add_and_fetch(&last, 0x10);
}
static __thread int32_t current_device;

answer aclInit(const char *config) { return outcome("aclInit"); }
answer aclrtGetDeviceCount(uint32_t *count) {
    const char *wanted = getenv("CANN_STUB_DEVICES");
    *count = wanted ? (uint32_t)atoi(wanted) : 1;
    return 0;
}
answer aclrtSetDevice(int32_t device) { current_device = device; return 0; }
answer aclrtGetDevice(int32_t *device) { *device = current_device; return 0; }
answer aclrtGetCurrentContext(void **context) { *context = (void *)&current_device; return 0; }
answer aclrtDeviceCanAccessPeer(int32_t *can, int32_t one, int32_t other) { *can = 0; return 0; }
answer aclrtCreateStream(void **stream) { *stream = (void *)handle(); return 0; }
answer aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) { return aclrtCreateStream(stream); }
answer aclrtCreateEventExWithFlag(void **event, uint32_t flags) { *event = (void *)handle(); return 0; }
answer aclrtCreateEventWithFlag(void **event, uint32_t flags) { *event = (void *)handle(); return 0; }
answer aclrtEventElapsedTime(float *milliseconds, void *begin, void *end) { *milliseconds = 0; return 0; }
answer aclrtSynchronizeDevice(void) { return outcome("aclrtSynchronizeDevice"); }
answer aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return outcome("aclrtSynchronizeDevice"); }
const char *aclrtGetSocName(void) { return "Ascend910B1"; }
const char *aclGetRecentErrMsg(void) { return "the stand-in was told to fail"; }
answer aclGetDeviceCapability(uint32_t device, int32_t kind, int64_t *value) { *value = 0; return 0; }
answer halGetDeviceInfo(uint32_t device, int32_t module, int32_t kind, int64_t *value) { if (value) *value = 0; return 0; }
size_t aclGetCompileoptSize(int32_t option) { return 16; }
answer aclGetCompileopt(int32_t option, char *value, size_t room) {
    memset(value, 0, room);
    strncpy(value, "disable", room - 1);
    return 0;
}

/* Memory of the device is memory of the host. */

answer aclrtMalloc(void **memory, size_t size, int32_t policy) {
    *memory = aligned_alloc(512, (size + 511) / 512 * 512);
    return *memory ? 0 : FAILURE;
}
answer aclrtMallocAlign32(void **memory, size_t size, int32_t policy) { return aclrtMalloc(memory, size, policy); }
answer aclrtMallocWithCfg(void **memory, size_t size, int32_t policy, void *config) { return aclrtMalloc(memory, size, policy); }
answer aclrtMallocHost(void **memory, size_t size) { return aclrtMalloc(memory, size, 0); }
answer aclrtMallocHostWithCfg(void **memory, uint64_t size, void *config) { return aclrtMalloc(memory, size, 0); }
answer aclrtFree(void *memory) { free(memory); return 0; }
answer aclrtFreeHost(void *memory) { free(memory); return 0; }
answer aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int32_t kind) { memcpy(to, from, size); return 0; }
answer aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int32_t kind, void *stream) { memcpy(to, from, size); return 0; }
answer aclrtMemset(void *memory, size_t room, int32_t value, size_t size) { memset(memory, value, size); return 0; }
answer aclrtMemsetAsync(void *memory, size_t room, int32_t value, size_t size, void *stream) { memset(memory, value, size); return 0; }
answer aclrtGetMemInfo(int32_t kind, size_t *unused, size_t *total) { *unused = *total = (size_t)1 << 30; return 0; }

/* The profiler. */

static char data_path[4096];
static int sessions;

answer aclprofInit(const char *path, size_t length) {
    answer result = outcome("aclprofInit");
    snprintf(data_path, sizeof data_path, "%.*s", (int)length, path);
    record("aclprofInit", data_path, "", result);
    if (!result && getenv("CANN_STUB_PROF")) {
        char folder[4352];
        snprintf(folder, sizeof folder, "%s/PROF_%06d_20260101000000000_CANNSTUB", data_path, ++sessions);
        mkdir(folder, 0750);
        strcat(folder, "/host");
        mkdir(folder, 0750);
        strcat(folder, "/start_info");
        int file = open(folder, O_WRONLY | O_CREAT, 0640);
        if (file >= 0) {
            if (write(file, "{}", 2) < 0) { /* as above */
            }
            close(file);
        }
    }
    return result;
}
void *aclprofCreateConfig(uint32_t *devices, uint32_t count, int32_t metrics, void *events, uint64_t kinds) {
    static int config;
    record("aclprofCreateConfig", "", "", (long)kinds);
    return &config;
}
#define LOGGED(name, parameters)                                                                                       \
    answer name parameters {                                                                                           \
        answer result = outcome(#name);                                                                                \
        record(#name, "", "", result);                                                                                 \
        return result;                                                                                                 \
    }
LOGGED(aclprofDestroyConfig, (const void *config))
LOGGED(aclprofWarmup, (const void *config))
LOGGED(aclprofStart, (const void *config))
LOGGED(aclprofStop, (const void *config))
LOGGED(aclprofFinalize, (void))
answer aclprofSetConfig(int32_t kind, const char *value, size_t length) { record("aclprofSetConfig", value, "", kind); return 0; }
answer aclprofGetSupportedFeatures(size_t *size, void **data) { return FAILURE; }
answer aclprofGetSupportedFeaturesV2(size_t *size, void **data) { return FAILURE; }
answer aclprofMarkEx(const char *text, size_t length, void *stream) { record("aclprofMarkEx", text, "", 0); return 0; }

/* Ranges. */

static uint64_t range_id(void) {
    static uint64_t last;
    return __sync_add_and_fetch(&last, 1);
}
void mstxMarkA(const char *text, void *stream) { record("mstxMarkA", text, "", 0); }
uint64_t mstxRangeStartA(const char *text, void *stream) {
    uint64_t id = range_id();
    record("mstxRangeStartA", text, "", (long)id);
    return id;
}
void mstxRangeEnd(uint64_t id) { record("mstxRangeEnd", "", "", (long)id); }
void *mstxDomainCreateA(const char *name) { record("mstxDomainCreateA", "", name, 0); return strdup(name); }
void mstxDomainDestroy(void *domain) { }
void mstxDomainMarkA(void *domain, const char *text, void *stream) { record("mstxDomainMarkA", text, domain, 0); }
uint64_t mstxDomainRangeStartA(void *domain, const char *text, void *stream) {
    uint64_t id = range_id();
    record("mstxDomainRangeStartA", text, domain, (long)id);
    return id;
}
void mstxDomainRangeEnd(void *domain, uint64_t id) { record("mstxDomainRangeEnd", "", domain, (long)id); }
