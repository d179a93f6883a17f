/* cuda/rows.cu against the scalar twins: bit for bit where an element is one product or one sum, else against float64. */
#include "gpu_support.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

static eng_kernels scalar;

static const float special[] = {0,     -0.0f,   INFINITY, -INFINITY,     NAN,    FLT_MAX, -FLT_MAX, FLT_MIN, 1e-40f,
                                1e10f, -1e10f,  65504,    65519.99f,     -65520, 65536,   1e-8f,    -87.5f,  88.9f,
                                -104,  -1e-30f, 1e-25f,   1.00390625f, 1.01171875f};

static float *values(t_rng *rng, size_t n, bool with_special)
{
    float *x = t_randoms(rng, n);
    for (size_t i = 0; i < n && with_special; i++)
        if (t_u64(rng) % 4 == 0)
            x[i] = special[t_u64(rng) % COUNT(special)];
    return x;
}

/* ---- embedding --------------------------------------------------------------------------------------------------------- */

START_TEST(embed)
{
    static const uint32_t plain_cols[] = {1, 7, 64, 576}, small_cols[] = {32, 576, 4864}, super_cols[] = {256, 768, 4864};
    enum { ROWS = 7 };
    t_rng rng = t_seed(1);
    for (eng_type t = 0; t < ENG_TYPE_COUNT; t++)
        for (int c = 0; c < (eng_types[t].block == 1 ? 4 : 3); c++) {
            uint32_t cols = eng_types[t].block == 1 ? plain_cols[c] : eng_types[t].block == 32 ? small_cols[c] : super_cols[c];
            static const int32_t ids[] = {3, 0, 6, 6, 5};
            float scale = c == 0 ? 1 : 33.94f, *row = t_floats(cols);
            size_t row_bytes = t_row_bytes(t, cols);
            char *w = t_weights(&rng, t, ROWS, cols, row_bytes);
            if (eng_types[t].block > 1) { /* scales that are no numbers */
                const uint16_t odd[] = {0x7c00, 0xfe00, 0x0001};
                for (int i = 0; i < 3; i++)
                    memcpy(w + (size_t)(3 + i) * row_bytes + t_scale_at(t), &odd[i], 2);
            }
            gpu_weight table = {t_in(w, ROWS * row_bytes), row_bytes, ROWS, cols, (gpu_type)t};
            void *device_ids = t_in(ids, sizeof ids);
            for (uint32_t n = 0; n <= COUNT(ids); n += n ? 4 : 1) {
                float *out = t_out(NULL, n * cols * sizeof(float));
                t_ok(gpu_embed(t_gpu, out, &table, device_ids, n, scale));
                const float *got = t_got(out, n * cols * sizeof(float));
                for (uint32_t i = 0; i < n; i++) {
                    eng_dequantize(t, w + (size_t)ids[i] * row_bytes, row, cols);
                    for (uint32_t j = 0; j < cols; j++)
                        row[j] *= scale;
                    t_same_floats(eng_types[t].name, got + (size_t)i * cols, row, cols);
                }
            }
            t_device_reset();
        }
}
END_TEST

/* ---- norms --------------------------------------------------------------------------------------------------------------- */

static void check_norm(const float *got, const float *x, const float *w, uint32_t cols, float eps)
{
    double sum = 0;
    for (uint32_t i = 0; i < cols; i++)
        sum += (double)x[i] * x[i];
    double f = 1 / sqrt(sum / cols + (double)eps);
    for (uint32_t i = 0; i < cols; i++) { /* a thread sums at most cols / 256 squares; then there are 10 steps, a root and three products */
        double want = x[i] * f * w[i];
        t_near("norm", "gpu", got[i], want, (cols / 256.0 + 20) * EPS * fabs(want) + FLT_MIN);
    }
}

