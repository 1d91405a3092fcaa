/* A CUDA driver without a GPU, for the ctypes side of shm/buffers/cuda_driver.py: device memory is files in $STUB_CUDA_DIR that
   every process maps, a pointer is where this one has them mapped, and all work is done at once. With the context of the
   device not current, or an argument that makes no sense, calls fail as the driver's do. One thread. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef WITH_CUDA_H /* proves the signatures: a definition that differs from the header's declaration does not compile */
#include <cuda.h>
#else
typedef int CUresult, CUdevice, CUdevice_attribute;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef struct { char reserved[64]; } CUipcEventHandle;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef int CUmemAllocationHandleType, CUmemAllocationGranularity_flags;
typedef struct { int type, id; } CUmemLocation;
typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct { unsigned char compressionType, gpuDirectRDMACapable; unsigned short usage; unsigned char reserved[4]; } allocFlags;
} CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
#endif

enum { OK = 0, BAD_VALUE = 1, NO_MEMORY = 2, NO_CONTEXT = 201, BAD_HANDLE = 400, NOT_READY = 600, REGISTERED = 712 };
enum { MAX = 64, BUSY_STREAM = 0xB5 /* never done, until an event recorded on it is waited for */ };

static struct region { char *start; size_t size; char name[64]; int own; } regions[MAX];
static void *registered, *host_allocated;
static int depth, counter;
static char context_place, stream_place;

#define NEED_CONTEXT if (depth < 1) return NO_CONTEXT

static void path_of(char *path, const char *name) { snprintf(path, 512, "%s/%s", getenv("STUB_CUDA_DIR"), name); }

static struct region *map(const char *name, size_t size, int own) {
    char path[512];
    path_of(path, name);
    int fd = open(path, own ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600);
    struct stat status;
    if (fd < 0) return NULL;
    if (own && ftruncate(fd, (off_t)size)) abort();
    fstat(fd, &status);
    for (int i = 0; i < MAX; i++)
        if (!regions[i].start) {
            struct region *r = &regions[i];
            r->size = (size_t)status.st_size;
            r->start = mmap(NULL, r->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            r->own = own;
            snprintf(r->name, sizeof r->name, "%s", name);
            close(fd);
            return r;
        }
    abort();
}

/* The region of the first byte; more bytes than it has lie in regions behind it. */
static struct region *find(uint64_t pointer, size_t size) {
    for (int i = 0; i < MAX; i++) {
        uint64_t start = (uint64_t)(uintptr_t)regions[i].start, end = start + regions[i].size;
        if (start && pointer >= start && pointer < end)
            return pointer + size <= end || find(end, pointer + size - end) ? &regions[i] : NULL;
    }
    return NULL;
}

static CUresult unmap(uint64_t pointer, int own) {
    struct region *r = find(pointer, 1);
    if (!r || r->own != own || (uint64_t)(uintptr_t)r->start != pointer) return BAD_VALUE;
    if (own) {
        char path[512];
        path_of(path, r->name);
        unlink(path);
    }
    munmap(r->start, r->size);
    r->start = NULL;
    return OK;
}

static struct region *make(const char *kind, size_t size) {
    char name[64];
    snprintf(name, sizeof name, "%s-%d-%d", kind, (int)getpid(), counter++);
    return map(name, size, 1);
}

CUresult cuInit(unsigned int flags) { return flags ? BAD_VALUE : OK; }
CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = error == NO_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : error == BAD_HANDLE ? "CUDA_ERROR_INVALID_HANDLE"
          : error == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE";
    return OK;
}
CUresult cuDeviceGetCount(int *count) { *count = 2; return OK; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = 40 + ordinal; return OK; }
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) { memset(uuid, device, 16); return OK; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)&context_place;
    return device == 40 || device == 41 ? OK : BAD_VALUE;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if ((void *)context != &context_place) return NO_CONTEXT;
    depth++;
    return OK;
}
CUresult cuCtxPopCurrent_v2(CUcontext *context) { NEED_CONTEXT; depth--; *context = (CUcontext)&context_place; return OK; }
CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    NEED_CONTEXT;
    *stream = (CUstream)&stream_place;
    return flags == 1 ? OK : BAD_VALUE;
}
CUresult cuStreamSynchronize(CUstream stream) { NEED_CONTEXT; return (void *)stream == &stream_place ? OK : BAD_HANDLE; }
CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size) {
    NEED_CONTEXT;
    if (size > (64u << 20)) return NO_MEMORY;
    struct region *r = make("memory", size);
    memset(r->start, 0x5A, size); /* another's data */
    *pointer = (uint64_t)(uintptr_t)r->start;
    return OK;
}
CUresult cuMemFree_v2(CUdeviceptr pointer) { NEED_CONTEXT; return unmap(pointer, 1); }
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    NEED_CONTEXT;
    struct region *r = find(pointer, 1);
    if (!r) return BAD_VALUE;
    *base = (uint64_t)(uintptr_t)r->start;
    *size = r->size;
    return OK;
}
CUresult cuMemsetD8Async(CUdeviceptr pointer, unsigned char value, size_t size, CUstream stream) {
    NEED_CONTEXT;
    if (!find(pointer, size) || (void *)stream != &stream_place) return BAD_VALUE;
    memset((void *)(uintptr_t)pointer, value, size);
    return OK;
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    NEED_CONTEXT;
    (void)stream;
    if (!find(to, size) || !find(from, size)) return BAD_VALUE;
    memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
    return OK;
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    NEED_CONTEXT;
    if (!find(from, size) || (void *)stream != &stream_place) return BAD_VALUE;
    memcpy(to, (void *)(uintptr_t)from, size);
    return OK;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    NEED_CONTEXT;
    if (!find(to, size) || !registered || (char *)from < (char *)registered) return BAD_VALUE;
    memcpy((void *)(uintptr_t)to, from, size);
    return OK;
}
CUresult cuMemHostAlloc(void **address, size_t size, unsigned int flags) {
    NEED_CONTEXT;
    if (size > (64u << 20)) return NO_MEMORY;
    if (flags != 2 || !size || host_allocated) return BAD_VALUE;
    *address = host_allocated = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    return OK;
}
CUresult cuMemFreeHost(void *address) {
    NEED_CONTEXT;
    if (!host_allocated || address != host_allocated) return BAD_VALUE;
    free(host_allocated);
    host_allocated = NULL;
    return OK;
}
CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned int flags) {
    NEED_CONTEXT;
    if (registered) return REGISTERED;
    if (flags != 1 || !size || (uintptr_t)address % 4096) return BAD_VALUE;
    registered = address;
    return OK;
}
CUresult cuMemHostUnregister(void *address) {
    NEED_CONTEXT;
    if (!registered || address != registered) return BAD_VALUE;
    registered = NULL;
    return OK;
}

