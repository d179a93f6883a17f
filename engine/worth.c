#include "worth.h"

typedef struct {
    eng_kept *kept;
    uint32_t n;
    uint64_t bytes, guests; /* of all, of guests, that are not gone */
} tier;

/* The one used longest ago of those that may go, among guests or among the others. n: there is none. */
static uint32_t next_victim(const tier *t, bool guests, uint64_t claim)
{
    uint32_t victim = t->n;
    for (uint32_t i = 0; i < t->n; i++) {
        const eng_kept *k = &t->kept[i];
        if (k->gone || k->holds || k->guest != guests || (!guests && k->worth > claim))
            continue;
        if (victim == t->n || k->used < t->kept[victim].used)
            victim = i;
    }
    return victim;
}

static void count(tier *t)
{
    for (uint32_t i = 0; i < t->n; i++) {
        const eng_kept *k = &t->kept[i];
        t->bytes += k->bytes;
        t->guests += k->guest ? k->bytes : 0;
    }
}

static void drop(tier *t, uint32_t i)
{
    eng_kept *k = &t->kept[i];
    k->gone = true;
    t->bytes -= k->bytes;
    t->guests -= k->guest ? k->bytes : 0;
    if (k->parent != ENG_KEPT_ROOT)
        t->kept[k->parent].holds--;
}

/* What residents may still take, beside `bytes` to come. */
static uint64_t spare_beside(const eng_room *r, const tier *t, uint64_t bytes)
{
    uint64_t reserve = r->limit / ENG_WORTH_GUESTS, most = r->limit - reserve, residents = t->bytes - t->guests + bytes, all = t->bytes + bytes;
    uint64_t a = residents < most ? most - residents : 0, b = all < r->limit ? r->limit - all : 0;
    return a < b ? a : b;
}

/* Residents stay out of the guests' part, guests in it. Guests may have to go for what they continue to go. */
static int64_t choose(eng_room *r, tier t, uint32_t *victims, bool as_guest)
{
    uint64_t reserve = r->limit / ENG_WORTH_GUESTS, most = r->bytes > r->limit - reserve ? r->limit : r->limit - reserve;
    int64_t n_victims = 0;
    if (r->bytes > (as_guest ? reserve : r->limit))
        return -1;
    for (;;) {
        bool over = r->bytes && (as_guest ? t.guests + r->bytes > reserve : t.bytes - t.guests + r->bytes > most);
        if (!over && t.bytes + r->bytes <= r->limit) {
            r->spare = as_guest ? 0 : spare_beside(r, &t, r->bytes);
            return n_victims;
        }
        uint32_t v = over && !as_guest ? next_victim(&t, false, r->claim) : t.n;
        if (v == t.n)
            v = next_victim(&t, true, 0);
        if (v == t.n && !as_guest)
            v = next_victim(&t, false, r->claim);
        if (v == t.n)
            return -1;
        drop(&t, v);
        victims[n_victims++] = v;
    }
}

static void bring_back(tier *t)
{
    for (uint32_t i = 0; i < t->n; i++) {
        eng_kept *k = &t->kept[i];
        if (k->gone && k->parent != ENG_KEPT_ROOT)
            t->kept[k->parent].holds++;
        k->gone = false;
    }
}

int64_t eng_worth_choose(eng_room *r, eng_kept *kept, uint32_t n, uint32_t *victims)
{
    tier t = {.kept = kept, .n = n};
    count(&t);
    int64_t n_victims = choose(r, t, victims, false);
    r->guest = n_victims < 0;
    if (!r->guest)
        return n_victims;
    bring_back(&t);
    uint64_t spare = spare_beside(r, &t, 0);
    n_victims = choose(r, t, victims, true);
    r->spare = n_victims < 0 ? spare : 0;
    return n_victims;
}
