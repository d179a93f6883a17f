/* Stands in for CUDA's header of this name: tiles of 16 x 16 x 16, f16 or bf16 into float32. Which element of a tile a lane has is our own affair, as it is
 * the device's: element e of lane i is number i * 8 + e, by rows. Sums over k are in rising order, in float32; a device may group and round them otherwise. */
#ifndef RETRIEVALD_SIMT_MMA_H
#define RETRIEVALD_SIMT_MMA_H

#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace nvcuda
{
namespace wmma
{

struct row_major;
struct col_major;
struct matrix_a;
struct matrix_b;
struct accumulator;
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int m, int n, int k, class T, class Layout = void> struct fragment {
    static_assert(m == 16 && n == 16 && k == 16, "of the shapes there are, the emulation has this one");
    enum { num_elements = 8 };
    T x[num_elements];
};

template <class F, class T> static inline void fill_fragment(F &f, T v)
{
    for (auto &x : f.x)
        x = v;
}

/* Where element e of this lane is in memory. */
static inline size_t simt_element(int e, unsigned ld, bool by_rows)
{
    unsigned i = simt_self->lane * 8 + (unsigned)e;
    return by_rows ? (size_t)(i / 16) * ld + i % 16 : (size_t)(i % 16) * ld + i / 16;
}

/* The pointer's alignment and ld are as CUDA demands: 32 bytes, 16 bytes. */
static inline void simt_check_tile(const void *p, size_t bytes_of_row)
{
    if ((uintptr_t)p % 32 || bytes_of_row % 16)
        simt_fault("a tile at %p with rows of %zu bytes: 32 and 16 must divide these", p, bytes_of_row);
}

template <class Use, class T, class Layout>
static inline void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout> &f, const T *p, unsigned ld, SIMT_LINE)
{
    simt_check_tile(p, ld * sizeof(T));
    simt_warp_sync(~0u, line);
    for (int e = 0; e < f.num_elements; e++)
        f.x[e] = p[simt_element(e, ld, std::is_same_v<Layout, row_major>)];
    simt_warp_sync(~0u, line);
}

template <class T>
static inline void load_matrix_sync(fragment<accumulator, 16, 16, 16, T> &f, const T *p, unsigned ld, layout_t layout, SIMT_LINE)
{
    simt_check_tile(p, ld * sizeof(T));
    simt_warp_sync(~0u, line);
    for (int e = 0; e < f.num_elements; e++)
        f.x[e] = p[simt_element(e, ld, layout == mem_row_major)];
    simt_warp_sync(~0u, line);
}

template <class T>
static inline void store_matrix_sync(T *p, const fragment<accumulator, 16, 16, 16, T> &f, unsigned ld, layout_t layout, SIMT_LINE)
{
    simt_check_tile(p, ld * sizeof(T));
    simt_warp_sync(~0u, line);
    for (int e = 0; e < f.num_elements; e++)
        p[simt_element(e, ld, layout == mem_row_major)] = f.x[e];
    simt_warp_sync(~0u, line);
}

template <class D, class A, class B, class C> struct simt_product {
    D *d;
    const A *a;
    const B *b;
    const C *c;

    __attribute__((no_sanitize("thread"))) static void work(void *const *of_lanes) /* which are on other threads' stacks */
    {
        float a[16][16], b[16][16], d[16][16];
        for (int i = 0; i < 256; i++) {
            auto p = (const simt_product *)of_lanes[i / 8];
            a[i / 16][i % 16] = (float)p->a->x[i % 8];
            b[i / 16][i % 16] = (float)p->b->x[i % 8];
            d[i / 16][i % 16] = (float)p->c->x[i % 8];
        }
        for (int i = 0; i < 16; i++)
            for (int k = 0; k < 16; k++)
                for (int j = 0; j < 16; j++)
                    d[i][j] += a[i][k] * b[k][j];
        for (int i = 0; i < 256; i++)
            ((const simt_product *)of_lanes[i / 8])->d->x[i % 8] = d[i / 16][i % 16];
    }
};

/* d = a b + c */
template <class T, class LayoutA, class LayoutB>
static inline void mma_sync(fragment<accumulator, 16, 16, 16, float> &d, const fragment<matrix_a, 16, 16, 16, T, LayoutA> &a,
                            const fragment<matrix_b, 16, 16, 16, T, LayoutB> &b, const fragment<accumulator, 16, 16, 16, float> &c, SIMT_LINE)
{
    simt_product<std::remove_reference_t<decltype(d)>, std::remove_const_t<std::remove_reference_t<decltype(a)>>,
                 std::remove_const_t<std::remove_reference_t<decltype(b)>>, std::remove_const_t<std::remove_reference_t<decltype(c)>>>
        mine = {&d, &a, &b, &c};
    simt_warp_work(&mine, decltype(mine)::work, line);
}

} // namespace wmma
} // namespace nvcuda

#endif