START_TEST(norms)
{
    static const uint32_t all_cols[] = {1, 2, 31, 64, 576, 896, 1024, 1025, 4096, 5120}, counts[] = {0, 1, 2, 65};
    static const float sizes[] = {1, 1e-25f, 1e15f, 0};
    t_rng rng = t_seed(2);
    for (size_t c = 0; c < COUNT(all_cols); c++)
        for (size_t k = 0; k < COUNT(counts); k++)
            for (size_t z = 0; z < COUNT(sizes); z++) {
                uint32_t cols = all_cols[c], n = counts[k];
                size_t all = (size_t)n * cols, bytes = all * sizeof(float);
                float eps = z % 2 ? 1e-6f : 1e-5f, *x = t_randoms(&rng, all), *w = t_randoms(&rng, cols);
                for (size_t i = 0; i < all; i++)
                    x[i] *= sizes[z];
                const float *device_w = t_in(w, cols * sizeof(float));
                float *device_x = t_out(x, bytes), *out = t_out(NULL, bytes), *both = t_out(x, bytes);
                t_ok(gpu_rms_norm(t_gpu, out, device_x, device_w, n, cols, eps));
                const float *got = t_got(out, bytes), *left = t_got(device_x, bytes);
                t_ok(gpu_rms_norm(t_gpu, both, both, device_w, n, cols, eps));
                t_same("out is x", "gpu", t_got(both, bytes), got, bytes);
                t_same("x stays", "gpu", left, x, bytes);
                for (uint32_t i = 0; i < n; i++)
                    check_norm(got + (size_t)i * cols, x + (size_t)i * cols, w, cols, eps);
                if (n > 1) { /* a row's bits are its own */
                    const float *one = t_in(x + cols, cols * sizeof(float));
                    float *alone = t_out(NULL, cols * sizeof(float));
                    t_ok(gpu_rms_norm(t_gpu, alone, one, device_w, 1, cols, eps));
                    t_same("a row alone", "gpu", t_got(alone, cols * sizeof(float)), got + cols, cols * sizeof(float));
                }
                t_device_reset();
            }
}
END_TEST

/* ---- element by element ---------------------------------------------------------------------------------------------------- */

START_TEST(sums)
{
    static const size_t counts[] = {0, 1, 255, 256, 257, 4864};
    t_rng rng = t_seed(3);
    for (size_t c = 0; c < COUNT(counts); c++)
        for (uint32_t rows = 0; rows <= 3; rows++) {
            size_t cols = counts[c], n = rows * cols, bytes = n * sizeof(float);
            float *x = values(&rng, n, true), *y = values(&rng, n, true), f = t_normal(&rng);
            float *device = t_out(x, bytes);
            t_ok(gpu_add(t_gpu, device, t_in(y, bytes), n));
            scalar.add(x, y, n);
            t_same_floats("add", t_got(device, bytes), x, n);
            t_ok(gpu_add_row(t_gpu, device, t_in(y, rows ? cols * sizeof(float) : 0), rows, (uint32_t)cols));
            for (uint32_t i = 0; i < rows; i++)
                scalar.add(x + i * cols, y, cols);
            t_same_floats("add_row", t_got(device, bytes), x, n);
            t_ok(gpu_scale(t_gpu, device, n, f));
            scalar.scale(x, n, f);
            t_same_floats("scale", t_got(device, bytes), x, n);
            t_device_reset();
        }
}
END_TEST

/* x / (1 + exp(-u)) in float64. An error of u, which is rounded four times in GELU, is one of |u| in the exponent. */
static double gate_of(double x, bool gelu, double *ret_u)
{
    *ret_u = gelu ? 2 * sqrt(2 / M_PI) * (x + 0.044715 * x * x * x) : x;
    return x / (1 + exp(-*ret_u));
}

