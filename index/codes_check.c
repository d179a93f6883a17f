/* Validation of codes. Every byte may come from a damaged or hostile file: what is not an address or a count may hold anything, since any
 * code, sum and mean is safe to compute with, but for what would put a NaN or infinity into every answer. */
#include "private.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

static int check_clusters(const idx_index *ix, char *err, size_t errlen)
{
    uint32_t n = ix->header->n, n_clusters = ix->header->n_clusters, n_runs = ix->code.n_runs;
    const uint32_t *first = ix->code.first, *run = ix->code.run;
    if (first[0] != 0 || first[n_clusters] != n || run[0] != 0 || run[n_runs] != n_clusters)
        return idx_bad(err, errlen, "clusters don't span the rows");
    for (uint32_t c = 0; c < n_clusters; c++)
        if (first[c + 1] <= first[c] || first[c + 1] - first[c] > IDX_MAX_CLUSTER)
            return idx_bad(err, errlen, "bad size of cluster %u", c);
    for (uint32_t r = 0; r < n_runs; r++) {
        uint32_t lo, hi;
        idx_codes_run_rows(n, r, &lo, &hi);
        if (run[r + 1] <= run[r] || run[r + 1] > n_clusters || run[r + 1] - run[r] > idx_codes_max_clusters(hi - lo) || first[run[r]] != lo)
            return idx_bad(err, errlen, "bad clusters of run %u", r);
    }
    for (uint32_t i = 0; i < ix->code.n_blocks; i++) {
        uint32_t c = ix->code.at[i];
        if (c >= n_clusters || first[c] > i * IDX_BLOCK || first[c + 1] <= i * IDX_BLOCK)
            return idx_bad(err, errlen, "bad cluster of block %u", i);
    }
    return 0;
}

/* Each run's ids are a permutation of its rows. Only after check_clusters(). */
static int check_ids(const idx_index *ix, char *err, size_t errlen)
{
    uint32_t n = ix->header->n;
    uint8_t *seen = calloc(n, 1);
    if (!seen)
        return -ENOMEM;
    int r = 0;
    for (uint32_t run = 0; run < ix->code.n_runs && !r; run++) {
        uint32_t lo, hi;
        idx_codes_run_rows(n, run, &lo, &hi);
        for (uint32_t i = lo; i < hi && !r; i++) {
            uint32_t id = ix->code.ids[i];
            if (id >= hi - lo || seen[lo + id])
                r = idx_bad(err, errlen, "bad row %u in slot %u", id, i);
            else
                seen[lo + id] = 1;
        }
    }
    free(seen);
    return r;
}

static bool finite_all(const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!isfinite(x[i]))
            return false;
    return true;
}

int idx_codes_check(const idx_index *ix, char *err, size_t errlen)
{
    size_t dim_pad = idx_dim_pad(ix->header->dim), n_slots = (size_t)ix->code.n_blocks * IDX_BLOCK;
    int r = check_clusters(ix, err, errlen);
    if (!r)
        r = check_ids(ix, err, errlen);
    if (r)
        return r;
    for (size_t i = 0; i < n_slots; i++)
        if (ix->code.scale[i] < 0 || isinf(ix->code.scale[i]))
            return idx_bad(err, errlen, "bad scale of slot %zu", i);
    for (size_t j = 0; j < dim_pad; j++)
        if (!(ix->code.unit[j] > 0 && ix->code.unit[j] < INFINITY))
            return idx_bad(err, errlen, "bad unit of dimension %zu", j);
    if (!finite_all(ix->code.mean, dim_pad) || !finite_all(ix->code.sums, ix->header->n_clusters * dim_pad))
        return idx_bad(err, errlen, "a mean or sum is not finite");
    uint32_t n = ix->header->n_clusters, n_pad = (n + IDX_BLOCK - 1) & ~(IDX_BLOCK - 1u), vectors = ix->header->kind == IDX_CLUSTER ? 1 + IDX_DIRECTIONS : 1;
    for (uint32_t i = 0; idx_is_lists(ix) && i < vectors * n_pad; i++)
        if (!(ix->code.cent_scale[i] >= 0 && ix->code.cent_scale[i] < INFINITY))
            return idx_bad(err, errlen, "bad centroid of cluster %u", i % n_pad);
    for (uint32_t i = 0; idx_is_lists(ix) && i < n; i++)
        if (!(ix->code.spread[i] >= 0 && ix->code.spread[i] < INFINITY))
            return idx_bad(err, errlen, "bad spread of cluster %u", i);
    return 0;
}
