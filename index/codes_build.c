/* Codes: every key in a byte a dimension, in the order of value clusters.
 *
 * Scores need no more of a key than this to find the best ones, if the mean key is taken off first: keys share a large offset that moves
 * every score alike and would eat the byte's range, and if dimensions are weighed: a score's error is that of the key's byte times the query, so each
 * dimension has a unit, the root of the keys' deviation by the queries' size, in which both have about one size. Besides, a scan that sees every score knows every key's softmax weight; only reading
 * all values would be dear. So the values are quantised, as vectors: k-means over the values of a run of about 8,192 rows, a centroid
 * per 32. What isn't retrieved counts with its own weight and its cluster's mean value (codes_scan.c). Codes lie in cluster order, so that
 * a cluster's weight is a sum over neighbours.
 *
 * k-means needs no perfection: it learns from a sample, in a few rounds, and each row is then assigned once.
 *
 * Source: RetrievalAttention (arXiv 2409.10516) names 8-bit codes as future work and no more. That a byte a dimension needs the mean key taken off and a unit for each dimension, how many candidates are
 * scored again, and the estimate by clusters of values are this project's, from measurements (README.md): product-quantised caches come near to the last, but no paper is known that has exact weights
 * beside quantised values. */
#include "graph_build.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    SAMPLE = 8, /* sampled rows per centroid */
    ROUNDS = 5,
    PIECE_ROWS = 128, /* rows assigned per step */
    PIECE_BLOCKS = 32,
};

typedef enum { RUN_BEGIN, RUN_BYTES, RUN_TRAIN, RUN_ASSIGN, RUN_ORDER, RUN_SUM } run_stage;

struct idx_codes_build {
    idx_kind kind;
    bool narrow;
    idx_rows points; /* what is clustered: the values, or, of lists, the keys as lists_build.c maps them */
    uint8_t *memory; /* the caller's, for the arena; NULL: its own */
    idx_rows values;
    double *key_sum, *key_squares; /* [dim] */
    const float *query_power; /* [dim]; NULL: not known */
    float *own_power;   /* what it is a copy in, of lists */
    uint32_t n_finite;
    double noise; /* sum of squared errors of a dimension */
    float *mean, *unit, *inverse_unit; /* [dim_pad] */

    /* the run at hand: rows [lo, hi) */
    uint32_t quads, run, lo, hi, n_cent, n_cent_pad, stride, round;
    run_stage stage;
    float inverse;       /* 1 / unit of the values' bytes */
    float *rows;         /* [16][dim_pad] */
    /* only while there is a run at hand */
    int8_t *bytes;       /* [hi - lo + 16][4 * quads]: the values */
    uint8_t *panel;      /* [n_cent_pad / 16][quads][16][4]: centroids in half units, and 128 */
    int32_t *half;       /* [n_cent_pad]: their squared norms, in units squared */
    int32_t *sums;       /* [n_cent][4 * quads] */
    uint32_t *counts;    /* [n_cent + 1] */
    uint32_t *assigned;  /* [hi - lo + 16] */
    uint32_t *order;     /* [hi - lo + 16]: rows */

    /* all runs so far; in the caller's memory, if there is some */
    uint32_t n_clusters, max_clusters;
    uint32_t *first, *run_first; /* slots, clusters */
    uint16_t *ids;
    float *cluster_sums; /* [max_clusters][dim_pad] */
};

/* ---- memory of a run -------------------------------------------------------------------------------------------- */

