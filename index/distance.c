#include "distance_narrow.h"

#include <cpuid.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void widen_row(float *dst, const uint8_t *src, idx_type type, uint32_t dim, uint32_t dim_pad)
{
    if (type == IDX_F32) {
        memcpy(dst, src, (size_t)dim * 4);
    } else if (type == IDX_Q8_0) {
        for (uint32_t j = 0; j < dim; j++) {
            const uint8_t *block = src + (size_t)(j / IDX_Q8_BLOCK) * IDX_Q8_BYTES;
            uint16_t d;
            memcpy(&d, block, 2);
            dst[j] = idx_half_to_float(d) * (int8_t)block[2 + j % IDX_Q8_BLOCK];
        }
    } else {
        for (uint32_t j = 0; j < dim; j++) {
            uint16_t h;
            memcpy(&h, src + 2 * (size_t)j, 2);
            if (type == IDX_F16) {
                dst[j] = idx_half_to_float(h);
            } else {
                uint32_t u = (uint32_t)h << 16;
                memcpy(dst + j, &u, 4);
            }
        }
    }
    memset(dst + dim, 0, (size_t)(dim_pad - dim) * 4);
}

static void widen(float *dst, const idx_rows *rows, const uint32_t *ids, uint32_t first, uint32_t n)
{
    uint32_t dim_pad = idx_dim_pad(rows->dim);
    for (uint32_t i = 0; i < n; i++)
        widen_row(dst + (size_t)i * dim_pad, idx_row(rows, ids ? ids[i] : first + i), rows->type, rows->dim, dim_pad);
}

/* The 16 partial sums are what lets a compiler vectorise this for the baseline without reordering a float sum. */
float idx_dot(const float *a, const float *b, uint32_t dim_pad)
{
    float acc[16] = {0};
    for (uint32_t j = 0; j < dim_pad; j += 16)
        for (uint32_t l = 0; l < 16; l++)
            acc[l] += a[j + l] * b[j + l];
    for (uint32_t w = 8; w; w /= 2)
        for (uint32_t l = 0; l < w; l++)
            acc[l] += acc[l + w];
    return acc[0];
}

static void dots(const float *rows, const float *q, uint32_t nq, uint32_t dim_pad, float scale, float *out, size_t ld)
{
    for (uint32_t h = 0; h < nq; h++)
        for (uint32_t r = 0; r < IDX_BLOCK; r++)
            out[h * ld + r] = scale * idx_dot(rows + (size_t)r * dim_pad, q + (size_t)h * dim_pad, dim_pad);
}

static float max_of(const float *x, uint32_t n, float init)
{
    for (uint32_t i = 0; i < n; i++)
        init = x[i] > init ? x[i] : init;
    return init;
}

static uint32_t filter(const uint32_t *ids, uint32_t first, const float *scores, uint32_t n, float thr, uint32_t *ret_ids,
                       float *ret_scores)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++) {
        float s = scores[i];
        ret_ids[kept] = ids ? ids[i] : first + i;
        ret_scores[kept] = s;
        kept += s >= thr;
    }
    return kept;
}

static void split(const float *x, uint32_t n, float pivot, float *gt, uint32_t *ret_gt, float *lt, uint32_t *ret_lt)
{
    uint32_t n_gt = 0, n_lt = 0;
    for (uint32_t i = 0; i < n; i++) {
        float s = x[i];
        gt[n_gt] = s;
        n_gt += s > pivot;
        lt[n_lt] = s;
        n_lt += s < pivot;
    }
    *ret_gt = n_gt;
    *ret_lt = n_lt;
}

static void visible(const float *scale, const uint16_t *ids, uint32_t n, uint32_t offset, uint32_t rows, float *out)
{
    idx_visible(scale, ids, n, offset, rows, out);
}

/* Numbers are made positive, where rounding down is dropping what follows the point. */
static int32_t round_query(const float *v, float inverse, const float *up, uint32_t n, int8_t *x)
{
    int32_t sum = 0;
    for (uint32_t j = 0; j < n; j++) {
        int32_t code = (int32_t)(v[j] * inverse + (128 + up[j % IDX_ROUNDINGS])) - 128;
        x[j] = (int8_t)code;
        sum += code;
    }
    return sum;
}

static void reach(const float *score, const float *spread, const float *votes, uint32_t n, float size, float margin, float least, uint32_t bit, uint32_t *want)
{
    idx_reach(score, spread, votes, n, size, margin, least, bit, want);
}

