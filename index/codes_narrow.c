/* Codes of four bits, to compare with those of eight: half the memory to read, errors of a score some seventeen times as large, so more candidates and more of them scored again. A row's
 * scale is the one of a few that leaves the least squared error: to cut off a row's largest number costs less than steps too wide for all others. README.md has what came of it. */
#include "distance_narrow.h"
#include "graph_build.h"

#include <math.h>
#include <string.h>

static const float shrink[] = {1, .9f, .8f, .7f, .6f};

static uint32_t code_of(float x, float inverse)
{
    float u = floorf((x * inverse + 16) / 2); /* 2 u - 15 nearest to x * inverse */
    return (uint32_t)fmaxf(fminf(u, 15), 0);
}

static double error_of(const float *v, uint32_t n, float scale)
{
    double sum = 0;
    for (uint32_t j = 0; j < n; j++) {
        float e = v[j] - scale * (2 * (float)code_of(v[j], 1 / scale) - 15);
        sum += (double)e * (double)e;
    }
    return sum;
}

float idx_narrow_encode(const float *v, uint32_t dim, uint8_t *codes, double *ret_error)
{
    float most = idx_largest(v, dim), best = 0;
    *ret_error = 0;
    if (!idx_usable(v, dim))
        return NAN;
    for (size_t i = 0; i < sizeof shrink / sizeof *shrink; i++) {
        float scale = most / 15 * shrink[i];
        double error = scale > 0 && 1 / scale < INFINITY ? error_of(v, dim, scale) : INFINITY;
        if (error < INFINITY && (!best || error < *ret_error)) {
            best = scale;
            *ret_error = error;
        }
    }
    for (uint32_t pair = 0; pair < (dim + 7) / 8; pair++)
        for (uint32_t k = 0; k < 4; k++) {
            uint32_t j = 8 * pair + k;
            codes[(size_t)pair * 64 + k] = (uint8_t)((best > 0 && j < dim ? code_of(v[j], 1 / best) : 0) | (best > 0 && j + 4 < dim ? code_of(v[j + 4], 1 / best) : 0) << 4);
        }
    return best;
}

void idx_narrow_scalar(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t pairs, const idx_code_query *q, uint32_t nq, float *out, size_t ld, float *ret_best)
{
    for (uint32_t h = 0; h < nq; h++) {
        ret_best[h] = -INFINITY;
        for (uint32_t s = 0; s < n_blocks * IDX_BLOCK; s++) {
            const uint8_t *slot = codes + (size_t)(s / IDX_BLOCK) * pairs * 64 + s % IDX_BLOCK * 4;
            int32_t dot = 0;
            for (uint32_t j = 0; j < 4 * pairs; j++) {
                uint32_t byte = slot[(size_t)(j / 4) * 64 + j % 4];
                dot += (int32_t)(byte & 15) * q[h].x[j / 4 * 8 + j % 4] + (int32_t)(byte >> 4) * q[h].x[j / 4 * 8 + 4 + j % 4];
            }
            float score = (float)(2 * dot + q[h].bias) * (scale[s] * q[h].scale) + q[h].offset;
            out[h * ld + s] = score;
            ret_best[h] = score > ret_best[h] ? score : ret_best[h];
        }
    }
}
