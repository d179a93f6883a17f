/* Byte-pair merging of one word (Sennrich et al. 2016): a doubly linked list of symbols and a heap of the pairs that may merge. A symbol's
 * `merge` is where the table has its pair with the next one, or NONE.
 *
 * A heap entry is rank << 32 | index of the pair's left symbol. It is stale when the pair at that symbol is another one by now;
 * since symbols only grow, the same pair never comes back to the same place, so comparing ranks tells.
 */
#include "tokenizer_parts.h"

#include <errno.h>
#include <stdlib.h>

#define NONE ENG_NO_SYMBOL

typedef struct {
    int32_t left, right, result; /* left < 0: free */
    uint32_t rank;
} merge;

struct eng_merges {
    merge *table;
    size_t mask;
    unsigned shift;
};

int eng_ids_push(eng_ids *ids, int32_t id)
{
    if (ids->n == ids->cap) {
        size_t cap = ids->cap ? 2 * ids->cap : 64;
        int32_t *v = realloc(ids->v, cap * sizeof *v);
        if (!v)
            return -ENOMEM;
        ids->v = v;
        ids->cap = cap;
    }
    ids->v[ids->n++] = id;
    return 0;
}

int eng_merges_new(size_t n, eng_merges **ret)
{
    if (n >= NONE / 4)
        return -E2BIG;
    eng_merges *m = calloc(1, sizeof *m);
    if (!m)
        return -ENOMEM;
    unsigned bits = 4;
    while (((size_t)1 << bits) < 2 * n)
        bits++;
    m->shift = 64 - bits;
    m->mask = ((size_t)1 << bits) - 1;
    m->table = malloc((m->mask + 1) * sizeof *m->table);
    if (!m->table) {
        free(m);
        return -ENOMEM;
    }
    for (size_t i = 0; i <= m->mask; i++)
        m->table[i] = (merge){.left = -1};
    *ret = m;
    return 0;
}

void eng_merges_free(eng_merges *m)
{
    if (!m)
        return;
    free(m->table);
    free(m);
}

static size_t slot_of(const eng_merges *m, int32_t left, int32_t right)
{
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    key ^= key >> 29; /* ids are small: bring the left one down before the multiplication carries everything up */
    size_t i = (size_t)(key * 0x9e3779b97f4a7c15u >> m->shift);
    while (m->table[i].left >= 0 && (m->table[i].left != left || m->table[i].right != right))
        i = (i + 1) & m->mask;
    return i;
}

void eng_merges_add(eng_merges *m, uint32_t rank, int32_t left, int32_t right, int32_t result)
{
    merge *slot = &m->table[slot_of(m, left, right)];
    if (slot->left < 0)
        *slot = (merge){left, right, result, rank};
}

static void heap_push(uint64_t *heap, size_t *n, uint64_t key, uint64_t *work)
{
    size_t i = (*n)++;
    for (++*work; i && heap[(i - 1) / 2] > key; ++*work) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = key;
}

static uint64_t heap_pop(uint64_t *heap, size_t *n, uint64_t *work)
{
    uint64_t top = heap[0], last = heap[--*n];
    size_t i = 0;
    for (size_t child; (++*work, child = 2 * i + 1) < *n; i = child) {
        if (child + 1 < *n && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= last)
            break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return top;
}

/* Looks up the pair that begins at symbol i, and queues it if it merges. */
static void offer(const eng_merges *m, eng_merge_scratch *w, uint32_t i, size_t *n)
{
    eng_symbol *sym = w->symbols;
    uint32_t next = sym[i].next;
    sym[i].merge = NONE;
    w->work++;
    if (next == NONE || sym[i].id < 0 || sym[next].id < 0)
        return;
    size_t slot = slot_of(m, sym[i].id, sym[next].id);
    if (m->table[slot].left < 0)
        return;
    sym[i].merge = (uint32_t)slot;
    heap_push(w->heap, n, (uint64_t)m->table[slot].rank << 32 | i, &w->work);
}

int eng_merge_reserve(eng_merge_scratch *w, size_t n)
{
    if (n <= w->n_symbols)
        return 0;
    if (n >= NONE)
        return -E2BIG;
    n = n < 256 ? 256 : n;
    eng_merge_scratch_done(w); /* nothing in it is worth copying */
    w->symbols = malloc(n * sizeof *w->symbols);
    /* At most n - 1 pairs to begin with; a merge takes one out and puts at most two in, and there are at most n - 1 merges. */
    w->heap = malloc(2 * n * sizeof *w->heap);
    if (!w->symbols || !w->heap) {
        eng_merge_scratch_done(w);
        return -ENOMEM;
    }
    w->n_symbols = n;
    return 0;
}

void eng_merge_scratch_done(eng_merge_scratch *w)
{
    free(w->symbols);
    free(w->heap);
    *w = (eng_merge_scratch){.work = w->work};
}

void eng_merges_run(const eng_merges *m, eng_merge_scratch *w)
{
    eng_symbol *sym = w->symbols;
    size_t queued = 0;
    for (uint32_t i = 0; i != NONE; i = sym[i].next)
        offer(m, w, i, &queued);
    while (queued) {
        uint64_t key = heap_pop(w->heap, &queued, &w->work);
        uint32_t i = (uint32_t)key;
        if (sym[i].merge == NONE || m->table[sym[i].merge].rank != key >> 32)
            continue;
        uint32_t gone = sym[i].next;
        sym[i].id = m->table[sym[i].merge].result;
        sym[i].next = sym[gone].next;
        if (sym[i].next != NONE)
            sym[sym[i].next].prev = i;
        sym[gone].merge = NONE;
        offer(m, w, i, &queued);
        if (sym[i].prev != NONE)
            offer(m, w, sym[i].prev, &queued);
    }
}

int eng_merges_apply(const eng_merges *m, eng_merge_scratch *w, const int32_t byte_id[256], const char *word, size_t n, eng_ids *out)
{
    int r = eng_merge_reserve(w, n);
    if (r < 0 || !n)
        return r;
    eng_symbol *sym = w->symbols;
    for (uint32_t i = 0; i < n; i++)
        sym[i] = (eng_symbol){byte_id[(unsigned char)word[i]], i ? i - 1 : NONE, i + 1 < n ? i + 1 : NONE, NONE};
    eng_merges_run(m, w);
    for (uint32_t i = 0; i != NONE; i = sym[i].next)
        if (sym[i].id >= 0 && (r = eng_ids_push(out, sym[i].id)) < 0)
            return r;
    return 0;
}
