/* What is done with every logit of a vocabulary for each token: bodies that the compiler makes vectors of in the file of each instruction set. No sum is contracted to a fused one, so all
 * levels give the same bits. */
#ifndef RETRIEVALD_KERNELS_LOGITS_H
#define RETRIEVALD_KERNELS_LOGITS_H

#include "kernels.h"

#include <float.h>
#include <string.h>

enum { ENG_LOGITS_LANES = 16 };

static inline bool eng_is_usable(float x)
{
    return __builtin_fabsf(x) <= FLT_MAX; /* false for NaN too */
}

/* e^x for x <= 0 within 2e-7 of its value, 0 below -87: branchless, so that the compiler makes vectors of it. */
static inline float eng_exp_negative(float x)
{
    float clamped = x < -87.f ? -87.f : x;
    float k = clamped * 1.44269504f + 12582912.f; /* 1.5 * 2^23: the sum's low bits are the rounded integer */
    uint32_t bits, out;
    memcpy(&bits, &k, sizeof bits);
    k -= 12582912.f;
    float r = clamped - k * .693359375f - k * -2.12194440e-4f; /* ln 2 in two parts (Cephes) */
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1;
    memcpy(&out, &y, sizeof out);
    out += bits << 23; /* times 2^k */
    memcpy(&y, &out, sizeof y);
    return x < -87.f ? 0 : y;
}

/* Largest usable logit of each block, -inf where none is; returns the largest of all. */
static inline float eng_logits_max(const float *x, size_t n, float *block_max)
{
    float all = -__builtin_inff();
    for (size_t at = 0, b = 0; at < n; at += ENG_LOGITS_BLOCK, b++) {
        float lane[ENG_LOGITS_LANES];
        for (int j = 0; j < ENG_LOGITS_LANES; j++)
            lane[j] = -__builtin_inff();
        size_t i = at, end = n - at < ENG_LOGITS_BLOCK ? n : at + ENG_LOGITS_BLOCK;
        for (; i + ENG_LOGITS_LANES <= end; i += ENG_LOGITS_LANES)
            for (int j = 0; j < ENG_LOGITS_LANES; j++) {
                float v = eng_is_usable(x[i + j]) ? x[i + j] : -__builtin_inff();
                lane[j] = v > lane[j] ? v : lane[j];
            }
        for (; i < end; i++)
            lane[0] = eng_is_usable(x[i]) && x[i] > lane[0] ? x[i] : lane[0];
        for (int width = ENG_LOGITS_LANES / 2; width; width /= 2)
            for (int j = 0; j < width; j++)
                lane[j] = lane[j + width] > lane[j] ? lane[j + width] : lane[j];
        block_max[b] = lane[0];
        all = lane[0] > all ? lane[0] : all;
    }
    return all;
}

/* The sum of e^(x - max) over the usable x, of which max is the largest. Float within a block, double across. */
static inline double eng_logits_sum(const float *x, size_t n, float max)
{
    double sum = 0;
    for (size_t at = 0; at < n; at += ENG_LOGITS_BLOCK) {
        float lane[ENG_LOGITS_LANES] = {0};
        size_t i = at, end = n - at < ENG_LOGITS_BLOCK ? n : at + ENG_LOGITS_BLOCK;
        for (; i + ENG_LOGITS_LANES <= end; i += ENG_LOGITS_LANES)
            for (int j = 0; j < ENG_LOGITS_LANES; j++)
                lane[j] += eng_exp_negative(eng_is_usable(x[i + j]) ? x[i + j] - max : -__builtin_inff());
        for (; i < end; i++)
            lane[0] += eng_exp_negative(eng_is_usable(x[i]) ? x[i] - max : -__builtin_inff());
        for (int width = ENG_LOGITS_LANES / 2; width; width /= 2)
            for (int j = 0; j < width; j++)
                lane[j] += lane[j + width];
        sum += (double)lane[0];
    }
    return sum;
}

#endif
