/* GET /metrics: Prometheus text. Names are llama-server's where the meaning is the same. */
#include "http.h"

/* jemalloc's, when the program is linked with it. */
extern int mallctl(const char *name, void *old, size_t *old_len, void *new_value, size_t new_len) __attribute__((weak));

static void metric(srv_buf *b, const char *type, const char *name, const char *help, double v)
{
    srv_buf_printf(b, "# HELP %s %s\n# TYPE %s %s\n%s %.17g\n", name, help, name, type, name, v);
}

static void allocator(srv_buf *b)
{
    static const struct {
        const char *ctl, *name, *help;
    } stats[] = {
        {"stats.allocated", "retrievald_heap_allocated_bytes", "Bytes allocated on the heap."},
        {"stats.resident", "retrievald_heap_resident_bytes", "Bytes of the heap in memory."},
    };
    uint64_t epoch = 1;
    size_t len = sizeof(epoch);
    if (!mallctl || mallctl("epoch", &epoch, &len, &epoch, len) != 0)
        return;
    for (size_t i = 0; i < sizeof(stats) / sizeof(stats[0]); i++) {
        size_t v = 0;
        len = sizeof(v);
        if (mallctl(stats[i].ctl, &v, &len, NULL, 0) == 0)
            metric(b, "gauge", stats[i].name, stats[i].help, (double)v);
    }
}

static void engine(srv_buf *b, const eng_stats *s)
{
    double computed = (double)s->prompt_tokens, predicted = (double)s->predicted_tokens;
    metric(b, "counter", "llamacpp:prompt_tokens_total", "Prompt tokens computed.", computed);
    metric(b, "counter", "llamacpp:prompt_seconds_total", "Seconds spent on prompts.", s->prompt_seconds);
    metric(b, "counter", "llamacpp:tokens_predicted_total", "Tokens generated.", predicted);
    metric(b, "counter", "llamacpp:tokens_predicted_seconds_total", "Seconds spent on generating.", s->predicted_seconds);
    metric(b, "gauge", "llamacpp:prompt_tokens_seconds", "Prompt tokens computed a second, over all.",
           s->prompt_seconds > 0 ? computed / s->prompt_seconds : 0);
    metric(b, "gauge", "llamacpp:predicted_tokens_seconds", "Tokens generated a second, over all.",
           s->predicted_seconds > 0 ? predicted / s->predicted_seconds : 0);
    metric(b, "counter", "retrievald_cached_tokens_total", "Prompt tokens taken from a kept context.", (double)s->cached_tokens);
    metric(b, "counter", "retrievald_cache_hits_total", "Requests that found a kept prefix.", (double)s->hits);
    metric(b, "counter", "retrievald_cache_misses_total", "Requests that found none.", (double)s->misses);
    metric(b, "counter", "retrievald_cache_evictions_total", "Segments dropped for room.", (double)s->evictions);
    metric(b, "counter", "retrievald_cache_refusals_total", "Segments not kept, since what would have to go is worth more.", (double)s->refusals);
    metric(b, "counter", "retrievald_cache_merges_total", "Times that small segments of a context became one.", (double)s->merges);
    metric(b, "gauge", "retrievald_cache_bytes", "Bytes of kept contexts and their indexes.", (double)s->cache_bytes);
    metric(b, "gauge", "retrievald_cache_limit_bytes", "Most bytes of kept contexts.", (double)s->cache_limit);
    metric(b, "gauge", "retrievald_cache_segments", "Segments kept.", s->segments);
    metric(b, "gauge", "retrievald_index_bytes", "Bytes of indexes.", (double)s->index_bytes);
    metric(b, "gauge", "retrievald_index_pending", "Indexes wanted and not ready.", s->index_pending);
    metric(b, "counter", "retrievald_index_seconds_total", "CPU seconds spent on building indexes.", s->index_seconds);
    metric(b, "counter", "retrievald_keys_held_total", "Keys in context, over steps, layers and query heads.", (double)s->keys_held);
    metric(b, "counter", "retrievald_keys_attended_total", "Keys read of those.", (double)s->keys_attended);
}

