#include "kernels.h"

void eng_kernels_avx512(eng_kernels *k, bool bf16)
{
    k->name = bf16 ? "avx512 (VNNI, BF16)" : "avx512 (VNNI)";
}
