/* Where the parts of codes lie: runs of rows, and the arena. */
#include "private.h"

uint32_t idx_codes_runs(uint32_t n)
{
    uint32_t runs = (uint32_t)(((uint64_t)n + IDX_RUN / 2) / IDX_RUN);
    return runs ? runs : 1;
}

void idx_codes_run_rows(uint32_t n, uint32_t run, uint32_t *ret_lo, uint32_t *ret_hi)
{
    uint64_t runs = idx_codes_runs(n);
    *ret_lo = (uint32_t)((uint64_t)n * run / runs);
    *ret_hi = (uint32_t)((uint64_t)n * (run + (uint64_t)1) / runs);
}

uint32_t idx_codes_run_of(uint32_t n, uint32_t row)
{
    uint32_t runs = idx_codes_runs(n), run = (uint32_t)((uint64_t)row * runs / n), lo, hi;
    for (;;) { /* the guess is at most one off */
        idx_codes_run_rows(n, run, &lo, &hi);
        if (row < lo)
            run--;
        else if (row >= hi)
            run++;
        else
            return run;
    }
}

uint32_t idx_codes_max_clusters(uint32_t n)
{
    return n / IDX_CLUSTER_ROWS + n / IDX_MAX_CLUSTER + idx_codes_runs(n) + 1;
}

uint32_t idx_codes_sum_stride(uint32_t dim)
{
    return idx_dim_pad(dim);
}

size_t idx_codes_layout(idx_kind kind, bool narrow, uint32_t n, uint32_t dim, uint32_t n_clusters, size_t ret_offset[IDX_CODE_PARTS])
{
    if (!n || n > IDX_MAX_ROWS || !dim || dim > IDX_MAX_DIM || !n_clusters || n_clusters > idx_codes_max_clusters(n))
        return 0;
    size_t blocks = ((size_t)n + IDX_BLOCK - 1) / IDX_BLOCK, dim_pad = idx_dim_pad(dim), at = sizeof(idx_header), quads = (dim + 3) / 4;
    size_t centroids = kind == IDX_FLAT ? 0 : ((size_t)n_clusters + IDX_BLOCK - 1) / IDX_BLOCK;
    size_t vectors = kind == IDX_CLUSTER ? 1 + IDX_DIRECTIONS : 1;
    const size_t bytes[IDX_CODE_PARTS] = {2 * dim_pad * 4,
                                          ((size_t)n_clusters + 1) * 4,
                                          ((size_t)idx_codes_runs(n) + 1) * 4,
                                          blocks * 4,
                                          blocks * IDX_BLOCK * 2,
                                          blocks * IDX_BLOCK * 4,
                                          n_clusters * dim_pad * 4,
                                          blocks * (narrow ? (dim + 7) / 8 : quads) * 64,
                                          vectors * centroids * IDX_BLOCK * 4,
                                          centroids * IDX_BLOCK * 4,
                                          vectors * centroids * quads * 64};
    for (int i = 0; i < IDX_CODE_PARTS; i++) {
        ret_offset[i] = at;
        at += (bytes[i] + IDX_ALIGN - 1) / IDX_ALIGN * IDX_ALIGN;
    }
    return at;
}
