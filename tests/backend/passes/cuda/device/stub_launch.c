// The driver's launch and its tensor maps: records one launch and one map. Layouts as in cuda.h of CUDA 12 and 13.
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

size_t num_parameters, parameter_bytes[4];

int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* bytes) {
    if (index >= num_parameters) return 1;
    *offset = 0;
    *bytes = parameter_bytes[index];
    return 0;
}

typedef struct {
    int type, rank;
    size_t address;
    unsigned long long dims[2], stride;
    unsigned box[2], steps[2];
    int interleave, swizzle, promotion, fill, misalignment;
} Map;

Map map;
int num_maps;

int cuTensorMapEncodeTiled(void* encoded, int type, unsigned rank, void* address, const unsigned long long* dims,
                           const unsigned long long* strides, const unsigned* box, const unsigned* steps,
                           int interleave, int swizzle, int promotion, int fill) {
    map = (Map){type, (int)rank, (size_t)address, {dims[0], dims[1]}, strides[0], {box[0], box[1]},
                {steps[0], steps[1]}, interleave, swizzle, promotion, fill, (int)((size_t)encoded % 64)};
    ++num_maps;
    memset(encoded, 0xA5, 128);
    return status;
}

int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void** extra) {
    memcpy(recorded.grid, config->grid, sizeof recorded.grid);
    memcpy(recorded.block, config->block, sizeof recorded.block);
    recorded.shared_bytes = config->shared_bytes;
    recorded.num_attributes = config->num_attributes;
    if (config->num_attributes == 1) {
        recorded.attribute = config->attributes[0].id;
        recorded.is_allowed = config->attributes[0].value.programmatic_stream_serialization_allowed;
    }
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