/* For the largest run. What is behind the rows of a smaller one is not looked at. */
static int take_run(idx_builder *b)
{
    struct idx_codes_build *s = b->codes;
    size_t most = 0, width = (size_t)s->quads * 4;
    for (uint32_t i = 0, lo, hi; i < idx_codes_runs(b->keys.n); i++) {
        idx_codes_run_rows(b->keys.n, i, &lo, &hi);
        most = hi - lo > most ? hi - lo : most;
    }
    size_t cent = (most + IDX_CLUSTER_ROWS - 1) / IDX_CLUSTER_ROWS, cent_pad = (cent + 15) & ~(size_t)15;
    s->bytes = idx_alloc((most + IDX_BLOCK) * width, 1);
    s->panel = idx_alloc(cent_pad * width, 1);
    s->half = idx_alloc(cent_pad, 4);
    s->sums = idx_alloc(cent * width, 4);
    s->counts = idx_alloc(cent + 1, 4);
    s->assigned = idx_alloc(most + IDX_BLOCK, 4);
    s->order = idx_alloc(most + IDX_BLOCK, 4);
    if (!s->bytes || !s->panel || !s->half || !s->sums || !s->counts || !s->assigned || !s->order)
        return -ENOMEM;
    memset(s->bytes, 0, (most + IDX_BLOCK) * width);
    return 0;
}

static void give_run(struct idx_codes_build *s)
{
    void *parts[] = {s->bytes, s->panel, s->half, s->sums, s->counts, s->assigned, s->order};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        free(parts[i]);
    s->bytes = NULL;
    s->panel = NULL;
    s->half = s->sums = NULL;
    s->counts = s->assigned = s->order = NULL;
}

uint32_t idx_codes_needs(const idx_builder *b)
{
    uint32_t lo, hi;
    idx_codes_run_rows(b->keys.n, b->codes->run, &lo, &hi);
    return hi;
}

void idx_codes_rest(idx_builder *b)
{
    if (b->codes)
        give_run(b->codes);
}

/* ---- clusters of one run ---------------------------------------------------------------------------------------- */

/* Values that aren't finite would be in every estimate; they count as 0. */
static void load_rows(const idx_builder *b, const idx_rows *from, float *dst, const uint32_t *ids, uint32_t first, uint32_t n)
{
    b->k->widen(dst, from, ids, first, n);
    for (uint32_t i = 0; i < n; i++)
        if (!idx_usable(dst + (size_t)i * b->dim_pad, b->dim_pad))
            memset(dst + (size_t)i * b->dim_pad, 0, (size_t)b->dim_pad * 4);
}

/* The unit of the values' bytes: a sixteenth of their root mean square over some rows, so that what is cut off, at 63, is rare and rounding is small beside the
 * distances between values. Clusters need no more. */
static float value_inverse(idx_builder *b)
{
    struct idx_codes_build *s = b->codes;
    enum { ROWS = 512 };
    uint32_t n = s->hi - s->lo, step = n < ROWS ? 1 : n / ROWS, rows = 0;
    double squares = 0;
    for (uint32_t i = 0; i < n; i += step, rows++) {
        load_rows(b, &s->points, s->rows, NULL, s->lo + i, 1);
        float lane[16] = {0}, sum = 0;
        for (uint32_t j = 0; j < b->dim_pad; j += 16)
            for (uint32_t l = 0; l < 16; l++)
                lane[l] += s->rows[j + l] * s->rows[j + l];
        for (uint32_t l = 0; l < 16; l++)
            sum += lane[l];
        squares += (double)sum;
    }
    double rms = sqrt(squares / rows / b->keys.dim);
    float inverse = rms > 0 ? (float)(16 / rms) : 0;
    return inverse < INFINITY ? inverse : 0;
}

static void run_begin(idx_builder *b)
{
    struct idx_codes_build *s = b->codes;
    if (!s->bytes && take_run(b) < 0) {
        b->error = -ENOMEM;
        return;
    }
    idx_codes_run_rows(b->keys.n, s->run, &s->lo, &s->hi);
    uint32_t n = s->hi - s->lo;
    s->n_cent = (n + IDX_CLUSTER_ROWS - 1) / IDX_CLUSTER_ROWS;
    s->n_cent_pad = (s->n_cent + 15) & ~15u;
    s->stride = n / (s->n_cent * SAMPLE);
    s->stride += !s->stride;
    s->inverse = value_inverse(b);
    s->round = 0;
    s->stage = RUN_BYTES;
    b->sub = 0;
}