static CUresult handle_of(char *reserved, uint64_t pointer) {
    struct region *r = find(pointer, 1);
    if (!r || !r->own) return BAD_VALUE;
    memset(reserved, 0, 64);
    snprintf(reserved, 64, "%s", r->name);
    return OK;
}
static struct region *open_handle(const char *reserved, const char *kind) {
    char name[65] = {0};
    memcpy(name, reserved, 64);
    return strncmp(name, kind, strlen(kind)) ? NULL : map(name, 0, 0);
}
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    NEED_CONTEXT;
    return handle_of(handle->reserved, pointer);
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
    NEED_CONTEXT;
    struct region *r = flags == 1 ? open_handle(handle.reserved, "memory") : NULL;
    if (!r) return BAD_HANDLE;
    *pointer = (uint64_t)(uintptr_t)r->start;
    return OK;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) { NEED_CONTEXT; return unmap(pointer, 0); }

CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    NEED_CONTEXT;
    if ((flags & 6) != 6) return BAD_VALUE; /* interprocess ones record no time */
    *event = (CUevent)make("event", 4096)->start;
    return OK;
}
CUresult cuEventDestroy_v2(CUevent event) {
    NEED_CONTEXT;
    struct region *r = find((uint64_t)(uintptr_t)event, 1);
    return r ? unmap((uint64_t)(uintptr_t)event, r->own) : BAD_HANDLE;
}
CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event) {
    NEED_CONTEXT;
    return handle_of(handle->reserved, (uint64_t)(uintptr_t)event);
}
CUresult cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle handle) {
    NEED_CONTEXT;
    struct region *r = open_handle(handle.reserved, "event");
    if (!r) return BAD_HANDLE;
    *event = (CUevent)r->start;
    return OK;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
    NEED_CONTEXT;
    if (!find((uint64_t)(uintptr_t)event, 1)) return BAD_HANDLE;
    *(volatile char *)event = (uintptr_t)stream == BUSY_STREAM;
    return OK;
}
CUresult cuEventQuery(CUevent event) {
    NEED_CONTEXT;
    if (!find((uint64_t)(uintptr_t)event, 1)) return BAD_HANDLE;
    return *(volatile char *)event ? NOT_READY : OK;
}
CUresult cuEventSynchronize(CUevent event) {
    NEED_CONTEXT;
    if (!find((uint64_t)(uintptr_t)event, 1)) return BAD_HANDLE;
    *(volatile char *)event = 0;
    return OK;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    NEED_CONTEXT;
    (void)stream;
    return flags || !find((uint64_t)(uintptr_t)event, 1) ? BAD_HANDLE : OK;
}

