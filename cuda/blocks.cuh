/* Weights in blocks: the layouts of engine/quant.h, and how a thread takes its share of a block apart, for matvec.cu and dequantize.cu.
 *
 * A share is 32 or 64 elements of a block, cut so that its bytes lie together, in pieces of 16 elements that have one scale each. Element i of a piece is
 *   d (code - ZERO) + m
 * with four codes in a word, as dp4a multiplies them. d times a code and m are exact in float32, so the sum rounds once, as the twin's.
 *
 * Blocks begin at multiples of 2 bytes at least, for most have an odd number of 16-bit words. Those of Q4_1 and Q2_K are aligned to 4, of Q5_1 and IQ4_XS to 8,
 * of Q4_K and Q5_K to 16: what their sizes make of an aligned tensor (gpu.h).
 */
#ifndef RETRIEVALD_CUDA_BLOCKS_CUH
#define RETRIEVALD_CUDA_BLOCKS_CUH

#include "private.cuh"

template <int PIECES> struct gpu_share {
    uint32_t q[PIECES][4];
    float d[PIECES], m[PIECES]; /* where one scale is for the whole share (ONE_SCALE) only the first; m only where HAS_MIN */
};

/* What each type says of itself:
 *   ELEMENTS, BYTES     of a block
 *   SHARES, PIECES      shares of a block, pieces of a share
 *   ONE_SCALE           the pieces are the halves of 32 elements that have one scale
 *   ZERO, HAS_MIN       as above
 *   at(share, piece)    the piece's first element in the block
 *   unpack(...)         takes a share apart */
template <gpu_type T> struct gpu_format;

/* ---- bytes --------------------------------------------------------------------------------------------------------- */

template <typename W> static __device__ __forceinline__ W load(const uint8_t *p)
{
    return *reinterpret_cast<const W *>(p);
}

static __device__ __forceinline__ float load_f16(const uint8_t *p)
{
    return __half2float(__ushort_as_half(load<uint16_t>(p)));
}

/* f16 in the low or high half of a word. */
static __device__ __forceinline__ float f16_low(uint32_t w)
{
    return __half2float(__ushort_as_half((uint16_t)w));
}

static __device__ __forceinline__ float f16_high(uint32_t w)
{
    return __half2float(__ushort_as_half((uint16_t)(w >> 16)));
}

/* N words from a multiple of 2 bytes, by N loads of aligned words and one of 16 bits. The first word may begin 2 bytes before p: those are the tensor's, for
 * it begins at a multiple of 4. */
template <int N> static __device__ __forceinline__ void load_words(const uint8_t *p, uint32_t *out)
{
    unsigned odd = (unsigned)(reinterpret_cast<uintptr_t>(p) & 2);
    const uint8_t *base = p - odd;
    uint32_t w[N + 1];
#pragma unroll
    for (int i = 0; i < N; i++)
        w[i] = load<uint32_t>(base + 4 * i);
    w[N] = odd ? load<uint16_t>(p + 4 * N - 2) : 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        out[i] = __funnelshift_r(w[i], w[i + 1], 8 * odd);
}

static __device__ __forceinline__ void store4(uint32_t *out, uint4 v)
{
    out[0] = v.x;
    out[1] = v.y;
    out[2] = v.z;
    out[3] = v.w;
}

/* Element i of a row of plain numbers. */
template <gpu_type T> static __device__ __forceinline__ float gpu_plain(const uint8_t *row, size_t i)
{
    return T == GPU_F32 ? load<float>(row + 4 * i) : T == GPU_F16 ? load_f16(row + 2 * i) : __uint_as_float((uint32_t)load<uint16_t>(row + 2 * i) << 16);
}

/* ---- codes --------------------------------------------------------------------------------------------------------- */

/* The low nibbles of 16 bytes are the codes of one piece, the high ones those of another. */
static __device__ __forceinline__ void split_nibbles(const uint32_t *bytes, uint32_t *low, uint32_t *high)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        low[i] = bytes[i] & 0x0f0f0f0f;
        high[i] = bytes[i] >> 4 & 0x0f0f0f0f;
    }
}

/* Bit i of h is the fifth bit of element i of 32. Four bits go to bit 4 of four bytes by one product: bit i of the factor's copy j lands on 4 + i + 7 j, and
 * these are all different, so that nothing carries. */