static void set_centroid(idx_builder *b, uint32_t c, const float *v)
{
    struct idx_codes_build *s = b->codes;
    uint8_t *to = s->panel + (size_t)(c / IDX_BLOCK) * s->quads * 64 + c % IDX_BLOCK * 4;
    int32_t norm = 0;
    for (uint32_t j = 0; j < 4 * s->quads; j++) {
        int32_t x = (int32_t)lrintf(2 * v[j]);
        to[(size_t)(j / 4) * 64 + j % 4] = (uint8_t)(128 + x);
        norm += x * x;
    }
    s->half[c] = norm / 4;
}

/* The run's values as bytes. sub: next row. At the end, evenly spaced rows become the first centroids. */
static void run_bytes(idx_builder *b)
{
    struct idx_codes_build *s = b->codes;
    uint32_t n = s->hi - s->lo, end = n - b->sub < 4 * PIECE_ROWS ? n : b->sub + 4 * PIECE_ROWS, width = 4 * s->quads;
    for (uint32_t i = b->sub; i < end; i += IDX_BLOCK) {
        uint32_t part = end - i < IDX_BLOCK ? end - i : IDX_BLOCK;
        load_rows(b, &s->points, s->rows, NULL, s->lo + i, part);
        for (uint32_t r = 0; r < part; r++) {
            const float *v = s->rows + (size_t)r * b->dim_pad;
            int8_t *to = s->bytes + (size_t)(i + r) * width;
            for (uint32_t j = 0; j < width; j++) {
                float x = v[j] * s->inverse;
                x = x < 63 ? x : 63;
                x = x > -63 ? x : -63;
                to[j] = (int8_t)idx_round(x);
            }
        }
    }
    b->sub = end;
    if (end < n)
        return;
    memset(s->panel, 128, (size_t)s->n_cent_pad * width);
    for (uint32_t c = s->n_cent; c < s->n_cent_pad; c++)
        s->half[c] = INT32_MAX / 2; /* no centroid */
    for (uint32_t c = 0; c < s->n_cent; c++) {
        const int8_t *row = s->bytes + (uint64_t)c * n / s->n_cent * width;
        float *v = s->rows;
        for (uint32_t j = 0; j < width; j++)
            v[j] = row[j];
        set_centroid(b, c, v);
    }
    s->stage = RUN_TRAIN;
    b->sub = 0;
}

/* Lloyd's rounds over every stride-th block of rows. sub: next row. A centroid that nothing is nearest to stays. */
static void run_train(idx_builder *b)
{
    struct idx_codes_build *s = b->codes;
    uint32_t n = s->hi - s->lo, width = 4 * s->quads, near[IDX_BLOCK];
    if (!b->sub) {
        memset(s->sums, 0, (size_t)s->n_cent * width * 4);
        memset(s->counts, 0, ((size_t)s->n_cent + 1) * 4);
    }
    for (uint32_t done = 0; b->sub < n && done < PIECE_ROWS; done += IDX_BLOCK, b->sub += IDX_BLOCK * s->stride) {
        const int8_t *rows = s->bytes + (size_t)b->sub * width;
        b->k->nearest(rows, s->quads, s->panel, s->half, s->n_cent_pad / IDX_BLOCK, near);
        for (uint32_t r = 0; r < IDX_BLOCK && b->sub + r < n; r++) {
            int32_t *to = s->sums + (size_t)near[r] * width;
            for (uint32_t j = 0; j < width; j++)
                to[j] += rows[r * width + j];
            s->counts[near[r]]++;
        }
    }
    if (b->sub < n)
        return;
    for (uint32_t c = 0; c < s->n_cent; c++) {
        float *v = s->rows, inverse = s->counts[c] ? 1 / (float)s->counts[c] : 0;
        for (uint32_t j = 0; j < width; j++)
            v[j] = (float)s->sums[(size_t)c * width + j] * inverse;
        if (s->counts[c])
            set_centroid(b, c, v);
    }
    b->sub = 0;
    if (++s->round == ROUNDS)
        s->stage = RUN_ASSIGN;
}