START_TEST(gates)
{
    static const size_t counts[] = {0, 1, 257, 4864};
    t_rng rng = t_seed(4);
    for (size_t c = 0; c < COUNT(counts); c++)
        for (int form = 0; form < 4; form++) {
            bool gelu = form % 2, in_place = form / 2;
            size_t n = counts[c], bytes = n * sizeof(float);
            float *gate = values(&rng, n, true), *up = values(&rng, n, true), *twin = t_floats(n);
            for (size_t i = 0; i < n; i += 3)
                gate[i] *= 20;
            float *device_gate = t_out(gate, bytes), *out = in_place ? device_gate : t_out(NULL, bytes);
            t_ok(gpu_gate(t_gpu, out, device_gate, t_in(up, bytes), n, gelu));
            const float *got = t_got(out, bytes);
            (gelu ? scalar.gelu_mul : scalar.silu_mul)(twin, gate, up, n);
            for (size_t i = 0; i < n; i++) {
                double u, g = gate_of(gate[i], gelu, &u), want = g * up[i];
                if (!isfinite(twin[i]) || !isfinite(want) || fabs(want) > (double)FLT_MAX * 0.999)
                    ck_assert_msg(!isfinite(got[i]) == !isfinite(twin[i]) && isnan(got[i]) == isnan(twin[i]), "gate %a, up %a: %a, the twin %a", (double)gate[i],
                                  (double)up[i], (double)got[i], (double)twin[i]);
                else { /* what is lost where the exponential overflows, up makes larger */
                    double lost = FLT_MIN * (1 + fabs((double)gate[i])) * (1 + fabs((double)up[i]));
                    t_near(gelu ? "gelu" : "silu", "gpu", got[i], want, (6 * fmin(fabs(u), 110) + 12) * EPS * fabs(want) + lost);
                }
            }
            t_device_reset();
        }
}
END_TEST

/* ---- rotation, keys and values ---------------------------------------------------------------------------------------------- */

static const uint32_t dims[] = {64, 80, 96, 128, 256};

START_TEST(rotation)
{
    static const uint32_t tokens[] = {0, 1, 2, 65}, heads[] = {1, 3, 14};
    t_rng rng = t_seed(5);
    for (size_t i = 0; i < COUNT(dims); i++)
        for (size_t j = 0; j < COUNT(tokens); j++)
            for (size_t h = 0; h < COUNT(heads); h++)
                for (int form = 0; form < 6; form++) {
                    bool halves = form % 2;
                    uint32_t d = dims[i], n = tokens[j], rot = form / 2 == 0 ? d : form / 2 == 1 ? d / 4 : 2;
                    size_t row = (size_t)heads[h] * d, bytes = n * row * sizeof(float);
                    float *x = values(&rng, n * row, form < 2), *cs = t_randoms(&rng, (size_t)n * rot), *device = t_out(x, bytes);
                    t_ok(gpu_rope(t_gpu, device, t_in(cs, (size_t)n * rot * sizeof(float)), n, heads[h], d, rot, halves));
                    for (uint32_t t = 0; t < n; t++)
                        for (uint32_t k = 0; k < heads[h]; k++)
                            scalar.rope(x + t * row + (size_t)k * d, cs + (size_t)t * rot, rot, halves);
                    t_same_floats(halves ? "rope, halves" : "rope, pairs", t_got(device, bytes), x, n * row);
                    t_device_reset();
                }
    float *x = t_out(NULL, 64 * sizeof(float));
    t_ok(gpu_rope(t_gpu, x, t_in(NULL, 0), 1, 1, 64, 0, true)); /* nothing turns */
    t_got(x, 64 * sizeof(float));
    t_device_reset();
}
END_TEST

static void same_halves(const char *what, eng_kv_type type, const uint16_t *got, const uint16_t *want, size_t n)
{
    const uint16_t infinity = type == ENG_KV_F16 ? 0x7c00 : 0x7f80;
    for (size_t i = 0; i < n; i++)
        if ((want[i] & 0x7fff) > infinity ? (got[i] & 0x7fff) <= infinity : got[i] != want[i])
            ck_abort_msg("%s, element %zu: 0x%04x, not 0x%04x", what, i, got[i], want[i]);
}