static __device__ __forceinline__ void add_fifth_bits(uint32_t (*q)[4], uint32_t h)
{
#pragma unroll
    for (int i = 0; i < 8; i++)
        q[i / 4][i % 4] |= (h >> 4 * i & 15) * 0x02040810 & 0x10101010;
}

/* A bit mask of each byte of four words, shifted down and then up to where it belongs in the codes. */
static __device__ __forceinline__ void add_bits(uint32_t *q, const uint32_t *h, unsigned down, uint32_t mask, unsigned up)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        q[i] |= (h[i] >> down & mask) << up;
}

/* The 16 values of IQ4_NL and IQ4_XS at the nibbles of 16 bytes: a byte permutation looks up 4 nibbles in 8 values, another one chooses between the upper
 * and the lower 8 by the nibble's highest bit, and the last two sort low nibbles from high ones. */
static __device__ __forceinline__ void split_values(const uint32_t *bytes, uint32_t *low, uint32_t *high)
{
    const uint32_t v0 = 0xbfad9881, v1 = 0xf6eaddcf, v2 = 0x26190d01, v3 = 0x71594535;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t at = bytes[i] & 0x77777777, upper = 0x32103210 | (bytes[i] & 0x88888888) >> 1;
        uint32_t a = __byte_perm(__byte_perm(v0, v1, at), __byte_perm(v2, v3, at), upper);
        at >>= 16;
        uint32_t b = __byte_perm(__byte_perm(v0, v1, at), __byte_perm(v2, v3, at), upper >> 16);
        low[i] = __byte_perm(a, b, 0x6420);
        high[i] = __byte_perm(a, b, 0x7531);
    }
}

/* ---- blocks of 32: one share ------------------------------------------------------------------------------------------ */

template <int BYTES_, int ZERO_, bool HAS_MIN_> struct gpu_small_format {
    static constexpr int ELEMENTS = 32, BYTES = BYTES_, SHARES = 1, PIECES = 2, ZERO = ZERO_;
    static constexpr bool ONE_SCALE = true, HAS_MIN = HAS_MIN_;
    static __device__ __forceinline__ unsigned at(unsigned, unsigned piece)
    {
        return 16 * piece;
    }
};

template <> struct gpu_format<GPU_Q8_0> : gpu_small_format<34, 0, false> {
    static __device__ __forceinline__ void unpack(const uint8_t *b, unsigned, gpu_share<2> *r)
    {
        r->d[0] = load_f16(b);
        load_words<8>(b + 2, r->q[0]);
    }
};

template <> struct gpu_format<GPU_Q4_0> : gpu_small_format<18, 8, false> {
    static __device__ __forceinline__ void unpack(const uint8_t *b, unsigned, gpu_share<2> *r)
    {
        uint32_t q[4];
        r->d[0] = load_f16(b);
        load_words<4>(b + 2, q);
        split_nibbles(q, r->q[0], r->q[1]);
    }
};

template <> struct gpu_format<GPU_Q4_1> : gpu_small_format<20, 0, true> {
    static __device__ __forceinline__ void unpack(const uint8_t *b, unsigned, gpu_share<2> *r)
    {
        uint32_t head = load<uint32_t>(b), q[4];
        r->d[0] = f16_low(head);
        r->m[0] = f16_high(head);
#pragma unroll
        for (int i = 0; i < 4; i++)
            q[i] = load<uint32_t>(b + 4 + 4 * i);
        split_nibbles(q, r->q[0], r->q[1]);
    }
};

template <> struct gpu_format<GPU_Q5_0> : gpu_small_format<22, 16, false> {
    static __device__ __forceinline__ void unpack(const uint8_t *b, unsigned, gpu_share<2> *r)
    {
        uint32_t hq[5];
        r->d[0] = load_f16(b);
        load_words<5>(b + 2, hq);
        split_nibbles(hq + 1, r->q[0], r->q[1]);
        add_fifth_bits(r->q, hq[0]);
    }
};

