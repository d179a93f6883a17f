/* cuda/: the GPU half, as plain C. One context a device; no global state.
 *
 * Memory: `device` pointers are the GPU's and are not to be read here; `pinned` is the host's, which copies may read and write while the host goes on.
 * Order: work goes to three queues (streams), each of which does one thing after the other; between queues, and between a queue and the host, only events
 * order anything. Every kernel runs in GPU_COMPUTE. A call returns when its work is queued.
 * Errors: the first failure of a context sticks: its reason is kept, and from then on every call does nothing and returns the same -errno. So a caller may
 * queue a whole layer and look once, where it waits. -ENOMEM of gpu_alloc and gpu_pin does not stick. -ENODEV: no device, or a driver that is missing or
 * too old; -EIO: the device failed.
 * Threads: one at a time; with a device the same one always is best.
 * Arithmetic: float32 accumulators; each kernel has a twin in engine/ that tests compare it with, named at its place. Matrices are row-major; counts are
 * elements unless a name says bytes. A weight begins at a multiple of 16 bytes of memory from gpu_alloc, or is whole rows of such a one.
 */
#ifndef RETRIEVALD_GPU_H
#define RETRIEVALD_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpu_context gpu_context;
typedef struct gpu_event gpu_event;

/* ---- device (context.cu) ------------------------------------------------------------------------------------------- */

typedef struct {
    char name[128];             /* "NVIDIA H200" */
    uint32_t major, minor;      /* compute capability */
    uint32_t n_sm;
    size_t total, free;         /* bytes of memory; free: when asked */
} gpu_info;

/* Opens device `index`. -ENODEV when there is none or this build has no GPU support; the reason goes to err. */
int gpu_open(int index, gpu_context **ret, char *err, size_t errlen);
void gpu_close(gpu_context *g); /* waits for all that is queued; NULL is fine. Memory and events of it are to be freed before */
int gpu_info_get(gpu_context *g, gpu_info *ret);
int gpu_status(const gpu_context *g);         /* 0, or what sticks */
const char *gpu_reason(const gpu_context *g); /* of that; "" for 0. Valid until gpu_close */

int gpu_alloc(gpu_context *g, size_t bytes, void **ret_device); /* 256-byte aligned. -ENOMEM */
void gpu_free(gpu_context *g, void *device);
int gpu_pin(gpu_context *g, size_t bytes, void **ret_pinned);   /* -ENOMEM */
void gpu_unpin(gpu_context *g, void *pinned);

/* ---- order --------------------------------------------------------------------------------------------------------- */

typedef enum { GPU_COMPUTE, GPU_TO_DEVICE, GPU_TO_HOST, GPU_QUEUES } gpu_queue;

int gpu_event_new(gpu_context *g, bool timed, gpu_event **ret); /* timed: for gpu_elapsed; costs a little more */
void gpu_event_free(gpu_context *g, gpu_event *e);
int gpu_record(gpu_context *g, gpu_event *e, gpu_queue q); /* happens when all that q has now is done */
int gpu_wait(gpu_context *g, gpu_queue q, gpu_event *e);   /* what q gets from now on starts after what e was last recorded for */
int gpu_finish(gpu_context *g, gpu_event *e);              /* the host waits for it; with this, errors of the work before come to light */
int gpu_happened(gpu_context *g, gpu_event *e);            /* 1: gpu_finish would not wait for it; 0: it would */
int gpu_elapsed(gpu_context *g, const gpu_event *from, const gpu_event *to, double *ret_ms); /* between two timed ones that have happened */
int gpu_drain(gpu_context *g);                             /* the host waits for everything: not in a step */

/* Copies between device and pinned memory, either way, or inside the device. From other host memory: gpu_upload, which returns when src may go. */
int gpu_copy(gpu_context *g, gpu_queue q, void *dst, const void *src, size_t bytes);
int gpu_upload(gpu_context *g, void *device, const void *src, size_t bytes);
int gpu_zero(gpu_context *g, gpu_queue q, void *device, size_t bytes);

/* ---- products with weights ----------------------------------------------------------------------------------------- */

/* Types of weights, numbered as engine/quant.h numbers them (asserted there), formats as there. */
typedef enum { GPU_F32, GPU_F16, GPU_BF16, GPU_Q8_0, GPU_Q4_0, GPU_Q4_1, GPU_Q5_0, GPU_Q5_1, GPU_IQ4_NL, GPU_Q2_K, GPU_Q3_K, GPU_Q4_K, GPU_Q5_K, GPU_Q6_K,
               GPU_IQ4_XS, GPU_TYPE_COUNT } gpu_type;

/* W [rows][cols] in device memory; row_bytes as in the file. */
typedef struct {
    const void *data;
    size_t row_bytes;
    uint32_t rows, cols;
    gpu_type type;
} gpu_weight;

/* Scratch for the calls below, once after opening: most columns of a weight, elements that gpu_matmul turns into bf16 at a time (at least a row; a larger
 * weight is multiplied in parts), most tokens of a gpu_matmul. -ENOMEM. */
int gpu_reserve(gpu_context *g, uint32_t max_cols, size_t max_elements, uint32_t max_tokens);
size_t gpu_reserve_bytes(uint32_t max_cols, size_t max_elements, uint32_t max_tokens); /* what it takes at most, of any device */

/* Decode (matvec.cu): y[i] = W[i] x for n <= 3 weights that read the same x [cols] float32; add: y[i] += W[i] x. Types with blocks: x is rounded to 8 bits a
 * block of 32 and multiplied in integers, as eng_kernels.quantize_q8 and gemv_q8; the others as gemv_f32. */
