/* What goes for what: invariants over random tiers, and orders of requests that would ruin a plain least-recently-used cache. */
#include "worth.h"

#include "context_cache.h"
#include "segments.h"

#include <stdlib.h>
#include <string.h>

enum { MAX = 40 };

static eng_kept random_kept(t_rng *r, uint32_t i)
{
    eng_kept k = {.bytes = 1 + t_u64(r) % 100, .worth = t_u64(r) % 50, .used = t_u64(r) % 100, .holds = t_u64(r) % 6 == 0, .guest = t_u64(r) % 16 == 0};
    if (k.guest)
        k.bytes = 1 + t_u64(r) % 10;
    k.parent = i && t_u64(r) % 2 ? (uint32_t)(t_u64(r) % i) : ENG_KEPT_ROOT;
    return k;
}

/* Bytes of residents and guests that would be left, were everything gone that may go. */
static void least_left(const eng_kept *kept, uint32_t n, uint64_t claim, bool residents_too, uint64_t *ret_residents, uint64_t *ret_guests)
{
    uint32_t holds[MAX];
    bool gone[MAX] = {0};
    for (uint32_t i = 0; i < n; i++)
        holds[i] = kept[i].holds;
    for (bool more = true; more;) {
        more = false;
        for (uint32_t i = 0; i < n; i++) {
            if (gone[i] || holds[i] || !(kept[i].guest || (residents_too && kept[i].worth <= claim)))
                continue;
            gone[i] = more = true;
            if (kept[i].parent != ENG_KEPT_ROOT)
                holds[kept[i].parent]--;
        }
    }
    *ret_residents = *ret_guests = 0;
    for (uint32_t i = 0; i < n; i++)
        *(kept[i].guest ? ret_guests : ret_residents) += gone[i] ? 0 : kept[i].bytes;
}

START_TEST(chooses_well)
{
    t_rng r = t_seed(61);
    int refused = 0, guests = 0, evicted = 0;
    for (int round = 0; round < 20000; round++) {
        eng_kept kept[MAX];
        uint32_t n = (uint32_t)(t_u64(&r) % MAX), victims[MAX], holds[MAX];
        uint64_t residents = 0, as_guests = 0;
        for (uint32_t i = 0; i < n; i++) {
            kept[i] = random_kept(&r, i);
            if (kept[i].parent != ENG_KEPT_ROOT)
                kept[kept[i].parent].holds++;
            *(kept[i].guest ? &as_guests : &residents) += kept[i].bytes;
        }
        for (uint32_t i = 0; i < n; i++)
            holds[i] = kept[i].holds;
        uint64_t limit = residents + as_guests + t_u64(&r) % 100;
        eng_room room = {.limit = limit, .bytes = 1 + t_u64(&r) % (t_u64(&r) % 2 ? 400 : 60), .claim = t_u64(&r) % 2 ? t_u64(&r) % 60 : 0};
        uint64_t reserve = limit / ENG_WORTH_GUESTS, most = room.bytes > limit - reserve ? limit : limit - reserve, left_r, left_g;
        eng_kept before[MAX];
        memcpy(before, kept, sizeof kept);
        int64_t got = eng_worth_choose(&room, kept, n, victims);
        least_left(before, n, room.claim, true, &left_r, &left_g);
        bool resident_fits = left_r + room.bytes <= most && left_r + left_g + room.bytes <= limit;
        ck_assert(!resident_fits || (got >= 0 && !room.guest));
        if (got < 0) {
            least_left(before, n, room.claim, false, &left_r, &left_g);
            ck_assert(left_g + room.bytes > reserve || left_r + left_g + room.bytes > limit);
            refused++;
            continue;
        }
        for (int64_t i = 0; i < got; i++) {
            const eng_kept *v = &before[victims[i]];
            ck_assert_uint_eq(holds[victims[i]], 0);
            ck_assert(v->guest || (!room.guest && v->worth <= room.claim));
            holds[victims[i]] = UINT32_MAX; /* not twice */
            if (v->parent != ENG_KEPT_ROOT)
                holds[v->parent]--;
            *(v->guest ? &as_guests : &residents) -= v->bytes;
        }
        ck_assert_uint_le(residents + as_guests + room.bytes, limit);
        ck_assert(room.guest ? as_guests + room.bytes <= reserve : residents + room.bytes <= most);
        guests += room.guest;
        evicted += got > 0;
    }
    ck_assert_msg(refused > 1000 && guests > 200 && evicted > 1000, "%d refused, %d guests, %d evicted", refused, guests, evicted);
}
END_TEST

/* Keeps a context of n tokens that nobody had before; whether it is there afterwards. */
static bool ask(eng_cache *c, int32_t text, uint32_t n)
{
    int32_t *ids = malloc(n * sizeof *ids);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)(((uint32_t)text * 7919 + i * 31) % 30000);
    eng_view v = {0};
    eng_prefix p = {.ids = ids, .n = n};
    eng_prefix_stop stop;
    bool there = eng_cache_find(c, &p, &v, &stop) == n;
    eng_view_done(&v);
    if (!there) {
        eng_segment *s = segment(NULL, 0, ids, n, true);
        eng_cache_insert(c, s);
        ck_assert_uint_le(eng_cache_info_get(c).bytes, eng_cache_info_get(c).limit);
        eng_segment_unref(s);
    }
    free(ids);
    return there;
}

static eng_cache *cache_for(uint32_t tokens)
{
    eng_cache *c;
    ck_assert_int_eq(eng_cache_new(eng_segment_bytes_for(&shape, tokens), &c), 0);
    return c;
}

/* A full cache of two long contexts, and short requests between their questions. */
START_TEST(short_beside_long)
{
    eng_cache *c = cache_for(4400);
    ask(c, 1, 2000);
    ask(c, 2, 2000);
    for (int i = 0; i < 40; i++)
        ck_assert(!ask(c, 100 + i, 110 + (uint32_t)i)); /* 5,000 tokens in all */
    ck_assert(ask(c, 1, 2000));
    ck_assert(ask(c, 2, 2000));
    ck_assert(ask(c, 139, 149)); /* and the last of them is there, too */
    ck_assert(!ask(c, 100, 110));
    eng_cache_free(c);
}
END_TEST

/* One that comes back outlasts any number of others of its length. */
START_TEST(scan)
{
    eng_cache *c = cache_for(2500);
    ask(c, 1, 1000);
    for (int i = 0; i < 6; i++)
        ck_assert(ask(c, 1, 1000));
    for (int i = 0; i < 100; i++) {
        ask(c, 100 + i, 1000);
        ask(c, 300 + i, 1100);
        ck_assert(ask(c, 1, 1000));
    }
    eng_cache_free(c);
}
END_TEST

/* What nobody asks for any more goes, long and often used as it may have been. */
START_TEST(nothing_stays_for_ever)
{
    eng_cache *c = cache_for(2500);
    ask(c, 1, 2000);
    for (int i = 0; i < 10; i++)
        ck_assert(ask(c, 1, 2000));
    int i = 0;
    while (!ask(c, 1000 + i % 4, 500 + (uint32_t)i % 4) && i < 400) /* four of 500 go round: none fits beside it */
        i++;
    ck_assert(i > 8 && i < 200);
    eng_cache_free(c);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("worth");
    TCase *c = tcase_create("worth");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, chooses_well);
    tcase_add_test(c, short_beside_long);
    tcase_add_test(c, scan);
    tcase_add_test(c, nothing_stays_for_ever);
    suite_add_tcase(s, c);
    return t_run(s);
}