template <> struct gpu_format<GPU_Q5_1> : gpu_small_format<24, 0, true> {
    static __device__ __forceinline__ void unpack(const uint8_t *b, unsigned, gpu_share<2> *r)
    {
        uint2 head = load<uint2>(b), u = load<uint2>(b + 8), v = load<uint2>(b + 16);
        const uint32_t q[4] = {u.x, u.y, v.x, v.y};
        r->d[0] = f16_low(head.x);
        r->m[0] = f16_high(head.x);
        split_nibbles(q, r->q[0], r->q[1]);
        add_fifth_bits(r->q, head.y);
    }
};

template <> struct gpu_format<GPU_IQ4_NL> : gpu_small_format<18, 0, false> {
    static __device__ __forceinline__ void unpack(const uint8_t *b, unsigned, gpu_share<2> *r)
    {
        uint32_t q[4];
        r->d[0] = load_f16(b);
        load_words<4>(b + 2, q);
        split_values(q, r->q[0], r->q[1]);
    }
};

/* ---- blocks of 256 ------------------------------------------------------------------------------------------------------ */

/* Q2_K, Q3_K: a share is 16 bytes of q, whose four pairs of bits are the codes of pieces 32 elements apart. */
template <int BYTES_, int ZERO_, bool HAS_MIN_> struct gpu_pairs_format {
    static constexpr int ELEMENTS = 256, BYTES = BYTES_, SHARES = 4, PIECES = 4, ZERO = ZERO_;
    static constexpr bool ONE_SCALE = false, HAS_MIN = HAS_MIN_;
    static __device__ __forceinline__ unsigned at(unsigned share, unsigned piece)
    {
        return 128 * (share / 2) + 32 * piece + 16 * (share % 2);
    }
};

template <> struct gpu_format<GPU_Q2_K> : gpu_pairs_format<84, 0, true> {
    static __device__ __forceinline__ void unpack(const uint8_t *b, unsigned share, gpu_share<4> *r)
    {
        unsigned g = share / 2, half = share % 2;
        uint32_t head = load<uint32_t>(b + 80), s[2] = {load<uint32_t>(b + 8 * g), load<uint32_t>(b + 8 * g + 4)};
        float d = f16_low(head), m = f16_high(head);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t w = load<uint32_t>(b + 16 + 16 * share + 4 * i);
#pragma unroll
            for (int p = 0; p < 4; p++)
                r->q[p][i] = w >> 2 * p & 0x03030303;
        }
#pragma unroll
        for (int p = 0; p < 4; p++) {
            uint32_t t = s[p / 2] >> (16 * (p % 2) + 8 * half);
            r->d[p] = d * (float)(t & 15);
            r->m[p] = -(m * (float)(t >> 4 & 15));
        }
    }
};

template <> struct gpu_format<GPU_Q3_K> : gpu_pairs_format<110, 4, false> {
    static __device__ __forceinline__ void unpack(const uint8_t *b, unsigned share, gpu_share<4> *r)
    {
        unsigned g = share / 2, half = share % 2;
        uint32_t h[4], q[4], s[3];
        load_words<4>(b + 16 * half, h);
        load_words<4>(b + 32 + 16 * share, q);
        load_words<3>(b + 96, s);
        float d = load_f16(b + 108);
#pragma unroll
        for (int p = 0; p < 4; p++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                r->q[p][i] = (q[i] >> 2 * p & 0x03030303) | (h[i] >> (4 * g + p) & 0x01010101) << 2;
            unsigned byte = 16 * (p % 2) + 8 * half; /* the scale is number 8 g + 2 p + half */
            int scale = (int)((s[p / 2] >> (byte + 4 * g) & 15) | (s[2] >> (byte + 4 * g + 2 * (p / 2)) & 3) << 4);
            r->d[p] = d * (float)(scale - 32);
        }
    }
};

