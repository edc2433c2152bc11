/* A CUDA driver for the C function with which Triton launches kernels: it keeps what the last launch was given, and runs nothing. */
#include <stdint.h>
#include <string.h>

typedef struct { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; } Config;

static int device = 1, expected;
static unsigned launches, shape[4];
static uint64_t values[16], stream;

/* By a test: how many arguments the next kernels have, and what the last one got. */
void fake_expect(int count) { expected = count; }
unsigned fake_launches(void) { return launches; }
unsigned fake_shape(int i) { return shape[i]; }
uint64_t fake_stream(void) { return stream; }
uint64_t fake_value(int i) { return values[i]; }

int cuLaunchKernelEx(const Config* config, void* function, void** arguments, void** extra) {
  ++launches;
  memcpy(shape, config->grid, sizeof config->grid);
  shape[3] = config->block[0];
  stream = (uint64_t)config->stream;
  memset(values, 0, sizeof values);
  for (int i = 0; i < expected; ++i) memcpy(values + i, arguments[i], 4); /* the low half of an address, or a whole number */
  return 0;
}

int cuCtxGetCurrent(void** context) { *context = &device; return 0; }
int cuCtxGetDevice(int* found) { *found = 0; return 0; }
int cuCtxGetLimit(void) { return 0; }
int cuCtxSetCurrent(void* context) { return 0; }
int cuCtxSetLimit(void) { return 0; }
int cuDeviceGet(int* found, int number) { *found = 0; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int of) { *value = 232448; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int of) { *context = &device; return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuFuncGetAttribute(int* value, int attribute, void* function) { *value = attribute ? 0 : 1024; return 0; }
int cuFuncSetAttribute(void* function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void* function, int config) { return 0; }
int cuGetErrorString(int error, const char** text) { *text = "none"; return 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) { *function = &launches; return 0; }
int cuModuleLoadData(void** module, const void* image) { *module = &device; return 0; }
int cuModuleUnload(void* module) { return 0; }
int cuOccupancyMaxActiveClusters(int* count, void* function, void* config) { *count = 1; return 0; }
int cuPointerGetAttribute(uint64_t* value, int attribute, uint64_t address) { *value = address; return 0; }
int cuStreamIsCapturing(void* of, int* status) { *status = 0; return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }
