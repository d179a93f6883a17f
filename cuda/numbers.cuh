/* 16-bit numbers as they lie in memory, and the arithmetic of a softmax: what the attention kernels share. */
#ifndef RETRIEVALD_CUDA_NUMBERS_CUH
#define RETRIEVALD_CUDA_NUMBERS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

/* Two 16-bit numbers, the first in the low half. Both types are exact in float32. */
template <bool BF16> static __device__ inline float2 unpack2(uint32_t x)
{
    if (BF16)
        return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
    return make_float2(__half2float(__ushort_as_half((unsigned short)x)), __half2float(__ushort_as_half((unsigned short)(x >> 16))));
}

template <bool BF16> static __device__ inline float4 unpack4(uint2 x)
{
    float2 a = unpack2<BF16>(x.x), b = unpack2<BF16>(x.y);
    return make_float4(a.x, a.y, b.x, b.y);
}

template <bool BF16> static __device__ inline void unpack8(float *to, uint4 x)
{
    float4 a = unpack4<BF16>(make_uint2(x.x, x.y)), b = unpack4<BF16>(make_uint2(x.z, x.w));
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
    to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

/* Over `width` neighbouring lanes, a power of two; all lanes of the warp are there, and each gets the result. */
static __device__ inline float warp_max(float x, int width)
{
    for (int i = width / 2; i > 0; i /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
    return x;
}

static __device__ inline float warp_sum(float x, int width)
{
    for (int i = width / 2; i > 0; i /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, i);
    return x;
}

/* What is subtracted from scores whose maximum this is: where nothing was seen yet, -inf minus it must stay -inf. */
static __device__ inline float softmax_base(float max)
{
    return max == -INFINITY ? 0 : max;
}

/* exp(x) 2^shift for x <= 0; 0 for -inf. The product with log2(e) is rounded: relative error 2^-24 |x|, and two units in the last place of exp2f. */
static __device__ inline float weight(float x, float shift = 0)
{
    return exp2f(fmaf(x, 1.44269504f, shift));
}

#endif