/* Q4_K, Q5_K: a share is 16 bytes of q, whose nibbles are halves of the parts 2 pair and 2 pair + 1 of 32 elements. */
template <int BYTES_> struct gpu_nibbles_format {
    static constexpr int ELEMENTS = 256, BYTES = BYTES_, SHARES = 8, PIECES = 2, ZERO = 0;
    static constexpr bool ONE_SCALE = false, HAS_MIN = true;
    static __device__ __forceinline__ unsigned at(unsigned share, unsigned piece)
    {
        return 64 * (share / 2) + 32 * piece + 16 * (share % 2);
    }

    /* The head of a block is d, m and 12 bytes of scales and minima of 6 bits, packed as quant.c says; both of a pair are taken at once. */
    static __device__ __forceinline__ void scales(uint4 head, unsigned pair, gpu_share<2> *r)
    {
        unsigned down = 16 * (pair % 2);
        uint32_t a = head.y >> down, c = head.z >> down, e = head.w >> down;
        uint32_t s = pair < 2 ? a & 0x3f3f : (e & 0x0f0f) | (a >> 2 & 0x3030), t = pair < 2 ? c & 0x3f3f : (e >> 4 & 0x0f0f) | (c >> 2 & 0x3030);
        float d = f16_low(head.x), m = f16_high(head.x);
#pragma unroll
        for (int p = 0; p < 2; p++) {
            r->d[p] = d * (float)(s >> 8 * p & 63);
            r->m[p] = -(m * (float)(t >> 8 * p & 63));
        }
    }
};

template <> struct gpu_format<GPU_Q4_K> : gpu_nibbles_format<144> {
    static __device__ __forceinline__ void unpack(const uint8_t *b, unsigned share, gpu_share<2> *r)
    {
        uint32_t q[4];
        scales(load<uint4>(b), share / 2, r);
        store4(q, load<uint4>(b + 16 + 16 * share));
        split_nibbles(q, r->q[0], r->q[1]);
    }
};

template <> struct gpu_format<GPU_Q5_K> : gpu_nibbles_format<176> {
    static __device__ __forceinline__ void unpack(const uint8_t *b, unsigned share, gpu_share<2> *r)
    {
        uint32_t q[4], h[4];
        scales(load<uint4>(b), share / 2, r);
        store4(h, load<uint4>(b + 16 + 16 * (share % 2)));
        store4(q, load<uint4>(b + 48 + 16 * share));
        split_nibbles(q, r->q[0], r->q[1]);
#pragma unroll
        for (int p = 0; p < 2; p++)
            add_bits(r->q[p], h, share / 2 * 2 + p, 0x01010101, 4);
    }
};

/* A share is 16 bytes of q; their low nibbles are a part of 16 elements, the high ones that of 64 elements further on. */
template <> struct gpu_format<GPU_Q6_K> {
    static constexpr int ELEMENTS = 256, BYTES = 210, SHARES = 8, PIECES = 2, ZERO = 32;
    static constexpr bool ONE_SCALE = false, HAS_MIN = false;
    static __device__ __forceinline__ unsigned at(unsigned share, unsigned piece)
    {
        return 128 * (share / 4) + 64 * piece + 16 * (share % 4);
    }
    static __device__ __forceinline__ void unpack(const uint8_t *b, unsigned share, gpu_share<2> *r)
    {
        unsigned g = share / 4, part = share % 4;
        uint32_t q[4], h[4];
        load_words<4>(b + 16 * share, q);
        load_words<4>(b + 128 + 32 * g + 16 * (part % 2), h);
        float d = load_f16(b + 208);
        split_nibbles(q, r->q[0], r->q[1]);
#pragma unroll
        for (int p = 0; p < 2; p++) {
            add_bits(r->q[p], h, part / 2 * 2 + 4 * p, 0x03030303, 4);
            r->d[p] = d * (float)load<int8_t>(b + 192 + 8 * g + part + 4 * p);
        }
    }
};

template <> struct gpu_format<GPU_IQ4_XS> {
    static constexpr int ELEMENTS = 256, BYTES = 136, SHARES = 8, PIECES = 2, ZERO = 0;
    static constexpr bool ONE_SCALE = true, HAS_MIN = false;
    static __device__ __forceinline__ unsigned at(unsigned share, unsigned piece)
    {
        return 32 * share + 16 * piece;
    }
    static __device__ __forceinline__ void unpack(const uint8_t *b, unsigned share, gpu_share<2> *r)
    {
        uint2 head = load<uint2>(b), u = load<uint2>(b + 8 + 16 * share), v = load<uint2>(b + 16 + 16 * share);
        const uint32_t q[4] = {u.x, u.y, v.x, v.y};
        int scale = (int)((head.y >> 4 * share & 15) | (head.x >> (16 + 2 * share) & 3) << 4);
        r->d[0] = f16_low(head.x) * (float)(scale - 32);
        split_values(q, r->q[0], r->q[1]);
    }
};

#endif
