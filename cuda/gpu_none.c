/* The GPU of a build without the CUDA toolkit. Opening it fails, so that no context reaches the rest, which is here for the linker. */
#include "gpu.h"

#include <errno.h>
#include <stdio.h>

#pragma GCC diagnostic ignored "-Wunused-parameter"

#define NO_GPU "this build has no GPU support"

int gpu_open(int index, gpu_context **ret, char *err, size_t errlen)
{
    snprintf(err, errlen, "device %d: " NO_GPU, index);
    return -ENODEV;
}

const char *gpu_reason(const gpu_context *g)
{
    return NO_GPU;
}

void gpu_close(gpu_context *g) {}
int gpu_info_get(gpu_context *g, gpu_info *ret) { return -ENODEV; }
int gpu_status(const gpu_context *g) { return -ENODEV; }
int gpu_alloc(gpu_context *g, size_t bytes, void **ret_device) { return -ENODEV; }
void gpu_free(gpu_context *g, void *device) {}
int gpu_pin(gpu_context *g, size_t bytes, void **ret_pinned) { return -ENODEV; }
void gpu_unpin(gpu_context *g, void *pinned) {}
int gpu_event_new(gpu_context *g, bool timed, gpu_event **ret) { return -ENODEV; }
void gpu_event_free(gpu_context *g, gpu_event *e) {}
int gpu_record(gpu_context *g, gpu_event *e, gpu_queue q) { return -ENODEV; }
int gpu_wait(gpu_context *g, gpu_queue q, gpu_event *e) { return -ENODEV; }
int gpu_finish(gpu_context *g, gpu_event *e) { return -ENODEV; }
int gpu_happened(gpu_context *g, gpu_event *e) { return -ENODEV; }
int gpu_elapsed(gpu_context *g, const gpu_event *from, const gpu_event *to, double *ret_ms) { return -ENODEV; }
int gpu_drain(gpu_context *g) { return -ENODEV; }
int gpu_copy(gpu_context *g, gpu_queue q, void *dst, const void *src, size_t bytes) { return -ENODEV; }
int gpu_upload(gpu_context *g, void *device, const void *src, size_t bytes) { return -ENODEV; }
int gpu_zero(gpu_context *g, gpu_queue q, void *device, size_t bytes) { return -ENODEV; }
int gpu_reserve(gpu_context *g, uint32_t max_cols, size_t max_elements, uint32_t max_tokens) { return -ENODEV; }
size_t gpu_reserve_bytes(uint32_t max_cols, size_t max_elements, uint32_t max_tokens) { return 0; }
int gpu_matvec(gpu_context *g, const gpu_weight *const *w, float *const *y, uint32_t n, const float *x, bool add) { return -ENODEV; }
int gpu_matmul(gpu_context *g, const gpu_weight *w, float *y, const float *x, uint32_t n_tokens, bool add) { return -ENODEV; }
int gpu_embed(gpu_context *g, float *out, const gpu_weight *table, const int32_t *ids, uint32_t n, float scale) { return -ENODEV; }
int gpu_rms_norm(gpu_context *g, float *out, const float *x, const float *w, uint32_t n, uint32_t cols, float eps) { return -ENODEV; }
int gpu_add(gpu_context *g, float *x, const float *y, size_t n) { return -ENODEV; }
int gpu_add_row(gpu_context *g, float *x, const float *row, uint32_t n, uint32_t cols) { return -ENODEV; }
int gpu_scale(gpu_context *g, float *x, size_t n, float f) { return -ENODEV; }
int gpu_gate(gpu_context *g, float *out, const float *gate, const float *up, size_t n, bool gelu) { return -ENODEV; }
int gpu_rope(gpu_context *g, float *x, const float *cs, uint32_t n, uint32_t n_head, uint32_t d, uint32_t rot, bool halves) { return -ENODEV; }
int gpu_round_q8(gpu_context *g, float *x, uint32_t n, uint32_t cols) { return -ENODEV; }
int gpu_kv_store(gpu_context *g, const gpu_kv *kv, const float *k, const float *v, uint32_t first_row, uint32_t n) { return -ENODEV; }
uint32_t gpu_attend_parts(uint32_t n_rows) { return 0; }
int gpu_attend(gpu_context *g, const gpu_parts *parts, uint32_t n_part, const float *q, float scale, const gpu_kv *kv, const gpu_rows *runs,
    uint32_t n_runs) { return -ENODEV; }
int gpu_merge(gpu_context *g, float *out, const gpu_parts *parts, uint32_t n_part, uint32_t n_head, uint32_t d) { return -ENODEV; }
int gpu_attend_begin(gpu_context *g, const gpu_parts *state, const gpu_kv *kv, uint32_t n) { return -ENODEV; }
int gpu_attend_block(gpu_context *g, const gpu_parts *state, const gpu_queries *q, const gpu_kv *kv, uint32_t first, uint32_t n_rows) { return -ENODEV; }
int gpu_attend_end(gpu_context *g, float *out, const gpu_parts *state, const gpu_kv *kv, uint32_t n) { return -ENODEV; }
