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

/* A tile in memory, which the last lane that comes to it moves for all of them. no_sanitize: fragments are on other threads' stacks. */
template <class T, bool store> struct simt_tile {
    T *x; /* the lane's elements */
    std::conditional_t<store, T, const T> *p;
    unsigned ld;
    bool by_rows;

    __attribute__((noinline)) static void read(T *to, const T *p, unsigned ld, bool by_rows)
    {
        for (unsigned i = 0; i < 16; i++)
            for (unsigned j = 0; j < 16; j++)
                to[by_rows ? i * 16 + j : j * 16 + i] = p[(size_t)i * ld + j];
    }

    __attribute__((noinline)) static void write(T *p, const T *from, unsigned ld, bool by_rows)
    {
        for (unsigned i = 0; i < 16; i++)
            for (unsigned j = 0; j < 16; j++)
                p[(size_t)i * ld + j] = from[by_rows ? i * 16 + j : j * 16 + i];
    }

    __attribute__((no_sanitize("thread"))) static void work(void *const *of_lanes)
    {
        const simt_tile *mine = (const simt_tile *)of_lanes[0];
        T tile[256];
        for (int i = 0; i < 32; i++) {
            const simt_tile *other = (const simt_tile *)of_lanes[i];
            if (other->p != mine->p || other->ld != mine->ld)
                simt_fault("a tile at %p with rows %u apart, and in lane %d at %p with %u", (const void *)mine->p, mine->ld, i, (const void *)other->p, other->ld);
            if (store)
                memcpy(tile + i * 8, other->x, sizeof(T) * 8);
        }
        if constexpr (store)
            return write(mine->p, tile, mine->ld, mine->by_rows);
        read(tile, mine->p, mine->ld, mine->by_rows);
        for (int i = 0; i < 32; i++)
            memcpy(((const simt_tile *)of_lanes[i])->x, tile + i * 8, sizeof(T) * 8);
    }
};

/* The pointer's alignment and ld are as CUDA demands: 32 bytes, 16 bytes. */
template <bool store, class T, class P> static inline void simt_move_tile(T *x, P *p, unsigned ld, bool by_rows, int line)
{
    if ((uintptr_t)p % 32 || ld * sizeof(T) % 16)
        simt_fault("a tile at %p with rows of %zu bytes: 32 and 16 must divide these", (const void *)p, ld * sizeof(T));
    simt_tile<T, store> mine = {x, p, ld, by_rows};
    simt_warp_work(&mine, simt_tile<T, store>::work, true, line);
}

template <class Use, class T, class Layout>
static inline void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout> &f, const T *p, unsigned ld, SIMT_LINE)
{
    simt_move_tile<false>(f.x, p, ld, std::is_same_v<Layout, row_major>, line);
}

template <class T>
static inline void load_matrix_sync(fragment<accumulator, 16, 16, 16, T> &f, const T *p, unsigned ld, layout_t layout, SIMT_LINE)
{
    simt_move_tile<false>(f.x, p, ld, layout == mem_row_major, line);
}

template <class T>
static inline void store_matrix_sync(T *p, const fragment<accumulator, 16, 16, 16, T> &f, unsigned ld, layout_t layout, SIMT_LINE)
{
    simt_move_tile<true>(const_cast<T *>(f.x), p, ld, layout == mem_row_major, line);
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
    simt_warp_work(&mine, decltype(mine)::work, false, line);
}

} // namespace wmma
} // namespace nvcuda

#endif