/* sub: next row of the run. */
static void run_assign(idx_builder *b)
{
    struct idx_codes_build *s = b->codes;
    uint32_t n = s->hi - s->lo, end = n - b->sub < PIECE_ROWS ? n : b->sub + PIECE_ROWS;
    for (uint32_t i = b->sub; i < end; i += IDX_BLOCK)
        b->k->nearest(s->bytes + (size_t)i * 4 * s->quads, s->quads, s->panel, s->half, s->n_cent_pad / IDX_BLOCK, s->assigned + i);
    b->sub = end;
    if (end == n)
        s->stage = RUN_ORDER;
}

/* Slots by cluster, rows rising in each; empty clusters vanish, large ones are cut. */
static void run_order(idx_builder *b)
{
    struct idx_codes_build *s = b->codes;
    uint32_t n = s->hi - s->lo;
    memset(s->counts, 0, ((size_t)s->n_cent + 1) * 4);
    for (uint32_t i = 0; i < n; i++)
        s->counts[s->assigned[i] + 1]++;
    s->run_first[s->run] = s->n_clusters;
    for (uint32_t c = 0; c < s->n_cent; c++) {
        uint32_t from = s->counts[c], to = from + s->counts[c + 1];
        for (; from < to; from += IDX_MAX_CLUSTER)
            s->first[s->n_clusters++] = s->lo + from;
        s->counts[c + 1] = to;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t slot = s->counts[s->assigned[i]]++;
        s->order[slot] = s->lo + i;
        s->ids[s->lo + slot] = (uint16_t)i;
    }
    s->first[s->n_clusters] = s->hi;
    s->run_first[s->run + 1] = s->n_clusters;
    s->stage = RUN_SUM;
    b->sub = s->run_first[s->run];
}

static void add_rows(const idx_builder *b, float *to, const uint32_t *ids, uint32_t n)
{
    struct idx_codes_build *s = b->codes;
    for (uint32_t i = 0; i < n; i += IDX_BLOCK) {
        uint32_t part = n - i < IDX_BLOCK ? n - i : IDX_BLOCK;
        load_rows(b, &s->values, s->rows, ids + i, 0, part);
        for (uint32_t r = 0; r < part; r++)
            for (uint32_t j = 0; j < b->dim_pad; j++)
                to[j] += s->rows[(size_t)r * b->dim_pad + j];
    }
}

/* sub: next cluster. */
static void run_sum(idx_builder *b)
{
    struct idx_codes_build *s = b->codes;
    for (uint32_t rows = 0; b->sub < s->n_clusters && rows < PIECE_ROWS * 8; b->sub++) {
        uint32_t from = s->first[b->sub], n = s->first[b->sub + 1] - from;
        float *to = s->cluster_sums + (size_t)b->sub * b->dim_pad;
        memset(to, 0, (size_t)b->dim_pad * 4);
        add_rows(b, to, s->order + (from - s->lo), n);
        rows += n;
    }
    if (b->sub == s->n_clusters) {
        s->run++;
        s->stage = RUN_BEGIN;
    }
}

bool idx_codes_cluster(idx_builder *b)
{
    struct idx_codes_build *s = b->codes;
    static void (*const stages[])(idx_builder *) = {run_begin, run_bytes, run_train, run_assign, run_order, run_sum};
    stages[s->stage](b);
    b->at = s->stage == RUN_BEGIN ? s->hi : s->lo + (uint64_t)(s->hi - s->lo) * s->stage / (RUN_SUM + 1);
    if (s->run < idx_codes_runs(b->keys.n))
        return false;
    give_run(s);
    return true;
}