static void check_store(t_rng *rng, uint32_t d, uint32_t heads, uint32_t cap, uint32_t first, uint32_t n, const gpu_kv_type *types)
{
    size_t elements = (size_t)heads * cap * d, row = (size_t)heads * d;
    void *out[2];
    uint16_t *want[2];
    float *x[2];
    for (int i = 0; i < 2; i++) {
        eng_kv_type type = types[i] == GPU_KV_F16 ? ENG_KV_F16 : ENG_KV_BF16;
        want[i] = t_alloc(elements * 2);
        for (size_t j = 0; j < elements; j++)
            want[i][j] = 0x5a5a;
        out[i] = t_out(want[i], elements * 2);
        x[i] = values(rng, n * row, true);
        for (uint32_t t = 0; t < n; t++)
            for (uint32_t h = 0; h < heads; h++)
                scalar.kv_store[type](x[i] + t * row + (size_t)h * d, want[i] + ((size_t)h * cap + ((uint64_t)first + t) % cap) * d, d);
    }
    gpu_kv kv = {.k = out[0], .v = out[1], .n_head_kv = heads, .group = 1, .d = d, .cap = cap, .type_k = types[0], .type_v = types[1]};
    t_ok(gpu_kv_store(t_gpu, &kv, t_in(x[0], n * row * sizeof(float)), t_in(x[1], n * row * sizeof(float)), first, n));
    same_halves("keys", types[0] == GPU_KV_F16 ? ENG_KV_F16 : ENG_KV_BF16, t_got(out[0], elements * 2), want[0], elements);
    same_halves("values", types[1] == GPU_KV_F16 ? ENG_KV_F16 : ENG_KV_BF16, t_got(out[1], elements * 2), want[1], elements);
    t_device_reset();
}

START_TEST(storing)
{
    static const struct {
        uint32_t cap, first, n;
    } cases[] = {{1, 0, 1}, {1, 5, 1}, {7, 0, 0}, {7, 3, 4}, {7, 3, 7}, {64, 1000, 63}, {64, 4294967290u, 9}};
    t_rng rng = t_seed(6);
    for (size_t i = 0; i < COUNT(dims); i++)
        for (size_t c = 0; c < COUNT(cases); c++)
            for (int form = 0; form < 4; form++) {
                gpu_kv_type types[2] = {form % 2 ? GPU_KV_BF16 : GPU_KV_F16, form / 2 ? GPU_KV_BF16 : GPU_KV_F16};
                check_store(&rng, dims[i], (uint32_t)(c % 3 + 1), cases[c].cap, cases[c].first, cases[c].n, types);
            }
}
END_TEST

START_TEST(rounding_q8)
{
    static const uint32_t cols[] = {1, 8, 64, 80, 96, 256};
    t_rng rng = t_seed(7);
    for (uint32_t i = 0; i < COUNT(cols); i++)
        for (uint32_t round = 0; round < 3; round++) {
            uint32_t n = round ? 40 : 0, size = cols[i];
            float *x = values(&rng, n * size, round == 2), *want = t_floats(n * size);
            char row[256 / 32 * 34];
            for (uint32_t r = 0; r < n; r++) {
                for (uint32_t j = 0; r % 5 == 0 && j < size; j++)
                    x[r * size + j] *= r % 2 ? 1e-7f : 1e5f; /* scales that f16 hardly has */
                scalar.kv_store[ENG_KV_Q8_0](x + r * size, row, size);
                scalar.kv_load[ENG_KV_Q8_0](row, want + r * size, size);
            }
            float *out = t_out(x, n * size * sizeof(float));
            t_ok(gpu_round_q8(t_gpu, out, n, size));
            t_same_floats("as q8_0", t_got(out, n * size * sizeof(float)), want, n * size);
            t_device_reset();
        }
}
END_TEST

int main(void)
{
    eng_kernels_scalar(&scalar);
    Suite *s = suite_create("rows");
    TCase *t = tcase_create("rows");
    tcase_add_test(t, embed);
    tcase_add_test(t, norms);
    tcase_add_test(t, sums);
    tcase_add_test(t, gates);
    tcase_add_test(t, rotation);
    tcase_add_test(t, storing);
    tcase_add_test(t, rounding_q8);
    suite_add_tcase(s, t);
    return t_gpu_run(s);
}