int gpu_matvec(gpu_context *g, const gpu_weight *const *w, float *const *y, uint32_t n, const float *x, bool add);

/* Prefill (matmul.cu): y [n_tokens][rows] = x [n_tokens][cols] W^T; add: y += . W and x are rounded to bf16 for the tensor cores (float32 where the device has
 * none for it), sums are float32: dequantize.cu, then cuBLAS. A token's bits do not depend on the other tokens, nor on how many they are (matmul.cu).
 * Twin: eng_linear_prefill. */
int gpu_matmul(gpu_context *g, const gpu_weight *w, float *y, const float *x, uint32_t n_tokens, bool add);

/* out [n][cols] float32 = rows ids[n] (device) of the table, times scale (rows.cu). Twin: eng_dequantize. */
int gpu_embed(gpu_context *g, float *out, const gpu_weight *table, const int32_t *ids, uint32_t n, float scale);

/* ---- rows (rows.cu): float32, in device memory; out may be x --------------------------------------------------------- */

int gpu_rms_norm(gpu_context *g, float *out, const float *x, const float *w, uint32_t n, uint32_t cols, float eps); /* each of n rows. Twin: rms_norm */
int gpu_add(gpu_context *g, float *x, const float *y, size_t n);                           /* x += y */
int gpu_add_row(gpu_context *g, float *x, const float *row, uint32_t n, uint32_t cols);    /* x[i] += row, for n rows: biases */
int gpu_scale(gpu_context *g, float *x, size_t n, float f);
int gpu_gate(gpu_context *g, float *out, const float *gate, const float *up, size_t n, bool gelu); /* silu_mul, gelu_mul */
/* Rotates the first `rot` dims of each head of x [n][n_head][d]; cs [n][rot]: cosines [rot / 2], then sines. Twin: rope */
int gpu_rope(gpu_context *g, float *x, const float *cs, uint32_t n, uint32_t n_head, uint32_t d, uint32_t rot, bool halves);
/* Each of n rows becomes what a q8_0 cache gives back of it. Twin: kv_store, then kv_load */
int gpu_round_q8(gpu_context *g, float *x, uint32_t n, uint32_t cols);

/* ---- attention ------------------------------------------------------------------------------------------------------ */

/* How keys and values lie in device memory: 16-bit rows [n_head_kv][cap][d]. */
typedef enum { GPU_KV_F16, GPU_KV_BF16 } gpu_kv_type;
typedef struct {
    void *k, *v;
    uint32_t n_head_kv, group, d;   /* group: query heads of a KV head, 1..16; d <= 256, a multiple of 8 */
    uint32_t cap;
    gpu_kv_type type_k, type_v;
} gpu_kv;

/* Stores k, v [n][n_head_kv][d] float32 as rows first_row + i, modulo cap (rows.cu). Rounds to nearest even, f16 saturates, as kv_store. */
int gpu_kv_store(gpu_context *g, const gpu_kv *kv, const float *k, const float *v, uint32_t first_row, uint32_t n);

/* Parts of a softmax, as engine/attention.h merges them: m maximum of the scores, l sum of exp(score - m), o sum of exp(score - m) v.
 * l = 0: nothing was seen, and m and o are not looked at. Device memory: m, l [n_part][n_head]; o [n_part][n_head][d]. */
typedef struct {
    float *m, *l, *o;
} gpu_parts;

typedef struct { uint32_t lo, hi; } gpu_rows;

/* Decode (attend_decode.cu): q [n_head][d], whose scores are scale q.k, over the rows of `runs` (n_runs <= 3, in any order), split over blocks of keys into
 * n_part parts: at least gpu_attend_parts(n) of them for n rows in all, those without keys are empty. Twin: qk, softmax, pv. */
uint32_t gpu_attend_parts(uint32_t n_rows);
int gpu_attend(gpu_context *g, const gpu_parts *parts, uint32_t n_part, const float *q, float scale, const gpu_kv *kv, const gpu_rows *runs, uint32_t n_runs);
/* out [n_head][d] = all parts in one (attend_decode.cu). All empty: zeros. Twin: eng_partial_merge. */
int gpu_merge(gpu_context *g, float *out, const gpu_parts *parts, uint32_t n_part, uint32_t n_head, uint32_t d);

/* Prefill (attend_prefill.cu): queries q [n][n_head][d] at positions pos0 + i over a block of keys and values, rows [0, n_rows) of kv at positions from
 * `first` on; a query sees the positions up to its own, and of these the last `window` (0: all). The softmax goes on from `state` (one part a query head:
 * m, l [n][n_head], o [n][n_head][d], unnormalised), which gpu_attend_begin empties and gpu_attend_end divides to out [n][n_head][d]: so blocks may come one
 * after the other from the host, and the result is that of one pass. Blocks begin at multiples of GPU_TILE positions and come in rising order; then a token's
 * bits do not depend on where chunks and blocks end. Twin: eng_attn_prefill. */
enum { GPU_TILE = 64 };
typedef struct {
    const float *q;
    float scale;
    uint32_t pos0, n, window;
} gpu_queries;
int gpu_attend_begin(gpu_context *g, const gpu_parts *state, const gpu_kv *kv, uint32_t n);
int gpu_attend_block(gpu_context *g, const gpu_parts *state, const gpu_queries *q, const gpu_kv *kv, uint32_t first, uint32_t n_rows);
int gpu_attend_end(gpu_context *g, float *out, const gpu_parts *state, const gpu_kv *kv, uint32_t n);

#ifdef __cplusplus
}
#endif
#endif