/* ---- codes ------------------------------------------------------------------------------------------------------ */

/* x[j] as a share of the largest, at least a millionth, so that units stay numbers; 1 where there is none. */
static double share_of(double x, double largest)
{
    const double least = 1e-6;
    return !(largest > 0 && largest < INFINITY) ? 1 : x > least * largest ? x / largest : least;
}

static void set_units(idx_builder *b)
{
    struct idx_codes_build *s = b->codes;
    double deviation[IDX_MAX_DIM], wide = 0, large = 0;
    for (uint32_t j = 0; j < b->keys.dim; j++) {
        double n = s->n_finite ? s->n_finite : 1, mean = s->key_sum[j] / n;
        deviation[j] = sqrt(fmax(s->key_squares[j] / n - mean * mean, 0));
        wide = fmax(wide, deviation[j]);
        if (s->query_power)
            large = fmax(large, (double)s->query_power[j]);
    }
    for (uint32_t j = 0; j < b->dim_pad; j++) {
        bool there = j < b->keys.dim;
        double unit = there ? sqrt(share_of(deviation[j], wide) / (s->query_power ? sqrt(share_of((double)s->query_power[j], large)) : 1)) : 1;
        s->unit[j] = (float)unit;
        s->inverse_unit[j] = (float)(1 / unit);
    }
}

/* at: next row. */
bool idx_codes_mean(idx_builder *b)
{
    struct idx_codes_build *s = b->codes;
    uint32_t first = (uint32_t)b->at, end = b->keys.n - first < 4 * PIECE_ROWS ? b->keys.n : first + 4 * PIECE_ROWS, dim = b->keys.dim;
    for (uint32_t i = first; i < end; i += IDX_BLOCK) {
        uint32_t n = end - i < IDX_BLOCK ? end - i : IDX_BLOCK;
        b->k->widen(s->rows, &b->keys, NULL, i, n);
        for (uint32_t r = 0; r < n; r++) {
            const float *v = s->rows + (size_t)r * b->dim_pad;
            if (!idx_usable(v, b->dim_pad))
                continue;
            s->n_finite++;
            for (uint32_t j = 0; j < dim; j++) {
                s->key_sum[j] += (double)v[j];
                s->key_squares[j] += (double)v[j] * (double)v[j];
            }
        }
    }
    b->at = end;
    if (end < b->keys.n)
        return false;
    for (uint32_t j = 0; j < dim && s->n_finite; j++)
        s->mean[j] = (float)(s->key_sum[j] / s->n_finite);
    set_units(b);
    if ((s->kind == IDX_CLUSTER || s->kind == IDX_IVF) && s->n_finite < b->keys.n)
        b->error = -EINVAL; /* it would be in a centroid */
    return true;
}

/* A part of the arena, whose other bytes are 0. Parts move down, if they are in it already, and come in rising order, so none is written over. */
static void lay(uint8_t *arena, const size_t *at, int part, const void *from, size_t bytes)
{
    if (bytes)
        memmove(arena + at[part], from, bytes);
    memset(arena + at[part] + bytes, 0, at[part + 1] - at[part] - bytes);
}

