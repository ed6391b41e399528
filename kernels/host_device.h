// PAT_HOST_DEVICE: marks functions that the GPU runs and that a host compiler can check.
#pragma once

#ifdef __CUDACC__
#define PAT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PAT_HOST_DEVICE inline
#endif