static void stops(srv_buf *b, const eng_engine *e)
{
    uint64_t n[ENG_MISS_COUNT];
    eng_prefix_stops(e, n);
    srv_buf_puts(b, "# HELP retrievald_cache_stops_total Requests by why what is kept of their prompt ends where it does; none: all of it was kept.\n"
                    "# TYPE retrievald_cache_stops_total counter\n");
    for (int i = 0; i < ENG_MISS_COUNT; i++)
        srv_buf_printf(b, "retrievald_cache_stops_total{reason=\"%s\"} %llu\n", eng_miss_name((eng_miss)i), (unsigned long long)n[i]);
}

static void disk(srv_buf *b, const eng_disk_stats *s)
{
    metric(b, "gauge", "retrievald_disk_bytes", "Bytes of contexts on disk.", (double)s->bytes);
    metric(b, "gauge", "retrievald_disk_limit_bytes", "Most bytes of contexts on disk; 0: none are kept there.", (double)s->limit);
    metric(b, "gauge", "retrievald_disk_segments", "Segments on disk.", s->segments);
    metric(b, "gauge", "retrievald_disk_saving", "Segments on their way to disk.", s->saving);
    metric(b, "counter", "retrievald_disk_hits_total", "Requests that read a kept prefix from disk.", (double)s->hits);
    srv_buf_puts(b, "# HELP retrievald_disk_misses_total Requests without a kept prefix in memory or on disk, and files that could not be used, by reason.\n"
                    "# TYPE retrievald_disk_misses_total counter\n");
    for (int i = ENG_MISS_NONE + 1; i < ENG_MISS_COUNT; i++)
        if (i == ENG_MISS_ABSENT || i >= ENG_MISS_SHORT)
            srv_buf_printf(b, "retrievald_disk_misses_total{reason=\"%s\"} %llu\n", eng_miss_name((eng_miss)i), (unsigned long long)s->misses[i]);
    metric(b, "counter", "retrievald_disk_evictions_total", "Segments removed from disk for room.", (double)s->evictions);
    metric(b, "counter", "retrievald_disk_refusals_total", "Segments not written, since what would have to go is worth more.", (double)s->refusals);
    metric(b, "counter", "retrievald_disk_saves_total", "Segments written to disk.", (double)s->saves);
    metric(b, "counter", "retrievald_disk_save_failures_total", "Segments that could not be written.", (double)s->save_failures);
    metric(b, "counter", "retrievald_disk_saved_bytes_total", "Bytes written.", (double)s->saved_bytes);
    metric(b, "counter", "retrievald_disk_save_seconds_total", "Seconds spent on writing.", s->save_seconds);
    metric(b, "gauge", "retrievald_disk_save_bytes_per_second", "Bytes written a second of writing, over all.", s->save_seconds > 0 ? (double)s->saved_bytes / s->save_seconds : 0);
    metric(b, "counter", "retrievald_disk_loads_total", "Segments read from disk.", (double)s->loads);
    metric(b, "counter", "retrievald_disk_loaded_bytes_total", "Bytes read.", (double)s->loaded_bytes);
    metric(b, "counter", "retrievald_disk_load_seconds_total", "Seconds spent on reading.", s->load_seconds);
    metric(b, "gauge", "retrievald_disk_load_bytes_per_second", "Bytes read a second of reading, over all.", s->load_seconds > 0 ? (double)s->loaded_bytes / s->load_seconds : 0);
}

void srv_metrics(srv_server *s, srv_conn *c)
{
    srv_buf *b = &c->reply;
    eng_stats stats;
    eng_disk_stats disk_stats;
    uint32_t waiting, running;
    eng_stats_get(s->app.engine, &stats);
    eng_disk_stats_get(s->app.engine, &disk_stats);
    srv_queue_depth(&s->queue, &waiting, &running);
    engine(b, &stats);
    stops(b, s->app.engine);
    disk(b, &disk_stats);
    metric(b, "gauge", "llamacpp:requests_processing", "Requests running.", running);
    metric(b, "gauge", "llamacpp:requests_deferred", "Requests waiting.", waiting);
    metric(b, "counter", "retrievald_requests_cancelled_total", "Requests whose client went away.", (double)s->cancelled);
    srv_buf_puts(b, "# HELP retrievald_http_responses_total Answers by status.\n# TYPE retrievald_http_responses_total counter\n");
    for (int i = 0; i < SRV_N_CODES; i++)
        if (s->codes[i])
            srv_buf_printf(b, "retrievald_http_responses_total{code=\"%d\"} %llu\n", i, (unsigned long long)s->codes[i]);
    allocator(b);
    c->status = 200;
    c->content_type = "text/plain; version=0.0.4; charset=utf-8";
}
