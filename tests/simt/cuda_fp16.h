/* Stands in for CUDA's header of this name: __half as 16 bits, computed with in float32 and rounded to nearest even after each operation. */
#ifndef RETRIEVALD_SIMT_CUDA_FP16_H
#define RETRIEVALD_SIMT_CUDA_FP16_H

#include "cuda_runtime.h"

static inline float simt_half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = (uint32_t)(h & 0x3ff) << 13;
    if (exponent == 0) /* fraction * 2^-24: the difference of two normal numbers */
        return __uint_as_float(sign | __float_as_uint(__uint_as_float(0x38800000u | fraction) - __uint_as_float(0x38800000u)));
    return __uint_as_float(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction);
}

static inline uint16_t simt_float_to_half(float x)
{
    uint32_t bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, a = bits & 0x7fffffff;
    if (a > 0x7f800000u)
        return 0x7fff; /* as CUDA's NaN */
    if (a >= 0x477ff000u) /* 65520 and more */
        return (uint16_t)(sign | 0x7c00);
    if (a < 0x33000001u) /* 2^-25 and less */
        return (uint16_t)sign;
    unsigned shift = 13;
    uint32_t value = a - 0x38000000u; /* of the exponent: 127 - 15 */
    if (a < 0x38800000u) {
        shift = 126 - (a >> 23);
        value = (a & 0x7fffff) | 0x800000;
    }
    uint32_t rest = value & ((1u << shift) - 1), half = 1u << (shift - 1), r = value >> shift;
    return (uint16_t)(sign | (r + (rest > half || (rest == half && (r & 1)))));
}

struct __half_raw {
    unsigned short x;
};
struct __half {
    uint16_t bits;
    __half() = default;
    __half(__half_raw r) : bits(r.x) {}
    __half(float x) : bits(simt_float_to_half(x)) {}
    operator __half_raw() const { return {bits}; }
    operator float() const { return simt_half_to_float(bits); }
};
typedef __half half;
struct alignas(4) __half2 {
    __half x, y;
    __half2() = default;
    __half2(__half a, __half b) : x(a), y(b) {}
};
typedef __half2 half2;

static inline float __half2float(__half h) { return simt_half_to_float(h.bits); }
static inline __half __float2half(float x) { return __half(x); }
static inline __half __float2half_rn(float x) { return __half(x); }
static inline __half __ushort_as_half(unsigned short x) { return __half(__half_raw{x}); }
static inline __half __short_as_half(short x) { return __ushort_as_half((unsigned short)x); }
static inline unsigned short __half_as_ushort(__half h) { return h.bits; }
static inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
static inline __half2 make_half2(__half a, __half b) { return {a, b}; }
static inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
static inline __half2 __float2half2_rn(float a) { return {__half(a), __half(a)}; }
static inline __half2 __half2half2(__half a) { return {a, a}; }
static inline __half2 __float22half2_rn(float2 a) { return {__half(a.x), __half(a.y)}; }
static inline float2 __half22float2(__half2 h) { return {(float)h.x, (float)h.y}; }
static inline __half __low2half(__half2 h) { return h.x; }
static inline __half __high2half(__half2 h) { return h.y; }
static inline float __low2float(__half2 h) { return h.x; }
static inline float __high2float(__half2 h) { return h.y; }
static inline __half __hadd(__half a, __half b) { return __half((float)a + (float)b); }
static inline __half __hsub(__half a, __half b) { return __half((float)a - (float)b); }
static inline __half __hmul(__half a, __half b) { return __half((float)a * (float)b); }
static inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
static inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
static inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
static inline bool __hisnan(__half a) { return (a.bits & 0x7fff) > 0x7c00; }
static inline int __hisinf(__half a) { return (a.bits & 0x7fff) != 0x7c00 ? 0 : a.bits & 0x8000 ? -1 : 1; }

#endif
