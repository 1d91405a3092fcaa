// The driver's launch with attributes: records one launch. Layouts as in cuda.h of CUDA 12 and 13.
#include <stddef.h>
#include <string.h>

typedef struct {
    int id;
    char pad[8 - sizeof(int)];
    union {
        char bytes[64];
        int programmatic_stream_serialization_allowed;
    } value;
} Attribute;

typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
    Attribute* attributes;
    unsigned num_attributes;
} Config;

typedef struct {
    unsigned grid[3], block[3], shared_bytes, num_attributes;
    int attribute, is_allowed;
    size_t stream, function;
    unsigned long long pointer;
    int integer;
    long long wide;
    float number;
} Recorded;

Recorded recorded;
int status;

int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void** extra) {
    memcpy(recorded.grid, config->grid, sizeof recorded.grid);
    memcpy(recorded.block, config->block, sizeof recorded.block);
    recorded.shared_bytes = config->shared_bytes;
    recorded.num_attributes = config->num_attributes;
    recorded.attribute = config->attributes[0].id;
    recorded.is_allowed = config->attributes[0].value.programmatic_stream_serialization_allowed;
    recorded.stream = (size_t)config->stream;
    recorded.function = (size_t)function;
    recorded.pointer = *(unsigned long long*)parameters[0];
    recorded.integer = *(int*)parameters[1];
    recorded.wide = *(long long*)parameters[2];
    recorded.number = *(float*)parameters[3];
    return extra ? 1 : status;
}

int cuGetErrorName(int error, const char** text) {
    *text = error == 1 ? "CUDA_ERROR_INVALID_VALUE" : 0;
    return 0;
}
