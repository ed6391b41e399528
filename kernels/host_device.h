// PAT_HOST_DEVICE: marks functions that the GPU runs and that host tests can call too.
#pragma once

#ifdef __CUDACC__
#define PAT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PAT_HOST_DEVICE inline
#endif