static void codes(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t quads, const idx_code_query *q, uint32_t nq,
                  float *out, size_t ld, float *ret_best)
{
    for (uint32_t h = 0; h < nq; h++) {
        const uint8_t *block = codes;
        float best = -INFINITY;
        for (uint32_t s = 0; s < n_blocks * IDX_BLOCK; s++) {
            uint32_t i = s % IDX_BLOCK;
            if (s && !i)
                block += (size_t)quads * 64;
            int32_t dot = 0; /* fits for 4,096 dimensions */
            for (uint32_t j = 0; j < 4 * quads; j++)
                dot += (block[(size_t)(j / 4) * 64 + i * 4 + j % 4] - 128) * q[h].x[j];
            float score = (float)dot * (scale[s] * q[h].scale) + q[h].offset;
            out[h * ld + s] = score;
            best = score > best ? score : best;
        }
        ret_best[h] = best;
    }
}

static void node(const uint8_t *block, const float *scale, uint32_t quads, const idx_code_query *q, uint32_t heads, float *out, float *best)
{
    idx_node(codes, block, scale, quads, q, heads, out, best);
}

static void weigh(const float *x, uint32_t n, float m, float *out)
{
    for (uint32_t i = 0; i < n; i++) {
        float d = x[i] - m;
        out[i] = d >= -87 ? expf(d) : 0;
    }
}

static void sums(const float *x, uint32_t nq, uint32_t from, uint32_t n, const uint32_t *end, uint32_t x0, float *const *to)
{
    for (uint32_t c = 0; from < n; c++) {
        uint32_t stop = end[c] - x0 < n ? end[c] - x0 : n;
        for (uint32_t h = 0; h < nq; h++) {
            float s = 0;
            for (uint32_t i = from; i < stop; i++)
                s += x[h * IDX_TILE + i];
            to[h][c] += s;
        }
        from = stop;
    }
}

static void nearest(const int8_t *rows, uint32_t quads, const uint8_t *panel, const int32_t *half, uint32_t n_blocks, uint32_t *ret)
{
    for (uint32_t r = 0; r < IDX_BLOCK; r++) {
        int32_t best = INT32_MIN;
        ret[r] = 0;
        for (uint32_t c = 0; c < n_blocks * IDX_BLOCK; c++) {
            const uint8_t *centroid = panel + (size_t)(c / IDX_BLOCK) * quads * 64 + c % IDX_BLOCK * 4;
            int32_t score = -half[c];
            for (uint32_t j = 0; j < 4 * quads; j++)
                score += centroid[(size_t)(j / 4) * 64 + j % 4] * rows[(size_t)r * 4 * quads + j];
            if (score > best) {
                best = score;
                ret[r] = c;
            }
        }
    }
}

const idx_kernels idx_kernels_scalar = {widen, dots, max_of, filter, split, node, reach, codes, visible, weigh, sums, nearest, round_query, idx_narrow_scalar};

/* Written once, by idx_cpu_set() or by the first use; both writers of a race would write the same detected table. */
static _Atomic(const idx_kernels *) current;

/* Not every compiler's __builtin_cpu_supports knows this name. It needs no more of the system than AVX does. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

/* AMX, and Linux's leave to use it, which a process asks for once; Linux before 5.16 knows no such question. */
static bool has_amx(void)
{
    enum { TILE = 1 << 24, INT8 = 1 << 25, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & (TILE | INT8)) == (TILE | INT8) &&
           !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
}

idx_cpu idx_cpu_detect(void)
{
    /* libgcc asks xgetbv too, so a level the operating system doesn't save the registers of isn't reported. */
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c())
        return IDX_CPU_SCALAR;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        return has_amx() ? IDX_CPU_AMX : IDX_CPU_AVX512;
    return IDX_CPU_AVX2;
}

void idx_cpu_set(idx_cpu level)
{
    idx_cpu best = idx_cpu_detect();
    if (level > best)
        level = best;
    static const idx_kernels *const tables[] = {&idx_kernels_scalar, &idx_kernels_avx2, &idx_kernels_avx512, &idx_kernels_amx};
    atomic_store(&current, tables[level]);
}

const idx_kernels *idx_kernels_get(void)
{
    const idx_kernels *k = atomic_load(&current);
    if (!k) {
        idx_cpu_set(IDX_CPU_AMX);
        k = atomic_load(&current);
    }
    return k;
}