/* Blocks with file descriptors: a block is a memfd, whose kernel object lives as the driver's does, and a handle is this
   process's fd of it + 1000. A range is address space; $STUB_CUDA_NO_BLOCKS is a device that has none. */
enum { GRANULE = 2 << 20, MAX_BLOCK = 64 << 20 };

static int has_properties(const CUmemAllocationProp *p) {
    return p->type == 1 && p->requestedHandleTypes == 1 && p->location.type == 1 && p->location.id >= 40 && !p->win32HandleMetaData
        && !p->allocFlags.usage && !p->allocFlags.compressionType;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = attribute == 103 && !getenv("STUB_CUDA_NO_BLOCKS");
    return device == 40 || device == 41 ? OK : BAD_VALUE;
}
CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags flags) {
    NEED_CONTEXT;
    *size = GRANULE;
    return has_properties(p) && !flags ? OK : BAD_VALUE;
}
CUresult cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr address, unsigned long long flags) {
    NEED_CONTEXT;
    if (size % GRANULE || !size || alignment || address || flags) return BAD_VALUE;
    void *reserved = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *start = (uint64_t)(uintptr_t)reserved;
    return reserved == MAP_FAILED ? NO_MEMORY : OK;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
    NEED_CONTEXT;
    return find(start, 1) || munmap((void *)(uintptr_t)start, size) ? BAD_VALUE : OK;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *p, unsigned long long flags) {
    NEED_CONTEXT;
    if (size > MAX_BLOCK) return NO_MEMORY;
    if (size % GRANULE || !has_properties(p) || flags) return BAD_VALUE;
    int fd = memfd_create("penstock-stub-block", MFD_CLOEXEC);
    *handle = (uint64_t)fd + 1000;
    return fd < 0 || ftruncate(fd, (off_t)size) ? NO_MEMORY : OK;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    NEED_CONTEXT;
    return handle < 1000 || close((int)handle - 1000) ? BAD_VALUE : OK;
}
CUresult cuMemExportToShareableHandle(void *fd, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags) {
    NEED_CONTEXT;
    if (type != 1 || flags) return BAD_VALUE;
    *(int *)fd = fcntl((int)handle - 1000, F_DUPFD_CLOEXEC, 0);
    return *(int *)fd < 0 ? BAD_VALUE : OK;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *fd, CUmemAllocationHandleType type) {
    NEED_CONTEXT;
    char path[64], target[64] = {0};
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(uintptr_t)fd);
    if (type != 1 || readlink(path, target, sizeof target - 1) < 0 || !strstr(target, "penstock-stub-block")) return BAD_VALUE;
    *handle = (uint64_t)fcntl((int)(uintptr_t)fd, F_DUPFD_CLOEXEC, 0) + 1000;
    return OK;
}
CUresult cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    NEED_CONTEXT;
    struct stat status;
    if (fstat((int)handle - 1000, &status) || (size_t)status.st_size != size || offset || flags || find(start, 1)) return BAD_VALUE;
    void *place = (void *)(uintptr_t)start;
    if (mmap(place, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle - 1000, 0) != place) return BAD_VALUE;
    for (int i = 0; i < MAX; i++)
        if (!regions[i].start) {
            regions[i] = (struct region){place, size, "block", 2};
            return OK;
        }
    abort();
}
CUresult cuMemSetAccess(CUdeviceptr start, size_t size, const CUmemAccessDesc *access, size_t count) {
    NEED_CONTEXT;
    struct region *r = find(start, size);
    if (!r || r->own != 2 || count != 1 || access->flags != 3 || access->location.type != 1) return BAD_VALUE;
    return mprotect(r->start, size, PROT_READ | PROT_WRITE) ? BAD_VALUE : OK;
}
CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
    NEED_CONTEXT;
    struct region *r = find(start, size);
    if (!r || r->own != 2 || r->start != (char *)(uintptr_t)start || r->size != size) return BAD_VALUE;
    mmap(r->start, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    r->start = NULL;
    return OK;
}
