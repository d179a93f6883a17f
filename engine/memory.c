#include "memory.h"
#include "index_work.h"
#include "text.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB(bytes) ((double)(bytes) / 1048576)

eng_kv_shape eng_kv_shape_of(const eng_model *m, eng_kv_type type_k, eng_kv_type type_v)
{
    return (eng_kv_shape){
        .n_layer = m->n_layer,
        .n_head_kv = m->n_head_kv,
        .group = m->n_head / m->n_head_kv,
        .head_dim = m->head_dim,
        .type_k = type_k,
        .type_v = type_v,
        .row_k = eng_kv_row_bytes(type_k, m->head_dim),
        .row_v = eng_kv_row_bytes(type_v, m->head_dim),
    };
}

static uint64_t retrieving_heads(const eng_kv_shape *shape)
{
    uint32_t layers = 0;
    for (uint32_t i = 0; i < shape->n_layer; i++)
        layers += !eng_kv_window(shape, i);
    return (uint64_t)layers * shape->n_head_kv;
}

/* Counted at the fewest keys that get an index, which take the most each. */
uint64_t eng_index_bytes_per_token(const eng_kv_shape *shape, unsigned wants)
{
    enum { KEYS = ENG_INDEX_MIN_TOKENS };
    static const struct {
        unsigned want;
        idx_kind kind;
    } kinds[] = {{ENG_WANT_CLUSTER, IDX_CLUSTER}, {ENG_WANT_IVF, IDX_IVF}, {ENG_WANT_GRAPH, IDX_GRAPH}};
    uint64_t bytes = idx_max_bytes(IDX_FLAT, KEYS, shape->head_dim);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        bytes += wants & kinds[i].want ? idx_max_bytes(kinds[i].kind, KEYS, shape->head_dim) : 0;
    if ((wants & ENG_WANT_GRAPH) && (wants & ENG_WANT_CLUSTER))
        bytes += KEYS * sizeof(uint32_t); /* the clusters of a graph's keys */
    if (wants)
        bytes += KEYS / ENG_KEYS_PER_KEPT_QUERY * (shape->head_dim + sizeof(uint16_t));
    return (bytes + KEYS - 1) / KEYS * retrieving_heads(shape);
}

/* A thread builds a head's index at a time (index/README.md, "Memory while building"). */
void eng_memory_of_index(eng_memory *m, const eng_kv_shape *shape, unsigned wants, uint32_t n_threads)
{
    enum { RUN = 12288, KEY = 4, LIST_KEY = 20, GRAPH_KEY = 32, GRAPH_QUERY = 460 };
    uint64_t dim = shape->head_dim, heads = retrieving_heads(shape), builds = n_threads < heads ? n_threads : heads;
    uint64_t run = RUN * (dim + 16), key = KEY + dim / 4, query = (uint64_t)shape->n_layer * shape->n_head_kv * dim * sizeof(uint16_t);
    if (wants & (ENG_WANT_CLUSTER | ENG_WANT_IVF))
        key += LIST_KEY + dim * sizeof(float);
    if ((wants & ENG_WANT_GRAPH) && key < GRAPH_KEY)
        key = GRAPH_KEY;
    m->index_per_token = eng_index_bytes_per_token(shape, wants);
    m->build_per_token = builds * key;
    m->build = builds * run + (wants ? query * (ENG_SAMPLED_QUERIES + shape->group) : 0) +
               (wants & ENG_WANT_GRAPH ? builds * GRAPH_QUERY * (ENG_SAMPLED_QUERIES + shape->group) : 0);
}

/* ---- what there is ---------------------------------------------------------------------------------------------- */

/* The number in a file; UINT64_MAX: no such file, or "max". */
static uint64_t read_limit(const char *path)
{
    unsigned long long v;
    FILE *f = fopen(path, "re");
    if (!f)
        return UINT64_MAX;
    int n = fscanf(f, "%llu", &v);
    fclose(f);
    return n == 1 ? v : UINT64_MAX;
}

/* The least limit of a control group and the groups it is in. `group`: "/a/b", changed. */
static uint64_t group_limit(const char *root, const char *mount, char *group, const char *file)
{
    uint64_t least = UINT64_MAX;
    for (;;) {
        char path[PATH_MAX];
        int n = snprintf(path, sizeof path, "%s%s%s/%s", root, mount, group, file);
        uint64_t limit = n > 0 && (size_t)n < sizeof path ? read_limit(path) : UINT64_MAX;
        least = limit < least ? limit : least;
        char *slash = strrchr(group, '/');
        if (!slash)
            return least;
        *slash = 0;
    }
}

uint64_t eng_memory_limit(const char *root)
{
    uint64_t least = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    char path[PATH_MAX], *line = NULL;
    size_t cap = 0;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    while (f && getline(&line, &cap, f) > 0) { /* HIERARCHY:CONTROLLERS:GROUP */
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group)
            continue;
        *group++ = 0;
        uint64_t limit = UINT64_MAX;
        if (!strcmp(controllers, ":"))
            limit = group_limit(root, "/sys/fs/cgroup", group, "memory.max");
        else if (!strcmp(controllers, ":memory")) /* version 1, still there on older systems */
            limit = group_limit(root, "/sys/fs/cgroup/memory", group, "memory.limit_in_bytes");
        least = limit < least ? limit : least;
    }
    free(line);
    if (f)
        fclose(f);
    return least;
}

bool eng_memory_huge_pages(const char *root)
{
    char path[PATH_MAX], line[128] = "";
    snprintf(path, sizeof path, "%s/sys/kernel/mm/transparent_hugepage/enabled", root);
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    char *got = fgets(line, sizeof line, f);
    fclose(f);
    return got && !strstr(line, "[never]");
}

/* ---- what is wanted --------------------------------------------------------------------------------------------- */

int eng_memory_check(const eng_memory *m, uint32_t n_ctx, uint64_t limit, char *err, size_t errlen)
{
    uint64_t fixed = m->weights + m->scratch + m->build, per_token = m->kv_per_token + m->index_per_token + m->build_per_token;
    uint64_t most = fixed < limit && per_token ? (limit - fixed) / per_token : 0;
    if (n_ctx <= most)
        return 0;
    if (!most)
        return eng_fail(err, errlen, -ENOMEM, "the model takes %.0f MiB (%.0f of weights, %.0f while an index is built), and there are %.0f MiB of memory",
                        MIB(fixed), MIB(m->weights), MIB(m->build), MIB(limit));
    double building = (double)m->build + m->build_per_token * (double)n_ctx;
    return eng_fail(err, errlen, -ENOMEM,
                    "a context of %" PRIu32
                    " tokens takes %.0f MiB of keys and values and up to %.0f MiB of index, of which %.0f MiB until it is built, beside %.0f MiB of weights "
                    "and %.0f MiB of scratch, and there are %.0f MiB of memory; the largest -c that fits is %" PRIu64,
                    n_ctx, MIB(m->kv_per_token * (double)n_ctx), MIB(m->index_per_token * (double)n_ctx + building), MIB(building), MIB(m->weights),
                    MIB(m->scratch), MIB(limit), most);
}