static int codes_arena_new(idx_builder *b)
{
    struct idx_codes_build *s = b->codes;
    uint32_t n = b->keys.n, dim = b->keys.dim, clusters = s->n_clusters, blocks = (n + IDX_BLOCK - 1) / IDX_BLOCK;
    size_t at[IDX_CODE_PARTS], bytes = idx_codes_layout(s->kind, s->narrow, n, dim, clusters, at), dim_pad = b->dim_pad;
    uint8_t *arena = s->memory ? s->memory : idx_alloc(bytes, 1);
    idx_index *ix = calloc(1, sizeof *ix);
    if (!arena || !ix) {
        if (!s->memory)
            free(arena);
        free(ix);
        return -ENOMEM;
    }
    ix->borrowed = s->memory != NULL;
    idx_header h = {.magic = IDX_MAGIC, .version = IDX_VERSION, .kind = s->kind, .n = n, .dim = dim, .n_clusters = clusters, .bytes = bytes, .narrow = s->narrow};
    memset(arena, 0, at[0]);
    memcpy(arena, &h, sizeof h);
    lay(arena, at, 0, s->mean, dim_pad * 4);
    memcpy(arena + at[0] + dim_pad * 4, s->unit, dim_pad * 4);
    lay(arena, at, 1, s->first, ((size_t)clusters + 1) * 4);
    lay(arena, at, 2, s->run_first, ((size_t)idx_codes_runs(n) + 1) * 4);
    lay(arena, at, 3, NULL, 0);
    const uint32_t *first = (const uint32_t *)(const void *)(arena + at[1]);
    uint32_t *of_block = (uint32_t *)(void *)(arena + at[3]);
    for (uint32_t i = 0, c = 0; i < blocks; i++) {
        while (first[c + 1] <= i * IDX_BLOCK)
            c++;
        of_block[i] = c;
    }
    lay(arena, at, 4, s->ids, (size_t)n * 2);
    lay(arena, at, 5, NULL, 0);
    lay(arena, at, 6, s->cluster_sums, clusters * dim_pad * 4);
    memset(arena + at[8], 0, bytes - at[8]); /* codes come next, whole blocks; what is behind them later, of lists */
    idx_index_bind(ix, arena, bytes);
    b->result = ix;
    return 0;
}

float idx_codes_encode(const idx_builder *b, float *v, uint32_t quads, uint8_t *codes)
{
    uint32_t dim_pad = b->dim_pad;
    for (uint32_t j = 0; j < dim_pad; j++)
        v[j] *= b->codes->inverse_unit[j];
    float most = idx_largest(v, dim_pad), scale = most / 127, inverse = scale > 0 ? 1 / scale : 0;
    uint8_t bytes[IDX_MAX_DIM];
    if (!idx_usable(v, dim_pad))
        return NAN;
    if (!(inverse < INFINITY))
        scale = inverse = 0;
    for (uint32_t j = 0; j < dim_pad; j++)
        bytes[j] = (uint8_t)(128 + idx_round(v[j] * inverse));
    for (uint32_t j = 0; j < quads; j++)
        memcpy(codes + (size_t)j * 64, bytes + 4 * j, 4);
    return scale;
}

const float *idx_codes_mean_of(const idx_builder *b)
{
    return b->codes->mean;
}

const float *idx_codes_unit_of(const idx_builder *b)
{
    return b->codes->unit;
}

