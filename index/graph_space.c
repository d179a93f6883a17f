/* The space in which the keys of lists are clustered.
 *
 * Keys k, k' matter alike to queries q when q.k and q.k' are close, that is when (k - k')' E[q q'] (k - k') is small. With E[q q'] = L L'
 * (Cholesky) this is the Euclidean distance of L'k and L'k': keys are mapped by L' once, and the rest of the build works with ordinary
 * distances there. Directions that no query looks at shrink. Without training queries it is the plain Euclidean distance. */
#include "graph_build.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GRAM_POSITIONS = 256 }; /* training positions the second moment is taken over */

int idx_space_new(idx_builder *b)
{
    size_t n = b->keys.n, dim = b->keys.dim;
    b->gram = calloc(dim * dim, sizeof *b->gram);
    b->mean = calloc(dim, sizeof *b->mean);
    b->basis = idx_alloc(dim * b->dim_pad, sizeof *b->basis);
    b->space = idx_alloc(n * b->dim_pad, sizeof *b->space);
    if (!b->gram || !b->mean || !b->basis || !b->space)
        return -ENOMEM;
    memset(b->basis, 0, dim * b->dim_pad * sizeof *b->basis);
    return 0;
}

static bool all_finite(const float *x, uint32_t n)
{
    float sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += fabsf(x[i]);
    return sum < INFINITY;
}

bool idx_space_gram(idx_builder *b)
{
    uint32_t m = b->train.m, dim = b->keys.dim, group = b->train.group, used = m < GRAM_POSITIONS ? m : GRAM_POSITIONS;
    if (b->at == used)
        return true;
    size_t position = (size_t)(b->at++ * m / used);
    idx_rows q = {b->train.q + position * group * dim, (size_t)dim * 2, group, dim, IDX_F16};
    b->k->widen(b->q, &q, NULL, 0, group);
    for (uint32_t h = 0; h < group; h++) {
        const float *v = b->q + (size_t)h * b->dim_pad;
        if (!all_finite(v, dim))
            continue;
        for (uint32_t i = 0; i < dim; i++)
            for (uint32_t j = 0; j <= i; j++)
                b->gram[(size_t)i * dim + j] += (double)(v[i] * v[j]);
    }
    return false;
}

bool idx_space_mean(idx_builder *b)
{
    uint32_t n = b->keys.n, first = (uint32_t)b->at, block = n - first < IDX_BLOCK ? n - first : IDX_BLOCK;
    b->k->widen(b->rows, &b->keys, NULL, first, block);
    for (uint32_t i = 0; i < block; i++) {
        const float *v = b->rows + (size_t)i * b->dim_pad;
        if (all_finite(v, b->keys.dim))
            for (uint32_t j = 0; j < b->keys.dim; j++)
                b->mean[j] += (double)v[j] / n;
    }
    b->at += block;
    return b->at == n;
}

/* Cholesky in place of the lower triangle; a ridge keeps unused directions alive and the factor regular. */
bool idx_space_basis(idx_builder *b)
{
    uint32_t dim = b->keys.dim;
    double *a = b->gram, trace = 0;
    for (uint32_t i = 0; i < dim; i++)
        trace += a[(size_t)i * dim + i];
    if (!(trace > 0 && trace < INFINITY)) {
        memset(a, 0, (size_t)dim * dim * sizeof *a);
        for (uint32_t i = 0; i < dim; i++)
            a[(size_t)i * dim + i] = 1;
        trace = dim;
    }
    double scale = dim / trace;
    for (uint32_t i = 0; i < dim; i++) {
        double *ai = a + (size_t)i * dim;
        for (uint32_t j = 0; j <= i; j++) {
            const double *aj = a + (size_t)j * dim;
            double s = ai[j] * scale + (i == j ? 0.01 : 0);
            for (uint32_t l = 0; l < j; l++)
                s -= ai[l] * aj[l];
            ai[j] = i == j ? sqrt(s > 1e-6 ? s : 1e-6) : s / aj[j];
        }
    }
    for (uint32_t j = 0; j < dim; j++)
        for (uint32_t i = j; i < dim; i++)
            b->basis[(size_t)j * b->dim_pad + i] = (float)a[(size_t)i * dim + j];
    return true;
}

/* Mean-subtracted (which moves no distance, but keeps them precise) and mapped. A row that isn't finite is put at the mean. */
bool idx_space_rows(idx_builder *b)
{
    uint32_t n = b->keys.n, dim = b->keys.dim, first = (uint32_t)b->at, block = n - first < IDX_BLOCK ? n - first : IDX_BLOCK;
    b->k->widen(b->rows, &b->keys, NULL, first, block);
    for (uint32_t i = 0; i < IDX_BLOCK; i++) {
        float *v = b->rows + (size_t)i * b->dim_pad;
        for (uint32_t j = 0; j < dim; j++)
            v[j] -= (float)b->mean[j];
        if (!all_finite(v, dim))
            memset(v, 0, dim * sizeof *v);
    }
    float out[IDX_BLOCK];
    for (uint32_t j = 0; j < dim; j++) {
        b->k->dots(b->rows, b->basis + (size_t)j * b->dim_pad, 1, b->dim_pad, 1, out, IDX_BLOCK);
        for (uint32_t i = 0; i < block; i++)
            b->space[(size_t)(first + i) * b->dim_pad + j] = out[i];
    }
    for (uint32_t i = 0; i < block; i++)
        memset(b->space + (size_t)(first + i) * b->dim_pad + dim, 0, (b->dim_pad - dim) * sizeof *b->space);
    b->at += block;
    return b->at == n;
}
