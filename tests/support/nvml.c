/* What NVIDIA's management library says of a GPU with every fault that it reports: a stand-in for libnvidia-ml.so.1,
 * with the functions and structures of nvml.h, where there is no GPU. Functions that are missing here are ones that an
 * older driver lacks. Compiled with WORN, its faults are those of a GPU at the end of its life, and with DENIED the user
 * has no right to ask for them; with LOST there is a second GPU that has fallen off the bus. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned int uint;
typedef unsigned long long ull;
typedef struct { ull total, free, used; } memory;
typedef struct { uint gpu, memory; } utilization;
typedef struct { uint version; ull total, reserved, free, used; } memory_v2;
typedef struct { uint pid; ull bytes; uint gpu_instance, compute_instance; } process_info;
enum { OK = 0, NOT_SUPPORTED = 3, NO_PERMISSION = 4, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };
#ifdef LOST
enum { COUNT = 2 };
#else
enum { COUNT = 1 };
#endif
#ifdef DENIED
#define COUNTED NO_PERMISSION
#else
#define COUNTED OK
#endif
#ifdef WORN
enum { WEAR = 1, REASONS = 0x80 | 0x20 };
#else
enum { WEAR = 0, REASONS = 0x40 | 0x1 };
#endif

static int device;

int nvmlInitWithFlags(uint flags) { return OK; }
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *text, uint length) { snprintf(text, length, "580.65.06"); return OK; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return OK; }
int nvmlDeviceGetCount_v2(uint *count) { *count = COUNT; return OK; }
int nvmlDeviceGetHandleByIndex_v2(uint index, void **handle) { *handle = &device; return index ? GPU_IS_LOST : OK; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **handle) { *handle = &device; return OK; }
int nvmlDeviceGetName(void *handle, char *text, uint length) { snprintf(text, length, "NVIDIA H100 80GB HBM3"); return OK; }
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2 *found) {
    found->total = 80ull << 30, found->reserved = 1ull << 30, found->used = 0, found->free = 79ull << 30;
    return OK;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory *found) {
    found->total = 80ull << 30, found->used = 4ull << 30, found->free = 76ull << 30;
    return OK;
}
int nvmlDeviceGetUtilizationRates(void *handle, utilization *found) { found->gpu = 97, found->memory = 40; return OK; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) { *major = 9, *minor = 0; return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *handle, uint *found) { *found = 5; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(void *handle, uint *found) { *found = 16; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(void *handle, uint *found) { *found = 8; return OK; }
int nvmlDeviceGetTemperature(void *handle, uint sensor, uint *found) { *found = 91; return OK; }
int nvmlDeviceGetPowerUsage(void *handle, uint *milliwatts) { *milliwatts = 350000; return OK; }
int nvmlDeviceGetClockInfo(void *handle, uint kind, uint *found) { *found = 300; return OK; }
int nvmlDeviceGetMaxClockInfo(void *handle, uint kind, uint *found) { *found = 1980; return OK; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, ull *reasons) { *reasons = REASONS; return COUNTED; }
int nvmlDeviceGetTotalEccErrors(void *handle, uint kind, uint counter, ull *found) {
    *found = kind == 1 && (!WEAR || counter == 1) ? 2 : 0;
    return COUNTED;
}
int nvmlDeviceGetRemappedRows(void *handle, uint *corrected, uint *uncorrected, uint *pending, uint *failed) {
    *corrected = 0, *uncorrected = 1, *pending = !WEAR, *failed = WEAR;
    return COUNTED;
}
int nvmlDeviceGetRetiredPagesPendingStatus(void *handle, uint *pending) { *pending = WEAR; return WEAR ? OK : NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkState(void *handle, uint link, uint *active) {
    *active = link != 3;
    return link < 4 ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetNvLinkErrorCounter(void *handle, uint link, uint counter, ull *found) {
    *found = link == 1 && counter == 0 ? 17 : 0;
    return COUNTED;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, uint *count, process_info *found) {
    if (COUNTED != OK)
        return COUNTED;
    if (*count < 1) {
        *count = 1;
        return INSUFFICIENT_SIZE;
    }
    memset(found, 0, sizeof *found);
    const char *pid = getenv("GPU_PROCESS"); // which program uses the GPU
    *count = 1, found->pid = pid ? atoi(pid) : 4242, found->bytes = 3ull << 30;
    return OK;
}