/* at: next block. */
bool idx_codes_emit(idx_builder *b)
{
    struct idx_codes_build *s = b->codes;
    if (!b->at)
        b->error = codes_arena_new(b);
    if (b->error)
        return true;
    idx_index *ix = b->result;
    uint32_t n = b->keys.n, first = (uint32_t)b->at,
             end = ix->code.n_blocks - first < PIECE_BLOCKS ? ix->code.n_blocks : first + PIECE_BLOCKS;
    float *scales = (float *)(void *)(ix->arena + ((const uint8_t *)ix->code.scale - ix->arena));
    uint8_t *codes = ix->arena + (ix->code.codes - ix->arena);
    for (uint32_t block = first, run = 0, lo = 0, hi = 0; block < end; block++) {
        uint8_t *to = codes + (size_t)block * ix->code.block_bytes;
        uint32_t ids[IDX_BLOCK], in_block = n - block * IDX_BLOCK < IDX_BLOCK ? n - block * IDX_BLOCK : IDX_BLOCK;
        for (uint32_t i = 0; i < in_block; i++) {
            uint32_t slot = block * IDX_BLOCK + i;
            if (slot >= hi || slot < lo) {
                run = idx_codes_run_of(n, slot);
                idx_codes_run_rows(n, run, &lo, &hi);
            }
            ids[i] = lo + ix->code.ids[slot];
        }
        for (uint32_t slot = (block + 1) * IDX_BLOCK; slot < n && slot < (block + 2) * IDX_BLOCK && slot < hi; slot++)
            __builtin_prefetch(idx_row(&b->keys, lo + ix->code.ids[slot]));
        b->k->widen(s->rows, &b->keys, ids, 0, in_block);
        memset(to, 128, ix->code.block_bytes);
        for (uint32_t i = 0; i < in_block; i++) {
            float *v = s->rows + (size_t)i * b->dim_pad;
            for (uint32_t j = 0; j < b->dim_pad; j++)
                v[j] -= s->mean[j];
            double error;
            for (uint32_t j = 0; j < b->dim_pad && s->narrow; j++)
                v[j] *= s->inverse_unit[j];
            float scale = s->narrow ? idx_narrow_encode(v, b->keys.dim, to + i * 4, &error) : idx_codes_encode(b, v, ix->code.quads, to + i * 4);
            scales[block * IDX_BLOCK + i] = scale;
            s->noise += scale != scale ? 0 : s->narrow ? error / b->keys.dim : (double)scale * (double)scale / 12; /* rounding is uniform in +-1/2 */
        }
    }
    b->at = end;
    if (end < ix->code.n_blocks)
        return false;
    ((idx_header *)(void *)ix->arena)->noise = (float)sqrt(s->noise / n);
    return true;
}

/* ---- builder ---------------------------------------------------------------------------------------------------- */

void idx_codes_build_free(struct idx_codes_build *s)
{
    if (!s)
        return;
    give_run(s);
    void *parts[] = {s->key_sum, s->key_squares, s->own_power, s->unit, s->inverse_unit, s->mean, s->rows};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        free(parts[i]);
    void *runs[] = {s->first, s->run_first, s->ids, s->cluster_sums};
    for (size_t i = 0; i < sizeof runs / sizeof runs[0] && !s->memory; i++)
        free(runs[i]);
    free(s);
}

/* What runs leave behind: in memory of the caller's as if there were as many clusters as there can be. */
static int take_results(idx_builder *b)
{
    struct idx_codes_build *s = b->codes;
    uint32_t n = b->keys.n, runs = idx_codes_runs(n);
    size_t at[IDX_CODE_PARTS];
    s->max_clusters = idx_codes_max_clusters(n);
    if (s->memory) {
        idx_codes_layout(s->kind, false, n, b->keys.dim, s->max_clusters, at);
        s->first = (uint32_t *)(void *)(s->memory + at[1]);
        s->run_first = (uint32_t *)(void *)(s->memory + at[2]);
        s->ids = (uint16_t *)(void *)(s->memory + at[4]);
        s->cluster_sums = (float *)(void *)(s->memory + at[6]);
        return 0;
    }
    s->first = idx_alloc((size_t)s->max_clusters + 1, 4);
    s->run_first = idx_alloc((size_t)runs + 1, 4);
    s->ids = idx_alloc(n, 2);
    s->cluster_sums = idx_alloc((size_t)s->max_clusters * b->dim_pad, 4);
    return s->first && s->run_first && s->ids && s->cluster_sums ? 0 : -ENOMEM;
}

static int codes_memory(idx_builder *b)
{
    struct idx_codes_build *s = b->codes;
    size_t dim_pad = b->dim_pad;
    s->quads = (b->keys.dim + 3) / 4;
    s->key_sum = calloc(b->keys.dim, sizeof *s->key_sum);
    s->key_squares = calloc(b->keys.dim, sizeof *s->key_squares);
    s->mean = idx_alloc(dim_pad, 4);
    s->unit = idx_alloc(dim_pad, 4);
    s->inverse_unit = idx_alloc(dim_pad, 4);
    s->rows = idx_alloc(IDX_BLOCK * dim_pad, 4);
    if (!s->key_sum || !s->key_squares || !s->mean || !s->unit || !s->inverse_unit || !s->rows)
        return -ENOMEM;
    memset(s->mean, 0, dim_pad * 4);
    memset(s->rows, 0, IDX_BLOCK * dim_pad * 4);
    return s->kind == IDX_GRAPH ? 0 : take_results(b);
}

static bool rows_fit(const idx_rows *r)
{
    return r->n && r->n <= IDX_MAX_ROWS && r->dim && r->dim <= IDX_MAX_DIM && r->type <= IDX_Q8_0 &&
           (r->n == 1 || r->stride >= idx_row_bytes(r));
}

int idx_codes_build_new(idx_kind kind, const idx_rows *keys, const idx_rows *values, void *memory, idx_builder **ret)
{
    if (!rows_fit(keys) || (kind != IDX_GRAPH && (!rows_fit(values) || values->n != keys->n || values->dim != keys->dim)))
        return -EINVAL;
    idx_builder *b = calloc(1, sizeof *b);
    if (!b)
        return -ENOMEM;
    b->keys = *keys;
    b->there = keys->n;
    b->k = idx_kernels_get();
    b->dim_pad = idx_dim_pad(keys->dim);
    b->codes = calloc(1, sizeof *b->codes);
    int r = b->codes ? 0 : -ENOMEM;
    if (!r) {
        b->codes->kind = kind;
        if (values)
            b->codes->values = b->codes->points = *values;
        b->codes->memory = memory;
        r = codes_memory(b);
    }
    if (r < 0) {
        idx_builder_free(b);
        return r;
    }
    *ret = b;
    return 0;
}

void idx_query_power(const idx_queries *q, uint32_t dim, float *ret)
{
    enum { POSITIONS = 64 };
    const idx_kernels *k = idx_kernels_get();
    uint32_t used = q->m < POSITIONS ? q->m : POSITIONS, n = 0;
    double squares[IDX_MAX_DIM] = {0};
    for (uint32_t i = 0; i < used * q->group; i++) {
        float v[IDX_MAX_DIM] __attribute__((aligned(64)));
        size_t row = (size_t)((uint64_t)(i / q->group) * q->m / used) * q->group + i % q->group;
        k->widen(v, &(idx_rows){q->q + row * dim, (size_t)dim * 2, 1, dim, IDX_F16}, NULL, 0, 1);
        if (!idx_usable(v, idx_dim_pad(dim)))
            continue;
        n++;
        for (uint32_t j = 0; j < dim; j++)
            squares[j] += (double)v[j] * (double)v[j];
    }
    for (uint32_t j = 0; j < dim; j++)
        ret[j] = (float)(squares[j] / (n ? n : 1));
}

int idx_codes_build_queries(idx_builder *b, const float *power)
{
    b->codes->query_power = b->codes->own_power = idx_alloc(b->keys.dim, sizeof *power);
    if (!b->codes->own_power)
        return -ENOMEM;
    memcpy(b->codes->own_power, power, b->keys.dim * sizeof *power);
    return 0;
}

void idx_codes_build_points(idx_builder *b, const idx_rows *points)
{
    b->codes->points = *points;
}

int idx_builder_new_codes(const idx_rows *keys, const idx_rows *values, const float *query_power, uint32_t bits, void *memory, idx_builder **ret)
{
    static const idx_phase phases[] = {{idx_codes_cluster, .85f}, {idx_codes_mean, .05f}, {idx_codes_emit, .1f}}; /* clusters need only a run's rows */
    idx_builder *b;
    if (bits != 8 && bits != 4)
        return -EINVAL;
    int r = idx_codes_build_new(IDX_FLAT, keys, values, memory, &b);
    if (r < 0)
        return r;
    b->codes->query_power = query_power;
    b->codes->narrow = bits == 4;
    b->phases = phases;
    b->n_phases = sizeof phases / sizeof *phases;
    *ret = b;
    return 0;
}
